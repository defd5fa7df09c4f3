"""Train, resume, evaluate and predict, generic over the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.envs.factory import UserEnv, probe_spaces, read_recipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, counted
from rl_training.experiment.checkpointing import load_checkpoint, pack_tree, unpack_tree
from rl_training.experiment.config import TrainConfig, load_config
from rl_training.runtime.acting import ActingSession, acting_lock
from rl_training.runtime.evaluation import EvaluationResult, Evaluator, record_video, watch
from rl_training.runtime.loop import run_loop
from rl_training.runtime.params import change_params, dump_params, read_params
from rl_training.runtime.random_play import compare_restored
from rl_training.runtime.run import SCHEMA, Callback, Run, RunState
from rl_training.runtime.run_folder import branch_run_dir, is_newest, locked, make_run_dir, run_dir_of
from rl_training.runtime.session import (
    Session,
    build_algorithm,
    check_same_spaces,
    choose_threads,
    describe_machine,
    open_session,
    threads_restored,
)
from rl_training.runtime.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.validation import validate

PathLike = str | Path
AnyConfig = TrainConfig | Mapping[str, Any] | str | Path
BUDGET_KEYS = {"total_timesteps", "max_seconds", "algo_kwargs.max_updates"}
FREE_KEYS = BUDGET_KEYS | {"output_dir", "worker_timeout", "algo_kwargs.replay_folder"}  # none changes what is learned


@dataclass(frozen=True)
class TrainResult:
    """Where a run is, its newest checkpoint, and its last metrics."""

    run_dir: Path
    checkpoint_path: Path
    metrics: dict[str, Any]
    policy: TrainedPolicy = field(repr=False)


class TrainedPolicy:
    """A learner with the spaces it acts in: predicts without an environment, in any thread.

    It can be pickled to another process, where it acts on the CPU and draws from the start of its seed again.
    """

    def __init__(self, algorithm: Algorithm, spaces: EnvSpaces, config: TrainConfig) -> None:
        self.algorithm, self.spaces, self.config, self.seed = algorithm, spaces, config, config.seed
        self._sessions: dict[tuple[int, bool], ActingSession] = {}

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """The environment's action for one raw observation, or a batch for a batch; memory starts empty.

        `action_mask` is as the environment's `info` has it, for a batch one per observation; None allows every action.
        """
        encoded, is_batch = self.spaces.encode_for_prediction(obs)
        masks = self.spaces.masks_for_prediction(action_mask, len(encoded), is_batch=is_batch)
        with acting_lock(self.algorithm):
            session = self.session(len(encoded), deterministic)
            session.forget()
            chosen = session.act(encoded, masks, np.ones(len(encoded), dtype=bool))
        actions = self.spaces.map_actions(chosen)
        return actions if is_batch else plain_action(actions[0])

    def session(self, count: int, deterministic: bool) -> ActingSession:
        """The acting session for that many rows; one per size, so that sampling goes on rather than repeats."""
        key = (count, deterministic)
        if key not in self._sessions:
            self._sessions[key] = ActingSession(self.algorithm, count, self.seed, deterministic=deterministic)
        return self._sessions[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """The parts of a checkpoint that predicting needs, in its own format."""
        with acting_lock(self.algorithm):
            state = dict(self.algorithm.state_dict())
        parts = {"config": self.config.model_dump(mode="json"), "spaces": self.spaces.to_dict(), "algorithm": state}
        return _unpickle_policy, (pack_tree(parts),)


def _unpickle_policy(data: bytes) -> TrainedPolicy:
    return TrainedPolicy(*load_algorithm("the pickled policy", unpack_tree(data)))


def plain_action(action: Any) -> Any:
    """A discrete action as an int, any other as an array."""
    array = np.asarray(action)
    return int(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else array


def read_config(config: AnyConfig, env: UserEnv | None) -> TrainConfig:
    """The config as `load_config` reads it, of the environment that the user names or makes, where one is given."""
    if isinstance(config, Mapping) and env is not None:
        name = env if isinstance(env, str) else getattr(env, "__name__", "")
        config = {"env_id": name if isinstance(env, str) or name.isidentifier() else "custom", **config}
    loaded = load_config(config)
    return loaded.model_copy(update={"env_id": env}).naming(env) if isinstance(env, str) else loaded


@threads_restored()
def train(
    config: AnyConfig, *, env: UserEnv | None = None, callbacks: Iterable[Callback] | None = None,
    run_suffix: str | None = None, console: bool | None = None,
) -> TrainResult:  # fmt: skip
    """One run from the start; `config` is a TrainConfig, a mapping, a file or a preset such as `ppo/cartpole`."""
    told = read_callbacks(callbacks)
    session = open_session(read_config(config, env), env=env)
    with ExitStack() as held:
        try:
            run_dir = make_run_dir(session.config, run_suffix)
            held.enter_context(locked(run_dir))
        except BaseException:
            session.source.close()
            raise
        return execute(session, run_dir, told, console)


def read_callbacks(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """The callbacks, each of which must have something to call."""
    if callbacks is not None and not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks is a {type(callbacks).__name__}; it must be a list of callbacks.")
    told = list(callbacks or ())
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in told:
        if not any(callable(getattr(callback, name, None)) for name in events):
            raise UserError(f"{callback!r} is no callback; it needs a method among {', '.join(events)}.")
    return told


class TrainFunction(Protocol):
    """What every `train_<name>` is: `train`, for a config of that algorithm."""

    def __call__(
        self, config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
    ) -> TrainResult: ...


def train_function(module: str, specs: Sequence[AlgorithmSpec]) -> TrainFunction:
    """The `train_<name>` of the module `<name>_trainer`, which trains the algorithms in it."""
    names = [spec.name for spec in specs]

    def train_named(
        config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | None = None
    ) -> TrainResult:
        loaded = load_config(config)
        if loaded.algo not in names:
            raise UserError(f"algo is {loaded.algo!r}; this function trains {', '.join(names)}.")
        return train(loaded, run_suffix=run_suffix, callbacks=callbacks)

    name = module.rpartition(".")[2].removesuffix("_trainer")
    train_named.__module__, train_named.__name__, train_named.__qualname__ = module, *(f"train_{name}",) * 2
    train_named.__doc__ = f"Train {' or '.join(spec.class_name for spec in specs)} as the config says."
    return train_named


def execute(
    session: Session, run_dir: Path, callbacks: Iterable[Callback], console: bool | None,
    restored: RunState | None = None, notes: Iterable[str] = (),
) -> TrainResult:  # fmt: skip
    """Run the loop of an open session in its folder."""
    resolved = session.config
    kept, *warnings = session.source.describe().split("\n")
    messages = [
        f"{resolved.algo} on {resolved.env_id}: {run_dir} (device {resolved.device}, threads {resolved.threads}, "
        f"{counted(resolved.num_envs, 'environment')} {resolved.vectorization}, {kept})",
        *warnings,
        *session.notes,
        *notes,
    ]
    shows = sys.stderr.isatty() if console is None else console
    try:
        run = Run(session, run_dir, callbacks=callbacks, console=shows, restored=restored, messages=messages)
    except BaseException:
        session.source.close()
        raise
    with run.signals():
        try:
            with run.rescue():
                run.start()
                with run.abandonment():
                    run_loop(session.algorithm, session.source, run)
                metrics = run.finish()
        finally:
            run.close()
    policy = TrainedPolicy(session.algorithm, session.spaces, session.config)
    return TrainResult(run_dir, run.checkpoints.latest, metrics, policy)


def read_checkpoint(path: PathLike) -> dict[str, Any]:
    """A training checkpoint's tree, checked for its parts."""
    tree = load_checkpoint(path)
    missing = {"schema", "config", "spaces", "algorithm", "source", "run"} - set(tree)
    if missing:
        raise UserError(f"{path} is not a training checkpoint: it has no {', '.join(sorted(missing))}.")
    if type(tree["schema"]) is not int or tree["schema"] != SCHEMA:
        raise UserError(f"{path} has the schema {tree['schema']!r}; this rl-training reads schema {SCHEMA}.")
    if odd := [part for part in ("config", "spaces", "algorithm", "source", "run") if not isinstance(tree[part], dict)]:
        raise UserError(f"{path} is not a training checkpoint: its {odd[0]} is not a mapping.")
    return tree


def load_algorithm(
    path: PathLike, tree: dict[str, Any], device: str = "cpu"
) -> tuple[Algorithm, EnvSpaces, TrainConfig]:
    """The learner in a checkpoint, with its weights; the config's `auto`s are decided."""
    config = validate(TrainConfig, tree["config"], str(path))
    spec = get_algorithm_spec(config.algo)
    params = read_params(spec.params, config.algo_kwargs)
    spaces = read_spaces(path, tree["spaces"])
    spec.check_support(spaces, learns=False)
    algorithm = build_algorithm(spec, params, spaces, seed=config.seed, device=device, stored=tree["algorithm"])
    load_weights(path, algorithm, tree["algorithm"])
    threads = config.threads if config.threads != "auto" else choose_threads(params, spaces)
    return algorithm, spaces, config.model_copy(update={"threads": threads})


def read_spaces(path: PathLike, data: dict[str, Any]) -> EnvSpaces:
    """The spaces in a checkpoint, checked to be what an environment with them would give."""
    try:
        spaces = EnvSpaces.from_dict(data)
        flags = {
            name: bool(getattr(spaces, name))
            for name in ("has_action_mask", "normalize_observations", "normalize_rewards")
        }
        again = EnvSpaces.from_gym(spaces.env_id, spaces.observation_space, spaces.action_space, **flags).to_dict()
    except Exception as error:  # what an edited file holds can fail in any way
        raise UserError(f"{path}: its spaces make no sense ({describe_error(error)}).") from None
    stored = spaces.to_dict()
    odd = [name for name, value in again.items() if not name.startswith("raw_") and stored[name] != value]
    if odd or not isinstance(spaces.env_id, str):
        raise UserError(f"{path}: its spaces do not fit together; {(odd or ['env_id'])[0]} is wrong.")
    return spaces


def describe_error(error: Exception) -> str:
    """An exception in a few words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()[:160]}" if lines else type(error).__name__


def load_weights(path: PathLike, algorithm: Algorithm, state: dict[str, Any]) -> None:
    """Put a checkpoint's state into a learner, after a look at every part of it."""
    state = with_own_generator(state, algorithm)
    if problem := first_difference(state, algorithm.state_dict(), "algorithm"):
        raise UserError(f"{path} does not fit its own config: {problem}.")
    try:
        algorithm.load_state_dict(state)
    except Exception as error:  # such as a generator's state of the right size that is none
        raise UserError(f"{path} does not fit its own config: {describe_error(error)}.") from None
    if (bad := algorithm.first_bad_tensor()) is not None:
        raise UserError(f"{path} holds a NaN or an infinity in {bad}; use an earlier checkpoint of the run.")


def with_own_generator(state: dict[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """The state, with this learner's own generators where they were made on another kind of device."""
    changed = {}
    for name, own in algorithm.state_dict().items():
        extra = state.get(name)
        if not isinstance(own, Mapping) or "generator" not in own or not isinstance(extra, Mapping):
            continue
        if isinstance(extra.get("device"), str) and extra["device"] != own["device"]:
            changed[name] = {**extra, "device": own["device"], "generator": own["generator"]}
    return {**state, **changed}


def first_difference(stored: Any, built: Any, name: str) -> str | None:
    """Where a stored state differs in kind or shape from a freshly built one, in words; None where it does not.

    A built None or {} stands for what only exists later, and fits anything.
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


def load_policy(path: PathLike) -> TrainedPolicy:
    """The policy in a checkpoint, on the CPU, ready to predict."""
    return TrainedPolicy(*load_algorithm(path, read_checkpoint(path)))


def predict_checkpoint(path: PathLike, obs: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
    """The action of a checkpoint's policy for one observation or a batch; `action_mask` as `predict` takes it."""
    return load_policy(path).predict(obs, deterministic, action_mask=action_mask)


@threads_restored()
def evaluate_checkpoint(
    path: PathLike, *, num_episodes: int | None = None, deterministic: bool = True,
    env: UserEnv | None = None, seed: int | None = None, record_video_dir: PathLike | None = None,
    render: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of whole episodes with a checkpoint's policy, per-episode returns and lengths among them."""
    whole = isinstance(num_episodes, (int, np.integer)) and not isinstance(num_episodes, bool)
    if num_episodes is not None and (not whole or num_episodes < 1):
        raise UserError(f"num_episodes is {num_episodes!r}; it must be a whole number of at least 1.")
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path))
    episodes = int(num_episodes) if num_episodes is not None else max(config.eval_episodes, 1)
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    check_same_spaces(spaces, probe_spaces(recipe))
    seed = config.seed if seed is None else seed
    torch.set_num_threads(int(config.threads))
    result: EvaluationResult
    if record_video_dir is not None:
        result = record_video(
            recipe, spaces, algorithm, episodes, seed, Path(record_video_dir), deterministic=deterministic
        )
    elif render:
        result = watch(recipe, spaces, algorithm, episodes, seed, deterministic=deterministic)
    else:
        result = Evaluator(recipe, spaces, seed).evaluate(algorithm, episodes, deterministic=deterministic)
    return {**result.metrics(), "eval_returns": result.returns, "eval_lengths": result.lengths}


@threads_restored()
def resume_training(
    path: PathLike, *, total_timesteps: int | None = None, output_dir: PathLike | None = None,
    changes: Mapping[str, Any] | None = None, force: bool = False, env: UserEnv | None = None,
    callbacks: Iterable[Callback] | None = None, console: bool | None = None,
) -> TrainResult:  # fmt: skip
    """Go on from a checkpoint, in its own run folder or a new one under `output_dir`.

    The budget may change (schedules stretch), and where files go; any other key in `changes` needs `force`.
    """
    told = read_callbacks(callbacks)
    wanted = dict(changes or {})
    if total_timesteps is not None:
        wanted["total_timesteps"] = total_timesteps
    if output_dir is not None:
        wanted["output_dir"] = str(output_dir)
    begun_in = run_dir_of(Path(path))
    in_place = begun_in if begun_in is not None and "output_dir" not in wanted and is_newest(Path(path)) else None
    with ExitStack() as held:
        if in_place is not None:  # before reading: nobody else goes on from what is read
            held.enter_context(locked(in_place))
        session, state, notes = restore_session(path, wanted, force=force, env=env)
        if in_place is None and "output_dir" not in wanted:  # a checkpoint does not say where to write
            home = TrainConfig.model_fields["output_dir"].default if begun_in is None else str(begun_in.parent)
            session.config = session.config.model_copy(update={"output_dir": home})
            if begun_in is not None:
                branch = f"{path} is not the newest state of {begun_in}, so this branch of it has a folder of its own."
                notes.append(branch)
        try:
            run_dir = in_place or branch_run_dir(session.config, begun_in)
            if in_place is None:
                held.enter_context(locked(run_dir))
        except BaseException:
            session.source.close()
            raise
        return execute(session, run_dir, told, console, restored=state, notes=notes)


def restore_session(
    path: PathLike, wanted: Mapping[str, Any], *, force: bool, env: UserEnv | None
) -> tuple[Session, RunState, list[str]]:
    """The parts of a run as a checkpoint has them, and sentences on what changed or did not come back exactly."""
    tree = read_checkpoint(path)
    stored = validate(TrainConfig, tree["config"], str(path))
    state = validate(RunState, tree["run"], f"{path}, run")
    config, notes = change_config(stored, wanted, force=force)
    if "replay_folder" not in (wanted.get("algo_kwargs") or {}):
        config, note = keep_replay_at_home(config, Path(path), elsewhere="output_dir" in wanted)
        notes += note
    if config.total_timesteps != stored.total_timesteps and config.total_timesteps < state.step:
        raise UserError(
            f"total_timesteps is {config.total_timesteps}, but {path} is at step {state.step} already; "
            "the budget counts from the start of the run."
        )
    seconds = config.max_seconds
    if seconds is not None and seconds != stored.max_seconds and seconds < state.train_seconds:
        raise UserError(
            f"max_seconds is {seconds:g}, but {path} has trained for {state.train_seconds:.1f} seconds already; "
            "it counts from the start of the run."
        )
    read_spaces(path, tree["spaces"])
    session = open_session(config, env=env, restored=tree)
    try:
        load_weights(path, session.algorithm, tree["algorithm"])
        sentences = load_source(path, session, tree["source"])
    except BaseException:
        session.source.close()
        raise
    if state.abandoned:
        sentences.append("it was saved in the middle of a turn: episodes start over, so this resume is not exact.")
    sentences += machine_changes(tree.get("machine"), session.config)
    return session, state, notes + [f"warning: {sentence}" for sentence in sentences]


def machine_changes(stored: Any, config: TrainConfig) -> list[str]:
    """A sentence on what the arithmetic depends on and is not as a checkpoint says; older ones say nothing."""
    if not isinstance(stored, Mapping):
        return []
    here = describe_machine(config).items()
    changed = [f"{name} {value}, was {stored[name]}" for name, value in here if stored.get(name, value) != value]
    return [f"this machine is another one ({'; '.join(changed)}), so this resume may not be exact."] if changed else []


def keep_replay_at_home(config: TrainConfig, checkpoint: Path, *, elsewhere: bool) -> tuple[TrainConfig, list[str]]:
    """A mapped buffer's files in the run's own folder, or in `output_dir` where the user gives one: `elsewhere`.

    A checkpoint must not decide where a resume writes.
    """
    named = config.algo_kwargs.get("replay_folder")
    home = str(run_dir_of(checkpoint) or TrainConfig.model_fields["output_dir"].default)
    home = config.output_dir if elsewhere else home
    if named in (None, home):
        return config, []
    note = f"the replay buffer is mapped to files in {home}; --set replay_folder={named} puts them where they were"
    return config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "replay_folder": home}}), [note]


def load_source(path: PathLike, session: Session, state: dict[str, Any]) -> list[str]:
    """Bring environments, generators and buffers back; returns sentences on what did not come back exactly."""
    try:
        sentences = session.source.load_state_dict(state)
        # What a source took without a look, it gives back as something else; a buffer looks itself, and may be absent.
        given, taken = ({**part, "replay": None} for part in (state, session.source.state_dict()))
        problem = first_difference(given, taken, "source")
    except UserError:
        raise
    except Exception as error:  # what an edited file holds can fail in any way
        raise UserError(f"{path}: its source cannot be brought back ({describe_error(error)}).") from None
    if problem:
        raise UserError(f"{path}: its source cannot be brought back: {problem}.")
    return sentences or find_history(session, state)


def find_history(session: Session, state: dict[str, Any]) -> list[str]:
    """A sentence where the environments had episodes before and random play shows that something carries over.

    A replay of the current episode alone may not show it yet: Box2D remembers contacts of bodies that are gone.
    """
    episodes = state.get("stepper", {}).get("engine", {}).get("episodes", [])
    if not any(episode["episode"] > 0 for episode in episodes):
        return []
    try:
        where = session.config.vectorization, session.config.worker_timeout
        seen, _ = compare_restored(session.recipe, session.spaces, session.config.seed, 330, 100, *where)
    except Exception as error:  # of environments made only to look at them
        reason = f"{session.spaces.env_id} failed in a trial with random actions ({describe_error(error)})"
        return [f"{reason}, so whether this resume is exact is unknown."]
    if not seen:
        return []
    return [
        f"{session.spaces.env_id} came to a different {seen[0]} when it was restored in a trial with random actions: "
        "something carries over from one episode to the next, so this resume is not exact."
    ]


def change_config(stored: TrainConfig, wanted: Mapping[str, Any], *, force: bool) -> tuple[TrainConfig, list[str]]:
    """The stored config with the wanted keys, and a sentence on each change; only budgets change without `force`."""
    before = stored.model_dump(mode="json")
    merged = {**before, **wanted}
    if isinstance(wanted.get("algo_kwargs"), Mapping):
        model = get_algorithm_spec(stored.algo).params
        merged["algo_kwargs"] = change_params(model, stored.algo_kwargs, wanted["algo_kwargs"])
    config = validate(TrainConfig, merged, "resume").naming(*([wanted["env_id"]] if "env_id" in wanted else ()))
    old, new = ({**c.model_dump(mode="json"), **flat_params(c)} for c in (stored, config))
    changed = [key for key in {**old, **new} if key != "algo_kwargs" and old.get(key) != new.get(key)]
    refused = [key for key in changed if key not in FREE_KEYS]
    if refused and not force:
        what = ", ".join(f"{key} from {old.get(key)!r} to {new.get(key)!r}" for key in refused)
        raise UserError(f"resuming would change {what}; only the budget may change, anything else needs --force.")
    notes = [f"changed by --force: {key} is now {new.get(key)!r} (was {old.get(key)!r})" for key in refused]
    if config.total_timesteps != stored.total_timesteps:
        budgets = f"{config.total_timesteps} steps (was {stored.total_timesteps})"
        notes.append(f"the budget is now {budgets}; schedules stretch with it")
    return config, notes


def flat_params(config: TrainConfig) -> dict[str, Any]:
    """Every hyper-parameter of a config under `algo_kwargs.<name>`."""
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    return {f"algo_kwargs.{name}": value for name, value in dump_params(params).items()}
