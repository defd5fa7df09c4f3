"""Engines and the stepper: streams that depend on the seed alone, true last observations, exact states, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import env_zoo
from rl_training.envs import stepper
from rl_training.envs.engines import choose_vectorization, make_engine
from rl_training.envs.factory import read_recipe
from rl_training.envs.hidden_state import hidden_state
from rl_training.envs.probe import probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import Episode, ReplayableEpisodes, Stepper
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint

ATARI_KWARGS = {"frameskip": 1, "wrappers": {"atari": {"noop_max": 3, "frame_stack": 2}}, "max_episode_steps": 12}


@contextmanager
def opened(
    env_id: str, vectorization: str = "sync", num_envs: int = 2, seed: int = 7, **env_kwargs: Any
) -> Iterator[Stepper]:
    recipe = read_recipe(env_id, env_kwargs)
    spaces = probe_spaces(recipe)
    stepper = Stepper(make_engine(recipe, spaces, num_envs, seed, vectorization), spaces, num_envs)
    try:
        yield stepper
    finally:
        stepper.close()


def choose(spaces: EnvSpaces, num_envs: int, rng: np.random.Generator, masks: Any) -> Any:
    """Random actions of a policy; with masks, legal ones."""
    if spaces.action_kind == "continuous":
        return rng.uniform(-1, 1, (num_envs, spaces.action_dim)).astype(np.float32)
    scores = rng.random((num_envs, spaces.action_dim)) * (1.0 if masks is None else masks)
    ends = np.cumsum(spaces.action_sizes)
    parts = [scores[:, end - size : end].argmax(1) for end, size in zip(ends, spaces.action_sizes, strict=True)]
    return parts[0] if spaces.action_kind == "discrete" else np.stack(parts, 1)


def record(stepper: Stepper, steps: int, seed: int = 0) -> list[Any]:
    """Everything that happens in `steps` steps of actions that depend on `seed`."""
    stepper.start()
    rng = np.random.default_rng(seed)
    history: list[Any] = [stepper.obs.copy()]
    for _ in range(steps):
        result, ended = stepper.step(choose(stepper.spaces, stepper.num_envs, rng, stepper.masks))
        if result.final_obs is not None:
            result = result._replace(final_obs=result.final_obs[result.terminated | result.truncated])
        history.append([None if part is None else np.array(part) for part in result])
        history += [ended, stepper.is_first.copy()]
    return history


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    else:
        assert left == right


# ---- streams ---------------------------------------------------------------------------------------------------------

EVERY_KIND = [
    "CartPole-v1",
    "Pendulum-v1",
    "env_zoo:DictObservation",
    "env_zoo:TupleObservation",
    "env_zoo:MinAtarLike",
    "env_zoo:DiscreteObservation",
    "env_zoo:Masked",
    "env_zoo:MaskedFactors",
    "env_zoo:MultiBinaryActions",
    "env_zoo:MultiDiscreteActions",
    "env_zoo:ShiftedDiscrete",
    "env_zoo:BoxActions",
]


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_the_same_seed_gives_the_same_stream(vectorization: str) -> None:
    streams = []
    for seed in (7, 7, 8):
        with opened("CartPole-v1", vectorization, seed=seed) as stepper:
            streams.append(record(stepper, 40))
    assert_same(streams[0], streams[1])
    assert not np.array_equal(streams[0][0], streams[2][0])
    assert not np.array_equal(streams[0][0][0], streams[0][0][1]), "environments side by side must differ"


@pytest.mark.parametrize("env_id", EVERY_KIND)
def test_processes_give_what_one_process_gives(env_id: str) -> None:
    kwargs = {} if env_id.startswith("env_zoo") else {"max_episode_steps": 6}
    streams = []
    for vectorization in ("sync", "async"):
        with opened(env_id, vectorization, **kwargs) as stepper:
            streams.append(record(stepper, 14))
    assert_same(*streams)
    assert any(isinstance(part, list) and part and isinstance(part[0], Episode) for part in streams[0])


def test_each_episode_starts_differently() -> None:
    with opened("env_zoo:Walk", length=1) as stepper:
        starts = {float(row[0][0, 0]) for row in record(stepper, 20)[1::3]}
    assert len(starts) == 20


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("name", ["Walk", "ReusesItsArray"])
def test_final_obs_is_the_true_last_observation(name: str, vectorization: str) -> None:
    """The walk's reward is its position and its observation holds the clock, so the truth is known anyway."""
    ends = 0
    with opened(f"env_zoo:{name}", vectorization, length=3) as stepper:
        stepper.start()
        clock = np.zeros(2)
        for _ in range(12):
            result, episodes_ended = stepper.step(np.zeros(2, dtype=np.int64))
            clock += 1
            done = result.terminated | result.truncated
            assert (result.final_obs is None) == (not done.any())
            for row in np.flatnonzero(done):
                assert result.final_obs is not None
                assert np.array_equal(result.final_obs[row], [result.rewards[row], clock[row]])
                assert result.obs[row, 1] == 0
            assert len(episodes_ended) == done.sum()
            clock[done] = 0
            ends += int(done.sum())
            assert np.array_equal(stepper.is_first, done)
            assert np.array_equal(stepper.obs[:, 1], clock)
    assert ends >= 6


@pytest.mark.parametrize(("name", "terminated"), [("AlwaysTruncates", False), ("AlwaysTerminates", True)])
def test_terminations_and_truncations_stay_apart(name: str, terminated: bool) -> None:
    with opened(f"env_zoo:{name}", length=2) as stepper:
        stepper.start()
        results = [stepper.step(np.zeros(2, dtype=np.int64)) for _ in range(2)]
    assert results[1][0].terminated.tolist() == [terminated] * 2
    assert results[1][0].truncated.tolist() == [not terminated] * 2
    assert results[1][1] == [Episode(2.0, 2)] * 2


def test_native_reset_rows_are_marked_and_not_counted() -> None:
    """Against a plain simulation of next-step autoreset: who ended resets in the next step, and that is no step."""
    with opened("CartPole-v1", "native", num_envs=4, max_episode_steps=15) as stepper:
        stepper.start()
        rng = np.random.default_rng(0)
        ended_before = np.zeros(4, dtype=bool)
        lengths = np.zeros(4, dtype=int)
        counted = finished = 0
        for _ in range(120):
            before = stepper.obs
            result, ended = stepper.step(rng.integers(0, 2, 4))
            valid = np.ones(4, dtype=bool) if result.valid is None else result.valid
            assert np.array_equal(valid, ~ended_before)
            assert (result.valid is None) == (not ended_before.any())
            assert not result.rewards[~valid].any()
            assert not (result.terminated | result.truncated)[~valid].any()
            assert np.array_equal(stepper.is_first, ~valid)
            assert np.abs(result.obs[~valid]).max(initial=0) <= 0.05
            assert (np.abs(before[~valid]).max(1, initial=0) > 0.05).all(), "a reset row holds the final observation"
            lengths = np.where(valid, lengths + 1, 0)
            ended_before = result.terminated | result.truncated
            assert [episode.length for episode in ended] == lengths[ended_before].tolist()
            assert [episode.episode_return for episode in ended] == lengths[ended_before].tolist()
            assert (lengths[result.truncated] == 15).all()
            counted += int(valid.sum())
            finished += len(ended)
    assert counted == 480 - finished + int(ended_before.sum())


def test_native_episodes_are_those_of_the_plain_environment() -> None:
    """The same start and actions give the same episode whatever engine steps them."""
    with opened("CartPole-v1", "native") as native, opened("CartPole-v1", "sync") as sync:
        native.start()
        sync.start()
        for env, state in zip(sync.engine.envs, native.engine.env.state.T, strict=True):  # type: ignore[attr-defined]
            env.unwrapped.state = np.array(state)
        for _ in range(100):
            actions = np.array([0, 1])
            one, ended = native.step(actions)
            other, ended_too = sync.step(actions)
            assert np.allclose(one.rewards, other.rewards)
            assert ended == ended_too
            if ended:
                assert other.final_obs is not None
                rows = one.terminated
                assert np.allclose(one.obs[rows], other.final_obs[rows], atol=1e-6)
                return
            assert np.allclose(one.obs, other.obs, atol=1e-6)
    pytest.fail("no episode ended")


def test_native_time_limit_is_the_one_asked_for() -> None:
    for env_id, kwargs, limit in (("CartPole-v0", {}, 200), ("CartPole-v1", {"max_episode_steps": 9}, 9)):
        with opened(env_id, "native", **kwargs) as stepper:
            assert stepper.engine.env.max_episode_steps == limit  # type: ignore[attr-defined]


@pytest.mark.parametrize(("limit", "steps"), [(None, 220), (10, 8), (112, 30)])  # 112: one loses a life there
def test_native_atari_is_atari_with_our_wrappers(limit: int | None, steps: int) -> None:
    """Without sticky actions and no-ops nothing is random, and every pixel, reward and end is that of sync."""
    pytest.importorskip("ale_py")
    wrappers = {"atari": {"noop_max": 0, "terminal_on_life_loss": True}, "clip_reward": (-1.0, 0.5)}
    kwargs = {"frameskip": 1, "repeat_action_probability": 0.0, "max_episode_steps": limit, "wrappers": wrappers}
    streams = []
    for vectorization in ("sync", "native"):
        with opened("ALE/Breakout-v5", vectorization, **kwargs) as stepper:
            streams.append(record(stepper, steps, seed=10))
    assert_same(*streams)
    _, rewards, terminated, truncated, *_ = zip(*streams[0][1::3], strict=True)
    assert (np.any(truncated), np.max(rewards)) == ((True, 0.0) if limit else (False, 0.5))
    assert np.sum(terminated) == (0 if limit else 13)  # the five lives of a first game each, and some of a second


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_a_lost_life_ends_the_episode_and_not_the_game(vectorization: str) -> None:
    pytest.importorskip("ale_py")
    kwargs = {"frameskip": 1, "wrappers": {"atari": {"terminal_on_life_loss": True}}}
    lives: list[int] = []
    with opened("ALE/Breakout-v5", vectorization, 1, **kwargs) as stepper:
        engine: Any = stepper.engine
        stepper.start()
        for turn in range(400):
            result, _ = stepper.step(np.array([(1, 2, 2, 2)[turn % 4]]))  # fire, and go right
            if result.terminated[0]:
                now = engine.envs[0].unwrapped.ale.lives() if vectorization == "sync" else int(engine._lives[0])
                lives.append(now)
                assert result.final_obs is not None
                same = np.array_equal(result.final_obs[0, -1], result.obs[0, -1])
                assert same == (now < 5)  # the frame with which the game goes on
                assert (result.obs[0] == result.obs[0, -1]).all()  # nothing from before the episode
    assert lives[:6] == [4, 3, 2, 1, 5, 4]


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Acrobot-v1", "Hopper-v5"])
def test_a_pool_marks_its_reset_rows_and_keeps_the_final_observation(env_id: str) -> None:
    pytest.importorskip("envpool")
    with opened(env_id, "native", num_envs=3, max_episode_steps=5) as stepper, opened(env_id, num_envs=3) as sync:
        sync.start()
        history = record(stepper, 12)
        assert (history[0].dtype, history[0].shape) == (sync.obs.dtype, sync.obs.shape)
        assert len({row.tobytes() for row in history[0]}) == 3, "environments side by side must differ"
        assert stepper.state_dict() == {}
    clocks = np.zeros(3, dtype=int)
    for (_, rewards, terminated, truncated, final_obs, _, valid, *_), ended, is_first in zip(
        history[1::3], history[2::3], history[3::3], strict=True
    ):
        done, resets = clocks == 5, np.zeros(3, bool) if valid is None else ~valid
        assert resets.tolist() == is_first.tolist() == done.tolist()
        assert not rewards[resets].any()
        clocks = np.where(resets, 0, clocks + 1)
        assert truncated.tolist() == (clocks == 5).tolist()
        assert [episode.length for episode in ended] == [5] * int(truncated.sum())
        assert final_obs is None
        assert not terminated.any()


def test_a_pool_plays_the_plain_environment() -> None:
    pytest.importorskip("envpool")
    with opened("Pendulum-v1", "native") as pool, opened("Pendulum-v1") as sync:
        pool.start()
        sync.start()
        for env, (x, y, speed) in zip(sync.engine.envs, pool.obs, strict=True):  # type: ignore[attr-defined]
            env.unwrapped.state = np.array([np.arctan2(y, x), speed], dtype=np.float64)
        for actions in np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 2, 1):
            one, other = pool.step(actions)[0], sync.step(actions)[0]
            assert np.allclose(one.obs, other.obs, atol=1e-3)
            assert np.allclose(one.rewards, other.rewards, atol=1e-3)


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_auto_prefers_vector_code_that_resumes_exactly() -> None:
    def chosen(env_id: str, num_envs: int, **env_kwargs: Any) -> str:
        return choose_vectorization("auto", read_recipe(env_id, env_kwargs), num_envs)

    assert chosen("CartPole-v1", 8) == "native"
    assert chosen("CartPole-v1", 8, wrappers={"normalize_observation": True}) == "native"
    assert chosen("CartPole-v1", 1) == "sync"
    assert chosen("CartPole-v1", 8, wrappers={"frame_stack": 2}) == "sync"
    assert chosen("Pendulum-v1", 8) == "sync"
    assert chosen("env_zoo:Walk", 8) == "sync"
    assert choose_vectorization("async", read_recipe("Pendulum-v1", {}), 2) == "async"
    with pytest.raises(UserError, match="has no vector implementation"):
        choose_vectorization("native", read_recipe("env_zoo:Walk", {}), 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"difficulty": 1}, "has no env_kwargs.difficulty"),
        ({"wrappers": {}}, "needs env_kwargs.wrappers.atari"),
        ({"wrappers": {"atari": {}, "frame_stack": 2}}, "its only other wrapper is clip_reward"),
    ],
)
def test_native_atari_is_taken_only_on_request_and_where_it_fits(change: dict[str, Any], words: str) -> None:
    pytest.importorskip("ale_py")
    recipe = read_recipe("ALE/Pong-v5", ATARI_KWARGS)
    assert choose_vectorization("auto", recipe, 8) == "sync"
    assert choose_vectorization("native", recipe, 8) == "native"
    with pytest.raises(UserError, match=words):
        choose_vectorization("native", read_recipe("ALE/Pong-v5", {**ATARI_KWARGS, **change}), 8)


# ---- states ----------------------------------------------------------------------------------------------------------


def through_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    state = load_checkpoint(save_checkpoint(folder / "state", {"state": state}, durable=False))["state"]
    return state


def assert_continues(env_id: str, vectorization: str, tmp_path: Path, before: int, after: int, **kwargs: Any) -> None:
    """`before` steps, a checkpoint, `after` steps; then the same `after` steps from the checkpoint in a new engine."""
    with opened(env_id, vectorization, **kwargs) as stepper:
        record(stepper, before)
        state = through_file(stepper.state_dict(), tmp_path)
        went_on = record(stepper, after, seed=1)
    with opened(env_id, vectorization, **kwargs) as stepper:
        assert stepper.load_state_dict(state) == []
        assert_same(went_on, record(stepper, after, seed=1))


@pytest.mark.parametrize("vectorization", ["sync", "native", "async"])
@pytest.mark.parametrize("before", [0, 1, 33])
def test_cartpole_goes_on_exactly(vectorization: str, before: int, tmp_path: Path) -> None:
    assert_continues("CartPole-v1", vectorization, tmp_path, before, 60, max_episode_steps=25)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Acrobot-v1", "InvertedPendulum-v5", "Hopper-v5"])
def test_other_environments_go_on_exactly(env_id: str, tmp_path: Path) -> None:
    if env_id.endswith("-v5"):
        pytest.importorskip("mujoco")
    assert_continues(env_id, "sync", tmp_path, 33, 40, max_episode_steps=20)


@pytest.mark.parametrize("env_id", EVERY_KIND[2:])
def test_every_kind_of_space_goes_on_exactly(env_id: str, tmp_path: Path) -> None:
    assert_continues(env_id, "sync", tmp_path, 7, 12)


@pytest.mark.parametrize("before", [5, 30])
def test_atari_goes_on_exactly(before: int, tmp_path: Path) -> None:
    """At 5 steps inside the first, seeded, episode; at 30 in a later one, from the emulator's own state."""
    pytest.importorskip("ale_py")
    assert_continues("ALE/Breakout-v5", "sync", tmp_path, before, 20, **ATARI_KWARGS)


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_a_game_goes_on_exactly_after_a_lost_life(vectorization: str, tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    kwargs = {"frameskip": 1, "wrappers": {"atari": {"noop_max": 3, "terminal_on_life_loss": True}}}
    assert_continues("ALE/Breakout-v5", vectorization, tmp_path, 75, 60, **kwargs)


@pytest.mark.parametrize(("sticky", "most_steps"), [(0.0, 20), (0.25, 20), (0.25, 300)])
def test_native_atari_goes_on_exactly(
    sticky: float, most_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no-ops, after each emulator was seeded again, each at the end of a game of its own, and reset since."""
    pytest.importorskip("ale_py")
    monkeypatch.setattr("rl_training.envs.native.MOST_STEPS", most_steps)
    monkeypatch.setattr("rl_training.envs.native.MOST_RESETS", 1)
    atari = {"frame_stack": 3, "terminal_on_life_loss": True}
    kwargs = {"frameskip": 1, "repeat_action_probability": sticky, "wrappers": {"atari": atari}}
    assert_continues("ALE/Breakout-v5", "native", tmp_path, 560, 30, **kwargs)
    state = load_checkpoint(tmp_path / "state")["state"]["engine"]
    assert state["seedings"].min() > 0
    assert len(set(state["since"].tolist())) == 2
    assert len(state["played"]) < 280
    assert (state["resets"].max() > 0) == (sticky == 0.0)


def test_native_atari_refuses_a_state_with_an_unknown_action_or_too_many_resets() -> None:
    """Either would hang the run, the first in a thread of the emulators."""
    pytest.importorskip("ale_py")
    with opened("ALE/Breakout-v5", "native", **ATARI_KWARGS) as stepper:
        record(stepper, 2)
        state = stepper.state_dict()
        engine = state["engine"]
        for wrong in ({"played": engine["played"] + np.uint8(99)}, {"resets": engine["resets"] + 10**9}):
            with pytest.raises(UserError, match="does not exist"):
                stepper.load_state_dict({**state, "engine": engine | wrong})


@pytest.mark.slow
def test_atari_in_processes_goes_on_exactly(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    assert_continues("ALE/Breakout-v5", "async", tmp_path, 30, 20, **ATARI_KWARGS)


def test_a_scalar_float_action_replays_in_its_own_width(tmp_path: Path) -> None:
    with opened("env_zoo:ScalarActions") as stepper:
        record(stepper, 3)
        kept = [env.actions() for env in stepper.engine.envs]  # type: ignore[attr-defined]
    assert all(actions.dtype == np.float32 and actions.shape == (3,) for actions in kept)
    assert_continues("env_zoo:ScalarActions", "sync", tmp_path, 3, 9)


def test_sync_and_async_read_each_others_states(tmp_path: Path) -> None:
    with opened("env_zoo:Masked") as stepper:
        record(stepper, 7)
        state = through_file(stepper.state_dict(), tmp_path)
        went_on = record(stepper, 8, seed=1)
    with opened("env_zoo:Masked", "async") as stepper:
        assert stepper.load_state_dict(state) == []
        assert_same(went_on, record(stepper, 8, seed=1))


def test_a_state_from_before_the_first_step_is_a_fresh_start(tmp_path: Path) -> None:
    for vectorization in ("sync", "native"):
        with opened("CartPole-v1", vectorization) as stepper, opened("CartPole-v1", vectorization) as other:
            assert other.load_state_dict(through_file(stepper.state_dict(), tmp_path)) == []
            assert_same(record(stepper, 5), record(other, 5))


def test_abandoned_episodes_do_not_count_in_the_next_ones() -> None:
    with opened("env_zoo:Misbehaves", length=5) as stepper:
        record(stepper, 3)
        stepper.abandon()
        assert stepper.is_first.all()
        stepper.start()
        ended = [episode for _ in range(5) for episode in stepper.step(np.zeros(2, dtype=np.int64))[1]]
        assert [episode.length for episode in ended] == [5, 5]


def test_a_state_does_not_change_after_it_was_taken() -> None:
    for vectorization in ("sync", "native"):
        with opened("CartPole-v1", vectorization) as stepper, opened("CartPole-v1", vectorization) as other:
            record(stepper, 5)
            state = stepper.state_dict()
            went_on = record(stepper, 30, seed=1)
            assert other.load_state_dict(state) == []
            assert_same(went_on, record(other, 30, seed=1))


def test_an_environment_that_does_not_replay_is_named() -> None:
    with opened("env_zoo:NotReplayable", length=50) as stepper, opened("env_zoo:NotReplayable", length=50) as other:
        record(stepper, 2)
        sentences = other.load_state_dict(stepper.state_dict())
        assert len(sentences) == 1
        assert "env_zoo:NotReplayable did not replay to the stored observation and return and " in sentences[0]
        positions = [env.unwrapped.position for env in other.engine.envs]  # type: ignore[attr-defined]
        assert np.array_equal(other.obs[:, 0], np.asarray(positions, dtype=np.float32))
        record(other, 5)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ScalesByHistory", "return and ScalesByHistory.begun, so this resume is not exact"),
        ("MasksByHistory", "action mask and MasksByHistory.begun, so this resume is not exact"),
        ("OwnGenerator", "OwnGenerator.own, so this resume may not be exact"),
    ],
)
def test_what_no_observation_shows_is_named_too(name: str, what: str, vectorization: str) -> None:
    with opened(f"env_zoo:{name}", vectorization) as stepper, opened(f"env_zoo:{name}", vectorization) as other:
        record(stepper, 7)  # between two ends
        sentences = other.load_state_dict(stepper.state_dict())
        assert sentences == [f"env_zoo:{name} did not replay to the stored {what}."]


@pytest.mark.parametrize("steps", range(12))
def test_gymnasiums_reward_normalization_is_told_wherever_the_stop_falls(steps: int) -> None:
    def maker(**_: Any) -> gym.Env[Any, Any]:
        return gym.wrappers.NormalizeReward(env_zoo.AlwaysTruncates())

    recipe = read_recipe("normalized", {}, maker)
    spaces = probe_spaces(recipe)
    one, other = (Stepper(make_engine(recipe, spaces, 1, 0, "sync"), spaces, 1) for _ in range(2))
    one.start()
    for _ in range(steps):
        one.step(np.zeros(1, dtype=np.int64))
    said = other.load_state_dict(one.state_dict())
    assert bool(said) == (steps >= 5), "its first episode replays exactly, a later one never does"


def test_a_state_from_before_returns_were_stored_is_read() -> None:
    with opened("env_zoo:ScalesByHistory") as stepper, opened("env_zoo:ScalesByHistory") as other:
        record(stepper, 7)
        state = stepper.state_dict()
        for episode in state["engine"]["episodes"]:
            for name in ("return", "action_mask", "checksums", "unseen"):
                del episode[name]
        assert other.load_state_dict(state) == []


def test_an_environment_that_ends_while_it_replays_starts_afresh() -> None:
    with opened("env_zoo:Walk", length=9) as stepper, opened("env_zoo:Walk", length=2) as other:
        record(stepper, 3, seed=4)
        assert "length of the episode" in other.load_state_dict(stepper.state_dict())[0]
        record(other, 5)


def test_what_no_step_changes_is_not_compared() -> None:
    class Named(env_zoo.AlwaysTruncates):
        def __init__(self) -> None:
            super().__init__(length=9)
            self.folder = f"/somewhere/{id(self)}"  # differs between instances, and means nothing

    one, other = (ReplayableEpisodes(Named(), 0, 0) for _ in range(2))
    one.reset()
    one.step(1)
    other.restore_episode(one.episode_state())
    assert one.env.unwrapped.folder != other.env.unwrapped.folder  # type: ignore[attr-defined]
    assert stepper.differences(one.episode_state(), other.episode_state()) == ([], [], [])


def test_another_engine_or_number_of_environments_starts_afresh() -> None:
    with opened("CartPole-v1", "native") as stepper:
        record(stepper, 3)
        state = stepper.state_dict()
    for vectorization, num_envs in (("sync", 2), ("native", 3)):
        with opened("CartPole-v1", vectorization, num_envs=num_envs) as other:
            assert "new episodes start" in other.load_state_dict(state)[0]
            record(other, 3)


def test_actions_of_an_episode_are_kept_as_one_array() -> None:
    for name, shape in (("Walk", ()), ("BoxActions", (2,))):
        env = ReplayableEpisodes(getattr(env_zoo, name)(length=50), 0, 0)
        env.reset()
        assert env.actions().shape == (0, *shape)
        taken = [env.action_space.sample() for _ in range(8)]
        for count, action in enumerate(taken, start=1):
            env.step(action)
            assert np.array_equal(env.actions(), taken[:count])
        assert env.actions().shape == (8, *shape)
        env.reset()
        assert len(env.actions()) == 0


def test_hidden_state_tells_two_wrappers_of_one_class_apart() -> None:
    inner = gym.wrappers.NormalizeReward(gym.make("CartPole-v1"))
    outer = gym.wrappers.NormalizeReward(inner)
    before = hidden_state(outer).sums
    outer.return_rms.update(np.ones(3))
    once = hidden_state(outer).sums
    inner.return_rms.update(np.ones(3))
    assert len({tuple(state.values()) for state in (before, once, hidden_state(outer).sums)}) == 3
