"""Atari episodes that end with a lost life while the game continues."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def lost(before: Any, after: Any) -> Any:
    """Whether a life was lost, but not the last one, which ends the game (some games show 0 lives before that)."""
    return (after > 0) & (after < before)


class LifeEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode when a life is lost; the next reset continues the game, or starts a new one if it is over.

    `terminal_on_life_loss` of Gymnasium's AtariPreprocessing starts a new game for every life, so a learner never
    sees the later part of a game.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.goes_on = False  # whether the next reset continues the game
        self._lives = 0
        self._last: tuple[Any, dict[str, Any]] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The observation at which a life was lost, or the first one of a new game."""
        if not self.goes_on or seed is not None:
            self._last = self.env.reset(seed=seed, options=options)
            self._lives = self._last[1]["lives"]
        self.goes_on = False
        assert self._last is not None
        return self._last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step; it terminates the episode if a life is lost and the game is not over."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.goes_on = lost(self._lives, info["lives"]) and not (terminated or truncated)
        self._lives, self._last = info["lives"], (observation, info)
        return observation, reward, terminated or self.goes_on, truncated, info


def find_lives(env: gym.Env[Any, Any]) -> LifeEpisodes | None:
    """The `LifeEpisodes` wrapper around an environment, if there is one."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, LifeEpisodes):
            return env
        env = env.env
    return None
