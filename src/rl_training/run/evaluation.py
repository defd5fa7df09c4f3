"""Evaluation: whole episodes in separate environments with their own seeds, however many run in parallel."""

from __future__ import annotations

import warnings
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
from rl_training.envs.factory import episode_limit, make_env
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.wrappers import Env
from rl_training.errors import UserError
from rl_training.play import closed_after, play
from rl_training.run.acting import ActingSession
from rl_training.safe_files import output_written, refuse_link

CAN_BE_LEFT = True  # a signal may interrupt this code (run/interruption.py)

EVALUATION_STREAM = 2**31  # an environment index that no training environment has
MOST_SIDE_BY_SIDE = 20
MOST_STEPS = 10_000  # for environments without a limit
NEEDS = "needs the extra 'video' (pip install 'rl-training[video]')"


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of the episodes, in the order of their seeds."""

    returns: list[float]
    lengths: list[int]
    cut: int = 0  # episodes that were cut because they took too long

    def metrics(self) -> dict[str, Any]:
        """Mean, standard deviation and count as metrics."""
        return {
            "eval_return_mean": float(np.mean(self.returns)),
            "eval_return_std": float(np.std(self.returns)),
            "eval_length_mean": float(np.mean(self.lengths)),
            "eval_episodes": len(self.returns),
        }


class Evaluator:
    """Evaluates in new environments every time, so that a result depends only on weights and seed.

    Some environments carry state over between episodes, so reusing them would change a resumed run. `check` runs before
    every step and may raise. `warn` receives an exception of an environment's `close`; without `warn` it is raised.
    An episode is cut, with a warning, after `max_steps` (default: the environment's limit, or 10,000).
    """

    def __init__(
        self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, *, max_steps: int | None = None,
        check: Callable[[], None] | None = None, warn: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.spaces, self.seed, self.max_steps = recipe, spaces, seed, max_steps
        self.check, self.warn, self._has_warned = check, warn, False

    def evaluate(
        self, algorithm: Algorithm, episodes: int, *, deterministic: bool = True, window: bool = False,
        videos: Path | None = None,
    ) -> EvaluationResult:  # fmt: skip
        """Run that many episodes; the seed of episode i depends only on the run's seed and i.

        They can be shown in a window or recorded as videos; then they run one after the other.
        """
        if videos is not None:
            with output_written(videos, "the folder of videos"):
                for path in videos.glob("*"):
                    refuse_link(path)
        if videos is not None and find_spec("moviepy") is None:  # otherwise Gymnasium leaves an empty folder
            raise UserError(f"a video {NEEDS}.")
        shown = "rgb_array" if videos is not None else "human" if window else None
        envs: list[Env] = []
        with closed_after(envs, self.spaces.env_id, self.warn, waits=videos is not None):  # until a video is written
            for _ in range(1 if shown else min(episodes, MOST_SIDE_BY_SIDE)):
                envs.append(make_env(self.recipe, evaluation=True, render_mode=shown))
            limit = self.max_steps or episode_limit(envs[0]) or MOST_STEPS
            try:
                if videos is not None:
                    envs[0] = gym.wrappers.RecordVideo(envs[0], str(videos), lambda _: True, disable_logger=True)
                result = self._play(envs, algorithm, episodes, deterministic, limit)
            except gym.error.DependencyNotInstalled as error:
                if shown is None:
                    raise
                raise UserError(f"a {'window' if videos is None else 'video'} {NEEDS}: {error}.") from None
        if result.cut and not self._has_warned:
            self._has_warned = True
            self._tell(f"evaluation episodes that did not end within {limit:,} steps and were cut there: {result.cut} "
                       f"of {episodes} (eval_max_steps sets that limit)")  # fmt: skip
        return result

    def _tell(self, text: str) -> None:
        if self.warn is None:
            warnings.warn(text, stacklevel=5)
        else:
            self.warn(f"warning: {text}")

    def _play(
        self, envs: list[Env], algorithm: Algorithm, episodes: int, deterministic: bool, limit: int
    ) -> EvaluationResult:
        actor = ActingSession(algorithm, len(envs), self.seed, deterministic=deterministic)
        act = actor.in_environments(self.spaces, self.check)
        seed_of = partial(episode_seed, self.seed, EVALUATION_STREAM)
        returns, lengths, cut = [0.0] * episodes, [0] * episodes, 0
        for step in play(envs, act, seed_of, self.spaces.env_id, episodes, limit):
            returns[step.episode] += step.reward
            lengths[step.episode] += 1
            cut += lengths[step.episode] == limit and not (step.terminated or step.truncated)
        return EvaluationResult(returns, lengths, cut)
