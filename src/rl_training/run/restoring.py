"""Continue a run: find it, change its config, and restore its parts from a checkpoint; every part is checked first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_training.config.params import change_params, dump_params, read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, dump_yaml, load_config, settings_in
from rl_training.envs.factory import UserEnv
from rl_training.envs.probe import compare_restored
from rl_training.errors import UserError, counted
from rl_training.run import learner
from rl_training.run.build import Session, closed_on_error, describe_machine, open_session
from rl_training.run.folder import END_FILE, find_status, run_dir_of
from rl_training.run.loop import RunState
from rl_training.run.ranks import Ranks, resume_command
from rl_training.safe_files import write_text
from rl_training.validation import validate

BUDGET_KEYS = {"total_timesteps", "max_seconds", "algo_kwargs.max_updates"}
FREE_KEYS = BUDGET_KEYS | {  # none affects learning
    "output_dir", "name", "loggers", "worker_timeout", "max_worker_restarts", "ray", "algo_kwargs.replay_folder",
    "algo_kwargs.replay_memory",
}  # fmt: skip
# what a run knows about a new environment
UNMEASURED = {"best_return": -math.inf, "good_evaluations": 0, "episodes": [], "last_evaluation": {}}
ASKED_FILE = "asked.yaml"  # the config before any `auto` was resolved
BEFORE_A_CHECKPOINT = {"config.yaml", "manifest.json", "metrics.jsonl", "checkpoints", ASKED_FILE, END_FILE}


def restore_session(
    path: learner.PathLike, wanted: Mapping[str, Any], *, force: bool, env: UserEnv | None, ranks: Ranks
) -> tuple[Session, RunState, list[str]]:
    """The parts of a run from a checkpoint, and sentences about what changed or was not restored exactly."""
    tree = part_of_rank(path, learner.read_checkpoint(path), ranks)
    if learner.is_policy(tree):
        raise UserError(f"{path} is a policy file: it can act, but not continue training; give a run's checkpoint.")
    stored = validate(TrainConfig, tree["config"], str(path))
    state = validate(RunState, tree["run"], f"{path}, run")
    config, notes = change_config(stored, wanted, force=force)
    if config.env_id != stored.env_id:
        tree, state = {**tree, "source": leave_episodes(tree["source"])}, state.model_copy(update=UNMEASURED)
    if "replay_folder" not in (wanted.get("algo_kwargs") or {}):
        config, note = keep_replay_at_home(config, Path(path), elsewhere="output_dir" in wanted)
        notes += note
    reached = {
        "total_timesteps": (state.step, f"is at step {state.step}"),
        "max_seconds": (state.train_seconds, f"has trained for {state.train_seconds:.1f} seconds"),
    }
    for name, (amount, where) in reached.items():
        budget = getattr(config, name)
        if budget is not None and budget != getattr(stored, name) and budget < amount:
            spent = f"{path} {where} already; the budget counts from the start of the run"
            raise UserError(f"{name} is {budget:.12g}, but {spent}.")
    learner.read_spaces(path, tree["spaces"])
    session = open_session(config, env=env, restored=tree, ranks=ranks)
    with closed_on_error(session):
        learner.load_weights(path, session.algorithm, tree["algorithm"])
        sentences = load_source(path, session, tree["source"])
    if state.abandoned:
        sentences.append("it was saved in the middle of a turn: episodes start over, so this resume is not exact.")
    sentences += machine_changes(tree.get("machine"), session.config)
    return session, state, notes + [f"warning: {sentence}" for sentence in dict.fromkeys(ranks.union(sentences))]


def leave_episodes(source: dict[str, Any]) -> dict[str, Any]:
    """The source without the parts that belong to its environments: the current episodes, and the replay buffer."""
    empty = {name: type(source[name])() for name in ("stepper", "workers", "flight") if name in source}
    return {name: value for name, value in source.items() if name != "replay"} | empty


def part_of_rank(path: learner.PathLike, tree: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The checkpoint with this rank's own experience and the parts of the learner that ranks do not share."""
    others = tree.get("ranks", [])
    if not isinstance(others, list):
        raise UserError(f"{path} is not a training checkpoint: its ranks are not a list.")
    if (count := 1 + len(others)) != ranks.count:
        found = f"{path} is of a run with {counted(count, 'learner')}, but this one has {ranks.count}"
        raise UserError(f"{found}; continue with {resume_command(count)}.")
    if ranks.rank == 0:
        return tree
    own = others[ranks.rank - 1]
    if not isinstance(own, dict) or not all(isinstance(own.get(part), dict) for part in ("algorithm", "source")):
        raise UserError(f"{path} is not a training checkpoint: its part of rank {ranks.rank} is not whole.")
    return {**tree, "algorithm": {**tree["algorithm"], **own["algorithm"]}, "source": own["source"]}


def machine_changes(stored: Any, config: TrainConfig) -> list[str]:
    """A sentence about versions or hardware that differ from the checkpoint's; older checkpoints do not record them."""
    if not isinstance(stored, Mapping):
        return []
    here = describe_machine(config).items()
    was = {name: str(found) for name, found in stored.items()}
    changed = [f"{name} {value}, was {was[name]}" for name, value in here if was.get(name, value) != value]
    return [f"this machine differs ({'; '.join(changed)}), so this resume may not be exact."] if changed else []


def keep_replay_at_home(config: TrainConfig, checkpoint: Path, *, elsewhere: bool) -> tuple[TrainConfig, list[str]]:
    """Keep a mapped buffer's files in the run's own folder, or in `output_dir` if the user gives one (`elsewhere`).

    A checkpoint must not decide where a resume writes.
    """
    named = config.algo_kwargs.get("replay_folder")
    home = str(run_dir_of(checkpoint) or TrainConfig.model_fields["output_dir"].default)
    home = config.output_dir if elsewhere else home
    if named in (None, home):
        return config, []
    note = f"the replay buffer is mapped to files in {home}; --set replay_folder={named} puts them where they were"
    return config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "replay_folder": home}}), [note]


def load_source(path: learner.PathLike, session: Session, state: dict[str, Any]) -> list[str]:
    """Restore environments, generators and buffers; return sentences about what was not restored exactly."""
    try:
        sentences = session.load_source(state)
        # If a source loaded a wrong state without noticing, its own state differs. Buffers check themselves.
        given, taken = ({**part, "replay": None} for part in (state, session.source_state()))
        problem = learner.first_difference(given, taken, "source")
        if problem:
            raise UserError(f"{path}: its source cannot be restored: {problem}.")
        return sentences or find_history(session, state)
    except UserError:
        raise
    except Exception as error:  # an edited file can fail in any way
        raise UserError(f"{path}: its source cannot be restored ({learner.describe_error(error)}).") from None


def find_history(session: Session, state: dict[str, Any]) -> list[str]:
    """A sentence if the environments had earlier episodes and random play shows that something carries over.

    A replay of the current episode alone may not show this: Box2D remembers contacts of removed bodies. Workers do not
    send checksums of attributes with every answer, so for them the trial compares attributes too.
    """
    workers = state.get("workers", [])
    steppers = [part.get("stepper", {}) for part in (state, *workers)]
    episodes = [episode for stepper in steppers for episode in stepper.get("engine", {}).get("episodes", [])]
    if not episodes or not (workers or any(episode["episode"] > 0 for episode in episodes)):
        return []
    try:
        where = session.config.vectorization, session.config.worker_timeout
        found = compare_restored(session.recipe, session.spaces, session.config.seed, 330, 100, *where)
    except Exception as error:  # from environments made only for the trial
        reason = f"{session.spaces.env_id} failed in a trial with random actions ({learner.describe_error(error)})"
        return [f"{reason}, so whether this resume is exact is unknown."]
    if not found.seen:
        what = f"{found.describe_attributes()} in a trial of {session.spaces.env_id}"
        return [f"{what}, so this resume may not be exact."] if workers and any(found) else []
    what = f"{session.spaces.env_id} came to a different {found.seen[0]} when it was restored in a trial"
    why = "something carries over from one episode to the next"
    return [f"{what} with random actions: {why}, so this resume is not exact."]


# what may change ---------------------------------------------------------------------------------------------------


def change_config(stored: TrainConfig, wanted: Mapping[str, Any], *, force: bool) -> tuple[TrainConfig, list[str]]:
    """The stored config with the wanted keys, and a sentence about each change; most need `force`."""
    if (algo := wanted.get("algo", stored.algo)) != stored.algo:
        raise UserError(f"algo is {algo!r}, but the run is of {stored.algo}; a run continues with its own algorithm.")
    moved = move_config(stored, wanted["env_id"]) if wanted.get("env_id", stored.env_id) != stored.env_id else {}
    config = merge_config(stored, moved, wanted)
    old, new = flatten(stored), flatten(config)
    free = FREE_KEYS | moved.keys()
    if stored.has_workers and config.has_workers:  # from processes to a cluster, or back
        free |= {"execution_backend"}
    refused = [key for key in changed_keys(old, new) if key not in free]
    if refused and not force:
        what = ", ".join(f"{key} from {old.get(key)!r} to {new.get(key)!r}" for key in refused)
        raise UserError(f"resuming would change {what}; only the budget may change, anything else needs --force.")
    notes = [
        f"changed by --force: {key} is {f'now {new[key]!r}' if key in new else 'gone'} (was {old.get(key)!r})"
        for key in refused
    ]
    if moved:
        names = f"{config.env_id} (was {stored.env_id})"
        notes.append(f"the environment is now {names}; new episodes and a new replay begin")
    if config.total_timesteps != stored.total_timesteps:
        params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
        stretch = "; schedules stretch with it" if params.schedules or params.built_in_schedules() else ""
        notes.append(f"the budget is now {config.total_timesteps:,} steps (was {stored.total_timesteps:,}){stretch}")
    return config, notes


def merge_config(stored: TrainConfig, moved: Mapping[str, Any], wanted: Mapping[str, Any]) -> TrainConfig:
    """The stored config with the changes of another environment and the wanted keys."""
    chosen = {"accelerate": "auto"} if wanted.get("device", stored.device) != stored.device else {}  # for that one
    merged = {**stored.model_dump(mode="json"), **chosen, **moved, **wanted}
    if isinstance(wanted.get("algo_kwargs"), Mapping):
        model = get_algorithm_spec(stored.algo).params
        settled = dump_params(read_params(model, stored.algo_kwargs))
        merged["algo_kwargs"] = change_params(model, settled, wanted["algo_kwargs"])
    config = validate(TrainConfig, merged, "resume")
    said = wanted.get("env_id"), (wanted.get("algo_kwargs") or {}).get("network")
    return config.naming(*(name for name in said if isinstance(name, str))).giving(*settings_in(wanted))


def move_config(stored: TrainConfig, env_id: str) -> dict[str, Any]:
    """The changes when a run continues in another environment, which does not get the first one's arguments."""
    kept = {name: value for name, value in stored.env_kwargs.items() if name in ("wrappers", "max_episode_steps")}
    special = stored.vectorization in ("native", "device")
    return {"env_id": env_id, "env_kwargs": kept, "vectorization": "auto" if special else stored.vectorization}


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every setting of a config; a hyper-parameter is under `algo_kwargs.<name>`."""
    params = dump_params(read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs))
    plain = config.model_dump(mode="json", exclude={"algo_kwargs"})
    return plain | {f"algo_kwargs.{name}": value for name, value in params.items()}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys of two flat configs whose values differ."""
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]


# `train --continue` --------------------------------------------------------------------------------------------------


class FoundRun(NamedTuple):
    """A run that `train --continue` continues."""

    latest: Path
    changes: dict[str, Any]  # for `resume_training`
    is_done: bool


def write_asked(run_dir: Path, config: TrainConfig) -> None:
    """Record the config of a named run; functions, which only Python code can give, cannot be compared later."""
    if config.name is not None and not any(map(callable, config.algo_kwargs.values())):
        write_text(run_dir / ASKED_FILE, dump_yaml(config.model_dump(mode="json")))


def find_run(config: TrainConfig) -> FoundRun | None:
    """The run in `output_dir/name`, or None if there is none or it has no checkpoint yet.

    Its config must be the one that started the run; only the budget, and what does not affect learning, may differ.
    """
    if config.name is None:
        raise UserError("--continue needs the name of the run; give --name, such as --name first.")
    run_dir = Path(config.output_dir) / config.name
    latest = run_dir / "checkpoints" / "latest.ckpt"
    if not latest.is_file():
        _check_nothing_else(run_dir)
        return None
    if not (run_dir / ASKED_FILE).is_file():
        unknown = f"{run_dir} has no {ASKED_FILE}, so --continue cannot compare its config with this one"
        raise UserError(f"{unknown}; rl-training resume --checkpoint {run_dir}{config.named_options} continues it.")
    asked, wanted = flatten(load_config(run_dir / ASKED_FILE)), flatten(config)
    changed = set(changed_keys(asked, wanted)) - {"name", "output_dir"}
    if refused := sorted(changed - FREE_KEYS):
        differences = ", ".join(f"{key} {asked.get(key)!r} (not {wanted.get(key)!r})" for key in refused)
        other = "give this run another --name, or change that one with rl-training resume --force"
        raise UserError(f"{run_dir} was started with {differences}; {other}.")
    stored = flatten(load_config(run_dir / "config.yaml"))  # a resume may have extended the budget already
    changed = {key for key in changed if stored.get(key) != wanted.get(key)}
    changes: dict[str, Any] = {key: wanted.get(key) for key in changed if "." not in key}
    inner = {key.partition(".")[2]: wanted.get(key) for key in changed if "." in key}
    is_done = not changed & BUDGET_KEYS and find_status(run_dir, is_complete=False) == "done"
    return FoundRun(latest, {**changes, "algo_kwargs": inner}, is_done)


def _check_nothing_else(run_dir: Path) -> None:
    """Refuse a folder without a newest checkpoint, unless it holds only what a run writes before its first one."""
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; give the run another --name.")
    names = {path.name for path in run_dir.iterdir()}
    odd = sorted(n for n in names - BEFORE_A_CHECKPOINT if not n.startswith((".", "events.out.tfevents")))
    odd += sorted(f"checkpoints/{path.name}" for path in run_dir.glob("checkpoints/*.ckpt"))
    if odd:
        found = f"{run_dir} has no checkpoints/latest.ckpt, but it holds {odd[0]}"
        raise UserError(f"{found}, so no new run is started there; give the run another --name.")
