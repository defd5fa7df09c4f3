"""The comparison of defaults: which jobs a round has, what is trained, what counts as recorded, and the table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import compare_defaults as defaults

SETTINGS = defaults.load_settings()
JOB = defaults.Job("ours", "ppo", "norm", "CartPole-v1", 0, 100_000)


def record_of(job: defaults.Job, **values: object) -> dict[str, object]:
    fields = {name: getattr(job, name) for name in defaults.Job.__dataclass_fields__}
    return {**fields, "hash": defaults.job_hash(SETTINGS, job), "steps": job.budget, "seconds": 10.0, **values}


def test_a_round_crosses_algorithms_labels_environments_and_seeds():
    settings = {**SETTINGS, "rounds": {"r": [
        {"side": "ours", "algorithms": ["ppo", "sac"], "labels": ["default", "norm_linear"], "half": "report",
         "seeds": [0, 1]}
    ]}}  # fmt: skip
    jobs = list(defaults.jobs_of(settings, "r"))
    assert sum(job.algo == "ppo" for job in jobs) == 8 * 2 * 2
    kinds = {env: (where["half"], where["actions"]) for env, where in SETTINGS["environments"].items()}
    assert {kinds[job.env] for job in jobs if job.algo == "sac"} == {("report", "continuous")}
    assert {job.label for job in jobs if job.algo == "sac"} == {"default"}  # sac has no candidate of the other name
    assert {job.budget for job in jobs if job.env == "Reacher-v5" and job.algo == "ppo"} == {50_000}


def test_every_job_of_every_round_has_a_valid_config():
    jobs = {job for name in SETTINGS["rounds"] for job in defaults.jobs_of(SETTINGS, name)}
    for job in jobs:
        if job.side == "ours":
            defaults.job_hash(SETTINGS, job)
    half = {env: where["half"] for env, where in SETTINGS["environments"].items()}
    assert {job.env for job in jobs} == set(half)
    assert {job.label for job in jobs if half[job.env] == "report"} == {"default"}  # nothing is chosen there


def test_vectors_are_normalized_and_images_are_not():
    image = replace(JOB, env="MinAtar/Breakout-v1")
    assert defaults.our_config(SETTINGS, image).env_kwargs["wrappers"] == {"normalize_reward": True}
    wrappers = defaults.our_config(SETTINGS, JOB).env_kwargs["wrappers"]
    assert wrappers == {"normalize_observation": True, "normalize_reward": True}


def test_a_record_counts_until_what_is_trained_changes(tmp_path):
    settings = {**SETTINGS, "rounds": {"r": [
        {"side": "ours", "algorithms": ["ppo"], "labels": ["norm"], "environments": ["CartPole-v1"], "seeds": [0, 1]}
    ]}}  # fmt: skip
    (tmp_path / "a.jsonl").write_text(json.dumps(record_of(JOB)) + "\n")
    records = defaults.read_records(tmp_path)
    assert defaults.due_jobs(settings, ["r"], records) == [replace(JOB, seed=1)]
    (tmp_path / "b.jsonl").write_text(json.dumps(record_of(JOB, steps=99_999, hash="of a stopped run")) + "\n")
    assert defaults.read_records(tmp_path) == records
    (tmp_path / "b.jsonl").write_text(json.dumps(record_of(JOB, hash="older")) + "\n")
    assert len(defaults.due_jobs(settings, ["r"], defaults.read_records(tmp_path))) == 2


def test_a_stopped_run_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "train_ours", lambda *_: (99_999, None))
    with pytest.raises(SystemExit, match="99999 of 100000"):
        defaults.run_job(SETTINGS, JOB, tmp_path / "r.jsonl", str(tmp_path), 1)
    assert not defaults.read_records(tmp_path)


def test_the_records_of_the_candidates_are_those_of_their_settings():
    assert not defaults.due_jobs(SETTINGS, ["tune_rollout"], defaults.read_records(defaults.RECORDS))


def test_the_normalized_mean_weighs_environments_equally():
    runs = {JOB: 500.0, replace(JOB, seed=1): 500.0, replace(JOB, env="LunarLander-v3"): -180.0}
    records = [record_of(job, final=final) for job, final in runs.items()]
    row = next(line for line in defaults.render_table(SETTINGS, records, "tune").splitlines() if "ppo" in line)
    assert "| ppo | **norm** | 1/2 | 0.500 (2 of 8) | 0.00 | 500 | -180 |" in row


def test_what_is_recorded_orders_the_next_jobs():
    assert defaults.expected_seconds(SETTINGS, JOB, [record_of(JOB, steps=50_000)]) == pytest.approx(20.0)
    rate = SETTINGS["algorithms"]["ppo"]["rates"]["ours"]
    assert defaults.expected_seconds(SETTINGS, JOB, []) == pytest.approx(100_000 / rate)


def test_a_job_writes_one_line_with_its_curve(tmp_path):
    job = defaults.Job("ours", "a2c", "norm", "FrozenLake-v1", 3, 800)
    defaults.run_job({**SETTINGS, "episodes": 4, "curve_episodes": 2}, job, tmp_path / "r.jsonl", str(tmp_path), 1)
    (record,) = defaults.read_records(tmp_path).values()
    assert len(record["curve"]) == 10
    assert record["steps"] <= 800
    assert len(record["returns"]) == 4
    assert record["final"] == record["curve"][-1][1] == pytest.approx(sum(record["returns"]) / 4)


def test_jobs_that_do_not_fit_are_not_started(tmp_path, capsys):
    assert defaults.run_jobs(SETTINGS, [JOB], tmp_path / "r.jsonl", 1, seconds=1.0) == 0
    assert "1 jobs were not started" in capsys.readouterr().out
