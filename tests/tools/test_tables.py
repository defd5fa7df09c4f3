"""Comparisons as files for papers, published curves next to runs, and runs as a data frame."""

from __future__ import annotations

import csv
import json
import re
import sys
import warnings
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

import rl_training
from rl_training.cli.main import app
from rl_training.errors import UserError
from rl_training.tools.compare import by_task, compare_groups, group_runs, read_groups
from rl_training.tools.records import find_runs
from run_records import write_group, write_run

HEAD = "algo,env,seed,step,return\n"


def compare(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Five runs of two algorithms on each of two environments."""
    for algo, share in (("a2c", 0.5), ("ppo", 1.0)):
        write_group(tmp_path / "runs", [500 * share + i for i in range(5)], algo=algo)
        write_group(tmp_path / "runs", [-20_000 * share + i for i in range(5)], algo=algo, env_id="Ant-v5")
    return tmp_path / "runs"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Published curves: two algorithms on the older version of one environment, and on one that nobody ran."""
    lines = [
        f"{algo},{env},{seed},{step},{final * step / 3000}\n"
        for env in ("Ant-v4", "Hopper-v4")
        for algo, final in (("sac", 90.0), ("ppo", 40.0))
        for seed in range(5)
        for step in (1000, 2000, 3000)
    ]
    path = tmp_path / "paper.csv"
    path.write_text(HEAD + "".join(lines))
    return path


def test_csv_and_json_hold_every_number(runs: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(compare(runs, "--format", "csv", "--threshold", "400").splitlines()))
    assert [(row["environment"], row["group"]) for row in rows] == [
        ("Ant-v5", "a2c"), ("Ant-v5", "ppo"), ("CartPole-v1", "ppo"), ("CartPole-v1", "a2c"),
    ]  # fmt: skip
    result = compare_groups(by_task(group_runs(find_runs([str(runs)])))[1], threshold=400)
    best = result.groups[0]
    assert [float(rows[2][name]) for name in ("iqm", "iqm_low", "iqm_high", "mean", "mean_over_steps")] == [
        float(x) for x in (*best.iqm, best.final, best.area or 0)
    ]
    assert (rows[2]["runs_at_threshold"], rows[2]["median_steps_to_threshold"]) == ("5", "3000.0")
    assert (rows[3]["runs_at_threshold"], rows[3]["median_steps_to_threshold"]) == ("0", "")

    said = compare(runs, "--output", tmp_path / "t.json")
    assert said.startswith("json: ")
    second, first = json.loads((tmp_path / "t.json").read_text())
    assert first["pairs"][0] | {"verdict": "ppo is better", "second": "a2c"} == first["pairs"][0]
    assert len(first["steps"]) == len(first["groups"][0]["curve"]["iqm"])
    assert second["environments"] == ["Ant-v5"]


def test_one_run_is_null_in_json_and_has_no_interval(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0, 2.0])
    (only,) = json.loads(compare(tmp_path, "--format", "json"))
    assert (only["groups"][0]["iqm"], only["groups"][0]["iqm_low"]) == (2.0, None)
    assert "nan" not in compare(tmp_path, "--format", "csv")


def test_latex_and_markdown_have_a_column_per_environment(runs: Path, tmp_path: Path) -> None:
    compare(runs, "--output", tmp_path / "t.tex")
    tex = (tmp_path / "t.tex").read_text()
    body = [line for line in tex.splitlines() if not line.startswith("%")]
    assert body[0] == r"\begin{tabular}{lrrr}"
    assert body[2] == r" & runs & Ant-v5 & CartPole-v1 \\"
    assert re.fullmatch(r"ppo & 5 & \$-\$19,998 \[\$-\$.*\] & 502 \[50\d.*\] \\\\", body[5])
    assert all(len(re.findall(r"(?<!\\)&", line)) == 3 for line in (body[2], *body[4:6]))
    write_run(runs, [1.0, 2.0], algo="n_step_dqn")
    tex, text = compare(runs, "--format", "latex"), compare(runs, "--format", "markdown")
    assert r"n\_step\_dqn & 1 & -- & 2 \\" in tex
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "|  | runs | Ant-v5 | CartPole-v1 |"
    assert rule.count("|") == 5
    assert r"| n\_step\_dqn | 1 | – | 2 |" in rows
    assert "- CartPole-v1: fewer than 5 runs of n_step_dqn" in text


def test_a_format_is_chosen_by_name_or_by_the_files_end(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "error: --format is 'tex'; did you mean 'latex'?" in compare(runs, "--format", "tex", code=2)
    for words, sentence in (
        (["t.md", "--format", "csv"], "--format is csv, but --output t.md is the name of a markdown file"),
        (["t.csv", "--format", "latex"], "--format is latex, but --output t.csv is the name of a csv file; leave one"),
        (["t.txt", "--format", "json"], "--format is json, but --output t.txt is the name of a table file"),
        (["t.foo"], "--output is 't.foo'; it must end in .csv, .json, .tex, .md or .txt"),
        (["t.tex.gz"], "it must end in .csv"),
    ):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            assert sentence in compare(runs, "--output", *words, code=2)
            assert not Path(words[0]).exists()
    compare(runs, "--output", tmp_path / "t.data", "--format", "csv")
    assert (tmp_path / "t.data").read_text().startswith("environment,group,")
    compare(runs, "--output", tmp_path / "t.txt")
    assert (tmp_path / "t.txt").read_text() == compare(runs)


def test_published_curves_stand_next_to_runs_on_the_same_task(runs: Path, table: Path) -> None:
    (one,) = [t for t in by_task(read_groups([str(runs), str(table)])) if "sac (paper)" in t]
    result = compare_groups(one)
    assert result.envs == ["Ant-v5"]  # and Hopper, which nobody ran here, is left out
    assert [group.name for group in result.groups] == ["sac (paper)", "ppo (paper)", "a2c", "ppo"]
    assert float(result.groups[0].iqm.value) == 90.0
    pairs = {(pair.name, pair.other) for pair in result.pairs}
    assert ("sac (paper)", "ppo (paper)") not in pairs  # of others with each other
    assert len(pairs) == 5
    assert "measured on Ant-v4, not Ant-v5: ppo (paper), sac (paper)." in result.notes
    assert "sac (paper)" not in compare(runs, f"{table}:ppo")
    shown = compare(table)  # a table by itself
    assert "Hopper-v4" in shown
    assert "sac (paper) is better" in shown


def test_a_table_without_the_environment_of_the_runs_is_named(runs: Path, table: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"no table has a curve on CartPole-v1\.$"):
        read_groups([str(runs), str(table)])
    write_group(tmp_path / "one", [1.0, 2.0], env_id="Acrobot-v1")
    with pytest.warns(UserWarning, match=r"paper\.csv has no curve on Acrobot-v1; it has Ant-v4, Hopper-v4\.$"):
        read_groups([str(tmp_path / "one"), str(table)])
    write_group(tmp_path / "two", [1.0, 2.0], env_id="Hopper-v5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_groups([str(tmp_path / "two"), str(table)])
        read_groups([str(table)])


def test_a_table_of_few_points_leaves_the_curves_as_they_are(tmp_path: Path) -> None:
    write_group(tmp_path / "runs", [50.0, 51.0])
    (tmp_path / "paper.csv").write_text(f"{HEAD}sac,CartPole-v1,0,1000,20\nsac,CartPole-v1,0,3000,40\n")
    result = compare_groups(read_groups([str(tmp_path / "runs"), str(tmp_path / "paper.csv")]))
    assert result.curve_of == "eval_return_mean"
    assert not any("training episodes" in note for note in result.notes)


def test_a_plot_may_have_published_curves_and_a_report_not(runs: Path, table: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plot", str(runs), str(table), "--output", str(tmp_path / "c.svg")])
    assert "note: measured on Ant-v4" in done.output
    assert "sac (paper) goes from 30 to 90" in (tmp_path / "c.svg").read_text()
    done = CliRunner().invoke(app, ["report", str(table)])
    assert (done.exit_code, "is a table; give it to compare or plot" in done.output.replace("\n", " ")) == (2, True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("algo,env,seed,steps,return\nsac,A-v1,0,1,2\n", "has no column 'step'; a table of curves has algo, env"),
        (f"{HEAD}sac,A-v1,0,1,many\n", "line 2: step is '1' and return is 'many'; they must be numbers"),
        (f"{HEAD}sac,A-v1,0,1,inf\n", "they must be numbers"),
        (f"{HEAD}sac,A-v1,0\n", "they must be numbers"),
        ("", "has no column 'algo'"),
    ],
)
def test_a_table_that_is_none_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_runs([str(tmp_path / "t.csv")])


def test_a_missing_table_or_algorithm_is_named(tmp_path: Path, table: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.csv cannot be read as a table of curves"):
        find_runs(["nowhere.csv"])
    with pytest.raises(UserError, match="has no algorithm 'sacc'; did you mean 'sac'"):
        find_runs([f"{table}:ppo,sacc"])


def test_load_runs_is_a_frame_with_what_differs(tmp_path: Path, table: Path) -> None:
    write_run(tmp_path / "runs", [1.0, 2.0], seed=3, gamma=0.9, hidden_sizes=[8])
    write_run(tmp_path / "runs", [5.0], seed=4, gamma=0.8, hidden_sizes=[8], kind="train")
    frame = rl_training.load_runs([tmp_path / "runs", f"{table}:sac"])
    assert list(frame.columns[:7]) == ["run", "algo", "env", "seed", "step", "kind", "return"]
    ours = frame[frame.algo == "ppo"]
    assert ours[["seed", "step", "return", "config.gamma"]].values.tolist() == [
        [3, 1000, 1.0, 0.9], [3, 2000, 2.0, 0.9], [4, 1000, 5.0, 0.8],
    ]  # fmt: skip
    published = frame[frame.algo == "sac (paper)"]
    assert set(published.env) == {"Ant-v4", "Hopper-v4"}  # as they are, whatever was run here
    assert published.kind.isna().all()
    parts = rl_training.load_runs(tmp_path / "runs", f"{table}:sac")
    pandas.testing.assert_frame_equal(frame, parts)
    with pytest.raises(UserError, match="load_runs got a list; it takes paths of folders and tables"):
        rl_training.load_runs("runs", ["more"])  # type: ignore[arg-type]
    last = rl_training.load_runs(str(table)).groupby(["algo", "env"])["return"].last()
    assert last["sac (paper)", "Hopper-v4"] == 90.0
    assert isinstance(last, pandas.Series)


def test_without_pandas_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    wanted = "load_runs needs pandas; run pip install 'rl-training[pandas]', in a checkout '.[pandas]'."
    with pytest.raises(UserError, match=re.escape(wanted)):
        rl_training.load_runs("runs")
