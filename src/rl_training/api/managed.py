"""`ManagedAlgorithm`: learn, evaluate, predict, save, load and resume, the same for every algorithm."""

from __future__ import annotations

import dis
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from html import escape
from inspect import signature
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from rl_training.config.params import dump_params, read_params
from rl_training.config.settings import UNSAID, AnyConfig, fill_defaults, read_config
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, names_config
from rl_training.envs.factory import NAMELESS, UserEnv, name_env, read_env, read_recipe
from rl_training.envs.inputs import encode_for_prediction, masks_for_prediction
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError, did_you_mean, near_name, policy_remark, sb3_hints, translate
from rl_training.record.checkpoints import save_checkpoint
from rl_training.run import learner
from rl_training.run.film import Film, film_episode
from rl_training.run.folder import home_of, run_dir_of
from rl_training.run.live import Live, is_watched, shows_html
from rl_training.run.loop import RunState
from rl_training.run.ranks import join_ranks
from rl_training.run.restoring import move_config
from rl_training.run.run import Callback, read_callbacks
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, resume_training, train
from rl_training.run.zoo import find_policy, read_card
from rl_training.validation import validate, whole_number

Self = TypeVar("Self", bound="ManagedAlgorithm")
Given = AnyConfig | UserEnv | None
ARGUMENTS_OF_LEARN = ("total_timesteps", "callbacks", "progress", "reset", "raise_on_signal")
ARGUMENTS_OF_PREDICT = ("obs", "deterministic", "action_mask")
_seen: dict[tuple[int, int], CodeType] = {}  # by call; the code is kept, so that no other one gets its id


class Actor:
    """A policy that remembers its episode: call `reset()` when an episode starts, then `act(obs)` at every step."""

    def __init__(self, policy: learner.TrainedPolicy, deterministic: bool) -> None:
        self._spaces = policy.spaces
        self._session = learner.ActingSession(policy.algorithm, 1, policy.seed, deterministic=deterministic)
        self.reset()

    def reset(self) -> None:
        """Forget the episode so far; the random generator of a stochastic policy continues, so episodes differ."""
        self._session.forget()
        self._is_first = True

    def act(self, obs: Any, *, action_mask: Any = None) -> Any:
        """Return the action for the next observation of the episode; `action_mask` says which actions are legal."""
        spaces = self._spaces
        encoded, is_batch = encode_for_prediction(spaces, obs)
        if is_batch:
            raise UserError(f"obs is a batch of {len(encoded)}; an actor takes one at a time.")
        masks = masks_for_prediction(spaces, action_mask, 1, is_batch=False)
        actions = self._session.act(encoded, masks, np.array([self._is_first]))
        self._is_first = False
        return learner.plain_action(spaces.map_actions(actions)[0])


class ManagedAlgorithm:
    """An algorithm and its config: learn, evaluate, predict, save, load.

    The first argument is an environment (a Gymnasium id, a class, a function, or an instance) or a config (a
    TrainConfig, a mapping, a file or a preset such as `ppo/cartpole`). A string is a config if it names a file or a
    preset, otherwise an environment. Keywords are fields of TrainConfig and hyper-parameters of the algorithm:
    `PPO("CartPole-v1", num_envs=8, learning_rate=3e-4)`. `env` replaces the environment of a config.
    """

    algo: ClassVar[str] = ""

    def __init__(self, config_or_env: Given = None, *others: Any, env: UserEnv | None = None, **settings: Any) -> None:
        config: Any = config_or_env
        name = type(self).__name__
        words = [word for word in (config, *others) if isinstance(word, str)]
        if policy := next((word for word in words if word.endswith("Policy")), None):
            given = next((repr(word) for word in words if word != policy), "env")
            wanted = f"write {name}({given}): {policy_remark(policy)}"
            raise UserError(f"{name} takes no policy such as {policy!r}; {wanted}")
        if others:
            raise UserError(f"{name} takes one environment or config; give everything else by name, as in seed=1.")
        known = isinstance(config, Mapping | TrainConfig | Path | None)
        if not (names_config(config) if isinstance(config, str) else known):
            if env is not None:
                raise UserError(f"{name} got two environments, {config!r} and env={env!r}; give one.")
            config, env = None, config
        if config is None and env is None and "env_id" not in settings:
            raise UserError(f'{name} needs an environment, such as {name}("CartPole-v1").')
        env = read_env(env)
        self._begin(read_config(config, env, self.algo, settings), env)

    def _begin(self, config: TrainConfig, env: UserEnv | None) -> None:
        read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)  # refuses values out of bounds
        self.config = self._asked = config
        self.env: UserEnv = config.named if env is None else env
        self._checkpoint: Path | None = None
        self._policy: learner.TrainedPolicy | None = None
        self._step = 0
        self._moves_to: str | None = None  # another environment than that of the checkpoint
        self._only_acts = False  # it was loaded from a policy file
        self._output_dir: str | None = None  # of a run that continues somewhere else than the checkpoint's

    def learn(
        self, total_timesteps: int | None = None, *, callbacks: Iterable[Callback] | Callback | None = None,
        progress: bool | Literal["plot"] | None = None, reset: bool = False, raise_on_signal: bool = True,
        **unknown: Any,
    ) -> TrainResult:  # fmt: skip
        """Train for `total_timesteps` steps; the default is the config's budget.

        Called again, or after `load`, it continues for that many more steps; without a number, to the end of an
        unfinished budget. Schedules stretch to the new end. `reset=True` starts a new run. `progress` shows a progress
        line; None shows it in a terminal or notebook only. In a notebook it is a bar, and with "plot" also a plot of
        the returns.

        Ctrl-C (SIGINT) and SIGTERM stop after the current update and save. Then `learn` raises KeyboardInterrupt or
        `rl_training.Terminated`; with `raise_on_signal=False` it returns the result. Either way, this object has the
        newest weights, and the next `learn` continues.
        """
        for name in unknown:
            hint, settings = did_you_mean(name, ARGUMENTS_OF_LEARN), {*TrainConfig.model_fields, *self.hyperparameters}
            if hint.startswith("known"):
                hint = translate(name, settings) or hint
            setting = f"{type(self).__name__}(env, {name}=...)"
            raise UserError(f"learn has no argument {name!r}; {f'{setting} sets it.' if name in settings else hint}")
        if callbacks is None and isinstance(total_timesteps, list | tuple):  # as it was called before
            total_timesteps, callbacks = None, total_timesteps
        steps = None if total_timesteps is None else whole_number("total_timesteps", total_timesteps, least=1)
        if progress not in (True, False, None, "plot"):
            raise UserError(f"progress is {progress!r}; it must be True, False, None or 'plot'.")
        shown = is_watched() if progress is None else bool(progress)
        if shown and shows_html():
            callbacks, shown = [*read_callbacks(callbacks), Live(plot=progress == "plot")], False
        if self._checkpoint is None or reset:
            config = self._asked if steps is None else self._asked.model_copy(update={"total_timesteps": steps})
            result = train(config, env=self.env, callbacks=callbacks, console=shown, raise_on_signal=False)
            return self._adopt(result, raise_on_signal)
        if self._only_acts:
            what = f"{self._checkpoint} is a policy file: it can act, but not continue training"
            raise UserError(f"{what}; learn(reset=True) trains a new policy.")
        left = self.config.total_timesteps - self._step
        steps = steps or (left if left > 0 else self._asked.total_timesteps)
        if progress is not False and join_ranks().rank == 0:
            what = f"{type(self).__name__} continues from step {self._step:,} for {steps:,} more steps"
            print(f"{what}; learn(reset=True) starts over", file=sys.stderr)
        return self.resume(
            total_timesteps=self._step + steps, callbacks=callbacks, console=shown, raise_on_signal=raise_on_signal
        )

    def resume(
        self, total_timesteps: int | None = None, *, raise_on_signal: bool = True, **changes: Any
    ) -> TrainResult:  # fmt: skip
        """Continue from the newest checkpoint to `total_timesteps`, counted from the start of the run.

        The other arguments are those of `resume_training`, such as `output_dir`.
        """
        path = self._path("resume")
        known = [name for name in signature(resume_training).parameters if name not in ("path", "env")]
        refuse_unknown("resume", set(changes) - set(known), known)
        wanted = dict(changes.pop("changes", None) or {})
        if self._moves_to is not None:
            wanted.setdefault("env_id", self._moves_to)
        own = {name: value for name, value in self._asked.algo_kwargs.items() if callable(value)}
        if self._own_network is not None:
            own["network"] = self._own_network
        wanted["algo_kwargs"] = {**own, **wanted.get("algo_kwargs", {})}  # a checkpoint does not hold functions
        if self._output_dir is not None and "output_dir" not in wanted:
            changes.setdefault("output_dir", self._output_dir)
        result = resume_training(
            path, total_timesteps=total_timesteps, env=self.env, changes=wanted, raise_on_signal=False, **changes
        )
        return self._adopt(result, raise_on_signal)

    def evaluate(
        self, num_episodes: int | None = None, *, seed: int | None = None, deterministic: bool = True, **unknown: Any
    ) -> dict[str, Any]:
        """Play whole episodes in new environments and return metrics; the same seed gives the same episodes."""
        refuse_unknown("evaluate", unknown, ("num_episodes", "seed", "deterministic"))
        seed = None if seed is None else whole_number("seed", seed, least=0)
        return evaluate_checkpoint(
            self._path("evaluate"), num_episodes=num_episodes, env=self.env, seed=seed, deterministic=deterministic,
            network=self._own_network,
        )  # fmt: skip

    def __repr__(self) -> str:
        trained = f"{self._step:,} steps" if self._checkpoint else "not trained"
        return f"<{type(self).__name__} on {self.config.env_id}: {trained}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: environment, steps, checkpoint, and every hyper-parameter."""
        rows = {"environment": self.config.env_id, "steps": f"{self._step:,} of {self.config.total_timesteps:,}"}
        rows["checkpoint"] = str(self._checkpoint or "not trained yet")
        tables = [
            "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in table.items())
            for table in (rows, self.hyperparameters)
        ]
        details = f"<details><summary>hyper-parameters</summary><table>{tables[1]}</table></details>"
        return f"<b>{type(self).__name__}</b><table>{tables[0]}</table>{details}"

    @property
    def _own_network(self) -> Any:
        """The network that the user gave or named."""
        network = self._asked.algo_kwargs.get("network")
        return network if not isinstance(network, str) or network in self._asked.named else None

    def __getattr__(self, name: str) -> NoReturn:
        hint = f"; {remark}" if (remark := sb3_hints()["remarks"].get(name)) else ""
        if "config" in vars(self):  # not while it is copied or unpickled
            hint = f"; .config.{name} has it" if name in TrainConfig.model_fields else hint
            hint = f"; .hyperparameters[{name!r}] has it" if name in self.hyperparameters else hint
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    if not TYPE_CHECKING:  # type checkers would allow every attribute

        def __setattr__(self, name: str, value: Any) -> None:
            own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
            # a subclass of the user's may keep under any name what it likes
            if not own and "env" in vars(self) and type(self).__module__.startswith("rl_training."):
                known = [*self.hyperparameters, *TrainConfig.model_fields]
                if (setting := name if name in known else near_name(name, known, likeness=0.8)) is not None:
                    ways = f"{type(self).__name__}(env, {setting}=...) sets {setting}"
                    later = f"rl-training resume --checkpoint RUN --set {setting}=... --force changes it in a run"
                    raise AttributeError(f"{name} cannot be assigned: {ways}, and {later}.", name=name, obj=self)
            super().__setattr__(name, value)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyper-parameters and schedules with their values; after `learn`, `auto` values are resolved."""
        return dump_params(read_params(get_algorithm_spec(self.algo).params, self.config.algo_kwargs))

    def get_parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters of the networks, targets too, and of the normalizers' statistics, by name."""
        return learner.copy_parameters(self._loaded().algorithm)

    def set_parameters(self, parameters: Mapping[str, Any], **unknown: Any) -> None:
        """Replace the parameters of these names (of `get_parameters`) and keep the others, also the optimizers' state.

        `predict`, `evaluate` and `save` use them, and the next `learn` continues with them in a new run folder. A
        target network has names of its own.
        """
        refuse_unknown("set_parameters", unknown, ("parameters",))
        if not isinstance(parameters, Mapping):
            raise UserError(f"parameters is {parameters!r:.60}; {sb3_hints()['remarks']['load_path_or_dict']}")
        tree = learner.read_checkpoint(self._path("set the parameters of"))
        if learner.is_policy(tree):
            raise UserError("this is a policy file, which only acts; set_parameters needs one of a run or of save().")
        tree["algorithm"] |= learner.check_parameters(self.get_parameters(), parameters)
        if (begun_in := run_dir_of(self._path("set the parameters of"))) is not None:
            self._output_dir = str(begun_in.parent)
        elif self._output_dir is None:
            self._output_dir = self.config.output_dir
        self._folder = TemporaryDirectory(prefix="rl-training-")
        path = save_checkpoint(Path(self._folder.name) / "parameters.ckpt", tree)
        policy = learner.TrainedPolicy(*learner.load_algorithm(path, tree, self._own_network))
        self._checkpoint, self._policy = path, policy

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None, **unknown: Any) -> Any:
        """Return the action for an observation, or the actions for a batch; nothing else, so `action, _ =` is wrong.

        Every call is treated as the first step of an episode; for a policy with memory (Dreamer) use `actor()`.
        `action_mask` has the form of `info["action_mask"]`, for a batch one per observation; None allows every action.
        """
        refuse_unknown("predict", unknown, ARGUMENTS_OF_PREDICT)
        action = self._loaded().predict(obs, deterministic, action_mask=action_mask)
        if isinstance(action, np.ndarray):
            warn_if_unpacked(sys._getframe(1))
        return action

    def actor(self, deterministic: bool = True) -> Actor:
        """Return an actor that remembers its episode."""
        return Actor(self._loaded(), deterministic)

    def video(self, *, seed: int | None = None, deterministic: bool = True) -> Film:
        """Play an episode and return it as an animated GIF, which a notebook shows; `.save(path)` writes a file.

        It needs no display and no video library; `rl-training eval --record-video DIR` writes MP4 files.
        """
        policy = self._loaded()
        seed = self.config.seed if seed is None else whole_number("seed", seed, least=0)
        return film_episode(
            policy.algorithm, policy.spaces, policy.config, self.env, seed=seed, deterministic=deterministic
        )

    def save(
        self, path: str | Path, include_replay: bool = False, *, policy_only: bool = False, **unknown: Any
    ) -> Path:  # fmt: skip
        """Write one file with the config, spaces, learner, normalizers and, on request, the replay buffer.

        With `policy_only`, it is a small file to share: it acts and is evaluated, but cannot continue training.
        """
        refuse_unknown("save", unknown, ("path", "include_replay", "policy_only"))
        tree = learner.read_checkpoint(self._path("save"))
        if policy_only and include_replay:
            raise UserError("policy_only and include_replay are both True; a policy file holds no replay buffer.")
        if policy_only and not learner.is_policy(tree):
            tree = learner.policy_tree(tree, self._loaded().algorithm)
        if include_replay and not tree["config"]["replay_in_checkpoint"]:
            raise UserError("include_replay is True, but the run kept no replay buffer: replay_in_checkpoint is false.")
        if not include_replay:
            tree["source"].pop("replay", None)
        return save_checkpoint(path, tree)

    @classmethod
    def load(
        cls: type[Self], path: str | Path, *, env: UserEnv | None = None, network: Any = None,
        output_dir: str | Path | None = None, **unknown: Any,
    ) -> Self:  # fmt: skip
        """Load the algorithm from a file that `save` or a run wrote; give `network` if it was trained with your own.

        `env` may be another environment with the same spaces: `learn` then continues there, with new episodes and an
        empty replay buffer. An environment with the same name counts as the same one; so does any environment if the
        policy was trained on a function without a name.

        `learn` continues in the run's own folder if the file is in one. Otherwise, and if `output_dir` is given, it
        makes a new folder in `output_dir`, which is `runs` by default: a file does not decide where it writes.
        """
        refuse_unknown("load", unknown, ("path", "env", "network", "output_dir"))
        tree, env = learner.read_checkpoint(path), read_env(env)
        policy = learner.TrainedPolicy(*learner.load_algorithm(path, tree, network))
        config = policy.config
        if network is not None:
            config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "network": network}})
            config = config.naming(*config.callables[1:])
        if config.algo != cls.algo:
            other = get_algorithm_spec(config.algo).class_name
            raise UserError(f"{path} is a checkpoint of {config.algo}, not of {cls.algo}; use {other}.load.")
        name = config.env_id if env is None or isinstance(env, tuple) else name_env(env)
        home = home_of(Path(path)) if output_dir is None else os.fspath(output_dir)
        config = config.model_copy(update={"output_dir": home})
        moves = config.env_id not in (name, NAMELESS)
        if moves:
            config = config.model_copy(update=move_config(config, name))
        if env is not None:
            learner.check_same_spaces(policy.spaces, probe_spaces(read_recipe(config.env_id, config.env_kwargs, env)))
        config = config.model_copy(update={"env_kwargs": fill_defaults(config.env_kwargs, UNSAID["env_kwargs"])})
        managed = cls.__new__(cls)
        managed._begin(config, env)
        managed._checkpoint, managed._policy, managed._moves_to = Path(path), policy, name if moves else None
        managed._only_acts, managed._output_dir = learner.is_policy(tree), None if output_dir is None else home
        managed._step = validate(RunState, tree["run"], f"{path}, run").step
        return managed

    @classmethod
    def from_zoo(cls: type[Self], name: str) -> Self:
        """Load a packaged policy, such as `ppo/halfcheetah_gpu`; `rl-training zoo list` shows all of them."""
        name = name if "/" in name else f"{cls.algo}/{name}"
        path, algo = find_policy(name), read_card(name).algo
        if algo != cls.algo:
            other = get_algorithm_spec(algo).class_name
            raise UserError(f"{name} is a policy of {algo}, not of {cls.algo}; use {other}.from_zoo.")
        return cls.load(path)

    def _adopt(self, result: TrainResult, raise_on_signal: bool) -> TrainResult:
        self._checkpoint, self._policy = result.checkpoint_path, result.policy
        self._moves_to, self._output_dir, self._only_acts = None, None, False
        self.config, self._step = result.policy.config, result.metrics["global_step"]
        return result.raise_signal() if raise_on_signal else result

    def _path(self, verb: str) -> Path:
        if self._checkpoint is None:
            raise UserError(f"there is nothing to {verb} yet; call learn() or load() first.")
        return self._checkpoint

    def _loaded(self) -> learner.TrainedPolicy:
        if self._policy is None:
            raise UserError("there is no policy yet; call learn() or load() first.")
        return self._policy


def refuse_unknown(method: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first argument that a method does not have."""
    for name in given:
        raise UserError(f"{method} has no argument {name!r}; {did_you_mean(name, known)}")


def warn_if_unpacked(caller: FrameType) -> None:
    """Warn once for each call whose result the caller unpacks into two names, the second one `_...` or `state...`.

    `throttle, steering = model.predict(obs)` is fine, so the names decide.
    """
    call = id(caller.f_code), caller.f_lasti
    if call in _seen:
        return
    _seen[call] = caller.f_code
    after = (one for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    first = next(after, None)
    if first is None or (first.opname, first.argval) != ("UNPACK_SEQUENCE", 2):
        return
    names: list[str] = []
    for one in islice(after, 4):
        if one.opname.startswith("STORE"):
            names += one.argval if isinstance(one.argval, tuple) else [one.argval]  # Python 3.13 stores two at once
    if len(names) > 1 and names[1].startswith(("_", "state")):
        warnings.warn(learner.ACTION_ALONE, stacklevel=3)
