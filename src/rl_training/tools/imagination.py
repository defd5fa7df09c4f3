"""Compare open-loop predictions of a world model with real episodes, as errors and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array
from rl_training.data import TransitionDataset
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.user_env import UserEnv
from rl_training.errors import UserError
from rl_training.run.evaluation import play_policy
from rl_training.run.learner import PathLike, load_algorithm, read_checkpoint
from rl_training.safe_files import output_written, refuse_link, replacing

PLAYED = 10  # windows' worth of steps that may be played to find one window
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


class OpenLoopErrors(NamedTuple):
    """Root mean squared errors [H] at 1..H steps after the last observation, and of repeating that observation.

    Dimensions of a vector are divided by their standard deviation; pixels are in [0, 1].
    """

    model: Array
    standing_still: Array


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


def open_loop_errors(
    path: PathLike, *, warm_up: int = 10, horizon: int = 50, windows: int = 50, seed: int | None = None,
    env: UserEnv | None = None,
) -> OpenLoopErrors:  # fmt: skip
    """Errors of a checkpoint's world model by horizon, over windows that its own (sampled) policy played."""
    algorithm, spaces, played = play_windows(path, warm_up + horizon, windows, seed=seed, env=env)
    predicted = open_loop(algorithm, played.obs, played.actions, warm_up).numpy()
    real = played.obs.float().numpy()
    axes = tuple(range(2, real.ndim))
    scale = np.float32(spaces.image_scale) if spaces.obs_kind == "image" else real.std(axis=(0, 1)) + 1e-6
    moved, stood = predicted[:, warm_up:] - real[:, warm_up:], real[:, warm_up - 1, None] - real[:, warm_up:]
    return OpenLoopErrors(*(np.sqrt(np.square(e / scale).mean(axis=(0, *axes))) for e in (moved, stood)))


def play_windows(
    path: PathLike, length: int, count: int, *, seed: int | None = None, env: UserEnv | None = None
) -> tuple[Algorithm, EnvSpaces, Windows]:
    """The learner in a checkpoint, and `count` windows of `length` steps inside episodes of its policy."""
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path))
    if not hasattr(algorithm, "world_model"):
        raise UserError(f"{path} is a checkpoint of {config.algo}, which has no world model to imagine with.")
    if spaces.obs_kind == "mixed":
        raise UserError(f"{config.env_id} has images among other parts; only an image or a vector alone can be shown.")
    steps = (count + PLAYED) * length
    dataset = play_policy(algorithm, spaces, config, steps, seed=seed, deterministic=False, env=env)
    starts = window_starts(dataset, length)
    if len(starts) == 0:
        raise UserError(f"no episode of {config.env_id} lasted {length} steps with this policy; nothing can be shown.")
    dataset = dataset.map(obs=spaces.encode, actions=spaces.unmap_actions)
    return algorithm, spaces, cut_windows(dataset, starts[:count], length)


def window_starts(dataset: TransitionDataset, length: int) -> Array:
    """First rows of windows of `length` observations that are inside one episode and do not overlap."""
    ends = dataset.episode_ends + 1
    starts = [  # n steps of an episode hold n + 1 observations
        np.arange(first, last - length + 2, length) for first, last in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return np.concatenate(starts)


def cut_windows(dataset: TransitionDataset, starts: Array, length: int) -> Windows:
    """The windows of `length` observations that begin at the rows `starts` [B]."""
    steps = starts[:, None] + np.arange(length - 1)
    obs = np.concatenate([dataset.obs[starts, None], dataset.next_obs[steps]], axis=1)
    led = (np.insert(column[steps], 0, 0, axis=1) for column in (dataset.actions, dataset.rewards))
    return Windows(*(torch.from_numpy(array) for array in (obs, *led)))


def draw_imagination(
    path: PathLike, folder: PathLike, *, warm_up: int = 10, horizon: int = 50, seed: int | None = None,
    env: UserEnv | None = None,
) -> list[Path]:  # fmt: skip
    """Pictures of one window, imagined against real: a strip and a GIF of frames, or curves of a vector."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--imagine needs the extra 'results' (pip install 'rl-training[results]').") from None
    algorithm, spaces, played = play_windows(path, warm_up + horizon, 1, seed=seed, env=env)
    predicted = open_loop(algorithm, played.obs, played.actions, warm_up)[0].numpy()
    real, still = played.obs[0].numpy(), Path(folder) / "imagined.png"
    rows: list[Array] = []
    if spaces.obs_kind == "vector":
        figure = draw_curves(Figure(layout="constrained"), real, predicted, warm_up)
    else:
        frames = [as_colors(images / spaces.image_scale) for images in (real, predicted)]
        rows = [*frames, np.abs(frames[0] - frames[1])]
        figure = draw_strip(Figure(layout="constrained"), rows, warm_up)
    with output_written(still, "the picture"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        refuse_link(folder)
        with replacing(still) as file:
            figure.savefig(file, format="png", dpi=120)
        return [still, write_gif(rows, warm_up, still.with_suffix(".gif"))] if rows else [still]


def as_colors(images: Array) -> Array:
    """Images [L, C, H, W] in [0, 1] as colors [L, H, W, 3]; channels that are neither gray nor RGB get a color each."""
    from matplotlib import colormaps

    channels = images.shape[1]
    if channels == 1:
        return np.repeat(images[:, 0, :, :, None], 3, axis=-1)
    palette = np.eye(3) if channels == 3 else np.array(colormaps["tab10"](np.arange(channels) % 10))[:, :3]
    return np.clip(np.einsum("tchw,ck->thwk", images, palette), 0.0, 1.0)


def draw_strip(figure: Any, rows: list[Array], warm_up: int) -> Any:
    """Frames in columns; rows are real, imagined and their difference."""
    shown = np.unique(np.linspace(0, len(rows[0]) - 1, COLUMNS).astype(int))
    figure.set_size_inches(0.8 * len(shown), 3.0)
    grid = figure.subplots(len(rows), len(shown), squeeze=False)
    for name, frames, line in zip(("real", "imagined", "difference"), rows, grid, strict=True):
        line[0].set_ylabel(name)
        for t, axes in zip(shown, line, strict=True):
            axes.imshow(frames[t], interpolation="nearest", vmin=0.0, vmax=1.0)
            axes.set_xticks([], [])
            axes.set_yticks([], [])
    for t, axes in zip(shown, grid[0], strict=True):
        axes.set_title("seen" if t < warm_up else f"+{t - warm_up + 1}", fontsize=8)
    return figure


def write_gif(rows: list[Array], warm_up: int, target: Path) -> Path:
    """Real, imagined and difference side by side; a bar on top marks frames whose observations the model gets."""
    from PIL import Image

    pictures = []
    for t in range(len(rows[0])):
        factor = max(1, FRAME_SIDE // rows[0].shape[1])
        line = np.concatenate([row[t] for row in rows], axis=1).repeat(factor, 0).repeat(factor, 1)
        bar = np.full((6, line.shape[1], 3), 1.0 if t < warm_up else 0.2)
        pictures.append(Image.fromarray((np.concatenate([bar, line]) * 255).astype(np.uint8)))
    with replacing(target) as file:
        pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0)
    return target


def draw_curves(figure: Any, real: Array, predicted: Array, warm_up: int) -> Any:
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
    return figure
