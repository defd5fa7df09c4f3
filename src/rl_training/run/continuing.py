"""`train --continue`: find the run of that name, and what the user wants to change in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.config.train_config import TrainConfig, dump_yaml, load_config, read_yaml
from rl_training.errors import UserError
from rl_training.run.restoring import BUDGET_KEYS, FREE_KEYS, flat_params
from rl_training.run.status import END_FILE, find_status
from rl_training.safe_files import write_text

ASKED_FILE = "asked.yaml"  # the config before any `auto` was resolved
BEFORE_A_CHECKPOINT = {"config.yaml", "manifest.json", "metrics.jsonl", "checkpoints", ASKED_FILE, END_FILE}


@dataclass(frozen=True)
class FoundRun:
    """A run that `train --continue` continues."""

    run_dir: Path
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
        raise UserError(f"{unknown}; rl-training resume --checkpoint {run_dir} continues it.")
    asked, wanted = _flatten(load_config(run_dir / ASKED_FILE)), _flatten(config)
    changed = {key for key in {**asked, **wanted} if asked.get(key) != wanted.get(key)} - {"name", "output_dir"}
    if refused := sorted(changed - FREE_KEYS):
        differences = ", ".join(f"{key} {asked.get(key)!r} (not {wanted.get(key)!r})" for key in refused)
        other = "give this run another --name, or change that one with rl-training resume --force"
        raise UserError(f"{run_dir} was started with {differences}; {other}.")
    stored = _flatten_plain(read_yaml(run_dir / "config.yaml"))  # a resume may have extended the budget already
    changed = {key for key in changed if stored.get(key) != wanted.get(key)}
    changes: dict[str, Any] = {key: wanted.get(key) for key in changed if "." not in key}
    inner = {key.partition(".")[2]: wanted.get(key) for key in changed if "." in key}
    is_done = not changed & BUDGET_KEYS and find_status(run_dir, is_complete=False) == "done"
    return FoundRun(run_dir, latest, {**changes, "algo_kwargs": inner}, is_done)


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


def _flatten(config: TrainConfig) -> dict[str, Any]:
    return {**config.model_dump(mode="json", exclude={"algo_kwargs"}), **flat_params(config)}


def _flatten_plain(data: Mapping[str, Any]) -> dict[str, Any]:
    inner = data.get("algo_kwargs")
    return {**data, **({f"algo_kwargs.{key}": inner[key] for key in inner} if isinstance(inner, dict) else {})}
