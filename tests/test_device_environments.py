"""Environments on the device: Gymnasium's step by step, the engine, and whole runs with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.utils.env_checker import check_env
from torch import Tensor

from resume_cases import SPECS, assert_same_run, stop_and_resume, tiny
from rl_training.envs.device import DeviceEngine, DeviceEnvironment, OneEnvironment, advance, map_actions
from rl_training.envs.engines import choose_vectorization, make_engine
from rl_training.envs.factory import EnvRecipe, make_env, probe_spaces, read_recipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.experiment.config import load_config
from rl_training.runtime.workflows import train

CLASSIC: dict[str, dict[str, Any]] = {
    "CartPole-v1": {}, "Acrobot-v1": {}, "MountainCar-v0": {}, "MountainCarContinuous-v0": {}, "Pendulum-v1": {},
}  # fmt: skip
OTHERWISE: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"sutton_barto_reward": True}, "Pendulum-v1": {"g": 3.0}, "MountainCar-v0": {"goal_velocity": 0.01},
}  # fmt: skip
CASES = [*CLASSIC.items(), *OTHERWISE.items()]


def open_engine(env: Any, num_envs: int, seed: int = 7, **env_kwargs: Any) -> DeviceEngine:
    recipe = read_recipe(env, env_kwargs) if isinstance(env, str) else read_recipe("mine", env_kwargs, env)
    engine = make_engine(recipe, probe_spaces(recipe), num_envs, seed, "device")
    assert isinstance(engine, DeviceEngine)
    return engine


def state_of(env: gym.Env[Any, Any]) -> Any:
    return np.asarray(env.unwrapped.state, dtype=np.float64)  # type: ignore[attr-defined]


def start_anywhere(env: gym.Env[Any, Any], rng: np.random.Generator) -> None:
    """Reset, and often go on from a state that random actions from a reset would take long to come to."""
    env.reset(seed=int(rng.integers(2**31)))
    plain: Any = env.unwrapped
    if rng.random() < 0.7:
        reach = {"CartPoleEnv": [2.4, 3.0, 0.21, 3.0], "AcrobotEnv": [3.1, 3.1, 12.5, 28.0], "PendulumEnv": [9.0, 8.0]}
        name = type(plain).__name__
        if name in reach:
            plain.state = rng.uniform(-1, 1, len(reach[name])) * reach[name]
        else:
            plain.state = np.array([rng.uniform(-1.2, 0.6), rng.uniform(-0.07, 0.07)])


def compare_with_gymnasium(env_id: str, kwargs: dict[str, Any], trajectories: int, limit: int) -> None:
    """Both sides take the same action from the same state at every step, until every trajectory has ended."""
    rng = np.random.default_rng(0)
    envs = [gym.make(env_id, limit, disable_env_checker=True, **kwargs) for _ in range(trajectories)]
    engine = open_engine(env_id, trajectories, max_episode_steps=limit, **kwargs)
    engine.reset()
    for env in envs:
        start_anywhere(env, rng)
    under_way, ends = np.ones(trajectories, dtype=bool), [0, 0]
    for _ in range(limit):
        rows = np.flatnonzero(under_way)
        states = np.stack([state_of(env) for env in envs])
        engine.state = torch.from_numpy(states.astype(np.float32))
        actions = np.stack([np.asarray(env.action_space.sample()) for env in envs])
        step = engine.step(actions)
        given = actions.tolist() if engine.spaces.action_kind == "discrete" else actions
        wanted = [envs[row].step(given[row]) for row in rows]
        obs, rewards, terminated, truncated, _ = (np.array(part) for part in zip(*wanted, strict=True))
        assert (terminated == step.terminated[rows]).all()
        assert (truncated == step.truncated[rows]).all()
        np.testing.assert_allclose(step.rewards[rows], rewards, rtol=1e-4, atol=1e-4)
        done = terminated | truncated
        np.testing.assert_allclose(step.obs[rows[~done]], obs[~done], rtol=1e-4, atol=2e-4)
        if done.any():
            assert step.final_obs is not None
            np.testing.assert_allclose(step.final_obs[rows[done]], obs[done], rtol=1e-4, atol=2e-4)
        ends = [ends[0] + int(terminated.sum()), ends[1] + int(truncated.sum())]
        under_way[rows[done]] = False
    assert not under_way.any()
    assert ends[1] > 0
    assert ends[0] > 0 or env_id == "Pendulum-v1"


@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_every_step_is_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    compare_with_gymnasium(env_id, kwargs, trajectories=200, limit=25)


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_every_step_of_a_thousand_whole_trajectories_is_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    limit = gym.spec(env_id).max_episode_steps
    assert limit is not None
    compare_with_gymnasium(env_id, kwargs, trajectories=1000, limit=limit)


@pytest.mark.parametrize("env_id", CLASSIC)
def test_the_same_draws_begin_the_same_episodes(env_id: str) -> None:
    engine, env = open_engine(env_id, 1), gym.make(env_id)
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        rng, _ = gym.utils.seeding.np_random(seed)
        noise = torch.from_numpy(rng.random((1, engine.env.reset_noise)))
        state = engine.env.reset(noise)
        np.testing.assert_allclose(state[0].numpy(), state_of(env), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(engine.env.observe(state)[0].numpy(), observation, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("env_id", CLASSIC)
def test_the_time_limit_is_the_registered_one(env_id: str) -> None:
    assert open_engine(env_id, 1).limit == gym.spec(env_id).max_episode_steps


# ---- one's own -------------------------------------------------------------------------------------------------------


class Walk(DeviceEnvironment):
    """Counts up to `length`, by one or two; the start, a jump by chance and a count of steps are seen."""

    observation_space = gs.Box(-100.0, 100.0, (3,), np.float32)
    action_space = gs.Discrete(2)
    max_episode_steps = 9
    step_noise = 1

    def __init__(self, length: float = 6.0) -> None:
        self.length = length

    def reset(self, noise: Tensor) -> Any:
        return {"place": noise[:, 0], "history": torch.zeros_like(noise).expand(-1, 2).clone()}

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        place = state["place"] + 1.0 + actions
        history = state["history"] + torch.cat([noise, torch.ones_like(noise)], -1)
        return {"place": place, "history": history}, place, place >= self.length

    def observe(self, state: Any) -> Tensor:
        return torch.cat([state["place"][:, None], state["history"]], -1)


def test_rows_that_end_begin_again_in_the_same_step_and_the_others_do_not() -> None:
    env = Walk(length=3.0)
    state = {"place": torch.tensor([0.5, 1.5, 0.5]), "history": torch.tensor([[0.1, 4.0]] * 3)}
    ages, noise = torch.tensor([0, 2, 4], dtype=torch.int32), (torch.tensor([[0.2], [0.4], [0.6]]), torch.zeros(3, 1))
    after = advance(env, 5, state, ages, torch.tensor([0, 1, 0]), noise)
    assert after.terminated.tolist() == [False, True, False]
    assert after.truncated.tolist() == [False, False, True]
    assert after.ages.tolist() == [1, 0, 0]
    assert after.rewards.tolist() == [1.5, 3.5, 1.5]
    torch.testing.assert_close(after.final_obs[:, 0], torch.tensor([1.5, 3.5, 1.5]))
    torch.testing.assert_close(after.obs[:, 0], torch.tensor([1.5, 0.4, 0.6]))
    torch.testing.assert_close(after.obs[:, 1:], torch.tensor([[0.1, 5.0], [0.0, 0.0], [0.0, 0.0]]))


def test_a_class_of_ones_own_is_a_gymnasium_environment_too() -> None:
    recipe = read_recipe("walk", {"length": 4.0}, Walk)
    env = make_env(recipe)
    assert isinstance(env.unwrapped, OneEnvironment)
    first, _ = env.reset(seed=1)
    assert (env.reset(seed=1)[0] == first).all()
    assert first.dtype == np.float32
    assert 0 < first[0] < 1
    observation, reward, terminated, truncated, _ = env.step(1)
    assert observation[0] == np.float32(first[0] + 2.0)
    assert 0 < observation[1] < 1
    assert (reward, terminated, truncated) == (pytest.approx(float(first[0]) + 2.0), False, False)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("given", "wanted"), [({}, 9), ({"max_episode_steps": 5}, 5)])
def test_the_limit_of_ones_own_holds_unless_the_config_says_another(given: dict[str, Any], wanted: int) -> None:
    assert open_engine(Walk, 2, length=1e6, **given).limit == wanted
    env = make_env(read_recipe("walk", {"length": 1e6, **given}, Walk))
    env.reset()
    assert [env.step(0)[3] for _ in range(wanted)] == [False] * (wanted - 1) + [True]


def test_environments_side_by_side_differ_and_the_seed_decides() -> None:
    streams = []
    for seed in (7, 7, 8):
        engine = open_engine(Walk, 3, seed=seed)
        obs = [engine.reset()[0]]
        obs += [engine.step(np.zeros(3, dtype=np.int64)).obs for _ in range(12)]
        streams.append(np.stack(obs))
    assert np.array_equal(streams[0], streams[1])
    assert not np.array_equal(streams[0], streams[2])
    assert not np.array_equal(streams[0][:, 0], streams[0][:, 1])


def test_the_state_comes_back_with_everything_in_it() -> None:
    engine, other = open_engine(Walk, 3), open_engine(Walk, 3, seed=99)
    engine.reset()
    actions = [np.array([i % 2, 1, 0]) for i in range(20)]
    for action in actions[:7]:
        engine.step(action)
    stored, (obs, _) = engine.state_dict(), other.load_state_dict(engine.state_dict())
    assert np.array_equal(obs, engine._encode(engine.env.observe(engine.state)))
    going_on = [engine.step(action) for action in actions]
    for step, again in zip(going_on, [other.step(action) for action in actions], strict=True):
        for one, two in zip(step, again, strict=True):
            assert np.array_equal(one, two)
    third = open_engine(Walk, 3)
    third.load_state_dict(stored)  # which later steps have not touched
    assert np.array_equal(third.step(actions[0]).obs, going_on[0].obs)


@pytest.mark.parametrize(
    "space",
    [
        gs.Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.1], np.float32)), gs.Discrete(3),
        gs.Discrete(3, start=2), gs.MultiDiscrete([2, 3]), gs.MultiBinary(3),
    ],
)  # fmt: skip
def test_tensors_of_actions_are_mapped_as_arrays_are(space: Any) -> None:
    spaces = EnvSpaces.from_gym("x", gs.Box(-1.0, 1.0, (1,)), space)
    rng = np.random.default_rng(0)
    actions = spaces.random_actions(rng, 50)
    if spaces.action_kind == "continuous":
        actions = actions * 1.5  # a Gaussian policy leaves [-1, 1]
    mapped = map_actions(spaces, torch.device("cpu"))(torch.from_numpy(actions))
    np.testing.assert_array_equal(mapped.numpy(), spaces.map_actions(actions))


# ---- refusals --------------------------------------------------------------------------------------------------------


class Wrapped(gym.Wrapper[Any, Any, Any, Any]):
    """Anything."""


class WalkOfDicts(Walk):
    """An observation that is no Box."""

    observation_space = gs.Dict({"place": gs.Box(-1.0, 1.0, (3,))})  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (read_recipe("CliffWalking-v1", {}), "CliffWalking-v1 is not a DeviceEnvironment"),
        (read_recipe("walk", {}, WalkOfDicts), "the observation space of walk is not a Box"),
        (read_recipe("x", {}, lambda: Wrapped(gym.make("CartPole-v1"))), "wrapped in Wrapped"),
        (read_recipe("CartPole-v1", {"wrappers": {"frame_stack": 2}}), "only normalize_observation"),
        (read_recipe("CartPole-v1", {"wrappers": {"clip_reward": True}}), "only normalize_observation"),
    ],
)
def test_what_has_no_tensor_functions_is_refused(recipe: EnvRecipe, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^vectorization is 'device', but .*{sentence}"):
        choose_vectorization("device", recipe, 4)


@pytest.mark.parametrize("backend", ["local_async", "ray"])
def test_workers_do_not_step_on_the_device(backend: str) -> None:
    config = {"algo": "ppo", "env_id": "CartPole-v1", "execution_backend": backend, "vectorization": "device"}
    with pytest.raises(UserError, match="vectorization is 'device'; with"):
        load_config({**config, "num_envs": 4, "total_timesteps": 10})


# ---- whole runs ------------------------------------------------------------------------------------------------------

QUICK = ("a2c", "ppo", "trpo", "impala", "appo", "gail", "dqn", "sac")  # of every store but Dreamer's
STEPPING = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, spec in SPECS.items()
    if spec.steps_environments
]


@pytest.mark.parametrize("algo", STEPPING)
def test_every_algorithm_resumes_exactly(algo: str, tmp_path: Path) -> None:
    given = {"vectorization": "device", "num_envs": 4, "total_timesteps": 160, "log_interval": 1}
    whole = train(tiny(algo, tmp_path / "whole", **given), console=False)
    parts = stop_and_resume(tiny(algo, tmp_path / "parts", **given), 70)
    assert math.isfinite(whole.metrics["eval_return_mean"])
    assert_same_run(whole, parts)
