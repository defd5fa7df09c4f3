"""Train, resume, evaluate and predict, generic over the registry."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rl_training
from rl_training.algorithms.base import Algorithm
from rl_training.envs.factory import Env, probe_spaces, read_recipe
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.errors import UserError
from rl_training.experiment.checkpointing import load_checkpoint, remove_stale_temporaries
from rl_training.experiment.config import TrainConfig, dump_yaml, load_config
from rl_training.runtime.acting import ActingSession
from rl_training.runtime.evaluation import EvaluationResult, Evaluator, record_video, watch
from rl_training.runtime.loop import run_loop
from rl_training.runtime.params import read_params
from rl_training.runtime.run import SCHEMA, Callback, Run
from rl_training.runtime.session import Session, build_algorithm, check_same_spaces, open_session
from rl_training.runtime.spec import get_algorithm_spec
from rl_training.validation import validate

PathLike = str | Path
BUDGET_KEYS = {"total_timesteps", "max_seconds", "output_dir"}


@dataclass(frozen=True)
class TrainResult:
    """Where a run is, its newest checkpoint, and its last metrics."""

    run_dir: Path
    checkpoint_path: Path
    metrics: dict[str, Any]
    policy: TrainedPolicy = field(repr=False)


class TrainedPolicy:
    """A learner with the spaces it acts in: predicts without an environment."""

    def __init__(self, algorithm: Algorithm, spaces: EnvSpaces, seed: int) -> None:
        self.algorithm, self.spaces, self.seed = algorithm, spaces, seed
        self._sessions: dict[tuple[int, bool], ActingSession] = {}

    def predict(self, obs: Any, deterministic: bool = True) -> Any:
        """The environment's action for one raw observation, or a batch for a batch; memory starts afresh."""
        encoded, is_batch = self.spaces.encode_for_prediction(obs)
        session = self.session(len(encoded), deterministic)
        session.carry = self.algorithm.initial_carry(len(encoded))
        actions = self.spaces.map_actions(session.act(encoded, is_first=np.ones(len(encoded), dtype=bool)))
        return actions if is_batch else plain_action(actions[0])

    def session(self, count: int, deterministic: bool) -> ActingSession:
        """The acting session for that many rows; one per size, so that sampling goes on rather than repeats."""
        key = (count, deterministic)
        if key not in self._sessions:
            self._sessions[key] = ActingSession(self.algorithm, count, self.seed, deterministic=deterministic)
        return self._sessions[key]


def plain_action(action: Any) -> Any:
    """A discrete action as an int, any other as an array."""
    return int(action) if np.ndim(action) == 0 else np.asarray(action)


def train(
    config: TrainConfig, *, env: Callable[..., Env] | None = None, callbacks: Iterable[Callback] | None = None,
    run_suffix: str | None = None, console: bool | None = None,
) -> TrainResult:  # fmt: skip
    """One run from the start."""
    session = open_session(config, env=env)
    run_dir = make_run_dir(session.config, run_suffix)
    write_run_files(run_dir, session.config)
    return execute(session, run_dir, callbacks or (), console)


def train_as(names: Iterable[str], config: Any, run_suffix: str | None, callbacks: Iterable[Callback] | None) -> TrainResult:
    """What every `train_<name>` is: `train`, for a config of that algorithm."""
    loaded = load_config(config)
    if loaded.algo not in names:
        raise UserError(f"algo is {loaded.algo!r}; this function trains {', '.join(names)}.")
    return train(loaded, run_suffix=run_suffix, callbacks=callbacks)


def execute(
    session: Session, run_dir: Path, callbacks: Iterable[Callback], console: bool | None,
    restored: dict[str, Any] | None = None,
) -> TrainResult:  # fmt: skip
    """Run the loop of an open session in its folder."""
    shows = sys.stderr.isatty() if console is None else console
    run = Run(session, run_dir, callbacks=callbacks, console=shows, restored=restored)
    try:
        if restored is not None:
            for sentence in session.source.load_state_dict(restored["source"]):
                run.logger.message(f"warning: {sentence}")
        resolved = session.config
        run.logger.message(
            f"{resolved.algo} on {resolved.env_id}: {run_dir} (device {resolved.device}, threads {resolved.threads}, "
            f"{resolved.num_envs} environments {resolved.vectorization})"
        )
        with run.signals():
            run.start()
            run_loop(session.algorithm, session.source, run)
            metrics = run.finish()
    finally:
        run.close()
    policy = TrainedPolicy(session.algorithm, session.spaces, session.config.seed)
    return TrainResult(run_dir, run.checkpoints.latest, metrics, policy)


def make_run_dir(config: TrainConfig, suffix: str | None = None) -> Path:
    """A new folder for the run; an existing one is never reused."""
    name = "-".join([config.algo, re.sub(r"[^\w.]+", "_", config.env_id), f"s{config.seed}", time.strftime("%Y%m%d-%H%M%S")])
    if suffix:
        name += f"-{suffix}"
    parent = Path(config.output_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = parent / (name if attempt == 0 else f"{name}-{attempt}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise UserError(f"output_dir is {config.output_dir!r}, where no folder can be made: {error.strerror}.") from None
    raise UserError(f"output_dir {config.output_dir!r} holds a thousand runs named {name}; clean it up.")


def write_run_files(run_dir: Path, config: TrainConfig) -> None:
    """`config.yaml`, resolved, and `manifest.json`: versions, platform, git state, seed, command."""
    (run_dir / "config.yaml").write_text(dump_yaml(config.model_dump(mode="json")), encoding="utf-8")
    import gymnasium

    manifest = {
        "rl_training": rl_training.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "git": git_state(),
        "seed": config.seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (run_dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the working directory, where it is a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "clean": not status.stdout.strip()}


def read_checkpoint(path: PathLike) -> dict[str, Any]:
    """A training checkpoint's tree, checked for its parts."""
    tree = load_checkpoint(path)
    missing = {"schema", "config", "spaces", "algorithm", "source", "run"} - set(tree)
    if missing:
        raise UserError(f"{path} is not a training checkpoint: it has no {', '.join(sorted(missing))}.")
    if tree["schema"] != SCHEMA:
        raise UserError(f"{path} has the schema {tree['schema']}; this rl-training reads schema {SCHEMA}.")
    return tree


def load_algorithm(path: PathLike, tree: dict[str, Any], device: str = "cpu") -> tuple[Algorithm, EnvSpaces, TrainConfig]:
    """The learner in a checkpoint, with its weights."""
    config = validate(TrainConfig, tree["config"], str(path))
    spec = get_algorithm_spec(config.algo)
    params = read_params(spec.params, config.algo_kwargs)
    spaces = EnvSpaces.from_dict(tree["spaces"])
    algorithm = build_algorithm(spec, params, spaces, seed=config.seed, device=device)
    load_weights(path, algorithm, tree["algorithm"])
    return algorithm, spaces, config


def load_weights(path: PathLike, algorithm: Algorithm, state: dict[str, Any]) -> None:
    """Put a checkpoint's state into a learner."""
    try:
        algorithm.load_state_dict(state)
    except (RuntimeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()
        raise UserError(f"{path} does not fit its own config: {(reason[-1] if reason else 'state').strip()}.") from None


def load_policy(path: PathLike) -> TrainedPolicy:
    """The policy in a checkpoint, on the CPU, ready to predict."""
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path))
    return TrainedPolicy(algorithm, spaces, config.seed)


def predict_checkpoint(path: PathLike, obs: Any, *, deterministic: bool = True) -> Any:
    """The action of a checkpoint's policy for one observation or a batch."""
    return load_policy(path).predict(obs, deterministic)


def evaluate_checkpoint(
    path: PathLike, *, num_episodes: int | None = None, deterministic: bool = True, env: Callable[..., Env] | None = None,
    seed: int | None = None, record_video_dir: PathLike | None = None, render: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Metrics of whole episodes with a checkpoint's policy, per-episode returns and lengths among them."""
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path))
    episodes = num_episodes if num_episodes is not None else max(config.eval_episodes, 1)
    if episodes < 1:
        raise UserError(f"num_episodes is {episodes}; it must be at least 1.")
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    check_same_spaces(spaces, probe_spaces(recipe))
    seed = config.seed if seed is None else seed
    torch.set_num_threads(int(config.threads))
    result: EvaluationResult
    if record_video_dir is not None:
        result = record_video(recipe, spaces, algorithm, episodes, seed, Path(record_video_dir))
    elif render:
        result = watch(recipe, spaces, algorithm, episodes, seed)
    else:
        evaluator = Evaluator(recipe, spaces, seed)
        result = evaluator.evaluate(algorithm, episodes, deterministic=deterministic)
        evaluator.close()
    return {**result.metrics(), "eval_returns": result.returns, "eval_lengths": result.lengths}


def resume_training(
    path: PathLike, *, total_timesteps: int | None = None, output_dir: PathLike | None = None,
    changes: Mapping[str, Any] | None = None, force: bool = False, env: Callable[..., Env] | None = None,
    callbacks: Iterable[Callback] | None = None, console: bool | None = None,
) -> TrainResult:  # fmt: skip
    """Go on from a checkpoint, in its own run folder or a new one under `output_dir`.

    The budget may change (schedules stretch); any other key in `changes` needs `force`.
    """
    tree = read_checkpoint(path)
    stored = validate(TrainConfig, tree["config"], str(path))
    wanted = dict(changes or {})
    if total_timesteps is not None:
        wanted["total_timesteps"] = total_timesteps
    if output_dir is not None:
        wanted["output_dir"] = str(output_dir)
    config, notes = change_config(stored, wanted, force=force)
    session = open_session(config, env=env, restored=tree)
    load_weights(path, session.algorithm, tree["algorithm"])
    run_dir = Path(path).resolve().parent.parent
    if output_dir is not None or not (run_dir / "config.yaml").is_file():
        run_dir = make_run_dir(session.config, "resumed")
    else:
        remove_stale_temporaries(run_dir / "checkpoints")
    write_run_files(run_dir, session.config)
    result = execute(session, run_dir, [*(callbacks or ()), Notes(notes)], console, restored=tree)
    return result


class Notes(Callback):
    """Says at the start what a resume changed."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def on_start(self, run: Run) -> bool | None:
        """Print the notes."""
        for note in self.notes:
            run.logger.message(note)
        return None


def change_config(stored: TrainConfig, wanted: Mapping[str, Any], *, force: bool) -> tuple[TrainConfig, list[str]]:
    """The stored config with the wanted keys, and a sentence on each change; only budgets change without `force`."""
    changed = {key: value for key, value in wanted.items() if getattr(stored, key, None) != value}
    refused = sorted(set(changed) - BUDGET_KEYS)
    if "algo_kwargs" in changed:
        kwargs = {k: v for k, v in changed["algo_kwargs"].items() if stored.algo_kwargs.get(k) != v}
        if set(kwargs) <= {"max_updates"}:
            refused.remove("algo_kwargs")
        changed["algo_kwargs"] = {**stored.algo_kwargs, **kwargs}
    if refused and not force:
        raise UserError(
            f"resuming would change {', '.join(refused)} "
            f"({', '.join(f'{key}: {getattr(stored, key, None)!r} -> {changed[key]!r}' for key in refused)}); "
            "only the budget may change, anything else needs --force."
        )
    config = validate(TrainConfig, {**stored.model_dump(mode="json"), **changed}, "resume")
    notes = [f"changed by --force: {key} is now {changed[key]!r} (was {getattr(stored, key)!r})" for key in refused]
    if config.total_timesteps != stored.total_timesteps:
        notes.append(
            f"the budget is now {config.total_timesteps} steps (was {stored.total_timesteps}); schedules stretch with it"
        )
    return config, notes
