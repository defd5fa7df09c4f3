"""An animated picture of a policy of the zoo in its MuJoCo task: film_policy.py ppo/halfcheetah_gpu docs/images/x.gif.

Needs no display: MUJOCO_GL=egl python scripts/film_policy.py ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
from PIL import Image

import rl_training
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.run.zoo import read_card

FIRST, LAST = 8, 80  # steps that are shown
WIDTH, HEIGHT, COLORS = 360, 202, 64


def film(name: str, output: Path, seed: int = 3) -> None:
    """Play the policy and write every step, in real time."""
    card = read_card(name)
    spec = get_algorithm_spec(card.algo)
    policy = getattr(rl_training, spec.class_name).from_zoo(name)
    env: Any = gym.make(card.env_id, render_mode="rgb_array", width=WIDTH, height=HEIGHT, camera_name="track")
    obs, _ = env.reset(seed=seed)
    frames = []
    for step in range(LAST):
        obs, _, terminated, truncated, _ = env.step(policy.predict(obs))
        if step >= FIRST:
            frames.append(Image.fromarray(env.render()))
        if terminated or truncated:
            break
    palette = frames[0].quantize(COLORS)
    pictures = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    duration = round(1000 * env.unwrapped.dt)
    pictures[0].save(output, save_all=True, append_images=pictures[1:], duration=duration, loop=0)


if __name__ == "__main__":
    film(sys.argv[1], Path(sys.argv[2]))
