"""Build a learner, or load it from a checkpoint, in which every part is checked first."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_training.algorithms.base import Algorithm
from rl_training.config.choices import choose_threads
from rl_training.config.own_network import give_network
from rl_training.config.params import Params, read_params
from rl_training.config.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.state import SCHEMA
from rl_training.validation import check_plain, validate

PathLike = str | Path


DEVICES = ("cpu", "cuda")  # kinds of device for a learner



def read_checkpoint(path: PathLike) -> dict[str, Any]:
    """The tree of a training checkpoint, checked to have all its parts."""
    tree = load_checkpoint(path)
    missing = {"schema", "config", "spaces", "algorithm", "source", "run"} - set(tree)
    if missing:
        raise UserError(f"{path} is not a training checkpoint: it has no {', '.join(sorted(missing))}.")
    if type(tree["schema"]) is not int or tree["schema"] != SCHEMA:
        raise UserError(f"{path} has the schema {tree['schema']!r}; this rl-training reads schema {SCHEMA}.")
    if odd := [part for part in ("config", "spaces", "algorithm", "source", "run") if not isinstance(tree[part], dict)]:
        raise UserError(f"{path} is not a training checkpoint: its {odd[0]} is not a mapping.")
    try:
        for name, value in tree["config"].items():
            check_plain(value, f"config.{name}")
    except ValueError as error:
        raise UserError(f"{path} is not a training checkpoint: {error}.") from None
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
    algorithm = build_algorithm(spec, params, spaces, seed=config.seed, device="cpu", stored=tree["algorithm"])
    load_weights(path, algorithm, tree["algorithm"])
    threads = config.threads if config.threads != "auto" else choose_threads(params, spaces)
    return algorithm, spaces, config.model_copy(update={"threads": threads})



def read_spaces(path: PathLike, data: dict[str, Any]) -> EnvSpaces:
    """The spaces in a checkpoint, checked to be those that an environment with them would have."""
    try:
        spaces = EnvSpaces.from_dict(data)
        names = ("has_action_mask", "normalize_observations", "normalize_rewards")
        flags = {name: bool(getattr(spaces, name)) for name in names}
        again = EnvSpaces.from_gym(spaces.env_id, spaces.observation_space, spaces.action_space, **flags).to_dict()
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



def load_weights(path: PathLike, algorithm: Algorithm, state: dict[str, Any]) -> None:
    """Load a checkpoint's state into a learner, after checking every part of it."""
    state = with_own_generator(state, algorithm)
    if problem := first_difference(state, algorithm.state_dict(), "algorithm"):
        cause = "it was edited, or written by a version of rl-training whose networks were different"
        raise UserError(f"{path} does not fit its own config: {problem}; {cause}.")
    for name, extra in state.items():  # the comparison accepts any string as a device
        if isinstance(extra, Mapping) and str(extra.get("device", "cpu")) not in DEVICES:
            raise UserError(f"{path} does not fit its own config: algorithm.{name}.device is {extra['device']!r}.")
    try:
        algorithm.load_state_dict(state)
    except Exception as error:  # such as bytes of the right size that are not a generator's state
        raise UserError(f"{path} does not fit its own config: {describe_error(error)}.") from None
    if (bad := algorithm.first_bad_tensor()) is not None:
        raise UserError(f"{path} holds a NaN or an infinity in {bad}; use an earlier checkpoint of the run.")



def with_own_generator(state: dict[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """The state, with this learner's own generators where the stored ones are from another kind of device."""
    changed = {}
    for name, own in algorithm.state_dict().items():
        extra = state.get(name)
        if not isinstance(own, Mapping) or "generator" not in own or not isinstance(extra, Mapping):
            continue
        if str(extra.get("device")) in DEVICES and extra["device"] != own["device"]:
            changed[name] = {**extra, "device": own["device"], "generator": own["generator"]}
    return {**state, **changed}



def first_difference(stored: Any, built: Any, name: str) -> str | None:
    """A description of the first difference in kind or shape between a stored and a newly built state, or None.

    A built None or {} is filled later, so it matches anything.
    """
    if built is None or (isinstance(built, Mapping) and not built):
        return None
    if isinstance(built, Mapping):
        if not isinstance(stored, Mapping) or set(stored) != set(built):
            names = set(stored) ^ set(built) if isinstance(stored, Mapping) else set()
            odd = min(names, key=str) if names else None
            verb = "lacks" if odd in built else "has an unknown"
            return f"{name} is not a mapping" if odd is None else f"{name} {verb} {odd!r}"
        problems = (first_difference(stored[key], built[key], f"{name}.{key}") for key in built)
        return next((problem for problem in problems if problem), None)
    if isinstance(built, torch.Tensor):
        if not isinstance(stored, torch.Tensor):
            return f"{name} is a {type(stored).__name__}, not a tensor"
        if stored.shape != built.shape or stored.dtype != built.dtype:
            there, here = ((str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in (stored, built))
            return f"{name} is {there[0]} {there[1]}, not {here[0]} {here[1]}"
        return None
    if type(stored) is not type(built):
        return f"{name} is a {type(stored).__name__}, not a {type(built).__name__}"
    return None

BUILDING = threading.RLock()  # held while torch's global generator is ours



def build_algorithm(
    spec: AlgorithmSpec, params: Params, spaces: EnvSpaces, *, seed: int, device: str,
    stored: Mapping[str, Any] | None = None,
) -> Algorithm:  # fmt: skip
    """Build the algorithm with weights that depend only on the seed, without changing torch's global generators.

    Networks draw their first weights from the global generator, so one thread builds at a time. `stored` is the state
    that will be loaded into it: a learner that is much larger is refused before it is built.
    """
    with BUILDING, torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU's
        with torch.device("cpu"), SizeLimit(stored):
            algorithm = spec.build(params, spaces)
        if device != "cpu":  # weights are drawn on the CPU, so that they are the same everywhere
            # a generator belongs to a device; a learner inside another one has its own
            weights = {name: value for name, value in algorithm.state_dict().items() if isinstance(value, torch.Tensor)}
            with torch.device(device):
                algorithm = spec.build(params, spaces)
            algorithm.load_state_dict(weights, strict=False)
    algorithm.seed(seed)
    return algorithm



class SizeLimit(TorchFunctionMode):
    """Counts the numbers that torch allocates inside it; refuses more than a checkpoint's state has (None: any)."""

    FACTORIES = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint,
                           torch.eye, torch.arange, torch.linspace))  # fmt: skip
    SPARE = 2**20  # numbers that are allocated but not stored

    def __init__(self, stored: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.held = None if stored is None else count_numbers(stored)
        self.made = 0

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
    return state.numel() if isinstance(state, torch.Tensor) else 0



def check_same_spaces(stored: EnvSpaces, found: EnvSpaces) -> None:
    """Refuse to continue with an environment whose spaces differ from the checkpoint's."""
    for what in ("observation", "action"):
        there, here = (getattr(spaces, f"{what}_space") for spaces in (stored, found))
        if there != here:
            raise UserError(f"the checkpoint was made for {what}s {there}; {found.env_id} now has {here}.")
