"""The example script of Dreamer, on games cut short and with the smallest networks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from registry_contract import EXAMPLES, ReferenceScript
from rl_training.config.train_config import load_config

pytest.importorskip("ale_py")
QUICK = {"size": "xxs", "batch_size": 2, "sequence_length": 8, "train_ratio": 8, "learning_starts": 50}


@pytest.mark.slow
class TestReferenceScript(ReferenceScript):
    script, preset = "dreamer_atari_reference", "dreamer/breakout_atari"

    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(EXAMPLES))

        def load_quick(preset: str) -> Any:
            config = load_config(preset)
            kwargs = {**config.algo_kwargs, **QUICK, "buffer_capacity": 1_000}
            short = {**config.env_kwargs, "max_episode_steps": 200}
            return config.model_copy(update={"algo_kwargs": kwargs, "env_kwargs": short, "num_envs": 2})

        monkeypatch.setattr("_runner.load_config", load_quick)
        return importlib.import_module(self.script).main

    def test_takes_another_environment(self, main: Any, tmp_path: Path) -> None:
        words = ["--env-id", "ALE/Pong-v5", "--total-timesteps", "50", "--eval-episodes", "1"]
        assert main([*words, "--output-dir", str(tmp_path)]).run_dir.name.startswith("dreamer-ALE_Pong")
