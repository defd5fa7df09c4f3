"""Replay learners with environments on the device: what is collected and stored, whole runs, and resuming them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from recorded_steps import Reads, Recorded
from resume_cases import StopAt, assert_same, assert_same_run, edit_checkpoint, stop_and_resume, take_steps, tiny
from rl_training import DQN, SAC
from rl_training.algorithms.base import Numbers
from rl_training.collect.device import DeviceStepCollector
from rl_training.data.device_ring import DeviceRing
from rl_training.data.replay_store import DeviceReplayStore
from rl_training.envs.device import DeviceEnvironment
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import Session, open_session
from rl_training.run.evaluation import read_policy_replay
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train
from rl_training.speed.capture import PLAIN_CALLS


class Walk(DeviceEnvironment):
    """Counts steps of 1 or 2 up to 6, which terminates, or 5 steps, which truncates; the start is random."""

    observation_space = gs.Box(-100.0, 100.0, (2,), np.float32)
    action_space: gym.Space[Any] = gs.Discrete(2)
    max_episode_steps = 5

    def reset(self, noise: Tensor) -> Tensor:
        return torch.cat([noise, torch.zeros_like(noise)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = state[:, 0] + 1.0 + self.push(actions)
        return torch.stack([place, state[:, 1] + 1.0], -1), 10.0 * place, place >= 6.0

    def push(self, actions: Tensor) -> Tensor:
        return actions.float()

    def observe(self, state: Tensor) -> Tensor:
        return state


class Slide(Walk):
    """The same with actions between 0 and 1."""

    action_space = gs.Box(0.0, 1.0, (1,), np.float32)

    def push(self, actions: Tensor) -> Tensor:
        return actions[:, 0]


class Turns(Slide):
    """Two choices at once."""

    action_space = gs.MultiDiscrete([2, 3])

    def push(self, actions: Tensor) -> Tensor:
        return actions[:, 0].float()


def open_replay(algo: str = "dqn", env: Any = Walk, num_envs: int = 4, **kwargs: Any) -> Session:
    env_id = env if isinstance(env, str) else "mine"
    config = tiny(algo, Path("unused"), kwargs=kwargs, num_envs=num_envs, env_id=env_id, vectorization="device")
    session = open_session(config, env=None if isinstance(env, str) else env)
    assert isinstance(session.store, DeviceReplayStore)
    assert isinstance(session.collector, DeviceStepCollector)
    return session


def take_rows(session: Session, step: int = 10**6) -> dict[str, Tensor]:
    """One turn's experience, stored and copied."""
    take_steps(session, step)
    return {name: array.clone() for name, array in session.collector.experience.arrays.items()}  # type: ignore[attr-defined]


# ---- what is collected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "env"), [("dqn", Walk), ("sac", Slide), ("ddpg", "Pendulum-v1"), ("iqn", "CartPole-v1")]
)
@pytest.mark.parametrize("step", [0, 10**6])
def test_experience_is_what_the_engine_does_with_its_actions(algo: str, env: Any, step: int) -> None:
    session, again = (open_replay(algo, env, train_frequency=28) for _ in range(2))
    for _ in range(2):
        take_rows(session, step)
    other: Any = again.collector
    assert other.load_state_dict(session.collector.state_dict()) == []
    rows = take_rows(session, step)
    resets, steps = other.engine.draw(7)
    drawn = iter(zip(resets, steps, strict=True))
    other.engine.draw = lambda count: tuple(part[None] for part in next(drawn))
    for t in range(7):
        np.testing.assert_array_equal(rows["obs"][t], other.engine.look())
        given = other.engine.step(session.spaces.map_actions(rows["actions"][t].numpy()))
        for name in ("rewards", "terminated", "truncated"):
            np.testing.assert_array_equal(rows[name][t], getattr(given, name))
        if given.final_obs is not None:
            np.testing.assert_array_equal(rows["final_obs"][t], given.final_obs)
    np.testing.assert_array_equal(rows["obs"][7], other.engine.look())


def test_every_row_explores_for_itself() -> None:
    session = open_replay("dqn", num_envs=2000, buffer_capacity=10_000)
    learner: Any = session.algorithm
    with torch.no_grad():
        for parameter in learner.q_network.parameters():
            parameter.zero_()
        list(learner.q_network.parameters())[-1].copy_(torch.tensor([0.0, 1.0]))  # action 1 is the best one
    for epsilon, share in ((0.0, 0.0), (0.4, 0.2), (1.0, 0.5)):
        learner.set_number("epsilon", epsilon)
        assert (take_rows(session)["actions"] == 0).double().mean() == pytest.approx(share, abs=0.04)
    session = open_replay("td3", Slide, num_envs=2000, buffer_capacity=10_000, exploration_noise=0.2)
    policy: Any = session.algorithm.acting()
    rows = take_rows(session)
    with torch.no_grad():
        apart = rows["actions"][0] - policy(rows["obs"][0])
    assert apart.std() == pytest.approx(0.2, abs=0.02)
    sac = open_replay("sac", Slide, num_envs=200)
    assert len(take_rows(sac)["actions"][0].unique()) > 190


@pytest.mark.parametrize(("env", "algo"), [(Walk, "dqn"), (Slide, "sac")])
def test_actions_before_learning_are_random_and_held(env: Any, algo: str) -> None:
    session = open_replay(
        algo, env, num_envs=100, train_frequency=30_000, buffer_capacity=60_000, learning_starts=20_000,
        random_action_hold=5.0,
    )  # fmt: skip
    actions = take_rows(session, 0)["actions"].view(300, 100).double()
    middle = 0.5 if env is Walk else 0.0
    assert actions[:200].mean() == pytest.approx(middle, abs=0.02)
    kept = float((actions[1:200] == actions[:199]).double().mean())
    assert kept == pytest.approx(0.9 if env is Walk else 0.8, abs=0.02)  # a new one of two may be the same
    assert float((actions[201:] == actions[200:-1]).double().mean()) != pytest.approx(kept, abs=0.02)
    assert take_rows(session, 10**6)["actions"].shape[0] == 300
    drawn = open_replay(algo, env, random_action_hold=1.0)
    first, second = (take_rows(drawn, 0)["actions"] for _ in range(2))
    assert algo == "dqn" or not torch.equal(first, second)


def test_several_choices_are_drawn_at_once() -> None:
    """No learner of ours replays them; the collector draws what the spaces say."""
    session = open_replay("sac", Slide)
    collector: Any = session.collector
    spaces = type(session.spaces).from_gym("x", Turns.observation_space, Turns.action_space)
    collector.actor.spaces, collector._choices = spaces, torch.tensor(spaces.action_sizes)
    drawn = torch.stack([collector._act_randomly(1.0) for _ in range(50)]).flatten(0, 1)
    assert drawn.shape == (200, 2)
    assert [column.unique().tolist() for column in drawn.unbind(1)] == [[0, 1], [0, 1, 2]]


def test_time_outs_bootstrap_from_the_final_observation() -> None:
    """Five steps of 1 from 0.5 truncate at 5.5; a step of 2 more often terminates first."""
    session = open_replay("dqn", num_envs=64, train_frequency=640, gamma=0.5, n_step=2, buffer_capacity=5000)
    session.algorithm.set_number("epsilon", 1.0)
    take_rows(session)
    ring: Any = session.store.buffer  # type: ignore[attr-defined]
    batch = ring.gather(torch.arange(len(ring)))
    ends = batch["truncated"] | batch["terminated"]
    assert (batch["next_obs"][batch["truncated"] & ~batch["terminated"], 1] == 5.0).all()
    assert (batch["next_obs"][batch["truncated"], 0] >= 5.0).all()
    assert (batch["next_obs"][batch["terminated"], 0] >= 6.0).all()
    one_left = ends & (batch["next_obs"][:, 1] - batch["obs"][:, 1] == 1.0)  # windows of a single step
    wanted = torch.where(one_left, 0.5, 0.25).masked_fill(batch["terminated"], 0.0)
    assert torch.equal(batch["discounts"][: 9 * 64], wanted[: 9 * 64])
    assert one_left.any()
    assert (batch["truncated"] & ~batch["terminated"]).any()


@pytest.mark.parametrize(
    "algo", ["sac", "td3", "ddpg", "d4pg", "naf", "dqn", "noisy_dqn", "c51_dqn", "iqn", "fqf", "discrete_sac"]
)
def test_a_turn_reads_nothing_on_the_host(algo: str) -> None:
    ends = {"v_min": -1e3, "v_max": 1e3} if algo in ("d4pg", "c51_dqn") else {}
    is_discrete = algo.endswith(("dqn", "iqn", "fqf", "discrete_sac"))
    session = open_replay(algo, Walk if is_discrete else Slide, n_step=3, **ends)
    for step in (0, 10**6):
        take_rows(session, step)
    with Reads() as reads:
        for _ in range(20):
            take_steps(session, 10**6)
            session.store.sample()  # type: ignore[attr-defined]
    assert reads.count == 0


def test_a_turn_can_be_captured() -> None:
    """Storing and sampling, run as recorded operations without Python in between, do what plain calls do."""
    session = open_replay("sac", Slide, n_step=3)
    ring, other = (DeviceRing(40, 4, obs_shape=(2,), n_step=3, action_shape=(1,), continuous=True) for _ in range(2))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]

    def turn(step: dict[str, Tensor]) -> dict[str, Tensor]:
        ring.insert(**step)
        return ring.gather(ring.draw(8, generators[0]))

    captured = Recorded(turn, Numbers(), generators[0])
    for _ in range(PLAIN_CALLS + 20):
        take_rows(session)
        (row,) = session.collector.experience.rows()  # type: ignore[attr-defined]
        row = {name: value.clone() for name, value in row.items() if value is not None}
        found = captured(row)
        other.add(**row)
        assert_same(found, other.sample(8, generators[1]))
    assert captured.replays == [20]


@pytest.mark.parametrize(("algo", "env"), [("dqn", Walk), ("sac", Slide), ("td3", Slide)])
def test_captured_steps_are_plain_ones(algo: str, env: Any) -> None:
    plain, captured = (open_replay(algo, env, train_frequency=8) for _ in range(2))
    collector: Any = captured.collector
    collector._roll = Recorded(collector._roll_out, Numbers(), collector.actor.algorithm.generator)
    for turn in range(PLAIN_CALLS + 6):
        step = 10**6 if turn else 0  # the first steps are random, and never captured
        assert_same(take_rows(captured, step), take_rows(plain, step))
    assert collector._roll.replays == [5]
    assert_same(captured.collector.state_dict(), plain.collector.state_dict())


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_envs", "frequency", "per_turn", "updates"),
    [(256, 256, 2, 6), (256, 512, 3, 3), (64, 256, 1, 3), (4, 1, 1, 1024 - 256)],
)
def test_fewer_updates_than_rows_and_every_step_counts(
    num_envs: int, frequency: int, per_turn: int, updates: int, tmp_path: Path
) -> None:
    kwargs = {"train_frequency": frequency, "gradient_updates_per_step": per_turn, "learning_starts": 256}
    config = tiny("dqn", tmp_path, kwargs={**kwargs, "buffer_capacity": 2000}, num_envs=num_envs, total_timesteps=1024,
                  vectorization="device", eval_episodes=0)  # fmt: skip
    metrics = train(config, console=False).metrics
    assert (metrics["global_step"], metrics["updates"]) == (1024, updates)


@pytest.mark.parametrize("algo", ["ddpg", "c51_dqn"])
def test_runs_with_schedules_normalizers_and_short_rings_resume_exactly(algo: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "vectorization": "device", "num_envs": 4, "total_timesteps": 400, "log_interval": 1,
        "kwargs": {"n_step": 3, "buffer_capacity": 120, "gamma_schedule": {"start": 0.9, "end": 0.99},
                   "gradient_updates_per_step": 2},
        "env_kwargs": {"max_episode_steps": 15, "wrappers": {"normalize_observation": True}},
    }  # fmt: skip
    whole = train(tiny(algo, tmp_path / "whole", **given), console=False)
    parts = stop_and_resume(tiny(algo, tmp_path / "parts", **given), 60, 270)
    assert whole.metrics["episode_length_mean"] <= 15
    assert_same_run(whole, parts)


def test_a_checkpoint_may_lack_the_replay(tmp_path: Path) -> None:
    config = tiny("sac", tmp_path, vectorization="device", num_envs=4, total_timesteps=200).model_copy(
        update={"replay_in_checkpoint": False}
    )
    stopped = train(config, callbacks=[StopAt(100)], console=False)
    assert "replay" not in load_checkpoint(stopped.checkpoint_path)["source"]
    with pytest.warns(UserWarning, match="the checkpoint has no replay buffer; it is filled again"):
        resumed = resume_training(stopped.checkpoint_path, console=False)
    refill = 16  # learning_starts, without updates
    assert (resumed.metrics["global_step"], resumed.metrics["updates"]) == (200, (200 - 16 - refill) // 4 + 1)


def test_episodes_that_were_left_are_cut_in_the_ring() -> None:
    session = open_replay(train_frequency=8)
    take_rows(session, 0)
    session.collector.abandon()
    ring: Any = session.store.buffer  # type: ignore[attr-defined]
    shown = ring.gather(torch.arange(4, 8))
    take_rows(session, 8)
    cut = ring.gather(torch.arange(4, 8))
    assert torch.equal(cut["truncated"], ~shown["terminated"])
    assert torch.equal(cut["next_obs"], shown["next_obs"]), "the last observation that was seen"
    assert (ring.columns["obs"][8:12, 1] == 0).all(), "a new episode begins"


def test_the_replay_of_a_run_is_a_data_set(tmp_path: Path) -> None:
    config = tiny("dqn", tmp_path, vectorization="device", num_envs=4, total_timesteps=200)
    stopped = train(config, console=False)
    dataset, spaces = read_policy_replay(stopped.checkpoint_path)
    assert (len(dataset), spaces.env_id) == (200, "CartPole-v1")
    assert dataset.terminated.sum() > 4
    going = ~(dataset.terminated | dataset.truncated)
    np.testing.assert_array_equal(dataset.next_obs[:-1][going[:-1]], dataset.obs[1:][going[:-1]])


class Notes(Callback):
    """What a run says at its start."""

    def on_start(self, run: Run) -> None:
        self.said = " ".join(run.session.notes)


@pytest.mark.parametrize(
    ("algo", "kwargs", "why"),
    [
        ("dqn", {"prioritized": True}, "prioritized is true"), ("rainbow_dqn", {}, "prioritized is true"),
        ("r2d2", {}, "a policy with memory learns from sequences"),
        ("sac", {"replay_memory": "host"}, "replay_memory is 'host'"),
        ("rlpd", {}, "rlpd keeps what it learns from there"), ("sac", {}, None), ("ppo", {}, None),
    ],
)  # fmt: skip
def test_what_stays_on_the_host_is_said(algo: str, kwargs: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    config = tiny(algo, tmp_path, kwargs=kwargs, vectorization="device", num_envs=4)
    session = open_session(config)
    session.close()
    said = f"every transition is copied from the device to the host: {why}"
    assert (said in session.notes) == (why is not None)
    assert any("copied" in note for note in session.notes) == (why is not None)
    sync = open_session(config.model_copy(update={"vectorization": "sync"}))
    sync.close()
    assert not any("copied" in note for note in sync.notes)


@pytest.mark.parametrize(
    ("first", "then", "sentence"),
    [
        ("auto", "host", "kept its replay on the device, next to its environments; resume with replay_memory auto"),
        ("host", "auto", "kept its replay on the host; resume with replay_memory host"),
    ],
)
def test_a_resume_keeps_the_replay_where_it_was(first: str, then: str, sentence: str, tmp_path: Path) -> None:
    config = tiny("dqn", tmp_path, kwargs={"replay_memory": first}, vectorization="device", num_envs=4)
    stopped = train(config, callbacks=[StopAt(60)], console=False)
    with pytest.raises(UserError, match=sentence):
        resume_training(stopped.checkpoint_path, console=False, changes={"algo_kwargs": {"replay_memory": then}})


def test_samples_on_another_kind_of_device_are_said_not_to_be_exact(tmp_path: Path) -> None:
    config = tiny("dqn", tmp_path, vectorization="device", num_envs=4)
    stopped = train(config, callbacks=[StopAt(60)], console=False)

    def move(tree: Any) -> None:
        tree["source"]["sampler"]["device"] = "cuda"

    edited = edit_checkpoint(stopped.checkpoint_path, tmp_path / "moved.ckpt", move)
    with pytest.warns(UserWarning, match="samples are drawn on another kind of device now, so this resume is not exa"):
        resume_training(edited, console=False)


def test_a_reward_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    class Breaks(Walk):
        def step(self, state: Any, actions: Tensor, noise: Tensor) -> Any:
            state, rewards, terminated = super().step(state, actions, noise)
            return state, torch.where(state[:, 1] > 3.0, torch.nan, rewards), terminated

    config = tiny("dqn", tmp_path, vectorization="device", num_envs=4, env_id="breaks")
    with pytest.raises(EnvironmentFailure, match="breaks returned a reward or an observation"):
        train(config, env=Breaks, console=False)


@pytest.mark.parametrize("algo", ["c51_dqn", "d4pg"])
def test_a_support_moves_with_the_returns_in_the_ring(algo: str) -> None:
    session = open_replay(algo, Walk if algo == "c51_dqn" else Slide, v_min=0.0, v_max=1.0, widen_support="v_max")
    step = 0
    for _ in range(60):
        step += take_steps(session, step)
        for _, batch in session.store.batches(session.algorithm, step):
            session.algorithm.update(batch)
    learner: Any = session.algorithm
    support = (learner if algo == "c51_dqn" else learner.model).support
    largest = session.store.buffer.extremes()[3]  # type: ignore[attr-defined]
    assert largest > 60.0
    assert support[0] == 0.0
    assert support[-1] >= 0.9 * largest
    assert session.store.metrics["v_max"] == pytest.approx(float(support[-1]))


def test_the_log_has_the_episodes_and_the_start_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny("dqn", tmp_path, vectorization="device", num_envs=4, total_timesteps=400, log_interval=20)
    metrics = train(config, console=True).metrics
    assert metrics["episode_return_mean"] == metrics["episode_length_mean"] > 5
    said = "".join(capsys.readouterr())
    assert "replay of 500 transitions: " in said
    assert "in the memory of cpu" in said


@pytest.mark.slow
def test_sac_learns_on_the_device(tmp_path: Path) -> None:
    sac = SAC(
        "Pendulum-v1", vectorization="device", num_envs=16, train_frequency=16, gradient_updates_per_step=8,
        learning_rate=1e-3, gamma=0.98, learning_starts=500, buffer_capacity=50_000, hidden_sizes=[64, 64],
        eval_interval=0, device="cpu", output_dir=tmp_path,
    )  # fmt: skip
    assert sac.learn(7_000, progress=False).metrics["eval_return_mean"] > -400.0


@pytest.mark.slow
def test_dqn_learns_on_the_device(tmp_path: Path) -> None:
    dqn = DQN(
        "CartPole-v1", vectorization="device", num_envs=16, train_frequency=16, gradient_updates_per_step=8, n_step=3,
        learning_rate_schedule={"type": "linear", "start": 1e-3, "end": 0.0}, gamma=0.98, optimizer_eps=1e-4,
        learning_starts=500, random_action_hold=1.0, epsilon_end=0.04, buffer_capacity=50_000, hidden_sizes=[64, 64],
        eval_interval=0, device="cpu", output_dir=tmp_path,
    )  # fmt: skip
    assert dqn.learn(30_000, progress=False).metrics["eval_return_mean"] > 150.0  # at random: 22
