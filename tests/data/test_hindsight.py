"""`HindsightReplayBuffer` against episodes whose goals tell where they were achieved, and runs with goals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import goal_cases
from resume_cases import SPECS, assert_same, assert_same_run, stop_and_resume, tiny
from rl_training.data import ReplayBuffer
from rl_training.data.hindsight import HindsightReplayBuffer
from rl_training.envs.factory import read_recipe
from rl_training.envs.goal_tasks import BitFlip, PointReach
from rl_training.envs.goals import Goals
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import open_session
from rl_training.run.evaluation import read_replay_buffer
from rl_training.run.workflows import train
from worker_cases import assert_same_end, workers

GAMMA = 0.9
BITS, POINT = "rl_training.envs.goal_tasks:BitFlip", "rl_training.envs.goal_tasks:PointReach"


class Told:
    """Goals that are numbers, in columns 3 and 4; reaching one pays 0 instead of -1, and may end the episode."""

    achieved, desired, env_id = np.array([3]), np.array([4]), "Told-v0"

    def __init__(self, ends: bool = False) -> None:
        self.ends = self.recomputes_ends = ends

    def judge(self, achieved: Any, desired: Any) -> Any:
        reached = (achieved == desired)[:, 0]
        return np.where(reached, 0.0, -1.0).astype(np.float32), reached if self.ends else None


def see(env: int, episode: int, t: int) -> Any:
    """Environment, episode and step; the achieved goal has all three, the desired one is never reached."""
    return np.array([env, episode, t, 10_000 * env + 100 * episode + t, -1], np.float32)


def play(
    buffer: HindsightReplayBuffer, steps: int, lengths: list[int], start: int = 0, terminates: bool = False
) -> None:
    """Steps of all environments; episode k of environment i is as long as `lengths` says for k + i."""
    places = [place_of(env, start, lengths) for env in range(buffer.num_envs)]
    for _ in range(steps):
        obs = np.stack([see(env, *place) for env, place in enumerate(places)])
        after = [(episode, t + 1) for episode, t in places]
        done = np.array([t == lengths[(k + env) % len(lengths)] for env, (k, t) in enumerate(after)])
        finals = np.stack([see(env, *place) for env, place in enumerate(after)])
        places = [(k + 1, 0) if ended else (k, t) for ended, (k, t) in zip(done, after, strict=True)]
        buffer.add(
            obs, np.zeros(len(obs), np.int64), np.full(len(obs), -1.0), done & terminates, done & (not terminates),
            np.stack([see(env, *place) for env, place in enumerate(places)]), final_obs=finals if done.any() else None,
        )  # fmt: skip


def place_of(env: int, steps: int, lengths: list[int]) -> tuple[int, int]:
    """Episode and step of an environment after that many steps."""
    episode = 0
    while steps >= (length := lengths[(episode + env) % len(lengths)]):
        steps, episode = steps - length, episode + 1
    return episode, steps


def make(capacity: int = 60, num_envs: int = 1, strategy: str = "future", **more: Any) -> HindsightReplayBuffer:
    plain = {"goals": Told(), "obs_shape": (5,), "gamma": GAMMA}
    return HindsightReplayBuffer(capacity, num_envs, strategy=strategy, **{**plain, **more})


def draw(buffer: HindsightReplayBuffer, count: int = 3_000, ratio: float = 1.0, seed: int = 0) -> dict[str, Any]:
    return {name: x.numpy() for name, x in buffer.sample(count, np.random.default_rng(seed), ratio=ratio).items()}


def steps_of(batch: dict[str, Any]) -> Any:
    """Environment, episode and step of each row, and where its goal was achieved."""
    env, episode, t = batch["obs"][:, :3].astype(int).T
    goal = batch["obs"][:, 4].astype(int)
    return env, episode, t, goal // 10_000, goal // 100 % 100, goal % 100


def goals_at(t: int, buffer: HindsightReplayBuffer, episode: int = 0) -> dict[int, float]:
    """The share of each j (the goal was achieved after step j) among draws for step t."""
    _, episodes, steps, _, _, goals = steps_of(draw(buffer, 30_000))
    found = Counter((goals[(steps == t) & (episodes == episode)] - 1).tolist())
    return {j: count / sum(found.values()) for j, count in sorted(found.items())}


@pytest.mark.parametrize(
    ("strategy", "expected"), [("future", {2, 3, 4}), ("final", {4}), ("episode", {0, 1, 2, 3, 4})]
)
def test_goals_come_from_the_steps_that_the_strategy_says(strategy: str, expected: set[int]) -> None:
    """An episode of five steps, t = 2: `future` draws j from 2, 3, 4 with probability 1/3 each."""
    buffer = make(strategy=strategy)
    play(buffer, 15, [5])
    for episode in range(3):
        shares = goals_at(2, buffer, episode)
        assert shares.keys() == expected
        assert list(shares.values()) == pytest.approx([1 / len(expected)] * len(expected), abs=0.03)


def test_goals_of_an_episode_that_goes_on_come_from_what_is_stored() -> None:
    for strategy, expected in {"future": {1, 2}, "final": {2}, "episode": {0, 1, 2}}.items():
        buffer = make(strategy=strategy)
        play(buffer, 8, [5])
        assert goals_at(1, buffer, 1).keys() == expected
        play(buffer, 2, [5], start=8)
        assert max(goals_at(1, buffer, 1)) == 4, "what comes later counts too"


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("steps", [7, 30, 95])
def test_a_goal_is_achieved_in_its_own_episode_also_when_the_ring_is_full(
    strategy: str, num_envs: int, steps: int
) -> None:
    """Episodes of 3, 9 and 40 steps in rings of 20 rows, so that their beginnings are overwritten."""
    lengths = [3, 9, 40]
    buffer = make(20 * num_envs, num_envs, strategy)
    play(buffer, steps, lengths)
    batch = draw(buffer)
    env, episode, t, *goal, reached_at = steps_of(batch)
    assert (goal[0] == env).all()
    assert (goal[1] == episode).all()
    now = [place_of(i, steps, lengths) for i in range(num_envs)]
    last = [now[i][1] if k == now[i][0] else lengths[(k + i) % 3] for i, k in zip(env, episode, strict=True)]
    if strategy == "final":
        assert (reached_at == last).all()
    elif strategy == "future":
        assert (reached_at > t).all()
    assert (reached_at <= last).all()
    assert (reached_at >= 1).all()
    for name, step in (("obs", t), ("next_obs", t + 1)):
        truth = np.stack([see(*row) for row in zip(env, episode, step, strict=True)])
        np.testing.assert_array_equal(batch[name][:, :4], truth[:, :4])
        np.testing.assert_array_equal(batch[name][:, 4], 10_000 * env + 100 * episode + reached_at)
    np.testing.assert_array_equal(batch["rewards"], np.where(reached_at == t + 1, 0.0, -1.0))
    assert {tuple(row) for row in np.stack([env, t]).T} >= {(i, now[i][1] - 1) for i in range(num_envs) if now[i][1]}


def test_the_own_next_goal_always_pays() -> None:
    """At j = t the sparse reward is 0; the last step of an episode has no other j, if the strategy looks ahead."""
    for strategy in ("future", "final"):
        buffer = make(strategy=strategy)
        play(buffer, 25, [5])
        batch = draw(buffer)
        ends = batch["truncated"]
        assert ends.any()
        assert (batch["rewards"][ends] == 0.0).all()
        assert (batch["discounts"] == np.float32(GAMMA)).all(), "a truncation bootstraps"


def test_an_episode_that_someone_else_moved_ends_there() -> None:
    buffer = make()
    play(buffer, 8, [50])
    play(buffer, 5, [50], start=20)
    _, _, t, _, _, reached_at = steps_of(draw(buffer))
    assert (reached_at[t < 8] <= 8).all()
    assert (reached_at[t >= 20] > 20).all()


@pytest.mark.parametrize(("ratio", "size", "changed"), [(0.8, 256, 204), (0.29, 100, 29), (0.0, 10, 0), (1.0, 7, 7)])
def test_a_share_of_every_batch_gets_new_goals(ratio: float, size: int, changed: int) -> None:
    buffer = make()
    play(buffer, 25, [5])
    batch = draw(buffer, size, ratio)
    assert (batch["obs"][:, 4] != -1).tolist() == [True] * changed + [False] * (size - changed)
    assert (batch["next_obs"][:, 4] == batch["obs"][:, 4]).all()
    assert (batch["rewards"][changed:] == -1.0).all()


def test_without_new_goals_samples_are_those_of_plain_replay() -> None:
    ours, plain = make(strategy="episode", n_step=2), ReplayBuffer(60, 1, obs_shape=(5,), gamma=GAMMA, n_step=2)
    for buffer in (ours, plain):
        play(buffer, 33, [4, 7])  # type: ignore[arg-type]
    one, other = (buffer.sample(40, np.random.default_rng(1)) for buffer in (ours, plain))
    assert_same(dict(sorted(one.items())), dict(sorted(other.items())))


# ends ----------------------------------------------------------------------------------------------------------------


def test_ends_are_those_of_the_new_goal_if_the_environment_tells_them() -> None:
    """Episodes terminate after five steps: under another goal that is a truncation, and reaching the goal an end."""
    buffer = make(goals=Told(ends=True))
    play(buffer, 25, [5], terminates=True)
    batch = draw(buffer, ratio=0.5)
    _, _, t, _, _, reached_at = steps_of(batch)
    new = np.arange(3_000) < 1_500
    np.testing.assert_array_equal(batch["terminated"], np.where(new, reached_at == t + 1, t == 4))
    np.testing.assert_array_equal(batch["truncated"], np.zeros(3_000, bool))
    np.testing.assert_array_equal(batch["dones"], batch["terminated"])
    np.testing.assert_array_equal(batch["discounts"] == 0.0, batch["terminated"])

    episode = make(goals=Told(ends=True), strategy="episode")
    play(episode, 25, [5], terminates=True)
    batch = draw(episode)
    _, _, t, _, _, reached_at = steps_of(batch)
    np.testing.assert_array_equal(batch["truncated"], (t == 4) & (reached_at != 5))
    assert (batch["discounts"][batch["truncated"]] == np.float32(GAMMA)).all()


def test_otherwise_ends_stay_as_they_were_stored() -> None:
    buffer = make(strategy="episode")
    with pytest.warns(UserWarning, match="an episode of Told-v0 terminated, but it has no compute_terminated") as said:
        play(buffer, 25, [5], terminates=True)
    assert len(said) == 1
    batch = draw(buffer)
    _, _, t, _, _, _ = steps_of(batch)
    np.testing.assert_array_equal(batch["terminated"], t == 4)
    assert not batch["truncated"].any()


@pytest.mark.parametrize("ends", [False, True])
def test_a_window_of_several_steps_has_one_goal_and_its_rewards(ends: bool) -> None:
    """Three steps, episodes of five: the sums, discounts and last observations, computed one by one."""
    buffer = make(goals=Told(ends), n_step=3)
    play(buffer, 20, [5])
    batch = draw(buffer)
    _, episode, t, _, _, reached_at = steps_of(batch)
    for i in range(500):
        steps = [s for s in range(t[i] + 1, t[i] + 4) if s <= 5]
        if ends and reached_at[i] in steps:
            steps = steps[: steps.index(reached_at[i]) + 1]
        paid = sum(GAMMA**n * (0.0 if s == reached_at[i] else -1.0) for n, s in enumerate(steps))
        assert batch["rewards"][i] == pytest.approx(paid, abs=1e-6)
        over = ends and reached_at[i] == steps[-1]
        assert batch["discounts"][i] == pytest.approx(0.0 if over else GAMMA ** len(steps))
        assert batch["terminated"][i] == over
        assert batch["next_obs"][i, 2] == steps[-1]
        assert batch["next_obs"][i, 1] == episode[i]


def test_a_restored_buffer_continues_in_the_middle_of_an_episode() -> None:
    one, other = make(40, 2), make(40, 2)
    play(one, 33, [5, 30])
    other.load_state_dict(one.state_dict())
    for buffer in (one, other):
        play(buffer, 9, [5, 30], start=33)
    assert_same(draw(one), draw(other))
    with pytest.raises(UserError, match="the stored replay buffer has hindsight None, this one True"):
        make(60).load_state_dict(ReplayBuffer(60, 1, obs_shape=(5,)).state_dict())


# environments --------------------------------------------------------------------------------------------------------


def goals_of(env: Any, **kwargs: Any) -> Goals:
    recipe = read_recipe(env.__name__, kwargs, env)
    return Goals(recipe, probe_spaces(recipe), 0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (CartPoleEnv, "must be a Dict with observation, achieved_goal and desired_goal"),
        (goal_cases.NoReward, r"failed in compute_reward\(achieved_goal"),
        (goal_cases.OtherGoals, "of the same kind and shape"),
        (goal_cases.ImageGoals, "of the same kind and shape"),
        (goal_cases.ReadsInfo, "compute_reward of ReadsInfo reads info, which replay does not store"),
    ],
)
def test_environments_whose_goals_cannot_change_are_refused(env: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        goals_of(env)


def test_a_missing_reward_function_is_named() -> None:
    class Without(goal_cases.NoReward):
        def __getattribute__(self, name: str) -> Any:
            if name == "compute_reward":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with pytest.raises(UserError, match="Without has no compute_reward"):
        goals_of(Without)


@pytest.mark.parametrize("env", [goal_cases.Corridor, goal_cases.EndsThere, goal_cases.OneByOne, goal_cases.NeverEnds,
                                 goal_cases.DiscreteGoal, goal_cases.WithCamera])  # fmt: skip
def test_the_environment_judges_encoded_goals(env: Any) -> None:
    """Rewards and ends of six pairs; a function that takes one pair is called for each."""
    goals = goals_of(env)
    made = env()
    rows = []
    for place, aim in [(0, 0), (1, 0), (0, 1), (3, 3), (2, 4), (4, 2)]:
        made.t, made.place, made.aim = 0, place, aim
        rows.append(goal_cases.gym.spaces.flatten(made.observation_space, made.observe()))
    encoded = probe_spaces(read_recipe("", {}, env)).encode(np.stack(rows))
    rewards, ends = goals.judge(encoded[:, goals.achieved], encoded[:, goals.desired])
    same = [True, False, False, True, False, False]
    assert rewards.tolist() == [0.0 if reached else -1.0 for reached in same]
    assert rewards.dtype == np.float32
    told = {goal_cases.Corridor: None, goal_cases.WithCamera: None, goal_cases.NeverEnds: [False] * 6}.get(env, same)
    assert (None if ends is None else ends.tolist()) == told
    calls = [note for note in goals.notes if "takes no batches" in note]
    assert len(calls) == (2 if env is goal_cases.OneByOne else 0)
    goals.close()


def test_rewards_of_new_goals_are_clipped_like_the_others() -> None:
    goals = goals_of(goal_cases.Corridor, wrappers={"clip_reward": [-0.25, 1.0]})
    pair = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert goals.judge(*pair)[0].tolist() == [-0.25]
    assert goals.notes == []


def test_a_step_that_pays_something_else_is_noted() -> None:
    (note,) = goals_of(goal_cases.PaysMore).notes
    assert "a step of PaysMore paid -1.5 and compute_reward says -1" in note


def test_the_two_tasks_are_what_they_say() -> None:
    bits, point = BitFlip(4), PointReach()
    seen, _ = bits.reset(seed=0)
    for bit in np.flatnonzero(seen["observation"] != seen["desired_goal"]):
        seen, reward, terminated, truncated, info = bits.step(bit)
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, True, False, True)
    bits.reset(seed=0)
    assert [bits.step(0)[2:4] for _ in range(4)][-1] == (False, True)
    seen, _ = point.reset(seed=1)
    for _ in range(50):  # brakes on its way
        pull = 2.0 * (seen["desired_goal"] - seen["achieved_goal"]) - 6.0 * seen["observation"][3:]
        seen, reward, terminated, truncated, info = point.step(pull.clip(-1.0, 1.0))
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, False, True, True)


# runs ----------------------------------------------------------------------------------------------------------------

FAMILIES = ["dqn", "n_step_dqn", "c51_dqn", "discrete_sac", "ddpg", "td3", "d4pg", "naf", "sac", "tqc"]


def goal_run(algo: str, output: Path, make_config: Any = tiny, **fields: Any) -> Any:
    kwargs = {"her_ratio": 0.8, **fields.pop("kwargs", {})}
    discrete = "discrete" in SPECS[algo].action_kinds
    env = {"env_id": BITS, "env_kwargs": {"bits": 5}} if discrete else {"env_id": POINT}
    return make_config(algo, output, **{**env, **fields}, kwargs=kwargs)


@pytest.mark.parametrize("algo", FAMILIES)
def test_runs_with_goals_resume_exactly(algo: str, tmp_path: Path) -> None:
    ends = {"v_min": -50.0, "v_max": 0.0} if "v_min" in SPECS[algo].params.model_fields else {}
    config = goal_run(algo, tmp_path, num_envs=2, kwargs={"buffer_capacity": 60, "her_strategy": "episode", **ends})
    assert_same_run(train(config, console=False), stop_and_resume(config, 71))


def test_workers_collect_for_hindsight(tmp_path: Path) -> None:
    config = goal_run("sac", tmp_path, workers, total_timesteps=90)
    assert_same_end(train(config, console=False), stop_and_resume(config, 51))


def test_processes_step_the_same_goals(tmp_path: Path) -> None:
    configs = [goal_run("dqn", tmp_path, num_envs=2, vectorization=kind) for kind in ("sync", "async")]
    ends = [load_checkpoint(train(config, console=False).checkpoint_path)["algorithm"] for config in configs]
    assert_same(*ends)


@pytest.mark.parametrize(
    ("algo", "kwargs", "said"),
    [
        ("dqn", {"prioritized": True}, "prioritized true; an error belongs to one goal, so it must be false"),
        ("dqn", {"replay_memory": "device"}, "goals are replaced on the host: auto or host"),
        ("rlpd", {}, "with prior data it must be 0"),
        ("mbpo", {}, "with a model it must be 0"),
        ("c51_dqn", {}, "returns of other goals are not measured: give v_min and v_max"),
        ("dqn", {"her_strategy": "next"}, "her_strategy"),
    ],
)
def test_settings_that_do_not_go_with_hindsight_are_refused(
    algo: str, kwargs: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        open_session(goal_run(algo, tmp_path, kwargs=kwargs))
    assert list(tmp_path.iterdir()) == []


def test_an_environment_without_goals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="her_ratio is above 0, but the observation space of CartPole-v1 is Box"):
        open_session(tiny("dqn", tmp_path, kwargs={"her_ratio": 0.5}))


def test_the_start_says_what_is_done(tmp_path: Path) -> None:
    config = goal_run("dqn", tmp_path, kwargs={"her_strategy": "final"}, env_id="goal_cases:OneByOne", env_kwargs={})
    with pytest.warns(UserWarning, match="takes no batches of goals, so it is called once for every row"):
        result = train(config, console=False)
    messages = " ".join(json.loads((result.run_dir / "manifest.json").read_text())["messages"])
    assert "0.8 of every batch with other goals (final)" in messages
    assert "compute_reward of goal_cases:OneByOne takes no batches of goals" in messages
    assert len(read_replay_buffer(result.checkpoint_path)) == 128, "also without its goals"
