"""`learn` called once, again and after `load`; `evaluate` and `load` with arguments; progress."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import gymnasium as gym
import numpy as np
import pytest

import env_zoo
from resume_cases import FirstReturns, StopAt, assert_same_run, tiny
from rl_training import A2C, DQN, PPO
from rl_training.config.settings import UNSAID
from rl_training.errors import UserError
from rl_training.run import live
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train


class Watch(Callback):
    """Remembers at which step each run began, and the lengths of the episodes in it."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    def on_start(self, run: Run) -> None:
        self.starts.append(run.step)


class Hill(env_zoo.Walk):
    """Another environment of the same spaces."""

    made = 0

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        type(self).made += 1


def make(tmp_path: Path, algo: type = A2C, **fields: Any) -> Any:
    name = algo.algo  # type: ignore[attr-defined]
    return algo(tiny(name, tmp_path, **{"env_id": "env_zoo:Walk", "num_envs": 1, "total_timesteps": 64, **fields}))


def test_learn_again_trains_as_many_steps_more_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    managed, watch = make(tmp_path), Watch()
    first = managed.learn(48, callbacks=[watch])
    assert first.metrics["global_step"] == 48
    assert capsys.readouterr().err == ""
    second = managed.learn(32, callbacks=[watch])
    assert second.metrics["global_step"] == 80
    assert second.run_dir == first.run_dir
    assert capsys.readouterr().err == "A2C continues from step 48 for 32 more steps; learn(reset=True) starts over\n"
    assert managed.learn(callbacks=[watch], progress=False).metrics["global_step"] == 80 + 64  # what the config says
    assert capsys.readouterr().err == ""
    assert watch.starts == [0, 48, 80]
    assert managed.config.total_timesteps == 144


def test_learn_again_is_an_exact_resume(tmp_path: Path) -> None:
    managed = make(tmp_path, DQN)
    managed.learn(40)
    again = managed.learn(24)
    resumed = train(managed._asked.model_copy(update={"total_timesteps": 40}), console=False)
    assert_same_run(resume_training(resumed.checkpoint_path, total_timesteps=64, console=False), again)


def test_learn_after_a_stop_finishes_the_budget(tmp_path: Path) -> None:
    managed = make(tmp_path)
    assert managed.learn(callbacks=[StopAt(24)]).metrics["global_step"] < 64
    assert managed.learn().metrics["global_step"] == 64


def test_reset_starts_over_as_a_new_run(tmp_path: Path) -> None:
    managed = make(tmp_path)
    first = managed.learn(32)
    again = managed.learn(32, reset=True)
    assert again.run_dir != first.run_dir
    assert_same_run(first, again)
    assert managed.learn(reset=True).metrics["global_step"] == 64  # the config's own budget


def test_learn_after_load_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    managed, watch = make(tmp_path), Watch()
    managed.learn(48)
    loaded = A2C.load(managed.save(tmp_path / "kept.ckpt"))
    assert loaded.learn(16, callbacks=[watch]).metrics["global_step"] == 64
    assert watch.starts == [48]
    assert loaded.learn(8, callbacks=[watch]).metrics["global_step"] == 72


def test_a_loaded_file_writes_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    managed = make(tmp_path / "logs")
    first = managed.learn(16)
    path = managed.save(tmp_path / "kept.ckpt")
    told = A2C.load(path, output_dir=tmp_path / "mine")
    assert told.config.output_dir == str(tmp_path / "mine")
    second = told.learn(16)
    assert second.run_dir.parent == tmp_path / "mine"
    assert told.learn(16).run_dir == second.run_dir
    assert told.learn(16, reset=True).run_dir.parent == tmp_path / "mine"
    elsewhere = A2C.load(first.checkpoint_path, output_dir="mine")  # even of a run that could continue in its place
    assert elsewhere.learn(16).run_dir.resolve().parent == tmp_path / "mine"
    beside = A2C.load(first.checkpoint_path)
    assert Path(beside.config.output_dir) == tmp_path / "logs"
    assert beside.learn(16, reset=True).run_dir.parent == tmp_path / "logs"
    assert A2C.load(first.checkpoint_path).learn(16).run_dir == first.run_dir


def test_a_file_does_not_decide_where_a_loaded_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    managed = make(tmp_path / "logs")
    managed.learn(16)
    loaded = A2C.load(managed.save(tmp_path / "kept.ckpt"))
    assert loaded.config.output_dir == "runs"
    run = loaded.learn(16).run_dir
    assert run.parent == Path("runs")
    said = json.loads((run / "manifest.json").read_text())["messages"]
    assert any("names output_dir" in one and "logs" in one and "this run is in runs" in one for one in said), said
    assert loaded.learn(16, reset=True).run_dir.parent == Path("runs")


def test_changed_parameters_are_learned_on_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    managed = make(tmp_path / "logs")
    first = managed.learn(16).run_dir
    managed.set_parameters(managed.get_parameters())
    managed.set_parameters(managed.get_parameters())
    second = managed.learn(16).run_dir
    assert second != first
    assert second.parent == first.parent


def test_callbacks_may_still_be_the_first_argument(tmp_path: Path) -> None:
    watch = Watch()
    assert make(tmp_path).learn([watch]).metrics["global_step"] == 64
    make(tmp_path).learn(callbacks=watch)  # nor need one alone be in a list
    assert watch.starts == [0, 0]


@pytest.mark.parametrize("steps", [0, -1, 1.5, "many", True, float("nan")])
def test_a_wrong_number_of_steps_is_refused(tmp_path: Path, steps: Any) -> None:
    with pytest.raises(UserError, match=r"total_timesteps is .*; it must be a whole number of at least 1"):
        make(tmp_path).learn(steps)


def test_steps_may_be_written_as_a_float_or_come_from_numpy(tmp_path: Path) -> None:
    managed = make(tmp_path)
    assert managed.learn(3.2e1).metrics["global_step"] == 32
    assert managed.learn(np.int64(8)).metrics["global_step"] == 40


# ---- evaluate --------------------------------------------------------------------------------------------------------


def test_evaluate_takes_a_seed_and_samples_on_request(tmp_path: Path) -> None:
    managed = make(tmp_path, PPO, env_id="CartPole-v1")
    managed.learn()
    plain = managed.evaluate(4)
    assert managed.evaluate(4, seed=managed.config.seed) == plain
    assert managed.evaluate(4, seed=11)["eval_returns"] != plain["eval_returns"]
    assert managed.evaluate(4, deterministic=False)["eval_returns"] != plain["eval_returns"]
    with pytest.raises(UserError, match="seed is -1; it must be a whole number of at least 0"):
        managed.evaluate(seed=-1)


# ---- another environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", [A2C, DQN])
@pytest.mark.filterwarnings("ignore:the checkpoint has no replay buffer")
def test_a_policy_goes_on_in_another_environment_of_the_same_spaces(
    tmp_path: Path, algo: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    managed = make(tmp_path, algo, env_kwargs={"length": 5, "max_episode_steps": 50})
    before = managed.learn()
    loaded = algo.load(before.checkpoint_path, env=Hill)  # type: ignore[attr-defined]
    assert loaded.config.env_id == "Hill"
    assert loaded.config.env_kwargs == {"max_episode_steps": 50, **UNSAID["env_kwargs"]}
    assert np.array_equal(loaded.predict(np.zeros(2, np.float32)), managed.predict(np.zeros(2, np.float32)))
    made = Hill.made
    after = loaded.learn(64, progress=True)
    assert Hill.made > made
    said = "the environment is now Hill (was env_zoo:Walk); new episodes and a new replay begin"
    assert said in capsys.readouterr().err
    assert after.metrics["global_step"] == 128
    assert after.run_dir != before.run_dir  # the first run stays as it is
    assert before.checkpoint_path.with_name("latest.ckpt").is_file()
    assert after.metrics["episode_length_mean"] <= 3
    assert loaded.config.env_id == "Hill"
    assert loaded.learn(16).run_dir == after.run_dir  # from here on it is a run like any other


def test_new_episodes_in_another_environment_start_with_no_return(tmp_path: Path) -> None:
    """Only a resume in the same environments continues their discounted returns."""
    managed = make(tmp_path, PPO, env_kwargs={"length": 500, "wrappers": {"normalize_reward": True}})
    path = managed.learn().checkpoint_path
    for env, starts_anew in ((None, False), (Hill, True)):
        watch = FirstReturns()
        PPO.load(path, env=env).learn(16, callbacks=[watch])
        (running,) = watch.running
        assert (running is None) == starts_anew


@pytest.mark.filterwarnings("error")
def test_one_environment_of_many_may_be_followed_by_another_engine(tmp_path: Path) -> None:
    """CartPole's own vector code steps the first; the second has none."""
    managed = make(tmp_path, PPO, env_id="CartPole-v1", num_envs=2)
    path = managed.learn().checkpoint_path
    assert managed.config.vectorization == "native"
    loaded = PPO.load(path, env=lambda: gym.make("CartPole-v1", max_episode_steps=7))
    loaded.learn(32)
    assert (loaded.config.env_id, loaded.config.vectorization) == ("custom", "sync")
    assert loaded.evaluate(2)["eval_lengths"] == [7, 7]


def test_other_spaces_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = make(tmp_path).learn().checkpoint_path
    with pytest.raises(UserError, match=r"the checkpoint was made for observations .*; CartPole-v1 now has"):
        A2C.load(path, env="CartPole-v1")


def test_a_resume_that_moves_stays_where_it_went(tmp_path: Path) -> None:
    managed = make(tmp_path)
    managed.learn()
    moved = managed.resume(changes={"env_id": "env_zoo:ReusesItsArray"}, total_timesteps=96)
    assert managed.config.env_id == "env_zoo:ReusesItsArray"
    assert managed.learn(16).run_dir == moved.run_dir


def test_an_environment_of_the_same_name_is_the_same(tmp_path: Path) -> None:
    managed = make(tmp_path)
    first = managed.learn(48)
    loaded = A2C.load(first.checkpoint_path, env="env_zoo:Walk")
    assert loaded.learn(16).run_dir == first.run_dir


# ---- progress --------------------------------------------------------------------------------------------------------


class NotebookStream(io.StringIO):
    """What stands for the screen in a notebook."""

    __module__ = "ipykernel.iostream"


def test_progress_is_shown_on_request_and_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, progress, shown in (
        (io.StringIO(), None, False), (io.StringIO(), True, True), (NotebookStream(), None, True),
        (NotebookStream(), False, False),
    ):  # fmt: skip
        monkeypatch.setattr("sys.stderr", stream)
        make(tmp_path).learn(progress=progress)
        assert ("steps/s" in stream.getvalue()) is shown


class Handle:
    """What IPython's display returns; it keeps every picture."""

    def __init__(self, shown: Any) -> None:
        self.pages = [shown._repr_html_()]

    def update(self, shown: Any) -> None:
        self.pages.append(shown._repr_html_())


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """A process whose output a notebook shows, and what it displays."""
    handles: list[Handle] = []

    def display(shown: Any, display_id: bool) -> Handle:
        assert display_id
        handles.append(Handle(shown))
        return handles[-1]

    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    page = ModuleType("IPython.display")
    page.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    monkeypatch.setattr(live, "SECONDS", 0.0)
    return handles


def test_a_notebook_gets_a_bar_and_on_request_a_plot(
    tmp_path: Path, notebook: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", NotebookStream())
    managed = make(tmp_path, total_timesteps=256, kwargs={"eval_interval": 64})
    managed.learn()
    (first,) = notebook
    assert '<progress value="0" max="256"' in first.pages[0]
    assert '<progress value="256" max="256"' in first.pages[-1]
    assert f"{managed.algo} on env_zoo:Walk" in first.pages[-1]
    assert " · evaluation " in first.pages[-1]
    assert "<svg" not in first.pages[-1]
    managed.learn(256, progress="plot")
    again = notebook[1].pages[-1]
    assert '<progress value="512" max="512"' in again
    assert again.count("<polyline") == 2
    assert ElementTree.fromstring(again.replace("<br>", "<br/>")).tag == "div"
    managed.learn(64, progress=False)
    assert len(notebook) == 2
    assert "steps/s" not in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_page_that_was_closed_ends_no_run(
    tmp_path: Path, notebook: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", NotebookStream())
    monkeypatch.setattr(Handle, "update", lambda *_: 1 / 0)
    assert make(tmp_path).learn().metrics["global_step"] == 64
    assert len(notebook) == 1


def test_many_points_are_thinned_and_few_draw_nothing() -> None:
    assert live.draw_returns([(1, 2.0)], [(3, 4.0)]) == ""
    drawn = live.draw_returns([(0, 1.0), (10, 1.0)], [])  # a flat line
    assert "nan" not in drawn
    watch = live.Live()
    run: Any = SimpleNamespace(
        step=0, run_dir="r", config=SimpleNamespace(total_timesteps=10_000, algo="x", env_id="<y>"),
        recorder=SimpleNamespace(progress_metrics=lambda: {"episode_return_mean": float(run.step)}),
        cadence=SimpleNamespace(pace=lambda: (1.0, 2.0)),
    )  # fmt: skip
    for run.step in range(1, 1_000):
        watch._show(run)
    assert len(watch.trained) <= live.MOST_POINTS
    assert watch.trained[0][0] == 1
    assert watch.trained[-1][0] > 990
    assert "&lt;y&gt;" in watch._repr_html_()


def test_a_progress_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="progress is 'bar'; it must be True, False, None or 'plot'"):
        make(tmp_path).learn(progress="bar")


def test_a_model_says_in_a_notebook_what_it_is(tmp_path: Path) -> None:
    managed = make(tmp_path)
    assert repr(managed) == "<A2C on env_zoo:Walk: not trained>"
    assert "not trained yet" in managed._repr_html_()
    managed.learn(progress=False)
    assert repr(managed) == "<A2C on env_zoo:Walk: 64 steps>"
    page = managed._repr_html_()
    assert ElementTree.fromstring(f"<div>{page}</div>").tag == "div"
    assert "<tr><th>gamma</th><td>0.99</td></tr>" in page
    assert "latest.ckpt" in page
