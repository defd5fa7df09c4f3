"""Checkpoints of every released version still load, act as they did, and continue (docs/compatibility.md)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from rl_training.api.algorithms import managed_class
from rl_training.config.spec import get_algorithm_spec
from rl_training.run.workflows import predict_checkpoint, resume_training

RELEASED = Path(__file__).parent / "released"
FILES = sorted(RELEASED.glob("*/*.ckpt"))
CASES = pytest.mark.parametrize("path", FILES, ids=[f"{file.parent.name} {file.stem}" for file in FILES])


def test_every_version_has_stored_several_families() -> None:
    for folder in RELEASED.iterdir():
        names = {path.stem for path in folder.glob("*.ckpt")}
        assert {"ppo", "dqn", "sac", "td3"} <= names
        assert json.loads((folder / "expected.json").read_text()).keys() == names


@CASES
def test_a_policy_acts_as_it_did(path: Path) -> None:
    expected = json.loads((path.parent / "expected.json").read_text())[path.stem]
    actions = np.array(expected["actions"])
    assert len(actions) == len(expected["obs"])
    assert len(np.unique(actions, axis=0)) > 1 or actions.dtype.kind == "i"  # of a policy that looks at its input
    found = predict_checkpoint(path, expected["obs"])
    if actions.dtype.kind == "i":
        np.testing.assert_array_equal(found, actions)
    else:
        np.testing.assert_allclose(found, actions, rtol=1e-4, atol=1e-4)
    managed = managed_class(get_algorithm_spec(path.stem).class_name).load(path)
    np.testing.assert_array_equal(managed.predict(expected["obs"]), found)


@CASES
def test_a_run_continues(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that another version or CPU may not be exact
        result = resume_training(path, total_timesteps=128, output_dir=tmp_path, console=False)
    assert result.metrics["global_step"] >= 128
    assert np.isfinite(result.metrics["eval_return_mean"])
