"""`DefaultExperimentManager`: a config in, something to train or resume out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from resume_cases import ONE_PER_LEARNER, StopAt, assert_same_run, tiny
from rl_training.config.train_config import dump_yaml
from rl_training.errors import UserError
from rl_training.experiment.default_manager import DefaultExperimentManager


@pytest.mark.parametrize("algo", ONE_PER_LEARNER)
def test_setup_then_train(tmp_path: Path, algo: str) -> None:
    result = DefaultExperimentManager().setup(tiny(algo, tmp_path)).train(run_suffix="mine")
    assert result.metrics["global_step"] == 128
    assert result.run_dir.name.endswith("mine")
    assert result.checkpoint_path.is_file()
    assert {"updates", "eval_return_mean", "eval_return_std", "eval_episodes", "train_seconds"} <= set(result.metrics)


def test_setup_then_resume_goes_on_exactly(tmp_path: Path) -> None:
    experiment = DefaultExperimentManager().setup(tiny("ppo", tmp_path))
    halfway = experiment.train(callbacks=[StopAt(64)])
    assert_same_run(experiment.train(), experiment.resume(halfway.checkpoint_path))


def test_a_resume_takes_a_budget(tmp_path: Path) -> None:
    experiment = DefaultExperimentManager().setup(tiny("ppo", tmp_path))
    result = experiment.resume(experiment.train().checkpoint_path, total_timesteps=160)
    assert result.metrics["global_step"] == 160


def test_a_config_may_be_a_mapping_a_file_or_a_preset(tmp_path: Path) -> None:
    config = tiny("a2c", tmp_path)
    plain = config.model_dump(mode="json")
    (tmp_path / "a2c.yaml").write_text(dump_yaml(plain))
    for given in (config, plain, tmp_path / "a2c.yaml", str(tmp_path / "a2c.yaml")):
        assert DefaultExperimentManager().setup(given).config == config
    assert DefaultExperimentManager().setup("ppo/cartpole").config.env_id == "CartPole-v1"


def test_an_environment_of_ones_own_is_passed_on(tmp_path: Path) -> None:
    made: list[gym.Env[Any, Any]] = []

    def short_cartpole() -> gym.Env[Any, Any]:
        made.append(gym.make("CartPole-v1", max_episode_steps=7))
        return made[-1]

    experiment = DefaultExperimentManager().setup(tiny("ppo", tmp_path, env_id="mine"), env=short_cartpole)
    halfway = experiment.train(callbacks=[StopAt(64)])
    assert made
    assert experiment.resume(halfway.checkpoint_path).metrics["episode_length_mean"] <= 7


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"algo": "pppo"}, "algo 'pppo' is not a registered algorithm; did you mean 'ppo'?"),
        ({"algo_kwargs": {"gama": 0.9}}, "algo_kwargs: unknown key 'gama'; did you mean 'gamma'?"),
        ({"algo_kwargs": {"gamma": 2}}, "algo_kwargs: gamma is 2; it should be less than or equal to 1."),
        ({"num_env": 2}, "config: unknown key 'num_env'; did you mean 'num_envs'?"),
        ({"algo_kwargs": {"early_stopping": {"treshold": 1}}},
         "algo_kwargs: unknown key 'early_stopping.treshold'; did you mean 'threshold'?"),
        (
            {"algo_kwargs": {"hidden_sizes": 64}},
            "algo_kwargs: hidden_sizes is 64; it should be a list (such as [64, 64]; critics that differ have "
            "critic_hidden_sizes).",
        ),
        ({"threads": "few"}, "config: threads is 'few'; it should be 'auto', or be a whole number."),
    ],
)  # fmt: skip
def test_setup_refuses_a_wrong_config_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        DefaultExperimentManager().setup(tiny("ppo", tmp_path).model_dump(mode="json") | change)
    assert str(error.value) == sentence
    assert list(tmp_path.iterdir()) == []
