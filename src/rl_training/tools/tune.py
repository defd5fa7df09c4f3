"""Search for hyper-parameters with Optuna: trials run in worker processes and are pruned by their evaluations.

Only this process owns the study, which is a file: it asks for trials, hands them to workers and records their results,
so that a killed study continues with its unfinished trials.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from rl_training.config.params import SCHEDULE, Params, change_params, read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig, dump_yaml, parse_yaml
from rl_training.errors import UserError, did_you_mean
from rl_training.run.cadence import EVALUATIONS
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import train
from rl_training.safe_files import output_written, refuse_link, write_text
from rl_training.tools.study_file import check_study, open_study, readable

if TYPE_CHECKING:
    import optuna

FRESH_SEED = 100_000  # added to the config's seed: no trial has such a seed
POLL_SECONDS = 1.0
FIELDS = ("eval_interval", "max_updates")  # every algorithm has them; not hyper-parameters


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

    def encode(self, value: Any) -> Any:
        """A value as the study stores it."""
        return json.dumps(value) if self.choices else value

    def describe(self) -> str:
        """The dimension in a few words."""
        if self.choices:
            return " ".join(json.dumps(choice) for choice in self.choices)
        return f"{self.low:g} to {self.high:g}{', logarithmic' if self.log else ''}"


Space = Mapping[str, Dimension]


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
    for name in wanted:
        if name not in model.model_fields or name in ("schedules", *FIELDS):
            known = [known for known in model.model_fields if known not in ("schedules", *FIELDS)]
            raise UserError(f"{name!r} is not a hyper-parameter of {config.algo}; {did_you_mean(name, known)}")
    return {name: dimension(model, name, current_value(params, name)) for name in wanted}


def current_value(params: Params, name: str) -> Any:
    """The config's value of a hyper-parameter; for a schedule, its start."""
    value = params.schedules[name].start if name in params.schedules else getattr(params, name)
    return list(value) if isinstance(value, tuple) else value


def dimension(model: type[Params], name: str, value: Any) -> Dimension:
    """The search range of a hyper-parameter: the curated range, or what its type and bounds allow around `value`."""
    field = model.model_fields[name]
    given = curated()["ranges"].get(name)
    if given is None and (choices := choices_of(field.annotation)):
        given = {"choices": choices}
    if given is not None and "choices" in given:
        listed = given["choices"]
        return Dimension(value, choices=tuple(listed if value in listed else [*listed, value]))
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = "null" if value is None else repr(value)
        raise UserError(f"{name} is {shown}, which cannot be tuned; give it a number with --set {name}=NUMBER first.")
    low, high = bounds_of(field.metadata)
    if given is None:
        if value <= 0:
            raise UserError(f"{name} is {value}, which gives no range to tune; give it a positive value with --set.")
        given = {"low": max(low, value / 10), "high": min(high, value * 10), "log": True}
    low, high = max(low, min(given["low"], value)), min(high, max(given["high"], value))
    return Dimension(value, low, high, bool(given.get("log")) and low > 0)


def choices_of(annotation: Any) -> list[Any]:
    """The values that a type lists; empty for numbers and strings."""
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType) and type(None) in get_args(annotation):
        inner = [choice for part in get_args(annotation) if part is not type(None) for choice in choices_of(part)]
        return [*inner, None] if inner else []
    return []


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
        schedule = config.algo_kwargs.get(name + SCHEDULE)
        if schedule is not None:
            start, value = schedule["start"], changes.pop(name)
            end = schedule.get("end")
            scaled = {} if end is None or not start else {"end": end * value / start}
            changes[name + SCHEDULE] = {**schedule, "start": value, **scaled}
    model = get_algorithm_spec(config.algo).params
    return config.model_copy(update={"algo_kwargs": change_params(model, config.algo_kwargs, changes)})


def prepare(config: TrainConfig, folder: Path, workers: int) -> TrainConfig:
    """The config for trials: evaluated during the run, in the study's folder, without replay in checkpoints.

    Parallel trials use one thread each unless the config says otherwise, because threads that wait for cores are slow.
    """
    if not config.eval_episodes:
        raise UserError("eval_episodes is 0; tune compares evaluations, so it must be at least 1.")
    if config.algo_kwargs.get("early_stopping"):
        raise UserError("early_stopping is set; tune compares whole runs, so take it out.")
    kwargs = dict(config.algo_kwargs)
    kwargs["eval_interval"] = kwargs.get("eval_interval") or max(1, config.total_timesteps // EVALUATIONS)
    threads = 1 if config.threads == "auto" and workers > 1 else config.threads
    update = {"output_dir": str(folder / "trials"), "replay_in_checkpoint": False, "threads": threads}
    return config.model_copy(update={**update, "algo_kwargs": kwargs})


# workers ---------------------------------------------------------------------------------------------------------


class Report(Callback):
    """Reports each evaluation to the study, and stops the run if the study says so."""

    def __init__(self, link: Connection) -> None:
        self.link, self.stopped = link, False

    def on_evaluation(self, run: Run, metrics: dict[str, Any]) -> bool | None:
        """Report the evaluation and ask whether to continue."""
        self.link.send(("evaluation", run.step, metrics["eval_return_mean"]))
        self.stopped = not self.link.recv()
        return False if self.stopped else None


def work(link: Connection, modules: Sequence[str]) -> None:
    """The loop of a worker: it receives configs, and sends evaluations and the end of each run."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # so that Ctrl-C reaches only the study
    threading.Thread(target=end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    for name in modules:
        importlib.import_module(name)
    while (config := link.recv()) is not None:
        report = Report(link)
        try:
            metrics = train(config, callbacks=[report], console=False).metrics
            link.send(("end", "pruned" if report.stopped else "complete", metrics.get("eval_return_mean")))
        except (EOFError, BrokenPipeError):  # the study is gone
            return
        except Exception as error:
            link.send(("end", "wrong" if isinstance(error, UserError) else "failed", str(error)))


def end_with_parent() -> None:
    """End this process when the study is killed, so that no run is left behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Worker:
    """A process that runs one config after another, and its current job."""

    def __init__(self, modules: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, tuple(modules)))
        self.process.start()
        other.close()
        self.job: Job | None = None

    def start(self, job: Job) -> None:
        """Start a job."""
        self.job = job
        self.link.send(job.config)

    def close(self) -> None:
        """End the process, even in the middle of a run."""
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        self.link.close()


@dataclass
class Job:
    """A run to do: `evaluated` returns whether it continues, `ended` receives how it ended and its result."""

    config: TrainConfig
    evaluated: Callable[[int, float], bool]
    ended: Callable[[str, Any], None]


def run_jobs(jobs: Iterator[Job], count: int, modules: Sequence[str], tick: Callable[[], None]) -> None:
    """Run all jobs on that many workers; `tick` is called at every event and about once a second."""
    workers: list[Worker] = []
    try:
        while True:
            for index in range(count):
                if index < len(workers) and workers[index].job is not None:
                    continue
                if (job := next(jobs, None)) is None:
                    break
                if index == len(workers):
                    workers.append(Worker(modules))
                workers[index].start(job)
            busy = {worker.link: worker for worker in workers if worker.job is not None}
            if not busy:
                return
            for link in wait(list(busy), POLL_SECONDS):
                hear(workers, busy[link], modules)  # type: ignore[index]
            tick()
    finally:
        for worker in workers:
            worker.close()


def hear(workers: list[Worker], worker: Worker, modules: Sequence[str]) -> None:
    """Handle one message from a worker; a dead worker is replaced, and its run counts as failed."""
    job = worker.job
    assert job is not None
    try:
        kind, *message = worker.link.recv()
        if kind == "evaluation":
            worker.link.send(job.evaluated(*message))
            return
    except (EOFError, OSError):
        worker.close()
        message = ["failed", f"its process ended with code {worker.process.exitcode}"]
        workers[workers.index(worker)] = Worker(modules)
    worker.job = None
    job.ended(*message)


# the study -------------------------------------------------------------------------------------------------------


class Study:
    """An Optuna study in a folder: `study.db`, the trials' runs, and at the end `best.yaml`."""

    def __init__(self, config: TrainConfig, space: Space, folder: Path, workers: int = 1) -> None:
        if find_spec("optuna") is None:
            raise UserError("optuna is not installed; run pip install 'rl-training[tune]'.")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.space, self.config = folder, space, prepare(config, folder, workers)
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
            check_study(self.study, {name: bool(one.choices) for name, one in space.items()})
            self._take_up()

    def _check_same(self) -> None:
        """Refuse a folder in which another config was tuned."""
        fields = ("algo", "env_id", "total_timesteps", "eval_episodes", "algo_kwargs", "env_kwargs")
        dump = self.config.model_dump(mode="json")
        says = {name: dump[name] for name in fields} | {"space": {n: d.describe() for n, d in self.space.items()}}
        stored = self.study.user_attrs.get("says")
        if stored is None:
            self.study.set_user_attr("says", says)
            self.study.enqueue_trial({name: one.encode(one.value) for name, one in self.space.items()})
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
            values = {name: one.suggest(trial, name) for name, one in self.space.items()}
            config = with_values(self.config, values)
            yield self._job(trial, config.model_copy(update={"seed": (config.seed + trial.number) % 2**32}))

    def _job(self, trial: optuna.Trial, config: TrainConfig) -> Job:
        def evaluated(step: int, value: float) -> bool:
            trial.report(value, round(step / config.algo_kwargs["eval_interval"]))
            trial.set_user_attr("step", step)
            return not trial.should_prune()

        def ended(how: str, result: Any) -> None:
            if how in ("complete", "pruned") and result is not None and math.isfinite(result):
                state = self.states.COMPLETE if how == "complete" else self.states.PRUNED
                self.study.tell(trial, None if how == "pruned" else result, state=state)
                return
            trial.set_user_attr("error", str(result))
            self.study.tell(trial, state=self.states.FAIL)
            if how == "wrong" and trial.number == 0:  # the config itself cannot run
                raise UserError(str(result))

        return Job(config, evaluated, ended)

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
        known = self.final_returns()
        for offset in range(seeds):
            for name, values in ((self._final_name(), self.best_values()), ("default", {})):
                if offset not in known[name]:
                    seed = (self.config.seed + FRESH_SEED + offset) % 2**32
                    yield self._final(name, offset, with_values(self.config, values).model_copy(update={"seed": seed}))

    def _final(self, name: str, offset: int, config: TrainConfig) -> Job:
        def ended(how: str, result: Any) -> None:
            value = float(result) if how == "complete" and result is not None else None
            self.study.set_user_attr(f"final {name} {offset}", value)

        return Job(config, lambda step, value: True, ended)

    def _final_name(self) -> str:
        return f"trial {self.best().number}"

    def final_returns(self) -> dict[str, dict[int, float | None]]:
        """Returns by seed of the best trial's config, under its name, and of the `default`; None for a failed run."""
        found: dict[str, dict[int, float | None]] = {self._final_name(): {}, "default": {}}
        for key, value in self.study.user_attrs.items():
            head, _, offset = key.rpartition(" ")
            if head.removeprefix("final ") in found and key.startswith("final "):
                found[head.removeprefix("final ")][int(offset)] = value
        return found

    def write_preset(self, config: TrainConfig, note: str) -> Path:
        """The config with the best hyper-parameters, as a file that `train --config` takes."""
        path = self.folder / "best.yaml"
        data = with_values(config, self.best_values()).model_dump(mode="json", exclude_defaults=True)
        text = "".join(f"# {line}\n" for line in note.splitlines()) + dump_yaml(data)
        write_text(path, text)
        return path
