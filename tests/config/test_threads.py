"""`threads: auto`: one thread for small networks, else measured once, without a trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from resume_cases import SPECS, assert_same, tiny
from rl_training.config import choices
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train

WIDE = {"hidden_sizes": [256]}
MEASURED = [name for name, spec in SPECS.items() if spec.lane in choices.MEASURED_LANES and name != "rlpd"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Seconds of an update by threads, on a machine with four cores; what was not asked for is taken out."""
    seconds = {1: 0.4, 2: 0.2, 4: 0.3}
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    real = choices._time_update

    def measure(algorithm: Any, phase: str, batch: Any, count: int, budget: float) -> float:
        real(algorithm, phase, batch, count, 0.0)  # what is measured works
        return seconds[count]

    monkeypatch.setattr(choices, "_time_update", measure)
    return seconds


def refuse(*arguments: Any) -> float:
    raise AssertionError("threads are measured")


def test_the_fastest_number_is_kept_said_and_resumed_with(
    taken: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tiny("dqn", tmp_path, kwargs=WIDE), console=True)
    said = "threads auto is 2: an update here takes 400 ms with 1, 200 ms with 2, 300 ms with 4"
    assert said in capsys.readouterr().err
    assert yaml.safe_load((result.run_dir / "config.yaml").read_text())["threads"] == 2
    monkeypatch.setattr(choices, "_time_update", refuse)
    again = resume_training(result.checkpoint_path, total_timesteps=160, console=False)
    assert yaml.safe_load((again.run_dir / "config.yaml").read_text())["threads"] == 2


def test_measuring_stops_when_more_threads_do_not_help(taken: dict[int, float], tmp_path: Path) -> None:
    taken.update({2: 0.5, 4: 0.1})
    session = open_session(tiny("sac", tmp_path, kwargs=WIDE))
    session.close()
    assert session.config.threads == 1
    assert not any("with 4" in note for note in session.notes)


@pytest.mark.parametrize(("seconds", "best"), [({1: 1.0, 2: 0.95}, 1), ({1: 1.0, 2: 0.8}, 2), ({1: 1.0, 2: 2.0}, 1)])
def test_fewer_threads_are_taken_where_they_are_nearly_as_fast(seconds: dict[int, float], best: int) -> None:
    assert choices.fastest(seconds) == best


@pytest.mark.parametrize("algo", ["ppo", "prioritized_dqn", "sac"])
def test_a_run_does_not_see_that_it_was_measured(algo: str, taken: dict[int, float], tmp_path: Path) -> None:
    def look(**fields: Any) -> tuple[dict[str, Any], Any]:
        session = open_session(tiny(algo, tmp_path, kwargs=WIDE, **fields))
        session.close()
        return session.algorithm.state_dict(), session.store.rng.bit_generator.state

    with choices.torch_settings_restored():
        before = torch.get_rng_state(), np.random.get_state()[1]
        measured, told = look(), look(threads=2)
    assert_same(measured, told)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[arg-type]


def test_a_run_leaves_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_all(*_: Any, **__: Any) -> Any:
        torch.set_num_threads(before[0] + 1)
        torch.set_float32_matmul_precision("high")
        raise UserError("enough")

    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    monkeypatch.setattr("rl_training.run.workflows.open_session", set_all)
    with pytest.raises(UserError, match="enough"):
        train(tiny("ppo", tmp_path), console=False)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_too_little_memory_to_measure_in_is_said_in_a_sentence(
    taken: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(choices, "make_up_experience", fail)
    with pytest.raises(UserError, match=r"^num_envs is \d+; the experience to store does not fit here: Unable to "):
        open_session(tiny("ppo", tmp_path, kwargs=WIDE))


@pytest.mark.parametrize("algo", MEASURED)
def test_every_algorithm_of_these_lanes_is_measured(algo: str, taken: dict[int, float], tmp_path: Path) -> None:
    with choices.torch_settings_restored():
        session = open_session(tiny(algo, tmp_path, kwargs=WIDE))
        session.close()
    assert session.config.threads == 2


@pytest.mark.parametrize("algo", ["ppo", "dqn", "rainbow_dqn"])
def test_learning_from_stacked_frames_is_measured(algo: str, taken: dict[int, float], tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    pixels = {"resize_shape": [36, 36], "frame_stack": 2, "grayscale": True}
    with choices.torch_settings_restored():
        session = open_session(tiny(algo, tmp_path, env_kwargs={"wrappers": {"pixels": pixels}}))
        session.close()
    assert session.config.threads == 2


@pytest.mark.parametrize(
    ("algo", "kwargs", "said"), [("dqn", {"hidden_sizes": [128]}, "auto"), ("dqn", WIDE, 3), ("bc", WIDE, "auto")]
)
def test_nothing_is_measured_where_the_answer_is_known(
    algo: str, kwargs: dict[str, Any], said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(choices, "_time_update", refuse)
    with choices.torch_settings_restored():
        session = open_session(tiny(algo, tmp_path, kwargs=kwargs, threads=said))
        session.close()
    assert session.config.threads == {"auto": 1 if algo == "dqn" else 4}.get(said, said)
