"""A learner outside of training: built, loaded from a checkpoint in which every part is checked first, and acting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_training.algorithms.base import Algorithm, Array, Carry, overrides
from rl_training.config.choices import choose_threads
from rl_training.config.networks import give_network, network_of
from rl_training.config.params import Params, read_params
from rl_training.config.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.envs.inputs import encode_for_prediction, masks_for_prediction, read_masks
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, did_you_mean
from rl_training.play import Act
from rl_training.record.checkpoints import load_checkpoint, pack_tree, unpack_tree
from rl_training.speed.capture import HostStep
from rl_training.speed.optimizer import Optimizer
from rl_training.validation import check_plain, validate

CAN_BE_LEFT = False  # a signal may not interrupt this code (run/interruption.py)

PathLike = str | Path
SCHEMA = 1
PARTS = ("config", "spaces", "algorithm", "source", "run")  # of a training checkpoint
ACTION_ALONE = "predict returns the action alone, not (action, state); write action = model.predict(obs)"
DEVICES = ("cpu", "cuda")  # kinds of device for a learner
MOST_OF_POLICY = 2**26  # numbers of a learner that a policy file may describe; the file holds a part of them
BUILDING = threading.RLock()  # held while torch's global generator is ours
_LOCKS: WeakKeyDictionary[Algorithm, Any] = WeakKeyDictionary()


# build and load --------------------------------------------------------------------------------------------------


def read_checkpoint(path: PathLike) -> dict[str, Any]:
    """The tree of a training checkpoint, checked to have all its parts."""
    tree = load_checkpoint(path)
    wrong = f"{path} is not a training checkpoint"
    if missing := {"schema", *PARTS} - set(tree):
        raise UserError(f"{wrong}: it has no {', '.join(sorted(missing))}.")
    if type(tree["schema"]) is not int or tree["schema"] != SCHEMA:
        raise UserError(f"{path} has the schema {tree['schema']!r}; this rl-training reads schema {SCHEMA}.")
    if odd := [part for part in PARTS if not isinstance(tree[part], dict)]:
        raise UserError(f"{wrong}: its {odd[0]} is not a mapping.")
    try:
        for name, value in tree["config"].items():
            check_plain(value, f"config.{name}")
    except ValueError as error:
        raise UserError(f"{wrong}: {error}.") from None
    return tree


def load_algorithm(
    path: PathLike, tree: dict[str, Any], network: Any = None
) -> tuple[Algorithm, EnvSpaces, TrainConfig]:
    """The learner in a checkpoint, with its weights; every `auto` in the config is resolved.

    `network` is the user's own, given again, or a tuple of names that the user trusts.
    """
    config = validate(TrainConfig, tree["config"], str(path))
    spec = get_algorithm_spec(config.algo)
    params = give_network(read_params(spec.params, config.algo_kwargs), network, path)
    spaces = read_spaces(path, tree["spaces"])
    spec.check_support(spaces, learns=False)
    state, only_acts = tree["algorithm"], is_policy(tree)
    held = MOST_OF_POLICY if only_acts else count_numbers(state)
    algorithm = build_algorithm(spec, params, spaces, seed=config.seed, device="cpu", held=held)
    load_weights(path, algorithm, state, only_acts=only_acts)
    threads = config.threads if config.threads != "auto" else choose_threads(params, spaces)
    return algorithm, spaces, config.model_copy(update={"threads": threads})


def is_policy(tree: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is a policy file: it holds what acts, and nothing to continue training from."""
    return tree.get("policy") is True


def policy_tree(tree: Mapping[str, Any], algorithm: Algorithm, *, half: bool = False) -> dict[str, Any]:
    """A policy file from a checkpoint and the learner loaded from it; with `half`, its weights have 16 bits.

    Statistics of observations keep their 32 bits: 16 hold no number above 65,504.
    """
    acting = algorithm.acting()
    weights = {name for name, value in acting.named_parameters() if half and _is(value, torch.float32)}
    state = {name: value.half() if name in weights else value for name, value in acting.state_dict().items()}
    return {**tree, "algorithm": state, "source": {}, "policy": True}


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype


def read_spaces(path: PathLike, data: dict[str, Any]) -> EnvSpaces:
    """The spaces in a checkpoint, checked to be those that an environment with them would have."""
    try:
        spaces = EnvSpaces.from_dict(data)
        names = ("has_action_mask", "normalize_observations", "normalize_rewards")
        flags = {name: bool(getattr(spaces, name)) for name in names}
        found = EnvSpaces.from_gym(spaces.env_id, spaces.observation_space, spaces.action_space, **flags)
        again = found.with_critic_obs(spaces.critic_obs).to_dict()
        stored = spaces.to_dict()
        odd = [name for name, value in again.items() if not name.startswith("raw_") and stored[name] != value]
    except Exception as error:  # an edited file can fail in any way
        raise UserError(f"{path}: its spaces are invalid ({describe_error(error)}).") from None
    if odd or not isinstance(spaces.env_id, str):
        raise UserError(f"{path}: its spaces do not fit together; {(odd or ['env_id'])[0]} is wrong.")
    return spaces


def describe_error(error: Exception) -> str:
    """An exception in a few words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()[:160]}" if lines else type(error).__name__


def load_weights(path: PathLike, algorithm: Algorithm, state: dict[str, Any], *, only_acts: bool = False) -> None:
    """Load a checkpoint's state into a learner, or a policy file's into what acts, after checking every part of it."""
    part, module = ("policy", algorithm.acting()) if only_acts else ("algorithm", algorithm)
    if only_acts:
        state = {name: value.float() if _is(value, torch.float16) else value for name, value in state.items()}
    state = with_own_generator(state, module)
    if problem := first_difference(state, module.state_dict(), part):
        cause = "it was edited, or written by a version of rl-training whose networks were different"
        raise UserError(f"{path} does not fit its own config: {problem}; {cause}.")
    for name, extra in state.items():  # the comparison accepts any string as a device
        if isinstance(extra, Mapping) and str(extra.get("device", "cpu")) not in DEVICES:
            raise UserError(f"{path} does not fit its own config: {part}.{name}.device is {extra['device']!r}.")
    try:
        module.load_state_dict(state)
    except Exception as error:  # such as bytes of the right size that are not a generator's state
        raise UserError(f"{path} does not fit its own config: {describe_error(error)}.") from None
    if (bad := algorithm.first_bad_tensor()) is not None:
        raise UserError(f"{path} holds a NaN or an infinity in {bad}; use an earlier checkpoint of the run.")


def with_own_generator(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """The state, with this learner's own generators where the stored ones are from another kind of device."""
    changed = {}
    for name, own in module.state_dict().items():
        extra = state.get(name)
        if not isinstance(own, Mapping) or "generator" not in own or not isinstance(extra, Mapping):
            continue
        if str(extra.get("device")) in DEVICES and extra["device"] != own["device"]:
            changed[name] = {**extra, "device": own["device"], "generator": own["generator"]}
    return {**state, **changed}


def copy_parameters(algorithm: Algorithm) -> dict[str, Tensor]:
    """All tensors of a learner's state by name, without those of its optimizers."""
    optimizers = tuple(f"{name}." for name, part in algorithm.named_modules() if isinstance(part, Optimizer))
    state = algorithm.state_dict().items()
    return {k: v.detach().cpu().clone() for k, v in state if isinstance(v, Tensor) and not k.startswith(optimizers)}


def check_parameters(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The given values as tensors of the learner's own shapes and types; a UserError names one that cannot be."""
    found = {}
    for name, value in given.items():
        if name not in own:
            raise UserError(f"there is no parameter {name!r}; {did_you_mean(str(name), own)}")
        like = own[name]
        try:
            tensor = torch.as_tensor(value).detach().to("cpu", like.dtype).clone()
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{name} is {value!r:.60}; it must be a tensor or an array.") from None
        if tensor.shape != like.shape:
            raise UserError(f"{name} has the shape {tuple(tensor.shape)}; it must be {tuple(like.shape)}.")
        if not tensor.isfinite().all():
            raise UserError(f"{name} holds a value that is not finite.")
        found[name] = tensor
    return found


def first_difference(stored: Any, built: Any, name: str) -> str | None:
    """A description of the first difference in kind or shape between a stored and a newly built state, or None.

    A built None or {} is filled later, so it matches anything.
    """
    if built is None or (isinstance(built, Mapping) and not built):
        return None
    if isinstance(built, Mapping) and isinstance(stored, Mapping):
        if names := stored.keys() ^ built.keys():
            odd = min(names, key=str)
            return f"{name} {'lacks' if odd in built else 'has an unknown'} {odd!r}"
        problems = (first_difference(stored[key], built[key], f"{name}.{key}") for key in built)
        return next(filter(None, problems), None)
    there, here = _kind(stored), _kind(built)
    return None if there == here else f"{name} is {there}, not {here}"


def _kind(value: Any) -> str:
    """The type of a value; of a tensor, its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def check_same_spaces(stored: EnvSpaces, found: EnvSpaces) -> None:
    """Refuse to continue with an environment whose spaces differ from the checkpoint's."""
    for what in ("observation", "action"):
        there, here = (getattr(spaces, f"{what}_space") for spaces in (stored, found))
        if there != here:
            raise UserError(f"the checkpoint was made for {what}s {there}; {found.env_id} now has {here}.")


def build_algorithm(
    spec: AlgorithmSpec, params: Params, spaces: EnvSpaces, *, seed: int, device: str,
    held: int | None = None,
) -> Algorithm:  # fmt: skip
    """Build the algorithm with weights that depend only on the seed, without changing torch's global generators.

    Networks draw their first weights from the global generator, so one thread builds at a time. `held` is how many
    numbers the file holds that will be loaded into it: a learner that is much larger is refused before it is built.
    """
    with BUILDING, torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU's
        with torch.device("cpu"), SizeLimit(held):
            algorithm = spec.build(params, spaces)
        if device != "cpu":  # weights are drawn on the CPU, so that they are the same everywhere
            # a generator belongs to a device; a learner inside another one has its own
            weights = {name: value for name, value in algorithm.state_dict().items() if isinstance(value, Tensor)}
            with torch.device(device):
                algorithm = spec.build(params, spaces)
            algorithm.load_state_dict(weights, strict=False)
    algorithm.seed(seed)
    return algorithm


class SizeLimit(TorchFunctionMode):
    """Counts the numbers that torch allocates inside it; refuses more than a checkpoint holds (None: any)."""

    FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint,
                           torch.eye, torch.arange, torch.linspace))  # fmt: skip
    SPARE = 2**20  # numbers that are allocated but not stored

    def __init__(self, held: int | None) -> None:
        super().__init__()
        self.held, self.made = held, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's result, unless it exceeds the limit."""
        kwargs = kwargs or {}
        if self.held is not None and func in self.FACTORIES:
            plain = {name: value for name, value in kwargs.items() if name not in ("device", "generator", "out")}
            self.made += func(*args, **plain, device="meta").numel()
            if self.made > self.held + self.SPARE:
                raise UserError(
                    f"the checkpoint does not fit its own config: it holds {self.held:,} numbers, and the networks "
                    "that its config and spaces describe have more."
                )
        return func(*args, **kwargs)


def count_numbers(state: Any) -> int:
    """Entries of all tensors in a state."""
    if isinstance(state, Mapping):
        return sum(map(count_numbers, state.values()))
    return state.numel() if isinstance(state, Tensor) else 0


# act -------------------------------------------------------------------------------------------------------------


def acting_lock(algorithm: Algorithm) -> Any:
    """The lock for acting with a learner outside training, while another generator is set."""
    return _LOCKS.setdefault(algorithm, threading.RLock())


class ActingSession:
    """Acts in N environments with its own generators and memory; never changes the generators of training.

    Several sessions may use one learner from different threads; they take turns.
    """

    def __init__(self, algorithm: Algorithm, num_envs: int, seed: int, *, deterministic: bool = True) -> None:
        self.algorithm, self.num_envs, self.deterministic = algorithm, num_envs, deterministic
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(algorithm.device).manual_seed(seed)

        def decide(given: Mapping[str, Tensor], carry: Carry) -> tuple[dict[str, Tensor], Carry]:
            first, legal = given.get("is_first"), given.get("action_masks")
            out = algorithm.act(given["obs"], carry, is_first=first, deterministic=deterministic, action_masks=legal)
            return {"actions": out.actions}, out.carry

        # not a method: a reference cycle would keep the session's graphs until garbage collection
        self._step = HostStep(decide, algorithm.numbers, self.generator, algorithm.device)
        self._numpy_policy = None if overrides(type(algorithm), "act") else algorithm.numpy_policy()
        self._numpy_memory = algorithm.numpy_memory()
        self._lock = acting_lock(algorithm)
        self.forget()

    def forget(self, num_envs: int | None = None) -> None:
        """Clear the memory, for another number of environments if given; the generators continue, so samples differ."""
        self.num_envs = self.num_envs if num_envs is None else num_envs
        self.carry = self.algorithm.initial_carry(self.num_envs)

    def act(self, obs: Array, masks: Array | None = None, is_first: Array | None = None) -> Array:
        """Actions of the policy for encoded observations [N, ...]."""
        with self._lock:
            if self._numpy_policy is not None:
                if self._numpy_memory is not None:
                    begins = np.zeros(len(obs), dtype=bool) if is_first is None else is_first
                    obs, states = self._numpy_memory(obs, self.carry.numpy(), begins)
                    self.carry = torch.from_numpy(states)
                return self._numpy_policy(obs, masks, self.rng, self.deterministic)
            given = {"obs": obs, "action_masks": masks, "is_first": is_first}
            arrays = {name: np.ascontiguousarray(array) for name, array in given.items() if array is not None}
            with evaluation_mode(self.algorithm, self.generator), torch.no_grad():
                found, self.carry = self._step(arrays, self.carry)
            actions: Array = found["actions"]
            return actions

    def in_environments(self, spaces: EnvSpaces, check: Callable[[], None] | None = None) -> Act:
        """A function that returns actions for environments with these spaces, for `play`; it calls `check` first."""

        def act(rows: list[Any], infos: list[Any], is_first: Array) -> Sequence[Any]:
            if check is not None:
                check()
            return spaces.as_given(self.act(spaces.encode_rows(rows), read_masks(infos, spaces), is_first))

        return act


@contextmanager
def evaluation_mode(algorithm: Algorithm, generator: torch.Generator) -> Iterator[None]:
    """Put the algorithm into eval mode with another generator, and restore both afterwards."""
    was_training, own = algorithm.training, algorithm.generator
    algorithm.eval()
    algorithm.generator = generator
    try:
        yield
    finally:
        algorithm.generator = own
        algorithm.train(was_training)


class TrainedPolicy:
    """A learner with the spaces of its environment: predicts without an environment, in any thread.

    It can be pickled and sent to another process, where it acts on the CPU and restarts its generator from its seed.
    """

    def __init__(self, algorithm: Algorithm, spaces: EnvSpaces, config: TrainConfig) -> None:
        self.algorithm, self.spaces, self.config, self.seed = algorithm, spaces, config, config.seed
        self._sessions: dict[bool, ActingSession] = {}  # by whether they are deterministic

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """Return the environment's action for one raw observation, or a batch of actions for a batch; memory is empty.

        `action_mask` has the form of the environment's `info["action_mask"]`, one per observation of a batch; None
        allows every action.
        """
        encoded, is_batch = encode_for_prediction(self.spaces, obs)
        masks = masks_for_prediction(self.spaces, action_mask, len(encoded), is_batch=is_batch)
        with acting_lock(self.algorithm):
            session = self.session(len(encoded), deterministic)
            chosen = session.act(encoded, masks, np.ones(len(encoded), dtype=bool))
        actions = self.spaces.map_actions(chosen)
        return actions if is_batch else plain_action(actions[0])

    def session(self, count: int, deterministic: bool) -> ActingSession:
        """The acting session for that many rows, with empty memory; always the same one, so that sampling continues."""
        if deterministic not in self._sessions:
            self._sessions[deterministic] = ActingSession(self.algorithm, count, self.seed, deterministic=deterministic)
        self._sessions[deterministic].forget(count)
        return self._sessions[deterministic]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts of a checkpoint that prediction needs, in the checkpoint format."""
        with acting_lock(self.algorithm):
            state = dict(self.algorithm.state_dict())
        parts = {"config": self.config.model_dump(mode="json"), "spaces": self.spaces.to_dict(), "algorithm": state}
        return _unpickle_policy, (pack_tree(parts), network_of(self.algorithm))


def _unpickle_policy(data: bytes, network: Any = None) -> TrainedPolicy:
    return TrainedPolicy(*load_algorithm("the pickled policy", unpack_tree(data), network))


class DiscreteAction(int):
    """An int that cannot be unpacked: `action, _ = model.predict(obs)` says what to write instead."""

    def __iter__(self) -> NoReturn:
        raise TypeError(ACTION_ALONE)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a plain int."""
        return int, (int(self),)


def plain_action(action: Any) -> Any:
    """A discrete action as an int, any other as an array."""
    array = np.asarray(action)
    return DiscreteAction(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else array


def load_policy(path: PathLike, network: Any = None) -> TrainedPolicy:
    """Load the policy of a checkpoint on the CPU, ready to predict; `network` is your own network, if it has one."""
    return TrainedPolicy(*load_algorithm(path, read_checkpoint(path), network))
