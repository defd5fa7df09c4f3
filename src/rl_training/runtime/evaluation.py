"""Evaluation: own environments, own seeds, whole episodes, the same ones whatever number runs side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.algorithms.base import Algorithm
from rl_training.envs.episodes import episode_seed
from rl_training.envs.factory import Env, EnvRecipe, make_env
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.play import closed_after, play
from rl_training.runtime.acting import ActingSession

EVALUATION_STREAM = 2**31  # an environment index that no training environment has
MOST_SIDE_BY_SIDE = 20


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of the episodes, in the order of their seeds."""

    returns: list[float]
    lengths: list[int]

    def metrics(self) -> dict[str, Any]:
        """Mean, deviation and count under the contract's names."""
        return {
            "eval_return_mean": float(np.mean(self.returns)),
            "eval_return_std": float(np.std(self.returns)),
            "eval_length_mean": float(np.mean(self.lengths)),
            "eval_episodes": len(self.returns),
        }


class Evaluator:
    """Evaluates in new environments every time: some keep a history, and a result may depend on weights and seed only.

    So a resumed run evaluates as the uninterrupted one does.
    """

    def __init__(
        self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, *, check: Callable[[], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.spaces, self.seed, self.check, self.warn = recipe, spaces, seed, check, warn

    def evaluate(self, algorithm: Algorithm, episodes: int, *, deterministic: bool = True) -> EvaluationResult:
        """Run that many episodes; episode i starts from a seed that depends on the run's seed and i only."""
        envs: list[Env] = []
        with closed_after(envs, self.spaces.env_id, self.warn):
            envs += (make_env(self.recipe, evaluation=True) for _ in range(min(episodes, MOST_SIDE_BY_SIDE)))
            return run_episodes(
                envs, self.spaces, algorithm, episodes, self.seed, deterministic=deterministic, check=self.check
            )


def run_episodes(
    envs: list[Env], spaces: EnvSpaces, algorithm: Algorithm, episodes: int, seed: int, *, deterministic: bool = True,
    check: Callable[[], None] | None = None,
) -> EvaluationResult:  # fmt: skip
    """`episodes` whole episodes over these environments, each environment taking the next one when it ends one.

    `check` is called before every step and may raise.
    """
    actor = ActingSession(algorithm, len(envs), seed, deterministic=deterministic)
    act = actor.in_environments(spaces, check)
    returns, lengths = [0.0] * episodes, [0] * episodes
    for step in play(envs, act, partial(episode_seed, seed, EVALUATION_STREAM), spaces.env_id, episodes):
        returns[step.episode] += step.reward
        lengths[step.episode] += 1
    return EvaluationResult(returns, lengths)


def record_video(
    recipe: EnvRecipe, spaces: EnvSpaces, algorithm: Algorithm, episodes: int, seed: int, folder: Path, *,
    deterministic: bool = True,
) -> EvaluationResult:  # fmt: skip
    """The same evaluation, one environment, each episode as a video in `folder`."""
    if find_spec("moviepy") is None:  # Gymnasium would leave an empty folder behind
        raise UserError("a video needs the extra 'video' (pip install 'rl-training[video]').")
    with closed_after(opened := [make_env(recipe, evaluation=True, render_mode="rgb_array")], spaces.env_id):
        try:
            opened[0] = gym.wrappers.RecordVideo(opened[0], str(folder), lambda _: True, disable_logger=True)
            return run_episodes(opened, spaces, algorithm, episodes, seed, deterministic=deterministic)
        except gym.error.DependencyNotInstalled as error:
            raise UserError(f"a video needs the extra 'video' (pip install 'rl-training[video]'): {error}.") from None


def watch(
    recipe: EnvRecipe, spaces: EnvSpaces, algorithm: Algorithm, episodes: int, seed: int, *, deterministic: bool = True
) -> EvaluationResult:
    """The same evaluation in a window."""
    env = make_env(recipe, evaluation=True, render_mode="human")
    with closed_after([env], spaces.env_id):
        try:
            return run_episodes([env], spaces, algorithm, episodes, seed, deterministic=deterministic)
        except gym.error.DependencyNotInstalled as error:
            raise UserError(f"a window needs the extra 'video' (pip install 'rl-training[video]'): {error}.") from None
