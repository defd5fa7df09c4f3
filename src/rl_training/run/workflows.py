"""Train, resume, evaluate and predict, generic over the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_training.config.choices import torch_settings_restored
from rl_training.config.settings import AnyConfig, keys_located, read_config
from rl_training.config.spec import AlgorithmSpec
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.envs.factory import UserEnv, read_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError, counted
from rl_training.record.json_lines import check_log_format
from rl_training.run import learner
from rl_training.run.build import Session, closed_on_error, open_session
from rl_training.run.evaluation import Evaluator, Watch
from rl_training.run.folder import (
    branch_run_dir,
    end_written,
    home_of,
    is_newest,
    locked,
    make_run_dir,
    read_end,
    run_dir_of,
)
from rl_training.run.interruption import abandon_turn_on_signal, save_on_failure, stop_error, stop_on_signals
from rl_training.run.loop import RunState, run_loop, summarize_episodes
from rl_training.run.ranks import join_ranks
from rl_training.run.restoring import find_run, restore_session, write_asked
from rl_training.run.run import Callback, Run, read_callbacks
from rl_training.validation import validate, whole_number


@dataclass(frozen=True)
class TrainResult:
    """A run's folder, its newest checkpoint, and its last metrics."""

    run_dir: Path
    checkpoint_path: Path
    metrics: dict[str, Any]
    policy: learner.TrainedPolicy = field(repr=False)
    stop_signal: int | None = field(default=None, repr=False)  # the number of the signal that stopped the run

    def raise_signal(self) -> TrainResult:
        """Raise KeyboardInterrupt or Terminated if a signal stopped the run; otherwise return this result."""
        if self.stop_signal is None:
            return self
        error = stop_error(self.stop_signal)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"step {self.metrics['global_step']:,} is saved in {self.checkpoint_path}")
        raise error


@torch_settings_restored()
@keys_located()
def train(
    config: AnyConfig, *, env: UserEnv | None = None, callbacks: Iterable[Callback] | Callback | None = None,
    run_suffix: str | None = None, console: bool | None = None, raise_on_signal: bool = True, continues: bool = False,
) -> TrainResult:  # fmt: skip
    """Train a new run; `config` is a TrainConfig, a mapping, a file or a preset such as `ppo/cartpole`.

    SIGINT or SIGTERM saves a checkpoint, then raises KeyboardInterrupt or `rl_training.Terminated`, which exits with
    143; with `raise_on_signal=False` it returns the result instead. With `continues`, the run of that name is resumed
    if it has a checkpoint, and its result is returned at once if it is done.
    """
    check_log_format()
    told, env = read_callbacks(callbacks), read_env(env)
    ranks, config = join_ranks(), read_config(config, env)
    found = ranks.first(lambda: find_run(config)) if continues else None
    if found is not None and found.is_done:
        if console and ranks.rank == 0:
            print(f"{found.latest.parents[1]} is done already; there is nothing to train", file=sys.stderr)
        return load_result(found.latest, config.named)
    if found is not None:
        return resume_training(
            found.latest, changes=found.changes, env=config.named if env is None else env, callbacks=told,
            console=console, raise_on_signal=raise_on_signal,
        )  # fmt: skip
    session = open_session(config, env=env, ranks=ranks)
    with ExitStack() as held:
        with closed_on_error(session):
            run_dir = ranks.first(lambda: make_run_dir(session.config, run_suffix, reuse=continues))
            ranks.first(lambda: held.enter_context(locked(run_dir)))
            if continues and ranks.first(lambda: find_run(config)) is not None:
                raise UserError(f"another process has started {run_dir} in the meantime; repeat the command.")
            ranks.first(lambda: write_asked(run_dir, config))
        notes = []
        if config.name is not None and (named := run_dir.with_name(config.name)) != run_dir and run_suffix is None:
            notes.append(f"{named} exists, so this run is {run_dir}; to continue {config.name}, use train --continue")
        result = execute(session, run_dir, told, console, notes=notes)
    return result.raise_signal() if raise_on_signal else result


class TrainFunction(Protocol):
    """The type of every `train_<name>`: `train`, for a config of that algorithm."""

    def __call__(
        self, config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | Callback | None = None
    ) -> TrainResult: ...


def train_function(module: str, specs: Sequence[AlgorithmSpec]) -> TrainFunction:
    """The `train_<name>` of the module `<name>_trainer`, which trains the algorithms in it."""
    names = [spec.name for spec in specs]

    def train_named(
        config: Any, *, run_suffix: str | None = None, callbacks: Iterable[Callback] | Callback | None = None
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
    config, ranks, here = session.config, session.ranks, Path.cwd()
    kept, *warnings = session.store.describe().split("\n")
    shown = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
    where = f" in {counted(int(config.num_workers), 'worker')}" if config.has_workers else ""
    where += " on Ray" if config.execution_backend == "ray" else ""
    each = f", each of {ranks.count} learners" if ranks.count > 1 else ""
    begins = (
        f"{config.algo} on {config.env_id}: {shown} (device {config.device}, threads {config.threads}, "
        f"{counted(config.num_envs, 'environment')} {config.vectorization}{where}, {kept}{each})"
    )
    messages = [begins, *warnings, *session.notes, *notes]
    shows = sys.stderr.isatty() if console is None else console
    with closed_on_error(session):
        run = Run(session, run_dir, callbacks=callbacks, console=shows, restored=restored, messages=messages)
    ending: AbstractContextManager[dict[str, Any]] = nullcontext({}) if ranks.rank else end_written(run_dir)
    with ending as end, stop_on_signals(run):
        try:
            with save_on_failure(run):
                run.start()
                with abandon_turn_on_signal(run):
                    run_loop(session, run)
                metrics = run.finish()
        finally:
            run.close()
        end["stop_reason"] = metrics["stop_reason"]
    policy = learner.TrainedPolicy(session.algorithm, session.spaces, config)
    stop_signal = int(ranks.largest(run.stop.signal or 0)) or None  # torchrun kills the others when one exits
    return TrainResult(run_dir, run.checkpoints.latest, metrics, policy, stop_signal)


def load_result(path: Path, names: tuple[str, ...]) -> TrainResult:
    """The result of a run that has ended, from its newest checkpoint; `names` may be imported."""
    tree = learner.read_checkpoint(path)
    state = validate(RunState, tree["run"], f"{path}, run")
    metrics = {
        "global_step": state.step, "updates": state.updates, **summarize_episodes(state),
        **state.last_evaluation, **state.collected_metrics, **state.latest, **state.logged,
        "train_seconds": state.train_seconds, "stop_reason": read_end(path.parents[1]).get("stop_reason"),
    }  # fmt: skip
    policy = learner.TrainedPolicy(*learner.load_algorithm(path, tree, names))
    return TrainResult(path.parents[1], path, metrics, policy)


def predict_checkpoint(
    path: learner.PathLike, obs: Any, *, deterministic: bool = True, action_mask: Any = None, network: Any = None
) -> Any:
    """The action of a checkpoint's policy for one observation or a batch; `action_mask` as `predict` takes it."""
    return learner.load_policy(path, network).predict(obs, deterministic, action_mask=action_mask)


@torch_settings_restored()
def evaluate_checkpoint(
    path: learner.PathLike, *, num_episodes: int | None = None, deterministic: bool = True,
    env: UserEnv | None = None, seed: int | None = None, record_video_dir: learner.PathLike | None = None,
    render: bool = False, network: Any = None, watch: Watch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of whole episodes with a checkpoint's policy, including per-episode returns and lengths.

    `watch` is called after every step with the number of the episode and its length so far.
    """
    asked = None if num_episodes is None else whole_number("num_episodes", num_episodes, least=1)
    network = env if network is None and isinstance(env, tuple) else network
    algorithm, spaces, config = learner.load_algorithm(path, learner.read_checkpoint(path), network)
    episodes = asked or config.eval_episodes or 1
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    learner.check_same_spaces(spaces, probe_spaces(recipe))
    seed = config.seed if seed is None else seed
    torch.set_num_threads(int(config.threads))
    videos = None if record_video_dir is None else Path(record_video_dir)
    result = Evaluator(recipe, spaces, seed, max_steps=config.eval_max_steps).evaluate(
        algorithm, episodes, deterministic=deterministic, window=render, videos=videos, watch=watch
    )
    return {**result.metrics(), "eval_returns": result.returns, "eval_lengths": result.lengths}


def said_again(config: TrainConfig, wanted: Mapping[str, Any], env: UserEnv | None) -> list[str]:
    """The modules, the environment and the network that the user of a resume named, for the config to know."""
    network = (wanted.get("algo_kwargs") or {}).get("network")
    modules = env if isinstance(env, tuple) else (env,) if env == config.env_id else ()
    return [name for name in (*modules, network) if isinstance(name, str)]


def why_there(
    path: learner.PathLike, begun_in: Path | None, home: str, named_there: str, *, elsewhere: bool
) -> list[str]:
    """A sentence if a resumed run gets a folder that its user may not expect."""
    if begun_in is None and named_there != home:
        return [f"{path} names output_dir {named_there!r}, which only you may choose; this run is in {home}."]
    if begun_in is not None and not elsewhere:
        return [f"{path} is not the newest state of {begun_in}, so this branch gets its own folder."]
    return []


@torch_settings_restored()
def resume_training(
    path: learner.PathLike, *, total_timesteps: int | None = None, output_dir: learner.PathLike | None = None,
    changes: Mapping[str, Any] | None = None, force: bool = False, env: UserEnv | None = None,
    callbacks: Iterable[Callback] | Callback | None = None, console: bool | None = None, raise_on_signal: bool = True,
) -> TrainResult:  # fmt: skip
    """Continue from a checkpoint, in its own run folder or a new one under `output_dir`.

    The budget (schedules stretch) and the location of files may change; any other key in `changes` needs `force`.
    `raise_on_signal` is as in `train`.
    """
    check_log_format()
    told = read_callbacks(callbacks)
    named = {"total_timesteps": total_timesteps, "output_dir": None if output_dir is None else str(output_dir)}
    wanted = {**(changes or {}), **{name: value for name, value in named.items() if value is not None}}
    begun_in = run_dir_of(Path(path))
    elsewhere = not {"output_dir", "env_id"}.isdisjoint(wanted)  # another environment means another run
    in_place = begun_in if begun_in is not None and not elsewhere and is_newest(Path(path), begun_in) else None
    ranks = join_ranks()
    with ExitStack() as held:
        if in_place is not None:  # before reading, so that no other process continues from the same state
            ranks.first(lambda: held.enter_context(locked(in_place)))
        session, state, notes = restore_session(path, wanted, force=force, env=env, ranks=ranks)
        if in_place is None and "output_dir" not in wanted:
            home, named_there = home_of(Path(path)), session.config.output_dir
            session.config = session.config.model_copy(update={"output_dir": home})
            notes += why_there(path, begun_in, home, named_there, elsewhere=elsewhere)
        session.config = session.config.naming(*said_again(session.config, wanted, env))
        with closed_on_error(session):
            run_dir = in_place or ranks.first(lambda: branch_run_dir(session.config, begun_in))
            if in_place is None:
                ranks.first(lambda: held.enter_context(locked(run_dir)))
        result = execute(session, run_dir, told, console, restored=state, notes=notes)
    return result.raise_signal() if raise_on_signal else result
