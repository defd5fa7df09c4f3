"""Registers MinAtar's games as `MinAtar/<Game>-v1`. MinAtar is GPL: this is imported only if a game is requested."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym

logging.disable(logging.WARNING)  # the import warns about plotting packages that only its windows need
try:
    from minatar.gym import BaseEnv
finally:
    logging.disable(logging.NOTSET)

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


class MinAtarGame(BaseEnv):  # type: ignore[misc]  # MinAtar has no types
    """One game with its minimal set of actions, whose episodes depend only on their seed and actions."""

    def __init__(self, game: str, **options: Any) -> None:
        super().__init__(game, use_minimal_action_set=True, **options)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Also forget the last action, which a sticky first step would repeat from the previous episode."""
        self.game.last_action = 0
        obs, info = super().reset(seed, options)
        return obs, info


for game in GAMES:
    name = game.title().replace("_", "")
    gym.register(f"MinAtar/{name}-v1", f"{__name__}:{MinAtarGame.__name__}", kwargs={"game": game})
