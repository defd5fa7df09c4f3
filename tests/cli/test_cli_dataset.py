"""`rl-training dataset`: collect, check and convert, and one sentence for every wrong command or file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from typer.testing import CliRunner

from resume_cases import edit_checkpoint, tiny
from rl_training.cli.main import app
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.envs.spaces import EnvSpaces
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.evaluation import record_policy
from rl_training.run.workflows import train

ENVS = """
import gymnasium as gym
import numpy as np

class Camera(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (6, 5, 3), np.uint8)
    action_space = gym.spaces.Discrete(3, start=2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.frame = 0, self.np_random.integers(0, 255, (6, 5, 3), dtype=np.uint8)
        return self.frame, {}

    def step(self, action):
        assert action in (2, 3, 4)
        self.t += 1
        self.frame += 1  # in place, as some environments do
        return self.frame, float(action), self.t == 5, False, {}

gym.register("Camera-v0", entry_point=Camera)
"""


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, ["dataset", *map(str, words)])


def succeed(*words: Any) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*words: Any) -> str:
    """The one sentence of a command that is refused."""
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture(scope="module")
def sac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a tiny SAC on Pendulum with two environments."""
    folder = tmp_path_factory.mktemp("sac")
    return train(tiny("sac", folder, total_timesteps=64, eval_episodes=0, num_envs=2), console=False).run_dir


def rows(path: str) -> TransitionDataset:
    return TransitionDataset.from_npz(path)


# ---- collect -------------------------------------------------------------------------------------


def test_random_steps_are_those_of_a_run_with_random_data() -> None:
    out = succeed("collect", "--env", "CartPole-v1", "--random", "--num-steps", "60", "--seed", 4, "--output", "d/c")
    assert "60 in" in out
    assert "rl-training dataset check --path d/c.npz --env CartPole-v1" in out
    written = rows("d/c.npz")
    assert written.sha256 == load_transition_dataset("random", env_id="CartPole-v1", size=60, seed=4).sha256
    assert written.metadata == {"env_id": "CartPole-v1", "policy": "random", "seed": 4}


def test_a_checkpoint_is_recorded_with_the_environments_actions(sac: Path) -> None:
    succeed("collect", "--checkpoint", sac, "--num-steps", 230, "--output", "a.npz", "--seed", 9)
    succeed("collect", "--checkpoint", sac, "--num-steps", 230, "--output", "again.npz", "--seed", 9)
    succeed("collect", "--checkpoint", sac, "--num-steps", 230, "--output", "other.npz", "--seed", 9, "--stochastic")
    written = rows("a.npz")
    assert written.sha256 == rows("again.npz").sha256 != rows("other.npz").sha256
    assert written.metadata["policy"] == "sac"
    assert written.metadata["deterministic"] is True
    assert written.episode_lengths.tolist() == [200, 30]
    assert (written.truncated.sum(), written.terminated.sum()) == (1, 0)
    assert np.abs(rows("other.npz").actions).max() > 1.0  # torque in [-2, 2], not the policy's [-1, 1]
    replayed = gym.make("Pendulum-v1").unwrapped
    replayed.reset()
    cos, sin, speed = written.obs[0]
    replayed.state = np.array([np.arctan2(sin, cos), speed])  # type: ignore[attr-defined]
    for row in range(5):
        obs, reward, *_ = replayed.step(written.actions[row])
        np.testing.assert_allclose(written.next_obs[row], obs, atol=1e-4)
        assert written.rewards[row] == pytest.approx(reward, abs=1e-3)


def test_the_replay_buffer_in_a_checkpoint_becomes_a_file(sac: Path) -> None:
    succeed("collect", "--checkpoint", sac, "--from-replay", "--output", "r.npz")
    written = rows("r.npz")
    stored = load_checkpoint(sac / "checkpoints" / "latest.ckpt")["source"]["replay"]["arrays"]
    assert len(written) == 64
    np.testing.assert_allclose(written.actions[:32], 2.0 * stored["actions"][:32, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(written.obs[:32], stored["obs"][:32, 0])
    assert np.flatnonzero(written.truncated).tolist() == [31, 63]  # where each environment's rows end
    succeed("check", "--path", "r.npz", "--env", "Pendulum-v1")
    succeed("collect", "--checkpoint", sac, "--from-replay", "--num-steps", 10, "--output", "newest.npz")
    np.testing.assert_array_equal(rows("newest.npz").obs, written.obs[-10:])
    assert "holds 64" in refuse("collect", "--checkpoint", sac, "--from-replay", "--num-steps", 65, "--output", "x")


def test_reading_a_replay_buffer_leaves_the_runs_own_files_alone(sac: Path) -> None:
    def point(tree: dict[str, Any]) -> None:
        tree["config"]["algo_kwargs"]["replay_folder"] = str(Path("mapped").absolute())

    edited = edit_checkpoint(sac / "checkpoints" / "latest.ckpt", Path("mapped.ckpt"), point)
    succeed("collect", "--checkpoint", edited, "--from-replay", "--output", "r.npz")
    assert not Path("mapped").exists()


def test_images_and_shifted_actions_are_recorded_as_the_environment_has_them() -> None:
    Path("camera_envs.py").write_text(ENVS)
    images = ["--import", "camera_envs"]
    succeed("collect", "--env", "Camera-v0", "--random", "--num-steps", 12, "--output", "random.npz", *images)
    config = tiny("dqn", Path("runs"), env_id="Camera-v0", total_timesteps=20, eval_episodes=0)
    run = train(config, console=False).run_dir
    succeed("collect", "--checkpoint", run, "--num-steps", 12, "--stochastic", "--output", "policy.npz", *images)
    succeed("collect", "--checkpoint", run, "--from-replay", "--output", "replay.npz", *images)
    for name in ("random", "policy", "replay"):
        written = rows(f"{name}.npz")
        assert written.obs.shape[1:] == (6, 5, 3)
        assert written.obs.dtype == np.uint8
        # the environment writes into the observation it gave; recording copied it before
        np.testing.assert_array_equal(written.obs + np.uint8(1), written.next_obs)
        succeed("check", "--path", f"{name}.npz", "--env", "Camera-v0", *images)
        assert set(written.actions.tolist()) <= {2, 3, 4}
        np.testing.assert_array_equal(written.rewards, written.actions)
    sys.modules.pop("camera_envs")


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(0, 255, (6, 5, 3), np.uint8), gym.spaces.Box(0, 255, (3, 6, 6), np.uint8),
        gym.spaces.Box(0, 255, (6, 5), np.uint8), gym.spaces.Box(-1, 1, (2, 3), np.float32),
    ],
)  # fmt: skip
def test_decoding_is_the_inverse_of_encoding(space: Any) -> None:
    spaces = EnvSpaces.from_gym("X-v0", space, gym.spaces.Discrete(2))
    batch = np.stack([space.sample() for _ in range(4)])
    np.testing.assert_array_equal(spaces.decode(spaces.encode(batch)), batch)


def test_wrapped_environments_are_named_with_their_wrappers(tmp_path: Path) -> None:
    limits = {"max_episode_steps": 7, "wrappers": {"frame_stack": 2}}
    config = tiny("ppo", tmp_path, env_id="CartPole-v1", env_kwargs=limits, total_timesteps=16, eval_episodes=0)
    result = train(config, console=False)
    dataset = record_policy(result.checkpoint_path, 15)
    assert dataset.obs.shape == (15, 2, 4)
    assert dataset.metadata["env_kwargs"] == config.env_kwargs
    assert dataset.episode_lengths.tolist() == [7, 7, 1]
    dataset.save_npz("stacked.npz")
    succeed("check", "--path", "stacked.npz", "--env", "CartPole-v1")
    succeed("convert", "stacked.npz", "cartpole/stacked-v0")
    succeed("convert", "cartpole/stacked-v0", "back.npz")
    np.testing.assert_array_equal(rows("back.npz").obs, dataset.obs)


def test_wrong_ways_to_collect_are_refused_before_any_work(sac: Path) -> None:
    Path("folder.npz").mkdir()
    Path("file").write_text("")
    random = ["--env", "CartPole-v1", "--random", "--num-steps", "5"]
    to = ["--output", "x.npz"]
    assert "needs --output" in refuse("collect", *random)
    assert "one of them is needed" in refuse("collect", "--num-steps", "5", *to)
    assert "not both" in refuse("collect", "--checkpoint", sac, *random, *to)
    assert "--random needs --env" in refuse("collect", "--random", "--num-steps", "5", *to)
    assert "--env has no meaning" in refuse("collect", "--checkpoint", sac, "--from-replay", "--env", "x", *to)
    assert "--from-replay has no meaning with --random" in refuse("collect", *random, "--from-replay", *to)
    assert "--stochastic has no meaning with --random" in refuse("collect", *random, "--stochastic", *to)
    assert "--seed has no meaning" in refuse("collect", "--checkpoint", sac, "--from-replay", "--seed", "1", *to)
    assert "collect needs --num-steps" in refuse("collect", "--checkpoint", sac, *to)
    assert "at least 1" in refuse("collect", "--checkpoint", sac, "--num-steps", "0", *to)
    assert "memory is free" in refuse("collect", "--checkpoint", sac, "--num-steps", "1e14", *to)
    assert "memory is free" in refuse("collect", *random[:3], "--num-steps", "1e14", *to)
    assert "Is a directory" in refuse("collect", *random, "--output", "folder")
    assert "cannot be written" in refuse("collect", *random, "--output", "file/x.npz")
    assert "did you mean 'CartPole-v1'" in refuse("collect", "--env", "CartPol-v1", *random[2:], *to)
    assert "absent" in refuse("collect", "--checkpoint", "absent.ckpt", "--num-steps", "5", *to)
    assert "did you mean 'collect'" in refuse("colect")
    assert not Path("x.npz").exists()


def test_a_checkpoint_without_or_with_a_broken_replay_buffer_is_refused(sac: Path) -> None:
    latest = sac / "checkpoints" / "latest.ckpt"
    edits = {
        "without": lambda tree: tree["source"].pop("replay"),
        "broken": lambda tree: tree["source"]["replay"].pop("heads"),
        "ppo": lambda tree: tree["config"].update(algo="ppo", algo_kwargs={}),
    }
    said = {}
    for name, edit in edits.items():
        path = edit_checkpoint(latest, Path(f"{name}.ckpt"), edit)
        said[name] = refuse("collect", "--checkpoint", path, "--from-replay", "--output", "x.npz")
    assert "holds no replay buffer" in said["without"]
    assert "its replay buffer cannot be read" in said["broken"]
    assert "has no replay buffer" in said["ppo"]


# ---- check ---------------------------------------------------------------------------------------


def test_check_shows_counts_ranges_and_coverage() -> None:
    load_transition_dataset("random", env_id="CartPole-v1", size=80, seed=0).save_npz("c.npz")
    out = succeed("check", "--path", "c.npz", "--env", "CartPole-v1")
    table = {line.split("  ")[1].strip(): line for line in out.splitlines() if line.startswith("  ") and line.strip()}
    assert "80" in table["transitions"]
    assert "the last one incomplete" in table["episodes"]
    assert {"terminated", "truncated", "return", "length", "reward", "obs", "actions", "coverage"} <= set(table)
    assert "float32 [4]" in table["obs"]
    assert "0: " in table["coverage"]
    assert "no problems, compared with CartPole-v1" in out
    assert "not compared with an environment" in succeed("check", "--path", "c.npz")


def test_problems_end_with_exit_code_1() -> None:
    dataset = load_transition_dataset("random", env_id="Pendulum-v1", size=30, seed=0)
    obs = dataset.obs.copy()
    obs[3, 1] = np.nan
    replace(dataset, obs=obs, actions=dataset.actions * 3).save_npz("wrong.npz")
    result = invoke("check", "--path", "wrong.npz", "--env", "Pendulum-v1")
    assert result.exit_code == 1
    assert "problem: obs holds 1 values that are NaN or infinite." in result.stdout
    assert "rows of actions lie outside the environment's space" in result.stdout
    assert result.stderr == ""
    result = invoke("check", "--path", "wrong.npz", "--env", "CartPole-v1")
    assert result.exit_code == 1
    assert "problem: obs has rows of shape (3,)" in result.stdout


def test_observations_that_are_numbers_are_compared_as_they_are_recorded() -> None:
    succeed("collect", "--env", "FrozenLake-v1", "--random", "--num-steps", "20", "--output", "lake.npz")
    succeed("check", "--path", "lake.npz", "--env", "FrozenLake-v1")


def test_files_that_are_no_data_sets_are_refused() -> None:
    Path("text.npz").write_text("hello")
    np.savez("part.npz", obs=np.zeros((3, 2)))
    assert "does not exist" in refuse("check", "--path", "absent.npz")
    assert "cannot be read as npz" in refuse("check", "--path", "text.npz")
    assert "holds no actions" in refuse("check", "--path", "part.npz")
    assert "is not a local Minari data set" in refuse("check", "--dataset-id", "cartpole/absent-v0")
    assert "one of --path" in refuse("check")
    assert "one of --path" in refuse("check", "--path", "part.npz", "--dataset-id", "x-v0")


def test_the_next_command_imports_what_this_one_did() -> None:
    Path("dataset_envs.py").write_text(ENVS.replace("Camera-v0", "NextCamera-v0"))
    out = succeed("collect", "--env", "NextCamera-v0", "--random", "--num-steps", 12, "--output", "c.npz",
                  "--import", "dataset_envs")  # fmt: skip
    words = shlex.split(out.splitlines()[-1])
    assert words[-2:] == ["--import", "dataset_envs"]
    assert "no problems" in succeed(*words[2:])


# ---- convert -------------------------------------------------------------------------------------


def test_npz_to_minari_and_back() -> None:
    before = load_transition_dataset("random", env_id="CartPole-v1", size=50, seed=2)
    before.save_npz("c.npz")
    assert "50" in succeed("convert", "c.npz", "cartpole/random-v0")
    assert "no problems" in succeed("check", "--dataset-id", "cartpole/random-v0", "--env", "CartPole-v1")
    succeed("convert", "cartpole/random-v0", "new/back.npz")
    after = rows("new/back.npz")
    for name, array in before.arrays().items():
        np.testing.assert_array_equal(after.arrays()[name][:-1], array[:-1], err_msg=name)
    assert after.truncated[-1]  # Minari has no open episodes
    assert after.metadata["env_id"] == "CartPole-v1"


def test_wrong_ways_to_convert_are_refused() -> None:
    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=10, seed=2)
    replace(dataset, metadata={}).save_npz("nameless.npz")
    assert "must be an npz file and the other a Minari id" in refuse("convert", "nameless.npz", "other.npz")
    assert "must be an npz file and the other a Minari id" in refuse("convert", "a-v0", "b-v0")
    assert "give --env ID" in refuse("convert", "nameless.npz", "cartpole/x-v0")
    assert "--env is for writing" in refuse("convert", "a-v0", "x.npz", "--env", "CartPole-v1")
    assert "Minari refuses" in refuse("convert", "nameless.npz", "no id", "--env", "CartPole-v1")
    assert "is not a Minari id" in refuse("convert", "nameless.npz", "bad_id", "--env", "CartPole-v1")
    assert "bad_id" in refuse("convert", "bad_id", "x.npz")
    assert "is not a local Minari data set" in refuse("convert", "cartpole/absent-v0", "x.npz")
    assert "does not exist" in refuse("convert", "absent.npz", "cartpole/x-v0")
    succeed("convert", "nameless.npz", "cartpole/x-v0", "--env", "CartPole-v1")
    assert "already exists" in refuse("convert", "nameless.npz", "cartpole/x-v0", "--env", "CartPole-v1")


def test_help_is_for_the_group_and_for_each_command() -> None:
    assert "collect" in succeed()
    for command in ("collect", "check", "convert"):
        assert "Usage: rl-training dataset" in succeed(command, "--help")
