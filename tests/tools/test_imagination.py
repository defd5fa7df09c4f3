"""Open-loop predictions of a world model: windows inside episodes, pictures, `--imagine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import env_zoo
from resume_cases import tiny
from rl_training.data import TransitionDataset
from rl_training.errors import UserError
from rl_training.run.learner import load_algorithm, read_checkpoint
from rl_training.run.workflows import train
from rl_training.tools.imagination import cut_windows, draw_imagination, open_loop, play_window

torch.set_num_threads(1)


class NeverTerminates(env_zoo.Walk):
    """Episodes of 80 steps."""

    def __init__(self) -> None:
        super().__init__(80)

    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, False, truncated, info


class LongImage(NeverTerminates, env_zoo.MinAtarLike):
    pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train(tiny("dreamer", folder, env_id=f"{__name__}:NeverTerminates"), console=False).checkpoint_path


@pytest.fixture(scope="module")
def image_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train(tiny("dreamer", folder, env_id=f"{__name__}:LongImage"), console=False).checkpoint_path


def test_windows_pair_each_observation_with_what_led_to_it() -> None:
    numbers = np.arange(12)  # steps 0..6 are one episode, 7..11 the beginning of the next
    dataset = TransitionDataset(
        obs=np.stack([numbers, numbers], -1), actions=numbers % 2, rewards=10 + numbers,
        next_obs=np.stack([numbers + 1, numbers + 1], -1), terminated=numbers == 6, truncated=np.zeros(12),
    )  # fmt: skip
    found = cut_windows(dataset, np.array([0, 4, 7]), 4)
    assert found.obs[:, :, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 8, 9, 10]]
    assert found.actions.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 1]]
    assert found.rewards.tolist() == [[0, 10, 11, 12], [0, 14, 15, 16], [0, 17, 18, 19]]


def test_a_window_is_inside_one_episode(checkpoint: Path) -> None:
    _, _, found = play_window(checkpoint, 81)  # 80 steps, the whole episode
    assert (found.obs.shape, found.rewards.shape) == ((1, 81, 2), (1, 81))
    with pytest.raises(UserError, match="lasted 82 steps"):
        play_window(checkpoint, 82)


def test_predictions_follow_the_observations_while_they_are_seen_and_the_actions_after(checkpoint: Path) -> None:
    algorithm: Any = load_algorithm(checkpoint, read_checkpoint(checkpoint))[0]
    obs, actions = torch.randn(3, 8, 2), torch.randint(0, 2, (3, 8))
    predicted = open_loop(algorithm, obs, actions, 5)
    assert predicted.shape == obs.shape
    later, other = obs.clone(), actions.clone()
    later[:, 5:] = 7.0
    assert torch.equal(open_loop(algorithm, later, actions, 5), predicted)
    other[:, 6] = 1 - other[:, 6]
    changed = open_loop(algorithm, obs, other, 5)
    torch.testing.assert_close(changed[:, :6], predicted[:, :6])
    assert not torch.equal(changed[:, 6:], predicted[:, 6:])


def test_a_vector_is_drawn_as_curves_and_images_as_a_strip_and_a_gif(
    checkpoint: Path, image_checkpoint: Path, tmp_path: Path
) -> None:
    curves = draw_imagination(checkpoint, tmp_path / "a", warm_up=3, horizon=8)
    frames = draw_imagination(image_checkpoint, tmp_path / "b", warm_up=3, horizon=8)
    assert [path.name for path in curves] == ["imagined.png"]
    assert [path.name for path in frames] == ["imagined.png", "imagined.gif"]
    assert all(path.read_bytes().startswith((b"\x89PNG", b"GIF8")) for path in (*curves, *frames))


def test_what_cannot_be_imagined_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which has no world model to imagine with"):
        draw_imagination(train(tiny("ppo", tmp_path), console=False).checkpoint_path, tmp_path)
    with pytest.raises(UserError, match=r"no episode of .* lasted 90 steps with this policy"):
        draw_imagination(checkpoint, tmp_path, warm_up=10, horizon=80)


@pytest.mark.slow
def test_the_command_says_where_the_picture_is(image_checkpoint: Path) -> None:
    from rl_training.cli.main import app

    words = ["eval", "--checkpoint", str(image_checkpoint), "--num-episodes", "1", "--imagine"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "imagined.gif" in result.output.replace("\n", "")
    assert (image_checkpoint.parent / "imagined.gif").is_file()
