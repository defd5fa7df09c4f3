"""Tests that hold for every algorithm in the registry; a test file selects one by a subclass with its name.

    class TestTrainer(TrainerSmoke):
        algo = "impala"
"""

from __future__ import annotations

import importlib
import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from gymnasium import spaces as gs

import env_zoo
from resume_cases import SPECS, StopAt, tiny
from rl_training.config.train_config import TrainConfig
from rl_training.errors import UserError
from rl_training.record.metrics_file import read_metrics
from rl_training.run.workflows import evaluate_checkpoint, predict_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ACTIONS: dict[str, gs.Space[Any]] = {
    "discrete": gs.Discrete(3),
    "continuous": gs.Box(np.array([-0.5, 2.0], np.float32), np.array([0.5, 4.0], np.float32)),
    "multi_discrete": gs.MultiDiscrete([2, 3]),
    "multi_binary": gs.MultiBinary(3),
}
OBSERVATIONS: dict[str, gs.Space[Any]] = {
    "vector": gs.Box(-100.0, 100.0, (2,), np.float32),
    "image": gs.Box(0, 255, (6, 5, 3), np.uint8),
    "mixed": gs.Dict(
        speed=gs.Box(-100.0, 100.0, (2,), np.float32), camera=gs.Box(0, 255, (6, 5, 3), np.uint8), gear=gs.Discrete(3)
    ),
}


KINDS = [(action, kind) for kind in ("vector", "image") for action in ACTIONS]
KINDS += [("discrete", "mixed"), ("continuous", "mixed")]  # which is read as an image is, whatever the actions are


class AnyKind(env_zoo.Walk):
    """A walk with any kind of action, seen as a vector, an image or both; it refuses an action outside its space."""

    def __init__(self, action: str, observation: str, length: int = 5) -> None:
        super().__init__(length)
        self.action_space, self.observation_space = ACTIONS[action], OBSERVATIONS[observation]

    def observe(self) -> Any:
        image = np.full((6, 5, 3), self.t, dtype=np.uint8)
        if self.observation_space.dtype == np.uint8:
            return image
        vector = super().observe()
        if isinstance(self.observation_space, gs.Dict):
            return {"speed": vector, "camera": image, "gear": np.int64(self.t % 3)}
        return vector


def train_function(algo: str) -> Any:
    """`train_<name>` of an algorithm; the variants of DQN share one."""
    for name in (algo, "dqn"):
        try:
            module = importlib.import_module(f"rl_training.runtime.{name}_trainer")
        except ModuleNotFoundError:
            continue
        return getattr(module, f"train_{name}")
    raise AssertionError(f"no module of rl_training.runtime trains {algo}")


def kind_config(algo: str, folder: Path, action: str, observation: str, **fields: Any) -> TrainConfig:
    """A tiny run of an algorithm on an environment of these kinds."""
    kinds = {"action": action, "observation": observation}
    plain: dict[str, Any] = {"env_id": f"{__name__}:AnyKind", "env_kwargs": kinds, "threads": 1, "total_timesteps": 64}
    return tiny(algo, folder, **{**plain, "num_envs": 2, **fields})


def first_kind(algo: str) -> str:
    """A kind of action that the algorithm supports."""
    return SPECS[algo].action_kinds[0]


def sample_batch(observation: str) -> Any:
    """Four observations, as `predict` takes a batch of them."""
    rows = [OBSERVATIONS[observation].sample() for _ in range(4)]
    return rows if observation == "mixed" else np.stack(rows)


def check_actions(predict: Any, action: str, observation: str) -> None:
    """One observation gives one action of the environment (an int where it is discrete), a batch gives a batch."""
    space, batch = ACTIONS[action], sample_batch(observation)
    one, many = predict(batch[0]), predict(batch)
    assert isinstance(one, int if action == "discrete" else np.ndarray)
    assert space.contains(np.asarray(one, dtype=space.dtype))
    assert isinstance(many, np.ndarray)
    assert many.shape == (4, *(space.shape or ()))
    assert all(space.contains(row) for row in many.astype(space.dtype))
    np.testing.assert_allclose(one, many[0], rtol=1e-4, atol=1e-5)  # one row and four may round differently


class TrainerSmoke:
    """`train_<name>` on a tiny budget, for every kind of action and observation."""

    algo: ClassVar[str]

    @pytest.mark.parametrize(("action", "observation"), KINDS)
    def test_trains_on_what_it_supports_and_refuses_the_rest(
        self, action: str, observation: str, tmp_path: Path
    ) -> None:
        spec, config = SPECS[self.algo], kind_config(self.algo, tmp_path, action, observation)
        if action not in spec.action_kinds or observation not in spec.observation_kinds:
            with pytest.raises(UserError, match=f"{self.algo} does not support the"):
                train_function(self.algo)(config)
            assert list(tmp_path.iterdir()) == []
            return
        result = train_function(self.algo)(config)
        assert result.metrics["global_step"] >= 64
        assert result.metrics["updates"] >= 1
        check_actions(result.policy.predict, action, observation)
        check_actions(lambda obs: predict_checkpoint(result.checkpoint_path, obs), action, observation)
        batch = sample_batch(observation)
        pickled = pickle.loads(pickle.dumps(result.policy))
        np.testing.assert_array_equal(pickled.predict(batch), result.policy.predict(batch))

    def test_result_has_the_metrics_and_files_of_a_run(self, tmp_path: Path) -> None:
        config = kind_config(self.algo, tmp_path, first_kind(self.algo), "vector", eval_episodes=3)
        result = train_function(self.algo)(config, run_suffix="mine")
        assert result.metrics["stop_reason"] == "total_timesteps"
        assert result.metrics["eval_episodes"] == 3
        numbers = ("global_step", "updates", "eval_return_mean", "eval_return_std", "train_seconds")
        assert all(np.isfinite(result.metrics[name]) for name in numbers)
        assert any(name.endswith("loss") for name in result.metrics)
        assert result.run_dir.parent == tmp_path
        assert result.run_dir.name.endswith("-mine")
        assert result.checkpoint_path.is_relative_to(result.run_dir / "checkpoints")
        assert json.loads((result.run_dir / "manifest.json").read_text())["seed"] == config.seed
        assert yaml.safe_load((result.run_dir / "config.yaml").read_text())["algo"] == self.algo
        assert read_metrics(result.run_dir / "metrics.jsonl")
        again = evaluate_checkpoint(result.checkpoint_path, num_episodes=2)
        assert again["eval_episodes"] == 2

    def test_callbacks_stop_it(self, tmp_path: Path) -> None:
        config = kind_config(self.algo, tmp_path, first_kind(self.algo), "vector", total_timesteps=10_000)
        result = train_function(self.algo)(config, callbacks=[StopAt(32)])
        assert result.metrics["stop_reason"] == "callback"
        assert result.metrics["global_step"] < 100

    def test_config_of_another_algorithm_is_refused(self, tmp_path: Path) -> None:
        config = kind_config(self.algo, tmp_path, first_kind(self.algo), "vector")
        with pytest.raises(UserError, match="algo is 'nobody'"):
            train_function(self.algo)(config.model_copy(update={"algo": "nobody"}))


class ReferenceScript:
    """An example script, in process, on a tiny budget."""

    script: ClassVar[str]
    preset: ClassVar[str]

    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(self.script).main

    def test_trains_the_preset_and_says_what_came_out(
        self, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--total-timesteps", "1e2", "--eval-episodes", "2", "--output-dir", str(tmp_path), "--seed", "7"]
        result = main(words)
        out = capsys.readouterr().out
        assert "over 2 evaluation episodes" in out
        assert str(result.checkpoint_path) in out
        assert result.run_dir.parent == tmp_path
        assert result.metrics["global_step"] >= 100
        config = yaml.safe_load((result.run_dir / "config.yaml").read_text())
        assert (config["algo"], config["seed"], config["total_timesteps"]) == (self.preset.split("/")[0], 7, 100)

    def test_takes_another_environment(self, main: Any, tmp_path: Path) -> None:
        discrete = "discrete" in SPECS[self.preset.split("/")[0]].action_kinds
        env_id = "env_zoo:Walk" if discrete else "env_zoo:BoxActions"
        words = ["--env-id", env_id, "--total-timesteps", "50", "--eval-episodes", "1", "--output-dir", str(tmp_path)]
        assert main(words).run_dir.name.startswith(self.preset.split("/")[0] + "-env_zoo")

    @pytest.mark.parametrize("words", [["--total-timesteps", "many"], ["--env-id", "NoSuch-v0"], ["--sede", "1"]])
    def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
        self, words: list[str], main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main([*words, "--output-dir", str(tmp_path)])
        assert exit_info.value.code == 2
        assert words[1] in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_is_ten_lines_over_the_shared_runner(self) -> None:
        text = (EXAMPLES / f"{self.script}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 10
        assert f'"{self.preset}"' in text
