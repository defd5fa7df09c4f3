"""Pictures of open-loop predictions of a world model next to a real episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array
from rl_training.data import TransitionDataset
from rl_training.envs.factory import UserEnv
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.run.evaluation import play_policy
from rl_training.run.learner import PathLike, load_algorithm, read_checkpoint
from rl_training.safe_files import output_written, refuse_link, replacing
from rl_training.tools.report import own_style

PLAYED = 11  # windows' worth of steps that are played to find one window
COLUMNS = 15  # frames of a strip
PLOTTED = 6  # dimensions of a vector
FRAME_SIDE, FRAME_MS = 192, 120  # of the moving picture


class Windows(NamedTuple):
    """Pieces of episodes as a policy sees them: obs [B, L, ...], with the actions and rewards [B, L, ...] before each.

    The first observation of a window has none before it: its action and reward are 0.
    """

    obs: Tensor
    actions: Tensor
    rewards: Tensor


@torch.no_grad()
def open_loop(algorithm: Any, obs: Tensor, actions: Tensor, warm_up: int) -> Tensor:
    """Predictions [B, L, ...]: states from `warm_up` observations, then from actions alone, using modes."""
    model = algorithm.world_model
    inputs = algorithm.actor.input_of(actions.transpose(0, 1))
    is_first = torch.zeros(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    is_first[0] = True
    embeds = model.encoder(model.prepare(obs[:, :warm_up].transpose(0, 1)))
    states = model.rssm.observe(embeds, inputs[:warm_up], is_first[:warm_up], None)
    features = list(states.features.unbind(0))
    for action in inputs[warm_up:]:
        features.append(model.rssm.imagine(features[-1], action, None))
    return model.predict(torch.stack(features)).transpose(0, 1)


def play_window(
    path: PathLike, length: int, *, seed: int | None = None, env: UserEnv | None = None
) -> tuple[Algorithm, EnvSpaces, Windows]:
    """The learner in a checkpoint, and the first window of `length` observations in the episodes of its policy."""
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path))
    if not hasattr(algorithm, "world_model"):
        raise UserError(f"{path} is a checkpoint of {config.algo}, which has no world model to imagine with.")
    if spaces.obs_kind == "mixed":
        raise UserError(f"{config.env_id} has images among other parts; only an image or a vector alone can be shown.")
    dataset = play_policy(algorithm, spaces, config, PLAYED * length, seed=seed, deterministic=False, env=env)
    ends = dataset.episode_ends + 1
    starts = [first for first, last in zip([0, *ends[:-1]], ends, strict=True) if last - first >= length - 1]
    if not starts:
        raise UserError(f"no episode of {config.env_id} lasted {length} steps with this policy; nothing can be shown.")
    dataset = dataset.map(obs=spaces.encode, actions=spaces.unmap_actions)
    return algorithm, spaces, cut_windows(dataset, np.array(starts[:1]), length)  # n steps hold n + 1 observations


def cut_windows(dataset: TransitionDataset, starts: Array, length: int) -> Windows:
    """The windows of `length` observations that begin at the rows `starts` [B]."""
    steps = starts[:, None] + np.arange(length - 1)
    obs = np.concatenate([dataset.obs[starts, None], dataset.next_obs[steps]], axis=1)
    led = (np.insert(column[steps], 0, 0, axis=1) for column in (dataset.actions, dataset.rewards))
    return Windows(*(torch.from_numpy(array) for array in (obs, *led)))


@own_style({"axes.grid": False})
def draw_imagination(
    path: PathLike, folder: PathLike, *, warm_up: int = 10, horizon: int = 50, seed: int | None = None,
    env: UserEnv | None = None,
) -> list[Path]:  # fmt: skip
    """Pictures of one window, imagined against real: a strip and a GIF of frames, or curves of a vector."""
    from matplotlib.figure import Figure

    algorithm, spaces, played = play_window(path, warm_up + horizon, seed=seed, env=env)
    predicted = open_loop(algorithm, played.obs, played.actions, warm_up)[0].numpy()
    real, still, figure = played.obs[0].numpy(), Path(folder) / "imagined.png", Figure(layout="constrained")
    frames: list[Any] = []
    if spaces.obs_kind == "vector":
        draw_curves(figure, real, predicted, warm_up)
    else:
        real, predicted = (as_colors(images / spaces.image_scale) for images in (real, predicted))
        rows = np.stack([real, predicted, np.abs(real - predicted)])
        draw_strip(figure, rows, warm_up)
        frames = moving_frames(rows, warm_up)
    with output_written(still, "the picture"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        refuse_link(folder)
        with replacing(still) as file:
            figure.savefig(file, format="png", dpi=120)
        if not frames:
            return [still]
        with replacing(still.with_suffix(".gif")) as file:
            frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
        return [still, still.with_suffix(".gif")]


def as_colors(images: Array) -> Array:
    """Images [L, C, H, W] in [0, 1] as colors [L, H, W, 3]; channels that are neither gray nor RGB get a color each."""
    from matplotlib import colormaps

    channels = images.shape[1]
    palettes = {1: np.ones((1, 3)), 3: np.eye(3)}
    palette = palettes.get(channels, np.array(colormaps["tab10"](np.arange(channels) % 10))[:, :3])
    return np.clip(np.einsum("tchw,ck->thwk", images, palette), 0.0, 1.0)


def draw_strip(figure: Any, rows: Array, warm_up: int) -> None:
    """Frames [3, L, H, W, 3] in columns; the rows are real, imagined and their difference."""
    shown = np.unique(np.linspace(0, rows.shape[1] - 1, COLUMNS).astype(int))
    figure.set_size_inches(0.8 * len(shown), 2.9)
    framed = np.pad(rows[:, shown], ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1.0)
    axes, (height, width) = figure.subplots(), framed.shape[2:4]
    axes.imshow(tiled(framed), interpolation="nearest")
    axes.set_yticks(height * (np.arange(3) + 0.5), ("real", "imagined", "difference"), rotation=90, va="center")
    times = ["seen" if t < warm_up else f"+{t - warm_up + 1}" for t in shown]
    axes.set_xticks(width * (np.arange(len(shown)) + 0.5), times, fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def tiled(frames: Array) -> Array:
    """One picture [R H, C W, 3] of frames [R, C, H, W, 3] in rows and columns."""
    rows, columns, height, width = frames.shape[:4]
    return frames.swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def moving_frames(rows: Array, warm_up: int) -> list[Any]:
    """Real, imagined and difference side by side; a bar on top marks frames whose observations the model gets."""
    from PIL import Image

    pictures, factor = [], max(1, FRAME_SIDE // rows.shape[2])
    for t in range(rows.shape[1]):
        line = tiled(rows[None, :, t]).repeat(factor, 0).repeat(factor, 1)
        bar = np.full((6, line.shape[1], 3), 1.0 if t < warm_up else 0.2)
        pictures.append(Image.fromarray((np.concatenate([bar, line]) * 255).astype(np.uint8)))
    return pictures


def draw_curves(figure: Any, real: Array, predicted: Array, warm_up: int) -> None:
    """One plot per dimension of a vector [L, D]."""
    count = min(real.shape[1], PLOTTED)
    figure.set_size_inches(7.0, 1.5 * count)
    for dimension, axes in enumerate(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]):
        axes.plot(real[:, dimension], label="real")
        axes.plot(predicted[:, dimension], "--", label="imagined")
        axes.axvline(warm_up - 0.5, color="grey", linewidth=0.8)
        axes.set_ylabel(f"obs[{dimension}]")
    figure.axes[0].legend(loc="upper right", fontsize=8)
    figure.axes[-1].set_xlabel(f"step (the gray line: {warm_up} observations seen, actions alone from there on)")
