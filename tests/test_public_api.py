"""The managed class: learn, evaluate, predict, act, save, load and resume, by its public names alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

import env_zoo
import rl_training
from registry_contract import kind_config
from resume_cases import SPECS, tiny
from rl_training import A2C, IMPALA, PPO, TrainConfig
from rl_training.config.train_config import dump_yaml, load_config
from rl_training.envs.stepper import episode_seed
from rl_training.errors import UserError
from rl_training.run.evaluation import EVALUATION_STREAM
from rl_training.run.workflows import train

OBS = np.array([0.0, 0.1, 0.02, -0.1], dtype=np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A managed PPO after a tiny run."""
    managed = PPO(tiny("ppo", tmp_path_factory.mktemp("runs"), num_envs=2, threads=1))
    managed.result = managed.learn()
    return managed


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_a_config_is_a_train_config_a_mapping_a_preset_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from the checkout's own `configs`
    file = tmp_path / "mine.yaml"
    file.write_text("algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 100\n")
    configs = [
        PPO(TrainConfig(algo="ppo", env_id="CartPole-v1", total_timesteps=100)).config,
        PPO({"env_id": "CartPole-v1", "total_timesteps": 100}).config,  # the class knows its own name
        PPO(str(file)).config,
        PPO(file).config,
    ]
    assert all(config == configs[0] for config in configs)
    assert PPO("ppo/cartpole").config == PPO("configs/ppo/cartpole.yaml").config
    assert PPO("ppo/cartpole").config.env_id == "CartPole-v1"


def test_workflows_train_takes_what_the_classes_take(tmp_path: Path) -> None:
    config = tiny("ppo", tmp_path, total_timesteps=16, eval_episodes=0)
    file = tmp_path / "mine.yaml"
    file.write_text(dump_yaml(config.model_dump(mode="json")))
    runs = [train(given, console=False) for given in (config, config.model_dump(), file, str(file))]
    assert [run.metrics["global_step"] for run in runs] == [16] * 4
    own = {name: value for name, value in config.model_dump().items() if name != "env_id"}
    result = train(own, env=env_zoo.Walk, console=False)
    assert yaml.safe_load((result.run_dir / "config.yaml").read_text())["env_id"] == "Walk"
    with pytest.raises(UserError, match="'ppo/nothing' is neither a file nor a packaged preset"):
        train("ppo/nothing")


def test_an_environment_that_is_named_replaces_that_of_the_config(tmp_path: Path) -> None:
    result = train(tiny("ppo", tmp_path), env="Acrobot-v1", console=False)
    assert yaml.safe_load((result.run_dir / "config.yaml").read_text())["env_id"] == "Acrobot-v1"
    assert "Acrobot" in result.run_dir.name


def test_a_path_may_be_a_pathlib_path(tmp_path: Path) -> None:
    config = TrainConfig(
        algo="dqn", env_id="CartPole-v1", total_timesteps=64, eval_episodes=0, output_dir=tmp_path / "runs",
        algo_kwargs={**tiny("dqn", tmp_path).algo_kwargs, "replay_folder": tmp_path / "replay"},
    )  # type: ignore[arg-type]  # fmt: skip
    assert config.output_dir == str(tmp_path / "runs")
    result = train(config, console=False)
    assert result.run_dir.parent == tmp_path / "runs"
    assert (tmp_path / "replay").is_dir()  # its files go with the run
    stored = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert stored["algo_kwargs"]["replay_folder"] == str(tmp_path / "replay")
    data = {"dataset_kind": "checkpoint", "dataset_path": result.checkpoint_path}
    assert SPECS["rlpd"].params(**data).dataset_path == str(result.checkpoint_path)  # type: ignore[attr-defined]
    mine = load_config({"algo": "ppo", "env_id": "Ant-v5", "total_timesteps": 1, "env_kwargs": {"xml_file": tmp_path}})
    assert mine.env_kwargs == {"xml_file": str(tmp_path)}


def test_a_config_of_another_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match="algo is 'ppo'; IMPALA needs 'impala'"):
        IMPALA("ppo/cartpole")


def test_nothing_works_before_there_is_a_policy(tmp_path: Path) -> None:
    managed = PPO("ppo/cartpole")
    uses = (managed.evaluate, managed.resume, lambda: managed.predict(OBS), managed.actor, lambda: managed.save("x"))
    for use in uses:
        with pytest.raises(UserError, match=r"learn\(\) or load\(\) first"):
            use()


# ---- after learning --------------------------------------------------------------------------------------------------


def test_learn_returns_where_the_run_is_and_how_it_went(trained: Any) -> None:
    result = trained.result
    assert result.run_dir.is_dir()
    assert result.checkpoint_path.is_file()
    wanted = {
        "global_step", "updates", "eval_return_mean", "eval_return_std", "eval_episodes", "train_seconds",
        "stop_reason", "loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction",
    }  # fmt: skip
    assert wanted <= set(result.metrics)
    assert result.metrics["global_step"] >= 128


def test_evaluate_repeats_itself(trained: Any) -> None:
    metrics = trained.evaluate(num_episodes=3)
    assert metrics["eval_episodes"] == 3
    assert metrics["eval_return_mean"] >= 1.0
    assert trained.evaluate(num_episodes=3) == metrics
    assert trained.evaluate()["eval_episodes"] == trained.config.eval_episodes


def test_predict_gives_an_int_for_one_observation_and_a_batch_for_a_batch(trained: Any) -> None:
    action = trained.predict(OBS)
    assert isinstance(action, int)
    assert action == trained.predict(list(OBS)) == trained.predict(OBS, deterministic=True)
    batch = trained.predict(np.stack([OBS, -OBS, OBS]))
    assert batch.shape == (3,)
    assert batch[0] == batch[2] == action
    sampled = {trained.predict(OBS, deterministic=False) for _ in range(50)}
    assert sampled == {0, 1}


def test_predict_loads_networks_once(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = PPO.load(trained.result.checkpoint_path)
    monkeypatch.setattr("builtins.open", None)  # nothing is read from here on
    monkeypatch.setattr(Path, "open", None)
    assert loaded.predict(OBS) == trained.predict(OBS)


def test_an_actor_plays_an_episode(trained: Any) -> None:
    actor, env = trained.actor(), gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    actor.reset()
    for _ in range(500):
        action = actor.act(obs)
        assert action == trained.predict(obs)
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    else:
        pytest.fail("an episode of CartPole-v1 has at most 500 steps")


def test_a_stochastic_actor_goes_on_drawing_from_episode_to_episode(trained: Any) -> None:
    def play(actor: Any) -> list[int]:
        actor.reset()
        return [actor.act(OBS) for _ in range(40)]

    actor = trained.actor(deterministic=False)
    episodes = [play(actor), play(actor)]
    assert episodes[0] != episodes[1]
    again = trained.actor(deterministic=False)
    assert [play(again), play(again)] == episodes


def test_an_actor_with_memory_plays_the_episodes_of_evaluate_and_predict_does_not(tmp_path: Path) -> None:
    config = tiny("dreamer", tmp_path, env_id="env_zoo:BoxActions")
    managed = rl_training.Dreamer(config)
    managed.learn()
    actor, env, total = managed.actor(), env_zoo.BoxActions(), 0.0
    for episode in range(2):
        obs, _ = env.reset(seed=episode_seed(config.seed, EVALUATION_STREAM, episode))
        actor.reset()
        is_first, ended = True, False
        while not ended:
            action = actor.act(obs)
            assert np.array_equal(action, managed.predict(obs)) == is_first
            obs, reward, terminated, truncated, _ = env.step(action)
            total, is_first, ended = total + reward, False, terminated or truncated
    assert managed.evaluate(num_episodes=2)["eval_return_mean"] == pytest.approx(total / 2, rel=1e-5)


def test_save_writes_one_file_that_load_brings_back(trained: Any, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "kept" / "policy.ckpt")
    assert path == tmp_path / "kept" / "policy.ckpt"
    assert [found.name for found in path.parent.iterdir()] == ["policy.ckpt"]
    loaded = PPO.load(path)
    assert loaded.config.env_id == "CartPole-v1"
    batch = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    assert np.array_equal(loaded.predict(batch), trained.predict(batch))
    assert loaded.evaluate(num_episodes=2) == trained.evaluate(num_episodes=2)
    with pytest.raises(UserError, match="not of a2c; use PPO"):
        A2C.load(path)


def test_resume_goes_on_to_a_larger_budget(trained: Any, tmp_path: Path) -> None:
    loaded = PPO.load(trained.save(tmp_path / "policy.ckpt"))
    result = loaded.resume(total_timesteps=256, output_dir=tmp_path / "more")
    assert result.metrics["global_step"] >= 256
    assert result.metrics["updates"] > trained.result.metrics["updates"]
    assert result.run_dir.parent == tmp_path / "more"
    assert loaded.evaluate(num_episodes=1)["eval_episodes"] == 1


# ---- environments of one's own ---------------------------------------------------------------------------------------


def test_a_callable_makes_the_environment(tmp_path: Path) -> None:
    """It is in no registry: training, evaluation and going on all use the callable."""
    config = {
        "total_timesteps": 32, "output_dir": str(tmp_path), "eval_episodes": 2, "device": "cpu",
        "algo_kwargs": {"num_steps": 8, "hidden_sizes": [8]},
    }  # fmt: skip
    managed = A2C(config, env=lambda: env_zoo.Walk(length=3))
    result = managed.learn()
    assert managed.evaluate(num_episodes=2)["eval_episodes"] == 2
    assert managed.predict(np.zeros(2, np.float32)) in (0, 1)
    loaded = A2C.load(managed.save(tmp_path / "walk.ckpt"), env=env_zoo.Walk)
    assert loaded.resume(total_timesteps=64).metrics["updates"] > result.metrics["updates"]


# ---- every algorithm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", [name for name, spec in SPECS.items() if spec.lane == "rollout"])
def test_the_whole_round_works_for_every_rollout_algorithm(algo: str, tmp_path: Path) -> None:
    managed_class = getattr(rl_training, SPECS[algo].class_name)
    action = "continuous" if "continuous" in SPECS[algo].action_kinds else "discrete"
    managed = managed_class(kind_config(algo, tmp_path, action, "vector"))
    managed.learn()
    loaded = managed_class.load(managed.save(tmp_path / "policy.ckpt"))
    obs = np.array([0.3, 1.0], dtype=np.float32)
    assert np.array_equal(loaded.predict(obs), managed.predict(obs))
    assert np.array_equal(loaded.actor().act(obs), managed.predict(obs))
    assert loaded.evaluate(num_episodes=2) == managed.evaluate(num_episodes=2)
    assert loaded.resume(total_timesteps=128).metrics["global_step"] >= 128
