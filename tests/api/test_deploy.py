"""`rl_training.deploy`: the actions of `predict` from an ONNX file, with numpy and onnxruntime alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import env_zoo
from resume_cases import tiny
from rl_training.api import Dreamer
from rl_training.deploy import Policy
from rl_training.errors import UserError
from rl_training.run.learner import TrainedPolicy, load_policy
from rl_training.run.workflows import train
from rl_training.tools.export import export_policy


def exported(algo: str, folder: Path, env: Any = None, **fields: Any) -> tuple[Path, Path]:
    """Checkpoint and ONNX file of a tiny run."""
    config = tiny(algo, folder, **({"env_id": "custom"} if env else {}), **fields)
    checkpoint = train(config, env=env, console=False).checkpoint_path
    return checkpoint, export_policy(checkpoint, "onnx", folder / "policy.onnx").path


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedPolicy, Path]:
    checkpoint, path = exported("dqn", tmp_path_factory.mktemp("masked"), env_zoo.Masked)
    return load_policy(checkpoint), path


def test_it_acts_as_predict_does_one_by_one_and_in_batches(masked: tuple[TrainedPolicy, Path]) -> None:
    policy, deployed = masked[0], Policy(masked[1])
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(64, 2)).astype(np.float32) * 3
    masks = rng.random((64, 5)) < 0.5
    masks[np.arange(64), rng.integers(5, size=64)] = True
    np.testing.assert_array_equal(deployed.predict(obs), policy.predict(obs))
    np.testing.assert_array_equal(deployed.predict(obs, action_mask=masks), policy.predict(obs, action_mask=masks))
    one = deployed.predict(obs[0].tolist(), action_mask=masks[0].tolist())
    assert type(one) is int
    assert one == policy.predict(obs[0], action_mask=masks[0])
    assert deployed.metadata["inputs"][1] == {"name": "action_mask", "dtype": "bool", "shape": ["batch", 5]}


@pytest.mark.parametrize(
    ("obs", "mask", "sentence"),
    [
        ([1.0, 2.0, 3.0], None, r"obs has the shape \(3,\); the policy needs \(2,\), or a batch of it"),
        ([1.0, float("nan")], None, "obs contains something other than finite numbers"),
        ("left", None, "obs contains something other than finite numbers"),
        (np.zeros((0, 2)), None, "at least 1"),
        ([1.0, 2.0], [1, 0], "action_mask has 2 entries; 1 x 5 are needed"),
    ],
)
def test_wrong_input_is_one_sentence(
    obs: Any, mask: Any, sentence: str, masked: tuple[TrainedPolicy, Path]
) -> None:
    with pytest.raises(UserError, match=sentence):
        Policy(masked[1]).predict(obs, action_mask=mask)


def test_a_wrong_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file; give one that"):
        Policy(tmp_path / "nothing.onnx")
    (tmp_path / "noise.onnx").write_bytes(b"noise")
    with pytest.raises(UserError, match=r"cannot be loaded .* export the checkpoint again"):
        Policy(tmp_path / "noise.onnx")


OBSERVATIONS = (
    "3", "null", '"x"', "[]", "{}", '["obs", "obs"]', '{"a": "state"}', '{"a": ["obs", 1]}', '"action_mask"',
    "[" * 900 + "]" * 900, '"\\ud800"', "1" + "0" * 5000,
)  # fmt: skip


@pytest.mark.parametrize(
    "stored",
    [
        "", "{", "3", "null", "[]", "{}", '"obs"', *(f'{{"observation": {described}}}' for described in OBSERVATIONS),
        f'{{"observation": {"[" * 99999}',
    ],
    ids=range(20),
)  # fmt: skip
def test_damaged_metadata_is_one_sentence(stored: str, masked: tuple[TrainedPolicy, Path], tmp_path: Path) -> None:
    import onnx

    model = onnx.load(masked[1])
    next(prop for prop in model.metadata_props if prop.key == "rl_training").value = stored
    onnx.save(model, tmp_path / "policy.onnx")
    with pytest.raises(UserError, match=r"policy.onnx cannot be loaded \(.+\); export the checkpoint again"):
        Policy(tmp_path / "policy.onnx")


@pytest.mark.parametrize("damage", ["no metadata", "a mask of another rank", "an input of words", "an unnamed size"])
def test_inputs_that_no_export_has_are_one_sentence(
    damage: str, masked: tuple[TrainedPolicy, Path], tmp_path: Path
) -> None:
    import onnx

    model = onnx.load(masked[1])
    obs, mask = (value.type.tensor_type for value in model.graph.input)
    if damage == "no metadata":
        del model.metadata_props[:]
    elif damage == "a mask of another rank":
        mask.shape.dim.add().dim_value = 2
    elif damage == "an input of words":
        obs.elem_type = onnx.TensorProto.STRING
    else:
        obs.shape.dim[1].dim_param = "any"
    onnx.save(model, tmp_path / "policy.onnx")
    with pytest.raises(UserError, match=r"policy.onnx cannot (be loaded|act) \(.+\); export the checkpoint again"):
        Policy(tmp_path / "policy.onnx").predict([0.0, 1.0])


def test_it_imports_neither_torch_nor_gymnasium(masked: tuple[TrainedPolicy, Path]) -> None:
    code = (
        "import sys; from rl_training.deploy import Policy; Policy(sys.argv[1]).predict([0.0, 1.0]); "
        "print([name for name in ('torch', 'gymnasium', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, masked[1]], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_observations_with_parts(tmp_path: Path) -> None:
    checkpoint, path = exported("ppo", tmp_path, env_zoo.DictObservation)
    policy, deployed = load_policy(checkpoint), Policy(path)
    rows = [policy.spaces.observation_space.sample() for _ in range(20)]
    wanted = policy.predict(rows)
    np.testing.assert_array_equal(deployed.predict(rows), wanted)
    assert deployed.predict(rows[0]) == wanted[0]
    batched = {
        "walk": np.stack([row["walk"] for row in rows]), "clock": np.array([row["clock"] for row in rows]),
        "more": {"flags": np.stack([row["more"]["flags"] for row in rows])},
    }  # fmt: skip
    np.testing.assert_array_equal(deployed.predict(batched), wanted)
    with pytest.raises(UserError, match="obs must be a mapping with exactly the keys walk, clock, more"):
        deployed.predict({"walk": [0, 0]})


@pytest.mark.slow
def test_memory_is_carried_through_an_episode_and_forgotten_at_its_end(tmp_path: Path) -> None:
    checkpoint, path = exported("dreamer", tmp_path, env_id="Pendulum-v1")
    actor, deployed = Dreamer.load(checkpoint).actor(), Policy(path)
    obs = np.random.default_rng(1).uniform(-1, 1, (10, 3)).astype(np.float32)
    for _ in range(2):
        actor.reset()
        deployed.reset()
        played = [deployed.act(row) for row in obs]
        np.testing.assert_allclose(played, [actor.act(row) for row in obs], atol=1e-5)
    assert not np.allclose(played[-1], deployed.predict(obs[-1]), atol=1e-6)  # which begins an episode
