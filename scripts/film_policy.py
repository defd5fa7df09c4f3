"""An animated picture of a policy of the zoo in its MuJoCo task: film_policy.py ppo/humanoid_gpu x.gif [ZOOM].

Needs no display: MUJOCO_GL=egl python scripts/film_policy.py ...
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
from PIL import Image

import rl_training
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.run.zoo import read_card

SECONDS, SHORTEST = 2.4, 0.04  # of the film; of a frame
WIDTH, HEIGHT, COLORS = 360, 202, 64
LOWER = 0.8  # of what `zoom` leaves out, this is above the picture


def film(name: str, output: Path, zoom: float = 1.0, seed: int = 3) -> None:
    """Play the policy from the start of an episode, and write what the camera sees, in real time."""
    card = read_card(name)
    spec = get_algorithm_spec(card.algo)
    policy = getattr(rl_training, spec.class_name).from_zoo(name)
    size = {"width": round(WIDTH * zoom), "height": round(HEIGHT * zoom)}
    env: Any = gym.make(card.env_id, render_mode="rgb_array", camera_name="track", **size)
    left, top = (size["width"] - WIDTH) // 2, round(LOWER * (size["height"] - HEIGHT))
    obs, _ = env.reset(seed=seed)
    every = max(1, math.ceil(SHORTEST / env.unwrapped.dt))
    frames = []
    for step in range(round(SECONDS / env.unwrapped.dt)):
        obs, _, terminated, truncated, _ = env.step(policy.predict(obs))
        if step % every == 0:
            picture = Image.fromarray(env.render())
            frames.append(picture.crop((left, top, left + WIDTH, top + HEIGHT)))
        if terminated or truncated:
            break
    palette = frames[0].quantize(COLORS)
    pictures = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    duration = round(1000 * every * env.unwrapped.dt)
    pictures[0].save(output, save_all=True, append_images=pictures[1:], duration=duration, loop=0)


if __name__ == "__main__":
    film(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
