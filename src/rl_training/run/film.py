"""An episode of a policy as an animated GIF: in a report, or inline in a notebook. It needs no video library."""

from __future__ import annotations

import io
import warnings
from base64 import b64encode
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.algorithms.base import Algorithm
from rl_training.config.train_config import TrainConfig
from rl_training.envs.factory import UserEnv, make_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.rendering import drawing_explained, without_screen
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import episode_seed
from rl_training.errors import UserError, counted
from rl_training.play import closed_after, play
from rl_training.run.evaluation import EVALUATION_STREAM
from rl_training.run.learner import ActingSession, check_same_spaces, load_algorithm, read_checkpoint
from rl_training.safe_files import output_written, replacing

MOST_STEPS, MOST_FRAMES, FRAME_WIDTH = 1_000, 120, 320  # of an episode


@dataclass(frozen=True)
class Film:
    """An episode: its GIF, and a few words about it. A notebook shows it; `save` writes a file."""

    gif: bytes
    told: str

    def _repr_html_(self) -> str:
        return f'<img alt="{self.told}" src="data:image/gif;base64,{b64encode(self.gif).decode()}"><br>{self.told}'

    def __repr__(self) -> str:
        return f"<Film: {self.told}; save(path) writes a GIF>"

    def save(self, path: str | Path) -> Path:
        """Write the GIF."""
        if Path(path).suffix.lower() != ".gif":
            raise UserError(f"path is {str(path)!r}; this film is a GIF, so it must end in .gif.")
        with output_written(path, "path"), replacing(path) as file:
            file.write(self.gif)
        return Path(path)


def film_checkpoint(checkpoint: Path, env: Any = None) -> Film:
    """The first evaluation episode of a checkpoint's policy; `env` is as in `evaluate_checkpoint`."""
    names = env if isinstance(env, tuple) else None
    algorithm, spaces, config = load_algorithm(checkpoint, read_checkpoint(checkpoint), names)
    return film_episode(algorithm, spaces, config, env, seed=config.seed)


def film_episode(
    algorithm: Algorithm, spaces: EnvSpaces, config: TrainConfig, env: UserEnv | None, *, seed: int,
    deterministic: bool = True,
) -> Film:  # fmt: skip
    """An episode in a new environment, the one that an evaluation with this seed begins with."""
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    check_same_spaces(spaces, probe_spaces(recipe))
    frames: list[Any] = []
    rewards, stride, ended = list[float](), 1, False
    with without_screen(), drawing_explained():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an environment that cannot render: the error says so
            played = make_env(recipe, evaluation=True, render_mode="rgb_array")
        with closed_after([played], spaces.env_id):
            act = ActingSession(algorithm, 1, seed, deterministic=deterministic).in_environments(spaces)
            first = episode_seed(seed, EVALUATION_STREAM, 0)
            for step in islice(play([played], act, lambda _: first, spaces.env_id, 1), MOST_STEPS):
                if len(rewards) % stride == 0:
                    frames.append(draw(played, config.env_id))
                if len(frames) > MOST_FRAMES:
                    frames, stride = frames[::2], 2 * stride
                rewards.append(step.reward)
                ended = step.terminated or step.truncated
    pause = max(20, round(1000 * stride / (played.metadata.get("render_fps") or 30)))
    frames[0].save(file := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:], duration=pause, loop=0)
    length = ("" if ended else "the first ") + counted(len(rewards), "step")
    return Film(file.getvalue(), f"{length}, return {sum(rewards):.4g}")


def draw(env: Any, env_id: str) -> Any:
    """What the environment shows now, as a small picture of few colors."""
    from PIL import Image

    try:
        pixels = np.asarray(env.render())
    except NotImplementedError:
        pixels = np.zeros(0)
    if pixels.ndim != 3:
        raise UserError(f"{env_id} does not render to rgb_array.")
    picture = Image.fromarray(pixels.astype(np.uint8))
    picture.thumbnail((FRAME_WIDTH, FRAME_WIDTH))
    return picture.quantize(64)
