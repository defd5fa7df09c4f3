"""How environments are made: by id, `module:Class` or callable; time limits, wrappers, and refusals before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import env_zoo
from rl_training.envs.factory import make_env, probe_spaces, read_recipe
from rl_training.errors import UserError
from rl_training.experiment.config import TrainConfig
from rl_training.runtime.session import open_session
from rl_training.runtime.workflows import train

ATARI = "ALE/Pong-v5"


def run_to_end(env: gym.Env[Any, Any]) -> int:
    env.reset(seed=0)
    for step in range(1, 1000):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return step
    return 0


def config(env_id: str, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{"algo": "ppo", "env_id": env_id, "total_timesteps": 16, "device": "cpu", "eval_episodes": 1, "num_envs": 2,
           "algo_kwargs": {"num_steps": 8, "hidden_sizes": [8], "minibatch_size": 8}, **changes}
    )  # fmt: skip


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ZooWalk-v0", "env_zoo:ZooWalk-v0", "env_zoo:Walk"])
def test_an_environment_is_found_by_its_name(env_id: str) -> None:
    env = make_env(read_recipe(env_id, {}))
    assert env.reset(seed=0)[0].dtype == np.float32


def test_a_callable_gets_the_env_kwargs() -> None:
    env = make_env(read_recipe("mine", {"length": 3}, lambda length: env_zoo.AlwaysTruncates(length)))
    assert run_to_end(env) == 3
    assert run_to_end(make_env(read_recipe("env_zoo:AlwaysTruncates", {"length": 4}))) == 4


@pytest.mark.parametrize("env_id", ["CartPole-v1", "env_zoo:AlwaysTruncates", "ZooWalk-v0"])
def test_max_episode_steps_is_the_time_limit(env_id: str) -> None:
    assert run_to_end(make_env(read_recipe(env_id, {"max_episode_steps": 2}))) == 2


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a console command, whose module path does not hold the working directory."""
    (tmp_path / "zoo_next_door.py").write_text("from env_zoo import Walk as Mine\n")
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    monkeypatch.chdir(tmp_path)
    assert make_env(read_recipe("zoo_next_door:Mine", {})).reset()[0].shape == (2,)


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "sentence"),
    [
        ("CartPol-v1", {}, "did you mean 'CartPole-v1'"),
        ("CartPole-v77", {}, "did you mean 'CartPole-v"),
        ("Qqqqqqqq-v0", {}, "module:Class"),
        ("ALE/Pongg-v5", {}, "did you mean 'ALE/Pong"),
        ("no_such_module:Env", {}, "cannot be imported"),
        ("no_such_module:Env-v0", {}, "cannot be made"),
        ("env_zoo:Nothing", {}, "has no class or function 'Nothing'"),
        ("env_zoo:Array", {"unknown": 1}, "cannot be made"),
        ("env_zoo:not_an_env", {}, "made a str; it must make a gymnasium.Env"),
        ("env_zoo:Walk", {"unknown": 1}, "cannot be made"),
        ("CartPole-v1", {"unknown": 1}, "cannot be made"),
        ("env_zoo:FailsInReset", {}, "fails in reset: the simulator is not there"),
        ("env_zoo:WrongShape", {}, r"gave an observation of shape \(3,\)"),
        ("env_zoo:InfiniteActions", {}, "infinite bounds"),
        ("env_zoo:TextObservation", {}, "is not supported"),
        ("CartPole-v1", {"max_episode_steps": 0}, "at least 1"),
        ("CartPole-v1", {"max_episode_steps": True}, "at least 1"),
        ("CartPole-v1", {"wrappers": {"frame_stak": 2}}, "frame_stack"),
        ("CartPole-v1", {"wrappers": {"frame_stack": 0}}, "frame_stack"),
        ("CartPole-v1", {"wrappers": 3}, "mapping"),
        ("CartPole-v1", {"wrappers": {"atari": {}}}, "do not fit CartPole-v1"),
        ("CartPole-v1", {"wrappers": {"clip_reward": [1, -1]}}, "wrappers"),
        ("env_zoo:Walk", {"wrappers": {"pixels": {}}}, "cannot be made|do not fit"),
        ("env_zoo:ImagePlane", {"wrappers": {"normalize_observation": True}}, "is for vectors"),
    ],
)
def test_what_is_wrong_is_said_before_training(
    env_id: str, env_kwargs: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        train(config(env_id, env_kwargs=env_kwargs, output_dir=str(tmp_path / "runs")))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore:.*ERROR")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_breaks_later_ends_the_run_with_its_own_error(vectorization: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the simulator broke"):
        train(config("env_zoo:FailsInStep", output_dir=str(tmp_path), vectorization=vectorization))


def test_a_closed_probe_leaves_nothing_open() -> None:
    closed = []

    class Watched(env_zoo.FailsInReset):
        def close(self) -> None:
            closed.append(True)

    with pytest.raises(UserError):
        probe_spaces(read_recipe("mine", {}, Watched))
    assert closed


# ---- wrappers --------------------------------------------------------------------------------------------------------


def wrapped(env_id: str, **wrappers: Any) -> gym.Env[Any, Any]:
    return make_env(read_recipe(env_id, {"wrappers": wrappers}))


def test_frame_stack_holds_the_newest_observations() -> None:
    env = wrapped("env_zoo:Walk", frame_stack=3)
    first, _ = env.reset(seed=0)
    assert first.shape == (3, 2)
    second, *_ = env.step(0)
    assert np.array_equal(second[:2], first[1:])
    assert second[2, 1] == 1
    assert probe_spaces(read_recipe("env_zoo:Walk", {"wrappers": {"frame_stack": 3}})).obs_shape == (6,)


@pytest.mark.parametrize(
    ("name", "raw", "seen"),
    [
        ("Image", (12, 10, 6), (6, 12, 10)), ("ImageChannelFirst", (6, 12, 10), (6, 12, 10)),
        ("ImagePlane", (2, 12, 10), (2, 12, 10)), ("MinAtarLike", (10, 10, 8), (8, 10, 10)),
    ],
)  # fmt: skip
def test_stacked_images_stay_images(name: str, raw: tuple[int, ...], seen: tuple[int, ...]) -> None:
    recipe = read_recipe(f"env_zoo:{name}", {"wrappers": {"frame_stack": 2}})
    env, spaces = make_env(recipe), probe_spaces(recipe)
    env.reset(seed=0)
    observation = env.step(0)[0]
    assert observation.shape == raw
    assert env.observation_space.contains(observation)
    assert spaces.obs_shape == seen
    encoded = spaces.encode(observation[None])[0]
    channels = seen[0] // 2
    assert (encoded[0, 0, 0], encoded[channels, 0, 0]) == (0, 1)  # the clock stands in the first pixel of each frame
    encoded[[0, channels], 0, 0] = 0
    assert np.array_equal(encoded[:channels], encoded[channels:])


def test_rewards_are_clipped_in_training_only() -> None:
    recipe = read_recipe("env_zoo:Walk", {"wrappers": {"clip_reward": [-0.01, 0.02]}})
    for evaluation in (False, True):
        env = make_env(recipe, evaluation=evaluation)
        env.reset(seed=1)
        rewards = [float(env.step(1)[1]) for _ in range(4)]
        assert all(-0.01 <= reward <= 0.02 for reward in rewards) is not evaluation


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
def test_normalisation_is_part_of_the_algorithm(algo: str) -> None:
    wrappers = {"normalize_observation": True, "normalize_reward": True}
    env_kwargs, algo_kwargs = {"wrappers": wrappers}, {"num_steps": 8}
    session = open_session(config("CartPole-v1", algo=algo, env_kwargs=env_kwargs, algo_kwargs=algo_kwargs))
    algorithm: Any = session.algorithm
    session.source.collect(algorithm, 0)
    for _, batch in session.source.batches(algorithm, 0):
        algorithm.update(batch)
    session.source.close()
    norm = algorithm.policy.observation_input.norm
    assert norm.count == 16
    assert norm.mean.abs().sum() > 0
    assert algorithm.reward_scale.moments[0] > 16
    names = set(algorithm.state_dict())
    assert {"policy.observation_input.norm.mean", "reward_scale.moments"} <= names
    plain: Any = open_session(config("CartPole-v1", algo=algo, algo_kwargs=algo_kwargs)).algorithm
    assert plain.policy.observation_input.norm is None
    assert plain.reward_scale is None


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (3, 84, 84)),
        ({"resize_shape": [40, 60], "frame_stack": 2, "grayscale": True}, (2, 40, 60)),
        ({"resize_shape": [40, 60], "frame_stack": 2, "channel_first": False}, (40, 60, 6)),
        ({"resize_shape": [40, 60], "frame_stack": 3, "grayscale": True, "channel_first": False}, (40, 60, 3)),
    ],
)
def test_pixels_replace_the_observation(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    pytest.importorskip("pygame")
    recipe = read_recipe("CartPole-v1", {"wrappers": {"pixels": options}})
    env, spaces = make_env(recipe), probe_spaces(recipe)
    env.reset(seed=0)
    for _ in range(6):  # until a step moves the pole by more than a pixel
        first, *_ = env.step(1)
    second, *_ = env.step(1)
    env.close()
    assert first.shape == second.shape == shape
    assert first.dtype == np.uint8
    assert spaces.obs_kind == "image"
    channels = shape[0] if options.get("channel_first", True) else shape[-1]
    height, width = options.get("resize_shape", (84, 84))
    assert spaces.obs_shape == (channels, height, width)
    if options.get("frame_stack", 1) > 1:  # the newest frame of before is the one but newest now
        per_frame = channels // options["frame_stack"]
        before, after = spaces.encode(np.stack([first, second]))
        assert np.array_equal(before[-per_frame:], after[-2 * per_frame : -per_frame])
        assert not np.array_equal(after[-per_frame:], after[-2 * per_frame : -per_frame])


def test_atari_preprocessing() -> None:
    pytest.importorskip("ale_py")
    env_kwargs = {"frameskip": 1, "wrappers": {"atari": {"noop_max": 2, "screen_size": 84, "frame_stack": 4}}}
    recipe = read_recipe(ATARI, env_kwargs)
    spaces = probe_spaces(recipe)
    assert (spaces.obs_kind, spaces.obs_shape, spaces.image_scale) == ("image", (4, 84, 84), 255.0)
    env = make_env(recipe)
    before, _ = env.reset(seed=0)
    after, *_ = env.step(0)
    assert np.array_equal(after[:3], before[1:])
    with pytest.raises(UserError, match=r"do not fit ALE/Pong-v5.*frame-skipping"):
        make_env(read_recipe(ATARI, {"wrappers": {"atari": {}}}))
