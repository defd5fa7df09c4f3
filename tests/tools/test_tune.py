"""`tune`: its search spaces, a study that goes on where it was killed, and the comparison at its end."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import env_zoo
from resume_cases import SPECS, tiny
from rl_training.cli.main import app
from rl_training.config.params import read_params
from rl_training.config.train_config import TrainConfig, load_config, parse_yaml
from rl_training.errors import TrainingFailure, UserError
from rl_training.run.workflows import train
from rl_training.tools import processes, tune
from rl_training.tools.processes import Job
from rl_training.tools.tune import Study, search_space, with_values

FRESH = tune.FRESH_SEED


def finish(job: Job, score: Callable[[TrainConfig], float], evaluations: int = 4) -> str:
    """A run of the job without a process: every evaluation gives the score."""
    value = score(job.config)
    interval = job.config.algo_kwargs["eval_interval"]
    for number in range(1, evaluations + 1):
        if not job.evaluated(number * interval, value):
            end(job, value, stop_reason="callback")
            return "pruned"
    end(job, value)
    return "complete"


def end(job: Job, value: float, stop_reason: str = "total_timesteps") -> None:
    """The end of a run with this return."""
    job.metrics = {"eval_return_mean": value, "stop_reason": stop_reason}
    job.ended(job)


def fail(job: Job, error: Exception) -> None:
    """The end of a run with this error."""
    job.error = error
    job.ended(job)


def by_rate(config: TrainConfig) -> float:
    """A score that is highest at a learning rate of 1e-3."""
    return -abs(math.log10(float(config.algo_kwargs.get("learning_rate", 3e-4))) + 3.0)


def study(folder: Path, names: tuple[str, ...] = ("learning_rate", "hidden_sizes"), **fields: Any) -> Study:
    config = tiny("ppo", folder, total_timesteps=1000, **fields)
    return Study(config, search_space(config, names), folder / "study")


@pytest.mark.parametrize("algo", SPECS)
def test_every_value_of_a_curated_space_is_legal(algo: str, tmp_path: Path) -> None:
    config = load_config({"algo": algo, "env_id": "X", "total_timesteps": 10})
    space = search_space(config)
    assert algo in tune.curated()["algorithms"]
    assert len(space) > 3
    for name, one in space.items():
        assert bool(one.choices) != (one.low < one.high)
        if one.choices:
            assert one.value in one.choices
        else:
            assert one.low <= one.value <= one.high
            assert not one.log or one.low > 0
        whole = isinstance(one.value, int)
        for value in one.choices or ((int(one.low), int(one.high)) if whole else (one.low, one.high)):
            changed = with_values(config, {name: value})
            assert tune.current_value(read_params(SPECS[algo].params, changed.algo_kwargs), name) == value


def test_what_is_not_in_the_table_comes_from_type_and_bounds(tmp_path: Path) -> None:
    config = tiny("ppo", tmp_path, kwargs={"optimizer_eps": 0.5, "gae_lambda": 0.55})
    space = search_space(config, ["optimizer_eps", "activation", "normalize_advantages", "gae_lambda"])
    assert (space["optimizer_eps"].low, space["optimizer_eps"].high) == (0.05, 1.0)  # at most 1, says its model
    assert space["activation"].choices == ("tanh", "relu", "elu", "silu", "gelu")
    assert set(space["normalize_advantages"].choices) == {True, False}
    assert 0.55 in space["gae_lambda"].choices  # the config's own value is always among them


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("learning_rat", "'learning_rat' is not a hyper-parameter of ppo; did you mean 'learning_rate'"),
        ("eval_interval", "'eval_interval' is not a hyper-parameter of ppo"),
        ("target_kl", "target_kl is null, which cannot be tuned; give it a number with --set target_kl=NUMBER"),
        ("policy_lag", "policy_lag is 0, which gives no range to tune"),
        ("early_stopping", "early_stopping is null, which cannot be tuned"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        search_space(tiny("ppo", tmp_path), [name])


def test_a_schedule_keeps_its_shape(tmp_path: Path) -> None:
    schedule = {"type": "linear", "start": 1e-3, "end": 1e-4}
    config = tiny("ppo", tmp_path, kwargs={"learning_rate_schedule": schedule})
    assert search_space(config, ["learning_rate"])["learning_rate"].value == 1e-3
    changed = with_values(config, {"learning_rate": 2e-3}).algo_kwargs
    assert changed["learning_rate_schedule"] == {"type": "linear", "start": 2e-3, "end": pytest.approx(2e-4)}
    assert "learning_rate" not in changed


def test_the_first_trial_is_the_config_itself_and_every_trial_has_a_seed_of_its_own(tmp_path: Path) -> None:
    opened, seen = study(tmp_path), []
    for job in opened.jobs(4):
        seen.append(job.config)
        finish(job, by_rate)
    assert seen[0].algo_kwargs["learning_rate"] == 3e-4
    assert list(seen[0].algo_kwargs["hidden_sizes"]) == [8]
    assert len({config.algo_kwargs["learning_rate"] for config in seen}) == 4
    assert [config.seed for config in seen] == [3, 4, 5, 6]
    assert seen[0].algo_kwargs["eval_interval"] == 100
    again = []
    for job in study(tmp_path / "again").jobs(4):
        again.append(job.config.algo_kwargs)
        finish(job, by_rate)
    assert again == [config.algo_kwargs for config in seen], "with one job a study is repeatable"


def test_a_killed_study_goes_on_with_what_it_had_begun(tmp_path: Path) -> None:
    first = study(tmp_path)
    jobs = first.jobs(10)
    finish(next(jobs), by_rate)
    begun = [next(jobs).config.algo_kwargs["learning_rate"] for _ in range(2)]
    del first, jobs  # killed: two trials were running
    again = study(tmp_path)
    assert len(again.trials()) == 1
    seen = []
    for job in again.jobs(4):
        seen.append(job.config.algo_kwargs["learning_rate"])
        finish(job, by_rate)
    assert len(seen) == 3
    assert seen[:2] == begun
    assert seen[2] not in begun
    assert len(again.trials()) == 4
    assert list(study(tmp_path).jobs(4)) == []


def test_a_trial_that_falls_behind_is_pruned_in_its_second_half(tmp_path: Path) -> None:
    opened = study(tmp_path)
    ends = [finish(job, lambda _: 100.0, evaluations=10) for job in opened.jobs(6)]
    assert ends == ["complete"] * 6
    assert [finish(job, lambda _: 1.0, evaluations=4) for job in opened.jobs(7)] == ["complete"]
    assert [finish(job, lambda _: 1.0, evaluations=10) for job in opened.jobs(8)] == ["pruned"]
    assert opened.best().value == 100.0


def test_a_failed_trial_counts_and_is_never_the_best(tmp_path: Path) -> None:
    opened = study(tmp_path)
    for number, job in enumerate(opened.jobs(3)):
        if number == 1:
            fail(job, TrainingFailure("the loss is not finite"))
        elif number == 2:
            end(job, math.nan)
        else:
            finish(job, by_rate)
    assert opened.best().number == 0
    assert opened.trials()[1].user_attrs["error"] == "the loss is not finite"


def test_a_config_that_cannot_run_ends_the_study_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no environment X"):
        fail(next(study(tmp_path).jobs(3)), UserError("there is no environment X."))


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study(tmp_path)
    with pytest.raises(UserError, match="holds a study with another space; give another --study"):
        study(tmp_path, ("learning_rate",))
    with pytest.raises(UserError, match="holds a study with another eval_episodes"):
        study(tmp_path, eval_episodes=7)


def test_what_compares_no_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eval_episodes is 0"):
        study(tmp_path, eval_episodes=0)
    with pytest.raises(UserError, match="early_stopping is set"):
        study(tmp_path, kwargs={"early_stopping": {"threshold": 1.0}, "eval_interval": 10})


def test_best_and_default_meet_on_fresh_seeds_and_the_best_is_a_preset(tmp_path: Path) -> None:
    opened = study(tmp_path)
    for job in opened.jobs(8):
        finish(job, by_rate)
    config = tiny("ppo", tmp_path, total_timesteps=1000)
    jobs = opened.finals(2)
    finish(next(jobs), by_rate)  # then killed
    opened = study(tmp_path)
    seeds = []
    for job in opened.finals(2):
        seeds.append(job.config.seed)
        finish(job, by_rate)
    assert seeds == [100_003, 100_004, 100_004]
    tuned, default = opened.final_returns().values()
    assert set(tuned) == set(default) == {0, 1}
    assert all((tuned[seed] or 0.0) > (default[seed] or 0.0) for seed in default)
    path = opened.write_preset(config, "first line\nsecond line")
    text = path.read_text()
    assert text.startswith("# first line\n# second line\nalgo: ppo\n")
    best = load_config(path)
    assert best.algo_kwargs["learning_rate"] == opened.best_values()["learning_rate"]
    assert best.output_dir == config.output_dir  # not the study's
    assert parse_yaml(text)["algo_kwargs"]["eval_interval"] == 0  # the config's own, not that of the trials


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trials", "0"], "--trials is '0'; it must be a whole number of at least 1"),
        (["--final-seeds", "1"], "an interval needs at least 2"),
        (["--tune", "gama"], "did you mean 'gamma'"),
        (["--set", "eval_episodes=0"], "eval_episodes is 0; tune compares evaluations"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--config", "ppo/cartpole", *words])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (by_rate, "; better."),
        (lambda config: by_rate(config) if config.seed < FRESH else float(config.seed % 2), "no difference shown."),
        (lambda config: -float(config.seed), "no trial was better than the config itself"),
    ],
)
def test_the_command_says_what_came_of_it(
    score: Callable[[TrainConfig], float], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(jobs: Any, count: int, modules: Any, tick: Callable[[], None]) -> None:
        for job in jobs:
            finish(job, score)
            tick()

    monkeypatch.setattr(processes, "run_jobs", run_here)
    words = ["tune", "ppo/cartpole", "--set", "learning_rate=0.0003", "--tune", "learning_rate", "--trials", "5"]
    result = CliRunner().invoke(app, [*words, "--final-seeds", "3", "--study", "here"])
    assert result.exit_code == 0, result.output
    assert told in result.output
    assert "learning_rate=0.0003" in result.output  # the line of trial 0
    assert result.output.count("default, new seed") == (0 if "no trial" in told else 3)
    preset = load_config(Path("here/best.yaml"))
    assert preset.algo == "ppo"
    assert ("on 3 new seeds" in Path("here/best.yaml").read_text()) == ("no trial" not in told)


def test_without_the_extra_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"optuna is not installed; run pip install 'rl-training\[tune\]'"):
        study(tmp_path)


QUICK = ["tune", "ppo/cartpole", "--tune", "learning_rate", "--trials", "2", "--final-seeds", "0", "--study"]


def test_a_second_tune_on_a_study_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Any] = []

    def run_here(jobs: Any, count: int, modules: Any, tick: Callable[[], None]) -> None:
        for job in jobs:
            if not refused:
                refused.append(CliRunner().invoke(app, [*QUICK, "here"]))
            finish(job, by_rate)
            tick()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "run_jobs", run_here)
    result = CliRunner().invoke(app, [*QUICK, "here"])
    assert (refused[0].exit_code, refused[0].stderr.count("\n")) == (2, 1)
    assert f"here is in use: process {os.getpid()}" in refused[0].stderr
    assert "or give another --study" in refused[0].stderr
    assert result.exit_code == 0, result.output
    assert result.output.count(" done ") == 2
    assert "fail" not in result.output


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "study"

    def run_here(jobs: Any, *_: Any) -> None:
        for job in jobs:
            finish(job, by_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "run_jobs", run_here)
        result = CliRunner().invoke(app, [*QUICK, str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def forge(path: Path, how: str, finished: Path) -> None:
    """A study.db that no study wrote."""
    if " set " in how or "insert" in how or "drop" in how:
        shutil.copyfile(finished / "study.db", path)
    if how == "text":
        path.write_text("hello")
        return
    if how == "folder":
        path.mkdir()
        return
    with contextlib.closing(sqlite3.connect(path)) as forged:
        if how == "other tables":
            forged.execute("create table trials (x int)")
        else:
            forged.executescript(how)
        forged.commit()


@pytest.mark.parametrize(
    "how",
    [
        "text", "folder", "other tables", "update alembic_version set version_num = 'v9.9'",
        "update study_user_attributes set value_json = '3' where key = 'says'",
        "update study_user_attributes set value_json = '{' where key = 'says'",
        "insert into study_user_attributes (study_id, key, value_json) values (1, 'final default x', '1.0')",
        "insert into study_user_attributes (study_id, key, value_json) values (1, 'final default 0', '\"many\"')",
        "update trial_params set distribution_json = '{}'", "update trial_params set param_name = '[/]'",
        "update trials set state = 'SLEEPING'", "drop table trial_values",
        "update trial_values set value = null", "update trial_values set value = 'much'",
    ],
)  # fmt: skip
def test_a_forged_study_is_one_sentence(
    how: str, finished_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    forge(Path("here/study.db"), how, finished_study)
    result = CliRunner().invoke(app, [*QUICK, "here"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "here/study.db cannot be read as a study" in result.stderr


@pytest.mark.parametrize("name", ["st?dy", "a%20b", "{x}", "a#b", "study?mode=ro"])
def test_a_study_may_have_any_name(
    name: str, finished_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_study, name)
    result = CliRunner().invoke(app, [*QUICK, name])
    assert result.exit_code == 0, result.output
    assert "continuing after 2 trials" in result.output
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["best.yaml", "study.db"]


@pytest.mark.skipif(sys.platform != "linux", reason="a folder in which root cannot write either")
def test_a_study_or_an_export_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    done = train(tiny("a2c", tmp_path), console=False)
    export = ["export", "--format", "torch", "--checkpoint", str(done.checkpoint_path), "--output"]
    for words in ([*QUICK, "/proc/study"], [*QUICK, "/proc"], [*export, "/proc/policy.pt2"]):
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert "cannot be written" in result.stderr


WORDS = [
    "tune", "--config", "ppo/cartpole", "--total-timesteps", "600", "--set", "num_steps=16", "--set", "num_envs=2",
    "--set", "eval_episodes=1", "--tune", "learning_rate", "--tune", "activation", "--study", "study",
    "--final-seeds", "2",
]  # fmt: skip


@pytest.mark.slow
def test_a_killed_command_goes_on_and_ends_with_a_preset(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rl_training", *WORDS, "--trials", "4", "--jobs", "2"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        next(line for line in killed.stdout if " done " in line)  # the first trial has ended, others run
        os.kill(killed.pid, signal.SIGKILL)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert "continuing after" in done.stdout
    assert "on 2 new seeds" in done.stdout
    assert load_config(tmp_path / "study" / "best.yaml").algo == "ppo"


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_trial_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([env_zoo.FOLDER, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("ZOO_FAULT", "os._exit")
    monkeypatch.syspath_prepend(env_zoo.FOLDER)
    ends: list[Job] = []
    good = tiny("ppo", tmp_path, kwargs={"eval_interval": 64})
    bad = tiny("ppo", tmp_path, env_id="env_zoo:Misbehaves", kwargs={"eval_interval": 64})
    jobs = (Job(config, ends.append) for config in (bad, good))
    processes.run_jobs(jobs, 1, ["env_zoo"], lambda: None)
    assert [job.state for job in ends] == ["failed", "done"]
    assert "its process ended with code" in str(ends[0].error)
