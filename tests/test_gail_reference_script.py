"""The example script of GAIL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "gail_cartpole_reference", "gail/cartpole"

    def test_takes_another_environment(self, main: Any, tmp_path: Path) -> None:
        """Another one that the expert's steps fit; any other is refused with what does not fit."""
        words = ["--total-timesteps", "50", "--eval-episodes", "1", "--output-dir", str(tmp_path), "--env-id"]
        assert main([*words, "CartPole-v0"]).run_dir.name.startswith("gail-CartPole_v0")
        with pytest.raises(SystemExit):
            main([*words, "env_zoo:Walk"])
