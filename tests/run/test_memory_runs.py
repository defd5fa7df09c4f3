"""Whole runs of policies with memory: exact resume, workers, devices, evaluation, prediction, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_training
from resume_cases import SPECS, assert_same_run, stop_and_resume, tiny
from rl_training.deploy import Policy
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.stepper import episode_seed
from rl_training.run.evaluation import EVALUATION_STREAM
from rl_training.run.workflows import TrainResult, train
from rl_training.tools.export import export_policy
from worker_cases import assert_same_end, workers

LSTM = {"memory": "lstm", "memory_size": 6}
GRU = {"memory": "gru", "memory_size": 5, "memory_layers": 2}
RUNS = {
    "ppo": {"algo": "ppo", "kwargs": {**LSTM, "sequence_length": 4, "refresh_memory": True}},
    "a2c": {"algo": "a2c", "kwargs": GRU},
    "impala": {"algo": "impala", "kwargs": LSTM},
    "appo": {"algo": "appo", "kwargs": GRU},
    "lag": {"algo": "appo", "kwargs": {**LSTM, "policy_lag": 2}},
    "continuous": {"algo": "ppo", "kwargs": GRU, "env_id": "Pendulum-v1"},
    "images": {"algo": "ppo", "kwargs": LSTM, "env_id": "env_zoo:Image"},
    "mixed": {"algo": "a2c", "kwargs": LSTM, "env_id": "env_zoo:DictObservation"},
    "masks": {"algo": "impala", "kwargs": LSTM, "env_id": "env_zoo:Masked"},
    "device": {"algo": "ppo", "kwargs": LSTM, "vectorization": "device"},
    "device_lag": {"algo": "impala", "kwargs": {**GRU, "policy_lag": 1}, "vectorization": "device"},
}


def config(run: str, output: Path, **fields: Any) -> Any:
    said = {"num_envs": 2, **RUNS[run], **fields}
    return tiny(said.pop("algo"), output, **said)


def trained(run: str, output: Path) -> TrainResult:
    return train(config(run, output), console=False)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_with_memory_resumes_exactly(tmp_path: Path, run: str) -> None:
    """The stop is in the middle of episodes, so the memory must be in the checkpoint."""
    said = config(run, tmp_path)
    assert_same_run(train(said, console=False), stop_and_resume(said, 50))


@pytest.mark.slow
def test_a_run_whose_workers_remember_resumes_exactly(tmp_path: Path) -> None:
    whole, parts = (workers("impala", tmp_path / name, kwargs=LSTM) for name in ("whole", "parts"))
    assert_same_end(train(whole, console=False), stop_and_resume(parts, 60))


@pytest.mark.parametrize("run", ["ppo", "continuous", "images", "masks"])
def test_an_actor_with_memory_plays_the_episodes_of_evaluate_and_predict_does_not(tmp_path: Path, run: str) -> None:
    said = config(run, tmp_path)
    managed: Any = getattr(rl_training, SPECS[said.algo].class_name)(said)
    managed.learn(progress=False)
    actor, total, same = managed.actor(), 0.0, []
    env = make_env(read_recipe(said.env_id, said.env_kwargs, (said.env_id,)), evaluation=True)
    for episode in range(2):
        obs, info = env.reset(seed=episode_seed(said.seed, EVALUATION_STREAM, episode))
        actor.reset()
        is_first, ended = True, False
        while not ended:
            mask = info.get("action_mask")
            action = actor.act(obs, action_mask=mask)
            same.append(np.array_equal(action, managed.predict(obs, action_mask=mask)))
            assert same[-1] or not is_first
            obs, reward, terminated, truncated, info = env.step(action)
            total, is_first, ended = total + float(reward), False, terminated or truncated
    assert run != "continuous" or not all(same)
    assert managed.evaluate(num_episodes=2)["eval_return_mean"] == pytest.approx(total / 2, rel=1e-5)


@pytest.mark.parametrize("file_format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", ["ppo", "continuous", "images", "masks"])
def test_an_exported_policy_has_its_state_as_input_and_output(tmp_path: Path, run: str, file_format: str) -> None:
    exported = export_policy(trained(run, tmp_path).checkpoint_path, file_format)
    parity = exported.facts["parity"]
    assert parity["different"] == 0
    assert parity["max_abs_state_difference"] < 1e-5
    assert [one["name"] for one in exported.facts["outputs"]] == ["action", "next_state"]


@pytest.mark.slow
def test_without_torch_a_policy_remembers_too(tmp_path: Path) -> None:
    checkpoint = trained("continuous", tmp_path).checkpoint_path
    deployed, actor = Policy(export_policy(checkpoint).path), rl_training.PPO.load(checkpoint).actor()
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    for _ in range(2):
        deployed.reset()
        actor.reset()
        np.testing.assert_allclose([deployed.act(row) for row in rows], [actor.act(row) for row in rows], atol=1e-5)
