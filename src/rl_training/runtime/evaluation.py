"""Evaluation: own environments, own seeds, whole episodes, the same ones whatever number runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.algorithms.base import Algorithm
from rl_training.envs.episodes import episode_seed
from rl_training.envs.factory import Env, EnvRecipe, close_all, make_env
from rl_training.envs.spaces import Array, EnvSpaces, read_action_mask
from rl_training.errors import EnvironmentFailure, UserError
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
    returns, lengths = [0.0] * episodes, [0] * episodes
    current = list(range(len(envs)))  # the episode that each environment is in; `episodes` or more: none
    obs: list[Any] = []
    masks: list[Array] = []
    with failures_named(spaces.env_id):
        for i, env in enumerate(envs):
            row, info = env.reset(seed=episode_seed(seed, EVALUATION_STREAM, i))
            obs.append(row)
            masks.append(read_action_mask(info, spaces))
    started, is_first = len(envs), np.ones(len(envs), dtype=bool)
    while any(episode < episodes for episode in current):
        if check is not None:
            check()
        encoded = spaces.encode_rows(obs)
        actions = actor.act(encoded, np.stack(masks) if spaces.has_action_mask else None, is_first)
        mapped = spaces.map_actions(actions)
        is_first = np.zeros(len(envs), dtype=bool)
        with failures_named(spaces.env_id):
            for i, env in enumerate(envs):
                episode = current[i]
                if episode >= episodes:
                    continue
                action = mapped[i].item() if spaces.action_kind == "discrete" else mapped[i]
                obs[i], reward, terminated, truncated, info = env.step(action)
                returns[episode] += float(reward)
                lengths[episode] += 1
                if terminated or truncated:
                    current[i], started, is_first[i] = started, started + 1, True
                    if current[i] < episodes:
                        obs[i], info = env.reset(seed=episode_seed(seed, EVALUATION_STREAM, current[i]))
                if spaces.has_action_mask:
                    masks[i] = read_action_mask(info, spaces)
    return EvaluationResult(returns, lengths)


@contextmanager
def failures_named(env_id: str) -> Iterator[None]:
    """What an environment raises, with its name; a missing package is told where it is asked for."""
    try:
        yield
    except (UserError, gym.error.DependencyNotInstalled):
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure.raised(env_id, type(error).__name__, str(error)) from error


@contextmanager
def closed_after(envs: list[Env], env_id: str, warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Close every environment at the end; `warn` is told what one raises then, else it is raised."""
    try:
        yield
    except BaseException:
        close_all(envs)
        raise
    if (error := close_all(envs)) is None:
        return
    failure = EnvironmentFailure.raised(env_id, type(error).__name__, str(error))
    if warn is None:
        raise failure from error
    warn(f"warning: when it was closed, {failure}")


def record_video(
    recipe: EnvRecipe, spaces: EnvSpaces, algorithm: Algorithm, episodes: int, seed: int, folder: Path, *,
    deterministic: bool = True,
) -> EvaluationResult:  # fmt: skip
    """The same evaluation, one environment, each episode as a video in `folder`."""
    if find_spec("moviepy") is None:  # Gymnasium would leave an empty folder behind
        raise UserError("a video needs the extra 'video' (pip install 'rl-training[video]').")
    env = make_env(recipe, evaluation=True, render_mode="rgb_array")
    try:
        recorder = gym.wrappers.RecordVideo(env, str(folder), episode_trigger=lambda _: True, disable_logger=True)
        result = run_episodes([recorder], spaces, algorithm, episodes, seed, deterministic=deterministic)
        recorder.close()
    except gym.error.DependencyNotInstalled as error:
        raise UserError(f"a video needs the extra 'video' (pip install 'rl-training[video]'): {error}.") from None
    return result


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
