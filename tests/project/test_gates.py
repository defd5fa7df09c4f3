"""The learning gates' own machinery: jobs are recorded once, rules decide as written, the page shows records."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import render_results  # noqa: E402
import run_gates  # noqa: E402
import sides  # noqa: E402

from rl_training.config.train_config import list_presets  # noqa: E402
from rl_training.errors import UserError  # noqa: E402

TINY = {"total_timesteps": 64, "num_envs": 2, "log_interval": 1, "algo_kwargs": {"num_steps": 8, "max_updates": 4}}


def write_gates(folder: Path, **gates: dict[str, Any]) -> Path:
    """A gates file whose gates are tiny PPO runs."""
    common = {"preset": "ppo/cartpole", "env": "CartPole-v1", "budget": 100, "figure": "tiny", "overrides": TINY}
    data = {"eval_episodes": 2, "gates": {name: {**common, **gate} for name, gate in gates.items()}}
    path = folder / "gates.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def fake_record(results: Path, gate: run_gates.Gate, seed: int, value: float | None, steps: int = 50) -> None:
    """A record as a run would have left it."""
    reached = {"reached": value} if gate.rule == "reach" else {}
    record = {
        **reached, "config_hash": run_gates.config_hash(gate), "eval": {"mean": value, "std": 0.0},
        "global_step": steps,
        "train_seconds": 1.0, "curve": {"train": [[10, 1.0], [50, value]], "eval": [[50, value]]},
        "versions": {"torch": "2"}, "machine": "here",
    }  # fmt: skip
    run_gates.write_record(run_gates.record_path(results, gate, seed), record)


def verdict_of(tmp_path: Path, values: list[float], steps: int = 50, **gate: Any) -> run_gates.Verdict:
    """The verdict over seeds 0, 1, ... with these returns."""
    gates = run_gates.load_gates(write_gates(tmp_path, one={"seeds": [0, 1, 2], **gate}))
    for seed, value in enumerate(values):
        fake_record(tmp_path / "results", gates["one"], seed, value, steps)
    return run_gates.judge(gates["one"], gates, tmp_path / "results")


def test_a_job_is_recorded_once_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gates(tmp_path, tiny={"threshold": 1, "seeds": [0, 1]})
    where = ["--gates", str(path), "--results", str(tmp_path / "results")]
    assert run_gates.main([*where, "--jobs", "1"]) == 0
    assert "2 jobs to run" in capsys.readouterr().out
    record = json.loads((tmp_path / "results" / "tiny" / "seed_1.json").read_text())
    assert record["seed"] == 1
    assert record["global_step"] <= 100
    assert len(record["eval"]["returns"]) == 2
    assert record["curve"]["eval"][-1][0] == record["global_step"]
    assert record["config_hash"] == run_gates.config_hash(run_gates.load_gates(path)["tiny"])
    assert {"versions", "machine", "command", "train_seconds", "wall_seconds"} <= set(record)

    assert run_gates.main([*where, "--jobs", "1"]) == 0
    assert "0 jobs to run" in capsys.readouterr().out
    assert run_gates.main([*where, "--check"]) == 0

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gates:begin -->\n<!-- gates:end -->\nafter\n")
    draw = [*where, "--page", str(page), "--images", str(tmp_path / "images")]
    assert render_results.main([*draw, "--check"]) == 1
    assert render_results.main(draw) == 0
    assert render_results.main([*draw, "--check"]) == 0
    assert "| `ppo/cartpole` with max_updates 4, " in page.read_text()
    assert page.read_text().endswith("after\n")
    assert (tmp_path / "images" / "tiny.png").stat().st_size > 1000


def test_a_job_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = run_gates.load_gates(write_gates(tmp_path, tiny={"threshold": 1}))["tiny"]
    undisturbed = run_gates.run_job(gate, 0, tmp_path / "undisturbed")
    steps: list[int] = []

    class Stops(run_gates.LastReturns):
        def on_update(self, run: Any) -> None:
            steps.append(run.step)
            if len(steps) == 2:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run_gates, "LastReturns", Stops)
    with pytest.raises(KeyboardInterrupt):
        run_gates.run_job(gate, 0, tmp_path / "results", runs=tmp_path / "runs")
    record = run_gates.run_job(gate, 0, tmp_path / "results", runs=tmp_path / "runs")
    assert len(steps) == 4  # nothing twice
    assert record["eval"] == undisturbed["eval"]
    assert not list((tmp_path / "runs").rglob("*.ckpt"))


def test_a_run_folder_gets_its_curve(tmp_path: Path) -> None:
    rows = [{"step": s, "kind": "train", "time": 0.1, "episode_return_mean": s / 2} for s in range(0, 1000, 2)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 1000, "kind": "eval", "eval_return_mean": 9.0}])
    (tmp_path / "metrics.jsonl").write_text(text)
    curve = run_gates.read_curve(tmp_path / "metrics.jsonl")
    assert len(curve["train"]) == run_gates.TRAIN_POINTS
    assert curve["train"][0] == [0, 0.0]
    assert curve["train"][-1] == [998, 499.0]
    assert curve["eval"] == [[1000, 9.0]]
    assert render_results.main(["--run", str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").is_file()


@pytest.mark.parametrize(
    ("bar", "values", "status"),
    [
        (475, [475, 500, 427.5], "pass"),
        (475, [475, 500, 427.4], "fail"),
        (475, [474.9, 500, 450], "fail"),
        (-250, [-240, -250, -275], "pass"),
        (-250, [-240, -250, -275.1], "fail"),
        (-250, [-240, -251, -260], "fail"),
    ],
)
def test_a_bar_is_for_median_and_worst_seed(tmp_path: Path, bar: float, values: list[float], status: str) -> None:
    assert verdict_of(tmp_path, values, threshold=bar).status == status


@pytest.mark.parametrize(
    ("steps", "limits", "status"),
    [
        ([200, 400, 800], {"below": "sac", "share": 0.5}, "pass"),
        ([200, 600, 800], {"below": "sac", "share": 0.5}, "fail"),
        ([200, 400, None], {"below": "sac", "share": 0.5}, "fail"),  # one seed never got there
        ([1200, 1400, None], {"above": "sac", "control": True}, "pass"),
        ([200, 400, None], {"above": "sac", "control": True}, "fail"),
    ],
)
def test_steps_to_a_bar_are_held_against_another_gate(
    tmp_path: Path, steps: list[float | None], limits: dict[str, Any], status: str
) -> None:
    reach = {"rule": "reach", "threshold": 1, "seeds": [0, 1, 2]}
    gates = run_gates.load_gates(write_gates(tmp_path, sac=reach, one={**reach, **limits}))
    for seed, value in enumerate(steps):
        fake_record(tmp_path / "results", gates["sac"], seed, 1000)
        fake_record(tmp_path / "results", gates["one"], seed, value)
    assert run_gates.judge(gates["one"], gates, tmp_path / "results").status == status


def test_a_bar_is_reached_at_the_first_of_two_successive_evaluations(tmp_path: Path) -> None:
    returns = [-500.0, -190.0, -210.0, -199.0, -150.0]
    rows = [{"step": 200 * i, "kind": "eval", "eval_return_mean": value} for i, value in enumerate(returns)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_gates.first_reached(path, -200) == 600
    assert run_gates.first_reached(path, -160) is None


def test_a_run_over_its_budget_fails(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, [500, 500, 500], steps=101, threshold=475)
    assert verdict.status == "fail"
    assert "over the budget" in verdict.reason


def test_missing_seeds_are_not_a_pass(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, [], threshold=475).status == "not run"
    assert verdict_of(tmp_path, [500, 500], threshold=475).status == "incomplete"


def test_a_record_of_another_config_is_stale_and_due(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, [500, 500, 500], threshold=475).status == "pass"
    changed = {"seeds": [0, 1, 2], "threshold": 475, "overrides": {**TINY, "num_envs": 4}}
    gates = run_gates.load_gates(write_gates(tmp_path, one=changed))
    assert run_gates.judge(gates["one"], gates, tmp_path / "results").status == "stale"
    assert [seed for _, seed in run_gates.due_jobs(gates.values(), tmp_path / "results", None)] == [0, 1, 2]
    command = ["--gates", str(tmp_path / "gates.yaml"), "--results", str(tmp_path / "results"), "--check"]
    assert run_gates.main(command) == 1


def test_a_control_stays_below_a_number_or_another_gate(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, [10, 20, 30], control=True, below=21).status == "pass"
    assert verdict_of(tmp_path, [10, 20, 30], control=True, below=20).status == "fail"
    assert verdict_of(tmp_path, [10, 20, 30], control=True, above=9, every_seed=True).status == "pass"
    lagging = verdict_of(tmp_path, [10, 20, 30], control=True, above=15, every_seed=True)
    assert (lagging.status, lagging.reason) == ("fail", "seed 0 10.0 is not above 15")
    control = {"control": True, "seeds": [0]}
    gates = run_gates.load_gates(write_gates(tmp_path, with_it=control, without={**control, "below": "with_it"}))
    results = tmp_path / "compared"
    fake_record(results, gates["without"], 0, 30.0)
    assert run_gates.judge(gates["without"], gates, results).status == "incomplete"
    fake_record(results, gates["with_it"], 0, 40.0)
    assert run_gates.judge(gates["without"], gates, results).status == "pass"
    assert run_gates.judge(gates["with_it"], gates, results).status == "recorded"
    fake_record(results, gates["with_it"], 0, 20.0)
    assert run_gates.judge(gates["without"], gates, results).status == "fail"


def test_wrong_gates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no threshold"):
        run_gates.load_gates(write_gates(tmp_path, one={}))
    with pytest.raises(UserError, match="below names"):
        run_gates.load_gates(write_gates(tmp_path, one={"control": True, "below": "nothing"}))
    gate = run_gates.load_gates(write_gates(tmp_path, one={"threshold": 1, "env": "Pendulum-v1"}))["one"]
    with pytest.raises(UserError, match="trains on CartPole-v1"):
        run_gates.gate_config(gate, 0)


def test_the_packaged_gates_fit_their_presets() -> None:
    gates = run_gates.load_gates()
    assert {gate.preset for gate in gates.values()} <= set(list_presets())
    for gate in gates.values():
        config = run_gates.gate_config(gate, 0)
        assert config.total_timesteps <= gate.budget
        assert run_gates.config_hash(gate)


def test_every_algorithm_has_a_gate_or_a_control_that_is_held_against_something() -> None:
    own = {preset.split("/")[0] for preset in list_presets()}
    judged = [gate for gate in run_gates.load_gates().values() if not gate.control or gate.below or gate.above]
    assert {gate.preset.split("/")[0] for gate in judged} == own


@pytest.mark.parametrize(("limit", "bar"), [({}, "1 (steps to it)"), ({"below": 9}, "1 (steps to it below `9.0`)")])
def test_a_bar_in_steps_is_shown_with_what_it_is_held_against(tmp_path: Path, limit: dict[str, Any], bar: str) -> None:
    gates = run_gates.load_gates(write_gates(tmp_path, one={"rule": "reach", "threshold": 1, **limit}))
    verdict = run_gates.judge(gates["one"], gates, tmp_path / "results")
    assert render_results.gate_row(gates["one"], verdict)[3] == bar


def test_the_page_counts_the_final_weights_that_its_own_table_shows() -> None:
    gates, text = (
        (ROOT / "docs" / "results" / name).read_text(encoding="utf-8") for name in ("gates.md", "history.md")
    )
    rows = re.findall(r"\| `(\w+)/cartpole` \| CartPole-v1 \|.*\(best, 4 of 5\).*\(final ([\d., ]+)\)", gates)
    finals = {algo: [float(value) for value in listed.split(", ")] for algo, listed in rows}
    good = {algo: sum(value >= 475 for value in values) for algo, values in finals.items()}
    told = dict(re.findall(r"`(\w+)` (\d+) of 5", text[text.index("<!-- final_weights:begin -->") :]))
    assert {algo: int(count) for algo, count in told.items()} == good
    assert len(good) == 11
    assert f"That is {sum(good.values())} of {5 * len(good)}." in text


def test_the_pages_hold_every_marker_once() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in render_results.PAGES)
    for name in ("gates", "summary", "final_weights", "tune", "report", "mujoco", "benchmarks"):
        assert render_results.fill(text, "", name) != ""


def test_the_summary_counts_what_is_met_by_suite(tmp_path: Path) -> None:
    gates = run_gates.load_gates()
    verdicts = {name: run_gates.judge(gate, gates, run_gates.RESULTS) for name, gate in gates.items()}
    missed = [name for name, verdict in verdicts.items() if verdict.status not in ("pass", "recorded")]
    text = render_results.render_summary(gates, verdicts)
    counts = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+)", text.partition("Not met")[0])]
    assert sum(total for _, total in counts) == len(gates)
    assert sum(met for met, _ in counts) == len(gates) - len(missed)
    assert all(f"`{name}`" in text for name in missed)
    assert all(f"- `{name}`: {verdicts[name].reason}" in text for name in missed if verdicts[name].status == "fail")


def test_nothing_recorded_or_documented_names_a_folder_of_a_machine() -> None:
    folders = ["benchmarks/results", "results", "docs"]
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, timeout=60)
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode or not names:
        pytest.skip("not a checkout")
    path = re.compile(rb"(?<![\w.>-])/(work|root|tmp|home|Users)/")
    assert [name for name in names if path.search((ROOT / name).read_bytes()) and not name.endswith(".png")] == []
    command = ["/home/me/compare_sb3.py", "--output", "/tmp/me/a.json", "--only", "ppo"]
    assert sides.without_folders(command) == ["compare_sb3.py", "--output", "a.json", "--only", "ppo"]


def test_no_gate_is_written_twice() -> None:
    """YAML would silently take the last one."""
    names = re.findall(r"^  (\w+):", run_gates.GATES.read_text(encoding="utf-8"), re.M)
    assert len(names) > 100
    assert len(names) == len(set(names))
