"""How environments are made: by id, `module:Class` or callable; time limits, wrappers, and refusals before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import env_zoo
from resume_cases import SPECS, edit_checkpoint, env_of, take_steps, tiny
from rl_training.algorithms.actor_critic import RewardScale
from rl_training.config.params import read_params
from rl_training.config.train_config import TrainConfig
from rl_training.envs.engines import choose_vectorization, make_engine
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.stepper import Stepper
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.build import open_session
from rl_training.run.evaluation import Evaluator
from rl_training.run.workflows import predict_checkpoint, resume_training, train

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


@pytest.mark.filterwarnings("error")
def test_a_name_without_its_version_is_the_newest_one() -> None:
    recipe = read_recipe("CartPole", {})
    assert recipe.env_id == "CartPole-v1"
    assert choose_vectorization("auto", recipe, 2) == "native"
    assert probe_spaces(recipe).env_id == "CartPole-v1"
    assert read_recipe("CartPole", {}, env_zoo.Walk).env_id == "CartPole"


def test_a_callable_gets_the_env_kwargs() -> None:
    env = make_env(read_recipe("mine", {"length": 3}, lambda length: env_zoo.AlwaysTruncates(length)))
    assert run_to_end(env) == 3
    assert run_to_end(make_env(read_recipe("env_zoo:AlwaysTruncates", {"length": 4}))) == 4


@pytest.mark.parametrize("env_id", ["CartPole-v1", "env_zoo:AlwaysTruncates", "ZooWalk-v0"])
def test_max_episode_steps_is_the_time_limit(env_id: str) -> None:
    assert run_to_end(make_env(read_recipe(env_id, {"max_episode_steps": 2}))) == 2


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
        ("env_zoo:Walk", {"unknown": 1}, "unknown key .unknown.; env_zoo:Walk does not take it"),
        ("CartPole-v1", {"unknown": 1}, "unknown key .unknown.; CartPole-v1 does not take it"),
        ("env_zoo:FailsInReset", {}, "fails in reset: the simulator is not there"),
        ("env_zoo:WrongShape", {}, r"returned an observation of shape \(3,\)"),
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


@pytest.mark.parametrize(
    ("wrappers", "sentence"),
    [
        ({"pixels": {"resize_shap": [8, 8]}}, "unknown key 'pixels.resize_shap'; did you mean 'resize_shape'?"),
        ({"atari": {"noop": 3}}, "unknown key 'atari.noop'; did you mean 'noop_max'?"),
        ({"pixels": {"frame_stack": True}}, "pixels: frame_stack is True; it must be a number."),
        ({"clip_reward": 3}, "clip_reward is 3; it should be true or false, or be a list."),
        ({"clip_reward": [0, "x"]}, "clip_reward.1 is 'x'; it should be a number."),
        ({"clip_reward": [0]}, "clip_reward is [0]; it should have more entries."),
    ],
)
def test_a_wrong_wrapper_is_one_sentence_in_plain_words(wrappers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        read_recipe("CartPole-v1", {"wrappers": wrappers})
    assert str(error.value) == f"env_kwargs.wrappers: {sentence}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_breaks_later_is_named_and_nothing_else_is_printed(
    vectorization: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvironmentFailure) as error:
        train(config("env_zoo:FailsInStep", output_dir=str(tmp_path), vectorization=vectorization))
    assert str(error.value).startswith("the environment env_zoo:FailsInStep raised RuntimeError: the simulator broke")
    assert ("(worker 1 of " in str(error.value)) == (vectorization == "async")
    assert "doctor --env env_zoo:FailsInStep" in str(error.value)
    assert "the simulator broke" in str(error.value.__cause__)  # for --debug
    assert "simulator" not in capfd.readouterr().err


def test_an_environment_that_breaks_in_an_evaluation_is_named_too(tmp_path: Path) -> None:
    policy = train(config("env_zoo:Walk", output_dir=str(tmp_path))).policy
    evaluator = Evaluator(read_recipe("env_zoo:FailsInStep", {}), policy.spaces, seed=0)
    with pytest.raises(EnvironmentFailure, match="raised RuntimeError: the simulator broke"):
        evaluator.evaluate(policy.algorithm, 1)


@pytest.mark.parametrize("fault", ["obs", "reward", "final_obs", "first_obs"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_number_that_is_not_finite_is_the_environments_and_not_the_learning_rates(
    fault: str, value: float, tmp_path: Path
) -> None:
    class Faulty(env_zoo.Walk):
        resets = 0

        def reset(self, **options: Any) -> Any:
            self.resets += 1
            return super().reset(**options)

        def observe(self) -> Any:
            at = {"obs": 3, "final_obs": self.length, "first_obs": 0}.get(fault)
            bad = self.t == at and self.resets == 1
            return np.array([value if bad else 0.0, self.t], dtype=np.float32)

        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, value if fault == "reward" and self.t == 3 else reward, terminated, truncated, info

    what = "a reward" if fault == "reward" else "an observation"
    sentence = f"the environment mine returned {what} with a NaN or an infinity in it"
    with pytest.raises(EnvironmentFailure, match=sentence):
        train(config("mine", output_dir=str(tmp_path)), env=lambda: Faulty(length=4))


def test_large_numbers_are_no_fault() -> None:
    class Large(env_zoo.Constant):
        def observe(self) -> Any:
            return np.array([1e30, -1e38], dtype=np.float32)

    recipe = read_recipe("mine", {}, lambda: Large())
    spaces = probe_spaces(recipe)
    stepper = Stepper(make_engine(recipe, spaces, 2, 0, "sync"), spaces, 2)
    stepper.start()
    stepper.step(np.zeros(2, np.int64))
    assert stepper.obs[0, 0] == np.float32(1e30)


@pytest.mark.parametrize("changes", [{}, {"algo": "dqn", "algo_kwargs": {"hidden_sizes": [8], "learning_starts": 4}}])
def test_a_mask_without_any_legal_action_is_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    class Stuck(env_zoo.Walk):
        def info(self) -> dict[str, Any]:
            return {"action_mask": np.full(2, self.t != 3)}

    with pytest.raises(UserError, match=r"info\['action_mask'\] of mine forbids every action"):
        train(config("mine", **changes, output_dir=str(tmp_path)), env=lambda: Stuck(length=8))


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


@pytest.mark.parametrize("algo", SPECS)
def test_rewards_are_normalized_or_it_is_refused(tmp_path: Path, algo: str) -> None:
    spec, env_kwargs = SPECS[algo], {"wrappers": {"normalize_reward": True}}
    config = tiny(algo, tmp_path, env_kwargs=env_kwargs)
    if not spec.normalizes_rewards:
        with pytest.raises(UserError, match=f"^{algo} does not normalize rewards; take normalize_reward out of"):
            train(config, console=False)
        assert list(tmp_path.iterdir()) == []
    spaces = probe_spaces(read_recipe(env_of(spec), env_kwargs))
    learner = spec.build(read_params(spec.params, config.algo_kwargs), spaces)
    assert any(isinstance(part, RewardScale) for part in learner.modules()) == spec.normalizes_rewards


def test_the_returns_of_a_resumed_reward_scale_are_on_its_device() -> None:
    """A checkpoint is read on the CPU; "meta" stands for a GPU."""
    scale, rewards = RewardScale(0.9).to("meta"), torch.zeros(2, 3, device="meta")
    scale.set_extra_state({"running": torch.ones(3)})
    assert scale(rewards, rewards.bool()).shape == (2, 3)


def test_a_policy_that_was_trained_while_it_was_ignored_still_predicts(tmp_path: Path) -> None:
    def ignore(tree: dict[str, Any]) -> None:
        tree["config"]["env_kwargs"] = {"wrappers": {"normalize_reward": True}}
        tree["spaces"]["normalize_rewards"] = True

    trained = train(tiny("sac", tmp_path, eval_episodes=0), console=False)
    path = edit_checkpoint(trained.checkpoint_path, tmp_path / "earlier.ckpt", ignore)
    obs = [0.1, 0.2, 0.3]
    np.testing.assert_array_equal(predict_checkpoint(path, obs), trained.policy.predict(obs))
    with pytest.raises(UserError, match=r"^sac does not normalize rewards"):
        resume_training(path, console=False)
    changes = {"env_kwargs": {}, "total_timesteps": 160}
    resumed = resume_training(path, output_dir=tmp_path, changes=changes, force=True, console=False)
    assert resumed.metrics["global_step"] == 160


@pytest.mark.parametrize(
    ("env_id", "normalizes"),
    [("CartPole-v1", True), ("MountainCarContinuous-v0", True), ("FrozenLake-v1", False), ("env_zoo:ImagePlane", False),
     ("env_zoo:Shares", False), ("env_zoo:DictObservation", True)],
)  # fmt: skip
def test_auto_normalizes_vectors_of_measurements(env_id: str, normalizes: bool) -> None:
    session = open_session(config(env_id, env_kwargs={"wrappers": {"normalize_observation": "auto"}}))
    session.close()
    assert session.spaces.normalize_observations is normalizes
    assert session.config.env_kwargs == {"wrappers": {"normalize_observation": normalizes}}


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
def test_normalization_is_part_of_the_algorithm(algo: str) -> None:
    wrappers = {"normalize_observation": True, "normalize_reward": True}
    env_kwargs, algo_kwargs = {"wrappers": wrappers}, {"num_steps": 8}
    session = open_session(config("CartPole-v1", algo=algo, env_kwargs=env_kwargs, algo_kwargs=algo_kwargs))
    algorithm: Any = session.algorithm
    take_steps(session, 0)
    for _, batch in session.store.batches(algorithm, 0):
        algorithm.update(batch)
    session.close()
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
