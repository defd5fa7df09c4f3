"""Environments on the device: Gymnasium's step by step, the engine, and whole runs with it."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.utils.env_checker import check_env
from torch import Tensor
from typer.testing import CliRunner

import resume_cases
from recorded_steps import Recorded
from resume_cases import SPECS, assert_same_run, stop_and_resume, tiny
from rl_training import PPO
from rl_training.algorithms.base import Numbers
from rl_training.cli.main import app
from rl_training.collect.device import DeviceCollector
from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.config.train_config import load_config
from rl_training.data import rollout_store as rollouts
from rl_training.envs import device_checks
from rl_training.envs.device import (
    DeviceEngine,
    DeviceEnvironment,
    OneEnvironment,
    advance,
    map_actions,
)
from rl_training.envs.device_checks import check_functions
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import EnvRecipe, make_env, read_recipe
from rl_training.envs.probe import probe, probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, TrainingFailure, UserError
from rl_training.models.blocks import ObservationInput
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.run.build import Session, open_session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import evaluate_checkpoint, resume_training, train
from rl_training.speed.capture import PLAIN_CALLS

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
OTHERWISE: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"sutton_barto_reward": True}, "Pendulum-v1": {"g": 3.0}, "MountainCar-v0": {"goal_velocity": 0.01},
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [*((env_id, {}) for env_id in CLASSIC), *OTHERWISE.items()]


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


def compare_with_gymnasium(env_id: str, kwargs: dict[str, Any], dtype: Any, trajectories: int, limit: int) -> None:
    """Both sides take the same action from the same state at every step, until every trajectory has ended.

    In 64 bits, as Gymnasium computes, the formulas must be the same; in 32 Acrobot at its fastest rounds away a little.
    """
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype is np.float64 else {"rtol": 1e-3, "atol": 1e-3}
    rng = np.random.default_rng(0)
    envs = [gym.make(env_id, limit, disable_env_checker=True, **kwargs) for _ in range(trajectories)]
    engine = open_engine(env_id, trajectories, max_episode_steps=limit, **kwargs)
    engine.reset()
    for env in envs:
        start_anywhere(env, rng)
    under_way, ends = np.ones(trajectories, dtype=bool), [0, 0]
    while under_way.any():
        rows = np.flatnonzero(under_way)
        states = np.stack([state_of(env) for env in envs])
        engine.state = torch.from_numpy(states.astype(dtype))
        actions = np.stack([np.asarray(env.action_space.sample()) for env in envs])
        step = engine.step(actions)
        given = actions.tolist() if engine.spaces.action_kind == "discrete" else actions
        wanted = [envs[row].step(given[row]) for row in rows]
        obs, rewards, terminated, truncated, _ = (np.array(part) for part in zip(*wanted, strict=True))
        assert (terminated == step.terminated[rows]).all()
        assert (truncated == step.truncated[rows]).all()
        np.testing.assert_allclose(step.rewards[rows], rewards, **near)
        done = terminated | truncated
        np.testing.assert_allclose(step.obs[rows[~done]], obs[~done], **near)
        if done.any():
            assert step.final_obs is not None
            np.testing.assert_allclose(step.final_obs[rows[done]], obs[done], **near)
        ends = [ends[0] + int(terminated.sum()), ends[1] + int(truncated.sum())]
        under_way[rows[done]] = False
    assert ends[0] > 0 or env_id == "Pendulum-v1"
    assert ends[1] > 0 or limit == 500  # which random play on a CartPole does not reach


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_every_step_is_gymnasiums(env_id: str, kwargs: dict[str, Any], dtype: Any) -> None:
    compare_with_gymnasium(env_id, kwargs, dtype, trajectories=100, limit=25)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", CLASSIC)
def test_every_step_of_a_thousand_whole_trajectories_is_gymnasiums(env_id: str) -> None:
    limit = gym.spec(env_id).max_episode_steps
    assert limit is not None
    compare_with_gymnasium(env_id, {}, np.float64, trajectories=1000, limit=limit)


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
        return {"place": noise[:, 0], "history": torch.zeros_like(noise).expand(-1, 2)}

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        place = state["place"] + 1.0 + actions
        history = state["history"] + torch.cat([noise, torch.ones_like(noise)], -1)
        return {"place": place, "history": history}, place, place >= self.length

    def observe(self, state: Any) -> Tensor:
        return torch.cat([state["place"][:, None], state["history"]], -1)


def test_rows_that_end_begin_again_in_the_same_step_and_the_others_do_not() -> None:
    env = Walk(length=3.0)
    state = {"place": torch.tensor([0.5, 1.5, 0.5]), "history": torch.tensor([[0.1, 4.0]] * 3)}
    ages, begun = torch.tensor([0, 2, 4], dtype=torch.int32), env.reset(torch.tensor([[0.2], [0.4], [0.6]]))
    after = advance(env, 5, state, ages, torch.tensor([0, 1, 0]), torch.zeros(3, 1), begun)
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


@pytest.mark.parametrize("vectorization", ["device", "async"])
def test_an_instance_of_ones_own_is_an_environment_too(vectorization: str, tmp_path: Path) -> None:
    """It holds no state, so any number of rows share it; worker processes get it pickled."""
    num_envs = 2 if vectorization == "device" else 1
    settings: dict[str, Any] = {"num_envs": num_envs, "num_steps": 8, "minibatch_size": 8, "output_dir": tmp_path}
    learner = PPO(Walk(length=5.0), vectorization=vectorization, **settings)
    assert learner.config.env_id == "Walk"
    assert learner.learn(32, progress=False).metrics["eval_length_mean"] <= 5
    with pytest.raises(UserError, match="env_kwargs: unknown key 'length'; Walk does not take it"):
        PPO(Walk(), env_kwargs={"length": 3.0}).learn(32)


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


def test_a_resume_on_another_kind_of_device_is_said_not_to_be_exact() -> None:
    session, again = open_rollouts(Walk), open_rollouts(Walk)
    take_rollout(session)
    stored: Any = session.collector.state_dict()
    stored["stepper"]["engine"]["device"] = "cuda"
    said = "mine did not replay to the stored random generator, so this resume is not exact."
    assert again.collector.load_state_dict(stored) == [said]


@pytest.mark.parametrize(
    "space",
    [
        gs.Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.1], np.float32)), gs.Discrete(3),
        gs.Discrete(3, start=2), gs.MultiDiscrete([2, 3]), gs.MultiBinary(3), gs.Box(-3, 9, (2, 2), np.int32),
    ],
)  # fmt: skip
def test_tensors_of_actions_are_mapped_as_arrays_are(space: Any) -> None:
    spaces = EnvSpaces.from_gym("x", gs.Box(-1.0, 1.0, (1,)), space)
    rng = np.random.default_rng(0)
    actions = spaces.random_actions(rng, 50)
    if spaces.action_kind == "continuous":
        actions = actions * 1.5  # a Gaussian policy leaves [-1, 1]
    mapped, wanted = map_actions(spaces, torch.device("cpu"))(torch.from_numpy(actions)), spaces.map_actions(actions)
    np.testing.assert_array_equal(mapped.numpy(), wanted, strict=True)


# ---- rollouts that stay on the device --------------------------------------------------------------------------------


class Pushed(Walk):
    """The same with other actions."""

    action_space = gs.MultiDiscrete([2, 3])  # type: ignore[assignment]

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        return super().step(state, actions.sum(-1) - 1, noise)


class Pictures(Walk):
    """The same, seen as an image with its channels last."""

    observation_space = gs.Box(0, 255, (6, 6, 2), np.uint8)

    def observe(self, state: Any) -> Tensor:
        place = (state["place"] * 20).to(torch.uint8)
        rows = torch.arange(6, dtype=torch.uint8, device=place.device).view(1, 6, 1, 1)
        return (place.view(-1, 1, 1, 1) + rows).expand(-1, 6, 6, 2)


def open_rollouts(env: Any, algo: str = "ppo", num_envs: int = 5, num_steps: int = 8, **kwargs: Any) -> Session:
    named = env if isinstance(env, str) else "mine"
    said = {"algo": algo, "env_id": named, "vectorization": "device", "num_envs": num_envs, "device": "cpu", "seed": 1}
    hyper = {"num_steps": num_steps, "hidden_sizes": [8], **kwargs}
    config = load_config(fill_defaults({**said, "total_timesteps": 10_000, "algo_kwargs": hyper}, UNSAID))
    session = open_session(config, env=None if isinstance(env, str) else env)
    assert isinstance(session.collector, DeviceCollector)
    return session


@pytest.mark.parametrize("env", [Walk, Pushed, Pictures, "CartPole-v1", "Pendulum-v1"])
def test_a_rollout_is_what_the_engine_does_with_its_actions(env: Any) -> None:
    session = open_rollouts(env)
    collector: Any = session.collector
    engine, spaces = collector.engine, session.spaces
    collected = [take_rollout(session) for _ in range(4)]
    stored = collector.state_dict()
    rows = take_rollout(session)
    if env != "Pendulum-v1":
        assert any(part["terminated"].any() or part["truncated"].any() for part in collected)
    again = open_rollouts(env)
    other: Any = again.collector
    assert other.load_state_dict(stored) == []
    resets, steps = other.engine.draw(8)
    drawn = iter(zip(resets, steps, strict=True))
    other.engine.draw = lambda count: tuple(part[None] for part in next(drawn))
    for t in range(8):
        np.testing.assert_array_equal(rows["obs"][t], other.engine.look())
        step = other.engine.step(spaces.map_actions(rows["actions"][t].numpy()))
        np.testing.assert_array_equal(rows["rewards"][t], step.rewards)
        np.testing.assert_array_equal(rows["terminated"][t], step.terminated)
        np.testing.assert_array_equal(rows["truncated"][t], step.truncated)
        if step.final_obs is not None:
            np.testing.assert_array_equal(rows["final_obs"][t], step.final_obs)
    np.testing.assert_array_equal(rows["obs"][8], other.engine.look())
    np.testing.assert_array_equal(engine.look(), other.engine.look())
    policy: Any = session.algorithm.acting()
    with torch.no_grad():
        assert rows["obs"].shape[2:] == session.spaces.obs_shape
        logprobs = policy.distribution(rows["obs"][:8].flatten(0, 1)).log_prob(rows["actions"].flatten(0, 1))
    torch.testing.assert_close(rows["logprobs"].flatten(), logprobs, rtol=1e-5, atol=1e-6)


def take_rollout(session: Session) -> dict[str, Tensor]:
    """One rollout, copied."""
    session.store.add(session.collect(session.store.request(0)), 0)
    return {name: array.clone() for name, array in session.store.experience.arrays.items()}  # type: ignore[attr-defined]


def test_finished_episodes_are_counted_over_rollouts_and_logged_once() -> None:
    session = open_rollouts(Walk, num_steps=7)
    played = [take_rollout(session) for _ in range(6)]
    rewards, done = (torch.cat([part[name] for part in played]) for name in ("rewards", "terminated"))
    done |= torch.cat([part["truncated"] for part in played])
    returns, lengths, episodes = torch.zeros(5), torch.zeros(5), []
    for t in range(42):
        returns, lengths = returns + rewards[t], lengths + 1
        episodes += [(returns[i].item(), lengths[i].item()) for i in range(5) if done[t, i]]
        returns, lengths = returns * ~done[t], lengths * ~done[t]
    means = np.mean(episodes, axis=0)
    wanted = {"episode_return_mean": pytest.approx(means[0]), "episode_length_mean": pytest.approx(means[1])}
    assert session.collector.metrics(last=True) == wanted
    assert session.collector.metrics() == wanted
    session.collector.sums.zero_()  # type: ignore[attr-defined]  # as after a rollout in which nothing ends
    assert session.collector.metrics() == wanted, "the last ones known"


def test_a_rollout_writes_where_the_last_one_was() -> None:
    """A captured graph has fixed addresses: of what it reads, and of what it leaves for the next one."""
    session = open_rollouts(Walk)
    collector: Any = session.collector

    def addresses() -> list[int]:
        kept = [*collector.engine.state.values(), collector.engine.ages, collector.returns]
        return [tensor.data_ptr() for tensor in [*kept, *collector.experience.arrays.values()]]

    take_rollout(session)
    before = addresses()
    take_rollout(session)
    collector.abandon()
    take_rollout(session)
    collector.engine.step(np.zeros(5, dtype=np.int64))
    collector.load_state_dict(collector.state_dict())
    assert addresses() == before


def learn_turns(session: Session, turns: int) -> list[dict[str, Tensor]]:
    """Rollouts of a policy that learns from each."""
    rollouts = []
    for _ in range(turns):
        rollouts.append(take_rollout(session))
        ((_, batch),) = session.store.batches(session.algorithm, 0)
        session.algorithm.update(batch)
    return rollouts


def test_a_captured_rollout_is_a_plain_one() -> None:
    plain, captured = open_rollouts(Walk), open_rollouts(Walk)
    collector: Any = captured.collector
    collector._roll = Recorded(collector._roll_out, Numbers())
    resume_cases.assert_same(learn_turns(captured, PLAIN_CALLS + 4), learn_turns(plain, PLAIN_CALLS + 4))
    assert collector._roll.replays == [4]
    resume_cases.assert_same(captured.collector.state_dict(), plain.collector.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("env_id", CLASSIC)
def test_a_graph_of_a_rollout_is_a_plain_one(env_id: str) -> None:
    sides = []
    for accelerate in ("graph", "none"):
        config = tiny("ppo", Path("unused"), env_id=env_id, vectorization="device", num_envs=64, device="cuda")
        sides.append(learn_turns(open_session(config.model_copy(update={"accelerate": accelerate})), 8))
    for one, other in zip(*sides, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("algo", ["a2c", "ppo", "trpo", "impala", "appo", "pqn"])
def test_truncated_episodes_are_worth_what_their_last_observation_is(algo: str) -> None:
    session = open_rollouts(Walk, algo, num_steps=24)
    rows = take_rollout(session)
    ((_, batch),) = session.store.batches(session.algorithm, 0)
    learner: Any = session.algorithm
    with torch.no_grad():
        values = learner.state_values(rows["obs"].flatten(0, 1)).view(25, 5)
        finals = learner.state_values(rows["final_obs"].flatten(0, 1)).view(24, 5)
        successors = learner.successor_values(values[:-1], learner.value_finals(batch))
    # IMPALA and APPO value them at every gradient step, with the weights that learn
    assert ("truncation_values" in batch) == learner.reads_values
    wanted = torch.where(rows["truncated"], finals, values[1:])
    assert rows["terminated"].any()
    torch.testing.assert_close(successors, wanted)


class Seen(Walk):
    """The place as an image."""

    observation_space = gs.Box(0, 255, (4, 4), np.uint8)  # type: ignore[assignment]

    def observe(self, state: Any) -> Tensor:
        return (10 * state["place"]).byte().view(-1, 1, 1).expand(-1, 4, 4)


def test_images_are_valued_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_rollouts(Seen)
    policy: Any = session.algorithm.acting()
    rows, valued, sizes = take_rollout(session), policy.values, []
    monkeypatch.setattr(rollouts, "MOST_IMAGES", 16)
    monkeypatch.setattr(policy, "values", lambda obs: (sizes.append(len(obs)), valued(obs))[1])
    ((_, batch),) = session.store.batches(session.algorithm, 0)
    assert max(sizes) == 16
    with torch.no_grad():
        finals = valued(rows["final_obs"].flatten(0, 1)).view(8, 5)
    torch.testing.assert_close(batch["truncation_values"], finals)


class Breaks(Walk):
    """A reward that is not a number, by and by."""

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        state, rewards, terminated = super().step(state, actions, noise)
        return state, torch.where(state["place"] > 4.0, torch.nan, rewards), terminated


def test_a_reward_that_is_not_a_number_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny("ppo", tmp_path, vectorization="device", num_envs=4, env_id="breaks")
    with pytest.raises(EnvironmentFailure, match="breaks returned a reward or an observation"):
        train(config, env=Breaks, console=True)
    assert "warning" not in "".join(capfd.readouterr())  # what learned from it is not worth saving


def test_an_environment_on_the_device_is_not_blamed_for_a_bad_policy(tmp_path: Path) -> None:
    class Break(Callback):
        def on_update(self, run: Run) -> None:
            with torch.no_grad():
                run.session.algorithm.policy.actor[0].weight.fill_(torch.nan)

    config = tiny("a2c", tmp_path, vectorization="device", num_envs=4, env_id="Pendulum-v1", eval_episodes=0)
    with pytest.raises(TrainingFailure, match=r"the tensor 'policy\.\S+' is not finite at step 64"):
        train(config, callbacks=[Break()], console=False)


@pytest.mark.parametrize(
    ("places", "blamed"),
    [
        ({"rewards": 2}, True), ({"final_obs": 2}, True), ({"obs": 3}, True),
        ({"rewards": 2, "actions": 3}, True), ({"actions": 0}, False),
        ({"actions": 0, "rewards": 0, "final_obs": 0, "obs": 1}, False),
    ],
)  # fmt: skip
def test_an_environment_is_blamed_for_what_it_makes_of_finite_actions(places: dict[str, int], blamed: bool) -> None:
    session = open_session(tiny("a2c", Path("unused"), vectorization="device", num_envs=3, env_id="Pendulum-v1"))
    experience, collector = session.collect(session.store.request(0)), session.collector
    assert isinstance(collector, DeviceCollector)
    for name, row in places.items():
        getattr(experience, name)[row, 1] = math.inf if name == "rewards" else math.nan
    assert math.isnan(collector._sum_episodes(collector.engine.ages)[3]) == blamed
    session.close()


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "continuous"])
def test_noise_drawn_before_gives_the_same_actions(kind: str) -> None:
    policy = MLPActorCritic(obs_dim=3, action_dim=5, action_kind=kind, action_sizes=[2, 3] if "multi" in kind else None)
    obs, sizes = torch.randn(7, 3), [2, 3] if kind == "multi_discrete" else [5]
    generator, same = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    pieces = [torch.empty(7, size) for size in sizes]
    for piece in pieces:
        piece.normal_(generator=same) if kind == "continuous" else piece.exponential_(generator=same).log_().neg_()
    chosen = policy.distribution(obs)
    assert torch.equal(chosen.sample(generator), chosen.sample(noise=torch.cat(pieces, -1)))


def test_a_normalized_policy_on_another_device_has_no_numpy_form() -> None:
    """Its weights cannot be read there; evaluation asked for it all the same and failed."""
    normalizing = ObservationInput(normalize_size=3)
    policy = MLPActorCritic(obs_dim=3, action_dim=2, hidden_sizes=[8], observation_input=normalizing)
    assert policy.numpy_policy() is not None
    assert policy.to("meta").numpy_policy() is None


# ---- refusals --------------------------------------------------------------------------------------------------------


class Wrapped(gym.Wrapper[Any, Any, Any, Any]):
    """Anything."""


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (read_recipe("CliffWalking-v1", {}), "CliffWalking-v1 is not a DeviceEnvironment"),
        (read_recipe("x", {}, lambda: Wrapped(gym.make("CartPole-v1"))), "wrapped in Wrapped"),
        (read_recipe("CartPole-v1", {"wrappers": {"frame_stack": 2}}), "wrappers.frame_stack is 2; its only"),
        (read_recipe("CartPole-v1", {"wrappers": {"clip_reward": True}}), "wrappers.clip_reward is True; its"),
    ],
)
def test_what_has_no_tensor_functions_is_refused(recipe: EnvRecipe, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^vectorization is 'device', but .*{sentence}"):
        probe(recipe, "device")


def gives(**parts: Any) -> type[Walk]:
    """A Walk whose `step` gives something else."""

    class Odd(Walk):
        def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
            state, rewards, terminated = super().step(state, actions, noise)
            given = {"state": state, "rewards": rewards, "terminated": terminated}
            given |= {name: change(given[name]) for name, change in parts.items()}
            return tuple(given.values())

    return Odd


def walk(**parts: Any) -> type[Walk]:
    """A Walk with other attributes."""
    return type("Odd", (Walk,), parts)


def stay(self: Any, state: Any, actions: Tensor, noise: Tensor) -> Any:
    """A step that does nothing."""
    return state, torch.zeros(len(actions)), torch.zeros(len(actions), dtype=torch.bool)


def triple(self: Any, state: Any) -> Tensor:
    """An observation of three numbers."""
    part: Tensor = state["all"] if isinstance(state, dict) else state
    return part[:, :1].expand(-1, 3)


def move_in_place(self: Any, state: Any, actions: Tensor, noise: Tensor) -> Any:
    """A step that changes the state that it is given."""
    state["place"] += 1.0
    return Walk.step(self, state, actions, noise)


def count_calls(self: Any, state: Any, actions: Tensor, noise: Tensor) -> Any:
    """A step that remembers."""
    self.calls = getattr(self, "calls", 0) + 1
    return Walk.step(self, state, actions, noise)


class Pictured(Walk):
    """Floats where the space says pixels."""

    observation_space = gs.Box(0, 255, (4, 4), np.uint8)  # type: ignore[assignment]

    def observe(self, state: Any) -> Tensor:
        return state["place"].view(-1, 1, 1).expand(-1, 4, 4)


@pytest.mark.parametrize(
    ("maker", "sentence"),
    [
        (gives(rewards=lambda x: x[:, None]), r"rewards of 17 environments has the shape \(17, 1\), not .* \(17,\)"),
        (gives(rewards=lambda x: 1.0), "step returned a value of type float; it must return tensors"),
        (gives(rewards=lambda x: (x, x)), "rewards of 17 environments has the type tuple"),
        (gives(terminated=lambda x: x[:1]), r"terminated of 17 environments has the shape \(1,\)"),
        (gives(terminated=lambda x: x.float()), "terminated is of torch.float32; it must be of torch.bool"),
        (gives(state=lambda x: {**x, "place": x["place"].double()}), r"state\['place'\] is .*float32 after .*float64"),
        (gives(state=lambda x: x | {"more": x["place"]}), r"state\['more'\] is missing after reset and \[17\] of"),
        (gives(state=lambda x: tuple(x.values())), "mine fails in observe with TypeError: tuple indices"),
        (Pictured, "observe gives an image of torch.float32; it must be of torch.uint8"),
        (walk(observation_space=gs.Box(-1.0, 1.0, (4,))), r"observe of 17 .*shape \(17, 3\), not the shape \(17, 4\)"),
        (walk(observation_space=gs.Box(-9, 9, (3,), np.int64)), "observe gives torch.float32; .* says int64"),
        (walk(observation_space=gs.Dict({"place": gs.Discrete(3)})), "space is Dict.*be a Box or a Dict of Boxes"),
        (walk(observation_space=gs.Dict({"place": gs.Box(-1.0, 1.0, (3,))})), "must return a dict .* place"),
        (walk(observation_space=gs.Dict({"place": gs.Box(-1.0, 1.0, (2,))}), observe=lambda self, state: state),
         r"observe\['place'\] of 17 environments has the shape \(17,\), not the shape \(17, 2\)"),
        (walk(observation_space=None), "the observation_space of mine is None; set self.observation_space"),
        (walk(action_space=gs.Dict()), "the action space Dict.* of mine is not supported"),
        (walk(reset_noise=-1), "reset_noise is -1; it must be a whole number of at least 0"),
        (walk(step_noise=1.0), "step_noise is 1.0; it must be a whole number"),
        (walk(max_episode_steps=0), "max_episode_steps is 0; it must be a whole number of at least 1"),
        (walk(step=DeviceEnvironment.step), "mine has no step; a DeviceEnvironment must define reset, step and obs"),
        (walk(step=lambda *_: (torch.zeros(1),) * 4), "step returned 4 values; it must return the next state, rewards"),
        (walk(observe=lambda self, state: None), "observe returned a value of type NoneType; it must return tensors"),
        (walk(reset=lambda self, noise: {"all": noise, "count": noise.sum()}, step=stay, observe=triple),
         r"state\['count'\] of 17 environments has the shape \(\), not \(17, ...\)"),
        (walk(reset=lambda self, noise: noise.mul_(2.0)), "reset changes a tensor that it is given; it must ret"),
        (walk(step=move_in_place), "step changes a tensor that it is given"),
        (walk(observe=lambda self, state: state.setdefault("new", Walk.observe(self, state))),
         "observe changes a tensor that it is given"),
        (walk(reset=lambda self, noise: torch.rand_like(noise)), "reset gives two results for the same input; random"),
        (walk(step=count_calls), "step changes self.calls; what changes must be part of the state"),
        (walk(reset=lambda self, noise: torch.zeros_like(noise), step=stay, observe=triple),
         "reset returns the same state for all noise; use it, or set reset_noise = 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("vectorization", ["device", "sync"])
def test_functions_that_do_not_fit_are_told_in_a_sentence(maker: Any, sentence: str, vectorization: str) -> None:
    """With every vectorization, so that `doctor` finds them too."""
    with pytest.raises(UserError, match=sentence) as caught:
        probe(read_recipe("mine", {}, maker), vectorization)
    assert "mine" in str(caught.value)


class Forgetful(Walk):
    """Keeps what changes on itself."""

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        return count_calls(self, state, actions, noise)


FORGETFUL = "step changes self.calls; what changes must be part of the state"


@pytest.mark.parametrize("vectorization", ["device", "sync"])
def test_every_way_in_tests_the_functions_first(vectorization: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_steps": 8, "minibatch_size": 8, "output_dir": tmp_path, "eval_episodes": 0}
    learner = PPO(Forgetful, vectorization=vectorization, **settings)
    with pytest.raises(UserError, match=FORGETFUL):
        learner.learn(8, progress=False)
    assert not any(tmp_path.iterdir())
    path = PPO(Walk, vectorization=vectorization, **settings).learn(8, progress=False).checkpoint_path
    with pytest.raises(UserError, match=FORGETFUL):
        evaluate_checkpoint(path, env=Forgetful)
    with pytest.raises(UserError, match=FORGETFUL):
        PPO.load(path, env=Forgetful)
    with pytest.raises(UserError, match=FORGETFUL):
        resume_training(path, total_timesteps=128, env=Forgetful, console=False)


def test_doctor_tests_the_functions() -> None:
    result = CliRunner().invoke(app, ["doctor", "--env", f"{__name__}:Forgetful"])
    assert result.exit_code == 2
    assert re.search(FORGETFUL, " ".join(result.output.split()))


@pytest.mark.parametrize(("env", "vectorization"), [(Walk, "device"), (Walk, "sync"), ("CartPole-v1", "device")])
def test_the_functions_are_tested_once_in_a_run(
    env: Any, vectorization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[str] = []

    def check(env: Any, env_id: str, device: str = "cpu") -> None:
        tested.append(device)

    monkeypatch.setattr(device_checks, "check_functions", check)
    settings: dict[str, Any] = {"num_envs": 2, "num_steps": 8, "minibatch_size": 8, "eval_interval": 16}
    learner = PPO(env, vectorization=vectorization, output_dir=tmp_path, device="cpu", **settings)
    learner.learn(48, progress=False)
    assert tested == ["cpu"]


@pytest.mark.parametrize(("device", "again"), [("cpu", []), ("cuda:1", ["cuda:1"])])
def test_the_functions_are_tested_again_on_another_device(
    device: str, again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[str] = []
    recipe = read_recipe("walk", {}, Walk)
    spaces = probe_spaces(recipe)
    monkeypatch.setattr(device_checks, "check_functions", lambda env, env_id, device: tested.append(device))
    monkeypatch.setattr("rl_training.envs.device.DeviceEngine", lambda *given: given[5])  # there may be no such GPU
    assert make_engine(recipe, spaces, 2, 0, "device", device=device) == device
    assert tested == again


def test_rows_of_a_test_begin_apart_if_rare_noise_does_something() -> None:
    rare = walk(reset=lambda self, noise: (noise < 0.001).float(), step=stay, observe=triple)
    check_functions(rare(), "mine")
    fixed = walk(reset_noise=0, reset=lambda self, noise: noise.new_zeros(len(noise), 1), step=stay, observe=triple)
    check_functions(fixed(), "mine")


def test_what_is_computed_once_may_be_kept() -> None:
    def step(self: Any, state: Any, actions: Tensor, noise: Tensor) -> Any:
        self.table = getattr(self, "table", torch.ones(1))
        return stay(self, state, actions, noise)

    check_functions(walk(reset=lambda self, noise: noise, step=step, observe=triple)(), "mine")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Walk, "device_environment is <class .*; it must be an instance"),
        (Walk(), r"action_space is Discrete\(3\), but that of its device_environment is Discrete\(2\)"),
        (walk(action_space=gs.Discrete(3))(), r"observation_space.shape is \(1,\), but that of .* is \(3,\)"),
    ],
)
def test_the_tensor_functions_of_a_gymnasium_environment_must_fit_it(given: Any, sentence: str) -> None:
    class Own(gym.Env[Any, Any]):
        observation_space = gs.Box(-1.0, 1.0, (1,))
        action_space = gs.Discrete(3)  # type: ignore[assignment]
        device_environment = given

    with pytest.raises(UserError, match=f"^mine: {sentence}"):
        probe(read_recipe("mine", {}, Own), "device")


class Elsewhere(Walk):
    """A part of the state that is always on the CPU."""

    def reset(self, noise: Tensor) -> Any:
        return super().reset(noise) | {"count": torch.zeros(len(noise))}

    def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
        after, *others = super().step(state, actions, noise)
        return after | {"count": state["count"] + 1}, *others


@pytest.mark.parametrize(
    ("maker", "name"), [(gives(rewards=lambda x: torch.ones(len(x))), "rewards"), (Elsewhere, r"state\['count'\]")]
)
def test_a_tensor_of_another_device_is_told_before_the_run(maker: Any, name: str) -> None:
    recipe = read_recipe("mine", {}, maker)
    with pytest.raises(UserError, match=f"^mine: {name} is on cpu, but the device is meta; make it like a given"):
        make_engine(recipe, probe_spaces(recipe), 2, 0, "device", device="meta")
    check_functions(Walk(), "mine", "meta")


def test_a_file_may_name_a_class_of_ones_own() -> None:
    """As it may name a gymnasium.Env class; a function has to be named by the user."""
    recipe = EnvRecipe(f"{__name__}:Walk")
    assert not recipe.named_by_user
    assert isinstance(make_env(recipe).unwrapped, OneEnvironment)
    with pytest.raises(UserError, match="did you mean 'Walk'"):
        make_env(EnvRecipe(f"{__name__}:Walks"))
    with pytest.raises(UserError, match="comes from a file"):
        make_env(EnvRecipe(f"{__name__}:gives"))


def test_what_the_functions_raise_is_told_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"mine fails in step with ZeroDivisionError: .* \(.*, line \d+\)\.$"):
        open_engine(gives(rewards=lambda x: x / (1 // 0)), 2)


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


AGED: dict[str, Any] = {"simulator": {"random_ages": True}}


def test_random_ages_spread_the_first_time_outs() -> None:
    first, again, other = (open_engine("Pendulum-v1", 64, seed, max_episode_steps=40, **AGED) for seed in (0, 0, 1))
    for engine in (first, again, other):
        engine.reset()
    assert len(first.ages.unique()) > 20
    assert first.ages.max() < 40
    assert torch.equal(first.ages, again.ages), "drawn with the run's seed"
    assert not torch.equal(first.ages, other.ages)
    ends = [first.step(np.zeros((64, 1), np.float32)).truncated for _ in range(80)]
    assert np.array_equal(np.sum(ends, 0), np.full(64, 2)), "later episodes have the whole limit"
    assert max(np.sum(row) for row in ends) < 10


def test_a_run_with_random_ages_resumes_exactly(tmp_path: Path) -> None:
    given: dict[str, Any] = {"vectorization": "device", "num_envs": 4, "total_timesteps": 160, "env_kwargs": AGED}
    whole = train(tiny("ppo", tmp_path / "whole", **given), console=False)
    assert_same_run(whole, stop_and_resume(tiny("ppo", tmp_path / "parts", **given), 70))


def test_random_ages_need_a_time_limit() -> None:
    with pytest.raises(UserError, match=r"random_ages is true, but mine has no time limit; set env_kwargs.max_epi"):
        open_engine(Endless, 4, **AGED)


class Endless(Walk):
    """No time limit."""

    max_episode_steps = None


def test_a_policy_that_lags_resumes_exactly(tmp_path: Path) -> None:
    given: dict[str, Any] = {"vectorization": "device", "num_envs": 4, "kwargs": {"policy_lag": 2}}
    whole = train(tiny("impala", tmp_path / "whole", **given), console=False)
    assert_same_run(whole, stop_and_resume(tiny("impala", tmp_path / "parts", **given), 70))


def test_the_progress_line_shows_returns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tiny("ppo", tmp_path, vectorization="device", num_envs=8, total_timesteps=1024)
    result = train(config, console=True, callbacks=[DueNow()])
    assert f"return {result.metrics['episode_return_mean']:.4g}  loss" in capfd.readouterr().err


class DueNow(Callback):
    """A progress line after every update, whatever the clock says."""

    def on_start(self, run: Any) -> None:
        run.logger._clock = itertools.count(0, 100).__next__


def test_episodes_are_logged_and_stop_a_run(tmp_path: Path) -> None:
    rule = {"metric": "episode_length_mean", "threshold": 1.0, "patience": 1}
    kwargs = {"eval_interval": 64, "early_stopping": rule}
    given: dict[str, Any] = {"vectorization": "device", "num_envs": 8, "total_timesteps": 4096, "kwargs": kwargs}
    metrics = train(tiny("ppo", tmp_path, **given), console=False).metrics
    assert metrics["stop_reason"] == "early_stopping"
    assert metrics["episode_return_mean"] == metrics["episode_length_mean"] > 1
