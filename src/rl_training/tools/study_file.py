"""The file of a study: opened by its path, whatever that contains, and checked before anything relies on it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError, first_line
from rl_training.record.metrics_file import is_number

if TYPE_CHECKING:
    import optuna


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a forged or damaged file causes into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Optuna, SQLAlchemy and SQLite raise many kinds
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path} cannot be read as a study ({reason}); give another --study.") from None


def open_study(path: Path, **options: Any) -> optuna.Study:
    """The study in a file, which is made if it is missing."""
    import optuna
    from sqlalchemy.pool import QueuePool

    connect = partial(sqlite3.connect, path, check_same_thread=False)  # not a URL, in which ? and % have a meaning
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": connect, "poolclass": QueuePool})
    return optuna.create_study(storage=storage, study_name="tune", load_if_exists=True, **options)


def check_study(study: optuna.Study, encoded: Mapping[str, bool]) -> None:
    """Raise a ValueError for what no `tune` writes; `encoded` has the hyper-parameters, True if stored as JSON."""
    for trial in study.get_trials(deepcopy=False):
        is_complete = trial.state.name == "COMPLETE"
        if not set(trial.params) <= set(encoded) or (is_complete and len(trial.params) < len(encoded)):
            raise ValueError(f"trial {trial.number} has other hyper-parameters")
        for name, value in trial.params.items():
            if encoded[name]:
                json.loads(value)
            elif not is_number(value):
                raise ValueError(f"{name} of trial {trial.number} is not a number")
        if is_complete and not is_number(trial.value):
            raise ValueError(f"trial {trial.number} has no return")
    for key, value in study.user_attrs.items():
        is_result = key.rpartition(" ")[2].isdecimal() and (value is None or is_number(value))
        if key.startswith("final ") and not is_result:
            raise ValueError(f"the result {key!r} is not a number")
