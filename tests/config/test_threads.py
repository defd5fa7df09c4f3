"""`threads: auto`: one thread for small networks, else one per core; a run leaves torch's settings as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from resume_cases import tiny
from rl_training.config import choices
from rl_training.errors import UserError
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train

WIDE = {"hidden_sizes": [256]}


@pytest.mark.parametrize(
    ("algo", "kwargs", "said", "cores", "used"),
    [
        ("dqn", {"hidden_sizes": [128]}, "auto", 4, 1), ("dqn", WIDE, "auto", 4, 2), ("bc", WIDE, "auto", 1, 1),
        ("sac", {"hidden_sizes": [1024]}, "auto", 64, choices.MOST_THREADS), ("dqn", WIDE, 3, 4, 3),
    ],
)  # fmt: skip
def test_the_number_follows_from_the_widest_layer_and_the_cores(
    algo: str, kwargs: dict[str, Any], said: Any, cores: int, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    with choices.torch_settings_restored():
        session = open_session(tiny(algo, tmp_path, kwargs=kwargs, threads=said))
        session.close()
    assert session.config.threads == used


def test_images_take_every_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    pixels = {"resize_shape": [36, 36], "frame_stack": 2, "grayscale": True}
    with choices.torch_settings_restored():
        session = open_session(tiny("ppo", tmp_path, env_kwargs={"wrappers": {"pixels": pixels}}))
        session.close()
    assert session.config.threads == 4


def test_a_resume_takes_the_number_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    result = train(tiny("dqn", tmp_path, kwargs=WIDE), console=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    again = resume_training(result.checkpoint_path, total_timesteps=160, console=False)
    assert yaml.safe_load((again.run_dir / "config.yaml").read_text())["threads"] == 2


def test_a_run_leaves_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_all(*_: Any, **__: Any) -> Any:
        torch.set_num_threads(before[0] + 1)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.deterministic = True
        raise UserError("enough")

    def read_all() -> tuple[Any, ...]:
        return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic

    before = read_all()
    monkeypatch.setattr("rl_training.run.workflows.open_session", set_all)
    with pytest.raises(UserError, match="enough"):
        train(tiny("ppo", tmp_path), console=False)
    assert read_all() == before
    assert not before[2]
