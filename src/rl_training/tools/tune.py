"""Search for hyper-parameters with Optuna: trials run in other processes and are pruned by their evaluations.

Only this process owns the study, which is a file: it asks for trials, hands them out and records their results, so that
a killed study continues with its unfinished trials. The file is opened by its path, whatever that contains, and checked
before anything relies on it.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from rl_training.config.params import SCHEDULE, Params, change_params, read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, dump_yaml, parse_yaml
from rl_training.errors import UserError, did_you_mean, install, kind_and_line
from rl_training.record.metrics_file import is_number
from rl_training.run.loop import EVALUATIONS
from rl_training.safe_files import output_written, refuse_link, write_text
from rl_training.tools.processes import Job

if TYPE_CHECKING:
    import optuna

FRESH_SEED = 100_000  # added to the config's seed: no trial has such a seed
FIELDS = ("schedules", "eval_interval", "max_updates")  # every algorithm has them; not hyper-parameters


@dataclass(frozen=True)
class Dimension:
    """The search range of one hyper-parameter: two numbers, or choices; `value` is the config's value."""

    value: Any
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Ask the trial for a value."""
        if self.choices:  # as JSON, since Optuna takes no lists
            return json.loads(trial.suggest_categorical(name, [json.dumps(choice) for choice in self.choices]))
        if isinstance(self.value, int):
            return trial.suggest_int(name, math.ceil(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)

    def describe(self) -> str:
        """The dimension in a few words."""
        if self.choices:
            return " ".join(json.dumps(choice) for choice in self.choices)
        return f"{self.low:g} to {self.high:g}{', logarithmic' if self.log else ''}"


@cache
def curated() -> dict[str, Any]:
    """The packaged table of ranges, and of the hyper-parameters to search for each algorithm."""
    text = files("rl_training").joinpath("assets/search_spaces.yaml").read_text(encoding="utf-8")
    return dict(parse_yaml(text))


def search_space(config: TrainConfig, names: Sequence[str] = ()) -> dict[str, Dimension]:
    """The curated space of the config's algorithm, or a space of the named hyper-parameters."""
    model = get_algorithm_spec(config.algo).params
    params = read_params(model, config.algo_kwargs)
    wanted = names or curated()["algorithms"].get(config.algo, ["learning_rate", "gamma", "hidden_sizes"])
    known = [name for name in model.model_fields if name not in FIELDS]
    for name in wanted:
        if name not in known:
            raise UserError(f"{name!r} is not a hyper-parameter of {config.algo}; {did_you_mean(name, known)}")
    return {name: dimension(model, name, current_value(params, name)) for name in wanted}


def current_value(params: Params, name: str) -> Any:
    """The config's value of a hyper-parameter; for a schedule, its start."""
    value = params.schedules[name].start if name in params.schedules else getattr(params, name)
    return list(value) if isinstance(value, tuple) else value


def dimension(model: type[Params], name: str, value: Any) -> Dimension:
    """The search range of a hyper-parameter: the curated range, or what its type and bounds allow around `value`."""
    field = model.model_fields[name]
    given = curated()["ranges"].get(name, {"choices": choices_of(field.annotation)})
    if listed := given.get("choices"):
        return Dimension(value, choices=tuple(listed if value in listed else [*listed, value]))
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = "null" if value is None else repr(value)
        raise UserError(f"{name} is {shown}, which cannot be tuned; give it a number with --set {name}=NUMBER first.")
    low, high = bounds_of(field.metadata)
    if "low" not in given:
        if value <= 0:
            raise UserError(f"{name} is {value}, which gives no range to tune; give it a positive value with --set.")
        given = {"low": max(low, value / 10), "high": min(high, value * 10), "log": True}
    low, high = max(low, min(given["low"], value)), min(high, max(given["high"], value))
    return Dimension(value, low, high, bool(given.get("log")) and low > 0)


def choices_of(annotation: Any) -> list[Any]:
    """The values that a type lists; empty for numbers and strings."""
    if annotation is bool:
        return [False, True]
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, UnionType) and type(None) in parts:
        inner = [choice for part in parts for choice in choices_of(part)]
        return [*inner, None] if inner else []
    return list(parts) if kind is Literal else []


def bounds_of(metadata: Iterable[Any]) -> tuple[float, float]:
    """The smallest and the largest number that a field's bounds allow."""
    low, high = -math.inf, math.inf
    for bound in metadata:
        low = max(low, getattr(bound, "ge", -math.inf), getattr(bound, "gt", -math.inf) + 1e-12)
        high = min(high, getattr(bound, "le", math.inf), getattr(bound, "lt", math.inf) - 1e-12)
    return low, high


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """The config with these hyper-parameters; a schedule keeps its shape and starts at the new value."""
    changes = dict(values)
    for name in values:
        if schedule := config.algo_kwargs.get(name + SCHEDULE):
            start, end, value = schedule["start"], schedule.get("end"), changes.pop(name)
            scaled = {} if end is None or not start else {"end": end * value / start}
            changes[name + SCHEDULE] = {**schedule, "start": value, **scaled}
    model = get_algorithm_spec(config.algo).params
    return config.model_copy(update={"algo_kwargs": change_params(model, config.algo_kwargs, changes)})


def prepare(config: TrainConfig, folder: Path) -> TrainConfig:
    """The config for trials: evaluated during the run, in the study's folder, without replay in checkpoints."""
    if not config.eval_episodes:
        raise UserError("eval_episodes is 0; tune compares evaluations, so it must be at least 1.")
    if config.algo_kwargs.get("early_stopping"):
        raise UserError("early_stopping is set; tune compares whole runs, so take it out.")
    interval = config.algo_kwargs.get("eval_interval") or max(1, config.total_timesteps // EVALUATIONS)
    kwargs = config.algo_kwargs | {"eval_interval": interval}
    update = {"output_dir": str(folder / "trials"), "replay_in_checkpoint": False, "algo_kwargs": kwargs}
    return config.model_copy(update=update)


# the study -------------------------------------------------------------------------------------------------------


class Study:
    """An Optuna study in a folder: `study.db`, the trials' runs, and at the end `best.yaml`."""

    def __init__(self, config: TrainConfig, space: Mapping[str, Dimension], folder: Path) -> None:
        if find_spec("optuna") is None:
            raise UserError(f"optuna is not installed; run {install('tune')}.")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.space, self.config = folder, space, prepare(config, folder)
        with output_written(folder, "--study"):
            folder.mkdir(parents=True, exist_ok=True)
            refuse_link(folder / "study.db")
        self.states = optuna.trial.TrialState
        evaluations = max(1, config.total_timesteps // self.config.algo_kwargs["eval_interval"])
        pruner = optuna.pruners.MedianPruner(5, n_warmup_steps=evaluations // 2)
        with readable(file := folder / "study.db"):
            self.study = open_study(file.absolute(), direction="maximize", pruner=pruner)
            # a different seed each time the study continues, or random trials would be drawn twice
            seed = config.seed + len(self.study.get_trials(deepcopy=False))
            self.study.sampler = optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
            self._check_same()
            check_study(self.study, space)
            self._take_up()

    def _check_same(self) -> None:
        """Refuse a folder in which another config was tuned."""
        fields = {"algo", "env_id", "total_timesteps", "eval_episodes", "algo_kwargs", "env_kwargs"}
        says = self.config.model_dump(mode="json", include=fields)
        says["space"] = {name: one.describe() for name, one in self.space.items()}
        stored = self.study.user_attrs.get("says")
        if stored is None:
            self.study.set_user_attr("says", says)
            unchanged = {name: json.dumps(one.value) if one.choices else one.value for name, one in self.space.items()}
            self.study.enqueue_trial(unchanged)
        elif odd := [name for name, value in says.items() if stored.get(name) != json.loads(json.dumps(value))]:
            raise UserError(f"{self.folder} holds a study with another {odd[0]}; give another --study.")

    def _take_up(self) -> None:
        """Put trials that a killed study left unfinished back in the queue."""
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            self.study.enqueue_trial(trial.params)
            self.study._storage.set_trial_user_attr(trial._trial_id, "interrupted", True)
            self.study.tell(trial.number, state=self.states.FAIL)

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Every trial that ended by itself or is running."""
        waiting = self.states.WAITING
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.state != waiting and not trial.user_attrs.get("interrupted")]

    def jobs(self, count: int) -> Iterator[Job]:
        """Runs until there are `count` trials; trial 0 is the unchanged config."""
        while len(self.trials()) < count:
            trial = self.study.ask()
            config = with_values(self.config, {name: one.suggest(trial, name) for name, one in self.space.items()})
            config = config.model_copy(update={"seed": (config.seed + trial.number) % 2**32})
            yield Job(config, partial(self._end_trial, trial), partial(self._evaluated, trial))

    def _evaluated(self, trial: optuna.Trial, step: int, value: float) -> bool:
        """Report an evaluation of a trial; return whether the trial continues."""
        trial.report(value, round(step / self.config.algo_kwargs["eval_interval"]))
        return not trial.should_prune()

    def _end_trial(self, trial: optuna.Trial, job: Job) -> None:
        """Record how a trial ended; one that a signal stopped stays unfinished."""
        if job.signal is not None:
            return
        metrics = job.metrics or {}
        value = metrics.get("eval_return_mean", math.nan)
        if math.isfinite(value):
            pruned = metrics["stop_reason"] == "callback"
            state = self.states.PRUNED if pruned else self.states.COMPLETE
            self.study.tell(trial, None if pruned else value, state=state)
            return
        trial.set_user_attr("error", str(job.error or f"its return is {value}"))
        self.study.tell(trial, state=self.states.FAIL)
        if isinstance(job.error, UserError) and trial.number == 0:  # the config itself cannot run
            raise job.error

    def best(self) -> optuna.trial.FrozenTrial:
        """The finished trial with the highest return."""
        done = [trial for trial in self.trials() if trial.state == self.states.COMPLETE]
        if not done:
            raise UserError(f"no trial of {self.folder} was finished; allow more --trials or a larger budget.")
        return max(done, key=lambda trial: (trial.value, -trial.number))

    def best_values(self) -> dict[str, Any]:
        """The hyper-parameters of the best trial, as a config writes them."""
        params = self.best().params
        return {name: json.loads(value) if self.space[name].choices else value for name, value in params.items()}

    def finals(self, seeds: int) -> Iterator[Job]:
        """The best trial's config and the original, each on seeds that no trial had; finished runs are skipped."""
        tuned = with_values(self.config, self.best_values())
        known = self.final_returns()
        for offset in range(seeds):
            seed = {"seed": (self.config.seed + FRESH_SEED + offset) % 2**32}
            for name, config in zip(known, (tuned, self.config), strict=True):
                if offset not in known[name]:
                    yield Job(config.model_copy(update=seed), partial(self._end_final, f"final {name} {offset}"))

    def _end_final(self, key: str, job: Job) -> None:
        """Record the return of a run on a new seed."""
        if job.signal is None:
            value = (job.metrics or {}).get("eval_return_mean")
            self.study.set_user_attr(key, None if value is None else float(value))

    def final_returns(self) -> dict[str, dict[int, float | None]]:
        """Returns by seed of the best trial's config, under its name, and of the `default`; None for a failed run."""
        found: dict[str, dict[int, float | None]] = {f"trial {self.best().number}": {}, "default": {}}
        for key, value in self.study.user_attrs.items():
            name, _, offset = key.removeprefix("final ").rpartition(" ")
            if name in found:
                found[name][int(offset)] = value
        return found

    def write_preset(self, config: TrainConfig, note: str) -> Path:
        """The config with the best hyper-parameters, as a file that `train --config` takes."""
        path = self.folder / "best.yaml"
        data = with_values(config, self.best_values()).model_dump(mode="json", exclude_defaults=True)
        text = "".join(f"# {line}\n" for line in note.splitlines()) + dump_yaml(data)
        write_text(path, text)
        return path


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a forged or damaged file causes into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Optuna, SQLAlchemy and SQLite raise many kinds
        raise UserError(f"{path} cannot be read as a study ({kind_and_line(error)}); give another --study.") from None


def open_study(path: Path, **options: Any) -> optuna.Study:
    """The study in a file, which is made if it is missing."""
    import optuna
    from sqlalchemy.pool import QueuePool

    connect = partial(sqlite3.connect, path, check_same_thread=False)  # not a URL, in which ? and % have a meaning
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": connect, "poolclass": QueuePool})
    return optuna.create_study(storage=storage, study_name="tune", load_if_exists=True, **options)


def check_study(study: optuna.Study, space: Mapping[str, Dimension]) -> None:
    """Raise a ValueError for what no `tune` writes."""
    for trial in study.get_trials(deepcopy=False):
        is_complete = trial.state.name == "COMPLETE"
        if not set(trial.params) <= set(space) or (is_complete and len(trial.params) < len(space)):
            raise ValueError(f"trial {trial.number} has other hyper-parameters")
        for name, value in trial.params.items():
            if space[name].choices:
                json.loads(value)
            elif not is_number(value):
                raise ValueError(f"{name} of trial {trial.number} is not a number")
        if is_complete and not is_number(trial.value):
            raise ValueError(f"trial {trial.number} has no return")
    for key, value in study.user_attrs.items():
        is_result = key.rpartition(" ")[2].isdecimal() and (value is None or is_number(value))
        if key.startswith("final ") and not is_result:
            raise ValueError(f"the result {key!r} is not a number")
