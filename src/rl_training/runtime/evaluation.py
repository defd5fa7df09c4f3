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
NEEDS = "needs the extra 'video' (pip install 'rl-training[video]')"


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

    So a resumed run evaluates as the uninterrupted one does. `check` is called before every step and may raise; `warn`
    is told what an environment raises when it is closed, else that is raised.
    """

    def __init__(
        self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, *, check: Callable[[], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.spaces, self.seed, self.check, self.warn = recipe, spaces, seed, check, warn

    def evaluate(
        self, algorithm: Algorithm, episodes: int, *, deterministic: bool = True, window: bool = False,
        videos: Path | None = None,
    ) -> EvaluationResult:  # fmt: skip
        """Run that many episodes; episode i starts from a seed that depends on the run's seed and i only.

        They can be shown in a window, or each be written to a folder of videos: then one runs after the other.
        """
        if videos is not None and find_spec("moviepy") is None:  # Gymnasium would leave an empty folder behind
            raise UserError(f"a video {NEEDS}.")
        shown = "rgb_array" if videos is not None else "human" if window else None
        envs: list[Env] = []
        with closed_after(envs, self.spaces.env_id, self.warn):
            for _ in range(1 if shown else min(episodes, MOST_SIDE_BY_SIDE)):
                envs.append(make_env(self.recipe, evaluation=True, render_mode=shown))
            try:
                if videos is not None:
                    envs[0] = gym.wrappers.RecordVideo(envs[0], str(videos), lambda _: True, disable_logger=True)
                return self._play(envs, algorithm, episodes, deterministic)
            except gym.error.DependencyNotInstalled as error:
                if shown is None:
                    raise
                raise UserError(f"a {'window' if videos is None else 'video'} {NEEDS}: {error}.") from None

    def _play(self, envs: list[Env], algorithm: Algorithm, episodes: int, deterministic: bool) -> EvaluationResult:
        actor = ActingSession(algorithm, len(envs), self.seed, deterministic=deterministic)
        act = actor.in_environments(self.spaces, self.check)
        seed_of = partial(episode_seed, self.seed, EVALUATION_STREAM)
        returns, lengths = [0.0] * episodes, [0] * episodes
        for step in play(envs, act, seed_of, self.spaces.env_id, episodes):
            returns[step.episode] += step.reward
            lengths[step.episode] += 1
        return EvaluationResult(returns, lengths)
