"""Compares stored returns with the support of a categorical distribution, and widens it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl_training.data.experience import Experience

EDGE = 0.05  # of the support, on both sides
LONGEST = 10_000  # rewards of an episode that are kept until it ends


def discounted_returns(rewards: Sequence[float], gamma: float) -> Iterator[float]:
    """The returns from every step of an episode, the last one first."""
    total = 0.0
    for earned in reversed(rewards):
        total = earned + gamma * total
        yield total


class SupportWatch:
    """Compares stored rewards, and the returns of stored episodes, with the support.

    An end that may move is moved beyond what lies outside; for one that may not, there is one warning. The width at
    least doubles, so that this happens a few times in a run at most. `widen` then moves the learner's atoms.
    """

    def __init__(self, params: Any, num_envs: int) -> None:
        self.ends: list[float] = [params.v_min, params.v_max]
        self.moves = [params.widen_support in (name, "both") for name in ("v_min", "v_max")]
        self._rewards: list[list[float]] = [[] for _ in range(num_envs)]  # of the current episodes
        self._reached: list[float] | None = list(self.ends)  # where the learner's ends are, if known
        self._warned = False

    def look(self, experience: Experience, gamma: float) -> None:
        """Compare the rewards of new experience and the returns of episodes that ended in it."""
        if self._warned and not any(self.moves):
            return  # there is nothing left to say
        for row in experience.rows():
            envs = row.get("envs", range(len(self._rewards)))
            ended, valid = row["terminated"] | row["truncated"], row["valid"]
            for i, (env, reward) in enumerate(zip(envs, row["rewards"].tolist(), strict=True)):
                if valid is not None and not valid[i]:
                    continue
                earned = self._rewards[env]
                earned.append(reward)
                self._meet(reward, "reward")
                if ended[i] or len(earned) == LONGEST:
                    returns = list(discounted_returns(earned, gamma))
                    self._meet(min(returns), "return")
                    self._meet(max(returns), "return")
                    earned.clear()

    def compare(self, extremes: Sequence[float]) -> None:
        """Compare the smallest and the largest reward and return that were stored, in this order."""
        for value, what in zip(extremes, ("reward", "reward", "return", "return"), strict=True):
            if math.isfinite(value):  # a run with other rewards ends soon
                self._meet(value, what)

    def _meet(self, value: float, what: str) -> None:
        low, high = self.ends
        slack = 1e-6 * (high - low)
        if low - slack <= value <= high + slack:
            return
        above = value > high
        name, near, far = ("v_max", high, low) if above else ("v_min", low, high)
        if self.moves[above]:
            further = max if above else min
            self.ends[above] = further(value + EDGE * (value - far), far + 2.0 * (near - far))
        elif not self._warned:
            self._warned = True
            where = f"{'above' if above else 'below'} {name} ({near:g})"
            warnings.warn(
                f"a {what} of {value:.4g} was stored, {where}: values there are clipped; widen the support, or leave "
                f"{name} out.", stacklevel=2,
            )  # fmt: skip

    def widen(self, algorithm: Any) -> dict[str, float]:
        """Move the learner's atoms to the ends, those of all ranks together; return the ends as metrics."""
        if not any(self.moves):
            return {}
        if algorithm.ranks is not None:
            low, high = self.ends
            self.ends = [-algorithm.ranks.largest(-low), algorithm.ranks.largest(high)]
        if self.ends != self._reached:
            algorithm.widen_support(*self.ends)
            self._reached = list(self.ends)
        return dict(zip(("v_min", "v_max"), self.ends, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The ends and the rewards of the current episodes; nothing if no end may move."""
        if not any(self.moves):
            return {}
        return {"support": {"ends": list(self.ends), "rewards": [np.array(earned) for earned in self._rewards]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; with another number of environments, new episodes start without rewards."""
        if not any(self.moves):
            return
        low, high = map(float, state["support"]["ends"])
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"its support is from {low} to {high}")
        self.ends, self._reached = [low, high], None
        rewards = [earned.tolist() for earned in state["support"]["rewards"]]
        if len(rewards) == len(self._rewards):
            self._rewards = rewards
