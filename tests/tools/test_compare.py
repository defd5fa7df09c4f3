"""`rl-training compare`: groups, statistics, verdicts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rl_training.cli.main import app
from rl_training.errors import UserError
from rl_training.tools.compare import compare_groups, group_runs
from rl_training.tools.records import find_runs
from run_records import HOSTILE, write_group, write_run

NEAR = [10.0, 12.0, 11.0, 13.0, 9.0, 10.5]


def compare(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_groups_of_algorithms_are_compared_best_first(tmp_path: Path) -> None:
    write_group(tmp_path, [10.0, 11.0, 12.0, 13.0, 30.0], algo="a2c")
    write_group(tmp_path, [50.0, 51.0, 52.0, 53.0, 90.0], algo="ppo")
    result = compare_groups(group_runs(find_runs([str(tmp_path)])))
    assert [group.name for group in result.groups] == ["ppo", "a2c"]
    first = result.groups[0]
    assert first.iqm.value == pytest.approx(np.mean([51, 52, 53]))
    assert first.iqm.low < first.iqm.value < first.iqm.high
    assert first.final == pytest.approx(np.mean([50, 51, 52, 53, 90]))
    assert first.area == pytest.approx(first.final / 2)  # of a line from zero
    assert first.curve is not None
    np.testing.assert_allclose(first.curve.value[[0, -1]], [0.0, 52.0])
    assert first.profile.value[0] == 1.0
    pair = result.pairs[0]
    assert (pair.name, pair.other, pair.verdict) == ("ppo", "a2c", "ppo is better")
    assert (float(pair.improvement.value), float(pair.difference.value)) == (1.0, 40.0)
    text = compare(str(tmp_path))
    assert "ppo is better" in text
    assert "note:" not in text


def test_no_difference_is_shown_where_the_interval_holds_zero(tmp_path: Path) -> None:
    write_group(tmp_path, NEAR, learning_rate=0.1)
    write_group(tmp_path, [value + 0.1 for value in NEAR], learning_rate=0.2)
    text = compare(str(tmp_path))
    assert "no difference shown" in text
    assert "learning_rate=0.1" in text  # found as what differs
    assert "is better" not in text.replace("first is better", "")


def test_runs_of_one_config_on_a_cpu_and_on_a_gpu_are_one_group(tmp_path: Path) -> None:
    for seed, where in enumerate(({"device": "cpu", "accelerate": "none"}, {"device": "cuda", "accelerate": "graph"})):
        config = write_run(tmp_path, [1.0], seed=seed) / "config.yaml"
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | where))
    assert list(group_runs(find_runs([str(tmp_path)]))) == ["ppo"]


def test_one_run_each_is_too_few_to_tell(tmp_path: Path) -> None:
    write_group(tmp_path, [1.0], algo="a2c")
    write_group(tmp_path, [100.0], algo="ppo")
    text = compare(str(tmp_path))
    assert "too few runs to tell" in text
    assert "fewer than 5 runs of a2c, ppo" in text
    assert "nan" not in text


def test_best_counts_the_best_evaluation_and_final_the_last(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, [5.0, 40.0, 20.0], seed=seed)
    group = compare_groups(group_runs(find_runs([str(tmp_path)]))).groups[0]
    assert (group.final, group.best) == (20.0, 40.0)


def test_steps_to_a_threshold_count_the_runs_that_reach_it(tmp_path: Path) -> None:
    for seed, returns in enumerate(([0.0, 10.0, 20.0], [0.0, 0.0, 10.0], [0.0, 1.0, 2.0])):
        write_run(tmp_path, returns, seed=seed)
    assert "2,500 (median, 2 of 3)" in compare(str(tmp_path), "--threshold", "10")
    assert "none of 3" in compare(str(tmp_path), "--threshold", "99")


def test_the_curve_spans_the_steps_that_all_runs_have(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0, 2.0, 3.0, 4.0], seed=0)
    write_run(tmp_path, [1.0, 2.0, 3.0], seed=1, step=2_000)
    result = compare_groups({"both": find_runs([str(tmp_path)])})
    assert result.steps is not None
    assert (result.steps[0], result.steps[-1]) == (2_000, 4_000)


def test_training_returns_stand_in_where_evaluations_are_too_few(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, [1.0, 2.0, 3.0], seed=seed, kind="train")
    result = compare_groups({"both": find_runs([str(tmp_path)])})
    assert result.scored_by == result.curve_of == "episode_return_mean"
    assert "return of training episodes" in compare(str(tmp_path))


# ---- unfinished runs, and what is measured ---------------------------------------------------------------------------


def write_evaluated(parent: Path, algo: str, finals: list[float], trained: float) -> None:
    """Finished runs that were evaluated, and whose training returns say something else."""
    for seed, final in enumerate(finals):
        folder = write_run(parent, [0.0, final / 2, final], algo=algo, seed=seed)
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        more = [json.loads(row) | {"kind": "train", "episode_return_mean": trained + seed} for row in rows]
        for row in more:
            del row["eval_return_mean"]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in [*rows, *map(json.dumps, more)]))


def test_one_unfinished_run_is_named_and_changes_nothing(tmp_path: Path) -> None:
    write_evaluated(tmp_path, "ppo", [50.0, 51.0, 52.0, 53.0, 54.0], trained=10.0)
    write_evaluated(tmp_path, "a2c", [20.0, 21.0, 22.0, 23.0, 24.0], trained=90.0)
    before = compare(str(tmp_path))
    assert "ppo is better" in before
    write_run(tmp_path, [99.0], algo="dqn", seed=3, kind="train", budget=9_000)  # stopped before any evaluation
    text = compare(str(tmp_path))
    assert text.startswith(before)
    assert "dqn-CartPole-v1-s3-10 (stopped at step 1,000 of 9,000)" in text
    assert "left out" in text
    assert "dqn " not in text.partition("note:")[0]


def test_an_unfinished_run_does_not_count_in_its_group(tmp_path: Path) -> None:
    write_group(tmp_path, [10.0, 11.0])
    write_run(tmp_path, [0.0, 500.0], seed=2, budget=3_000)
    failed = write_run(tmp_path, [0.0, 500.0, 500.0], seed=3)
    (failed / "end.json").write_text('{"failure": "ZeroDivisionError"}')
    group = compare_groups(group_runs(find_runs([str(tmp_path)]))).groups[0]
    assert (group.runs, group.best) == (2, 10.5)


def test_all_runs_are_compared_up_to_the_step_that_all_reached_on_request(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0, 2.0, 3.0, 40.0], algo="a2c")
    write_run(tmp_path, [5.0, 6.0, 7.0], algo="ppo", budget=9_000)
    text = compare(str(tmp_path), "--shared-steps")
    assert "up to step 3,000" in text
    groups = compare_groups(group_runs(find_runs([str(tmp_path)])), shared_steps=True).groups
    assert [(group.name, group.final) for group in groups] == [("ppo", 7.0), ("a2c", 3.0)]


def test_runs_that_are_all_unfinished_are_compared_up_to_the_step_that_all_reached(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0, 2.0, 3.0], algo="a2c", budget=9_000)
    write_run(tmp_path, [1.0, 2.0], algo="ppo", budget=9_000)
    assert "no run is finished, so all are compared up to step 2,000" in compare(str(tmp_path))


def test_a_finished_run_without_evaluations_does_not_change_what_is_compared(tmp_path: Path) -> None:
    write_evaluated(tmp_path, "ppo", [50.0, 51.0, 52.0, 53.0, 54.0], trained=10.0)
    write_run(tmp_path, [7.0, 8.0, 9.0], seed=9, kind="train")
    groups = group_runs(find_runs([str(tmp_path)]))
    result = compare_groups(groups)
    assert (result.scored_by, result.groups[0].runs) == ("eval_return_mean", 5)
    assert any("never evaluated and left out: ppo-CartPole-v1-s9-5" in note for note in result.notes)
    on_request = compare_groups(groups, trained=True)
    assert (on_request.scored_by, on_request.groups[0].runs) == ("episode_return_mean", 6)
    assert "return of training episodes" in compare(str(tmp_path), "--training")


def test_curves_of_another_measure_are_announced(tmp_path: Path) -> None:
    write_evaluated(tmp_path, "ppo", [50.0, 51.0], trained=10.0)
    last = tmp_path / "ppo-CartPole-v1-s1-1" / "metrics.jsonl"
    last.write_text("".join(line for line in last.open() if '"step": 1000, "kind": "eval"' not in line))
    result = compare_groups(group_runs(find_runs([str(tmp_path)])))
    assert (result.scored_by, result.curve_of) == ("eval_return_mean", "episode_return_mean")
    assert any("fewer than 3 evaluations of ppo-CartPole-v1-s1-1: curves" in note for note in result.notes)


def test_a_verdict_from_few_runs_says_so(tmp_path: Path) -> None:
    write_group(tmp_path, [10.0, 11.0], algo="a2c")
    write_group(tmp_path, [50.0, 51.0, 52.0, 53.0, 54.0], algo="ppo")
    text = compare(str(tmp_path))
    assert "ppo is better (2 runs only)" in " ".join(text.split())
    from rl_training.tools.report import build_report

    assert "ppo is better (2 runs only)" in build_report(group_runs(find_runs([str(tmp_path)])))


def test_environments_are_not_mixed_unless_normalized(tmp_path: Path) -> None:
    for algo, share in (("ppo", 1.0), ("a2c", 0.5)):
        write_group(tmp_path, [500 * share + i for i in range(5)], algo=algo)
        write_group(tmp_path, [-1000 + 900 * share + i for i in range(5)], algo=algo, env_id="Pendulum-v1")
    each = compare(str(tmp_path))
    assert each.index("CartPole-v1: return") < each.index("Pendulum-v1: return")
    assert each.count("ppo is better") == 2
    refused = compare(str(tmp_path), "--reference", "CartPole-v1=0,500", code=2)
    assert "CartPole-v1 and Pendulum-v1" in refused
    assert "--reference Pendulum-v1=LOW,HIGH" in refused.replace("\n", "")
    scale = ["--reference", "CartPole-v1=0,500", "--reference", "Pendulum-v1=-1000,-100"]
    assert "ppo is better" in compare(str(tmp_path), *scale)
    groups = group_runs(find_runs([str(tmp_path)]))
    result = compare_groups(groups, {"CartPole-v1": (0.0, 500.0), "Pendulum-v1": (-1000.0, -100.0)})
    assert [float(group.iqm.value) for group in result.groups] == pytest.approx([1.0, 0.5], abs=0.01)
    write_group(tmp_path, [1.0], algo="trpo")
    assert "trpo has no run on Pendulum-v1" in compare(str(tmp_path), *scale, code=2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--by", "learning_rat"], "did you mean 'learning_rate'?"),
        (["--threshold", "high"], "--threshold is 'high'; it must be a number."),
        (["--reference", "CartPole-v1=5"], "it must be ENV=LOW,HIGH"),
        (["--reference", "CartPole-v1=5,5"], "two different returns"),
        (["--reference", "Cartpole-v1=0,5"], "did you mean 'CartPole-v1'?"),
        (["nowhere"], "nowhere is not a run folder and contains none"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    write_group(tmp_path, NEAR, learning_rate=0.1)
    assert sentence in compare(str(tmp_path), *words, code=2)


def test_doubts_name_same_seeds_and_what_else_differs(tmp_path: Path) -> None:
    write_group(tmp_path, NEAR, learning_rate=0.1, gamma=0.9)
    write_group(tmp_path, NEAR, learning_rate=0.2, gamma=0.99)
    words = compare(str(tmp_path), "--by", "learning_rate")
    assert "the runs also differ in gamma" in words
    same = compare(str(tmp_path), "--by", "algo")
    assert "some runs have the same seed" in same
    assert "also differ in gamma, learning_rate" in same


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    write_group(tmp_path, NEAR)
    inside = next(tmp_path.iterdir())
    assert len(find_runs([str(tmp_path), str(inside), f"{inside}/../{inside.name}"])) == len(NEAR)


def test_odd_files_are_read_as_data(tmp_path: Path) -> None:
    values: list[Any] = ["nan", None, True, HOSTILE, [1.0], 10**400, 7.0]
    run = find_runs([str(write_run(tmp_path, values, manifest=[HOSTILE]))])[0]
    assert run.curve("eval_return_mean")[1].tolist() == [7.0]
    assert run.manifest == {}
    folder = write_run(tmp_path, ["inf"])
    with pytest.raises(UserError, match="train them for longer"):
        compare_groups({"one": find_runs([str(folder)])})
    (folder / "config.yaml").write_text("algo: [1]\nenv_id: x\n")
    with pytest.raises(UserError, match="algo is \\[1\\]; it must be a name"):
        find_runs([str(folder)])
