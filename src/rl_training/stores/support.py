"""The support of a categorical distribution of returns: given, or derived from random play and widened in a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rl_training.algorithms.base import read_metrics
from rl_training.data.experience import Experience
from rl_training.envs.factory import make_env
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure
from rl_training.runtime.random_play import play_at_random
from rl_training.validation import StrictModel

FIXED_ATOMS = "the atoms are placed when the learner is built"
EPISODES, STEPS = 10, 5_000  # limits of random play
UNKNOWN = (-10.0, 10.0)  # if random play earns no reward: the support of Bellemare et al. 2017
ROOM_ABOVE, ROOM_BELOW = 3.0, 1.0  # ranges of random returns that learning may gain, or lose
EDGE = 0.05  # of the support, on both sides
LONGEST = 10_000  # rewards of an episode that are kept until it ends
LOOK_EVERY, LOOKS, MUCH_CLIPPED = 100, 10, 0.1  # updates between checks of `clipped_targets`, and the limit


class SupportParams(StrictModel):
    """Hyper-parameters of a categorical head; a part of `Params`."""

    v_min: float | None = Field(None, description="Smallest return of the distribution; null: measured, and widened.")
    v_max: float | None = Field(None, description="Largest return of the distribution; null: measured, and widened.")
    num_atoms: int = Field(51, ge=2, le=10_001, description="Number of atoms of the distribution.")
    widen_support: Literal["auto", "none", "v_min", "v_max", "both"] = Field(
        "auto", description="Ends that move outward when a return beyond them is stored; auto: those that are null."
    )

    @model_validator(mode="after")
    def _support_has_width(self) -> SupportParams:
        if self.v_min is not None and self.v_max is not None and self.v_max <= self.v_min:
            raise ValueError(f"v_max is {self.v_max}; it must be above v_min ({self.v_min})")
        return self

    def arguments_of(self, owner: type) -> dict[str, Any]:
        """The arguments as usual; before `settle`, missing ends of the support are those of `UNKNOWN`."""
        arguments: dict[str, Any] = super().arguments_of(owner)  # type: ignore[misc]  # of the Params, as below
        ends = dict(zip(("v_min", "v_max"), UNKNOWN, strict=True))
        return {name: ends.get(name) if value is None else value for name, value in arguments.items()}

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus the ends of the support."""
        inherited: dict[str, str] = super().fixed_numbers()  # type: ignore[misc]  # of the Params that this is a part of
        return inherited | dict.fromkeys(("v_min", "v_max"), FIXED_ATOMS)

    def settle(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Any:
        """A copy with both ends of the support set."""
        given = (self.v_min is not None, self.v_max is not None)
        moving = {(True, True): "none", (False, True): "v_min", (True, False): "v_max", (False, False): "both"}[given]
        widened = {"widen_support": moving if self.widen_support == "auto" else self.widen_support}
        if all(given):
            return self.model_copy(update=widened)
        schedule = self.schedules.get("gamma")  # type: ignore[attr-defined]
        gamma = self.gamma if schedule is None else max(schedule.value(0.0), schedule.value(1.0))  # type: ignore[attr-defined]
        low, high = derive_support(recipe, spaces, gamma, seed)
        low = low if self.v_min is None else self.v_min
        high = high if self.v_max is None else self.v_max
        if high <= low:  # the given end is beyond everything that was seen
            low, high = (low, low + 1.0) if self.v_max is None else (high - 1.0, high)
        return self.model_copy(update={"v_min": low, "v_max": high, **widened})


def derive_support(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[float, float]:
    """Ends for a start, from a few random episodes and the environment's `reward_range`, if it declares one.

    They leave room for `ROOM_ABOVE` times the range of random returns above those, and `ROOM_BELOW` times below, but
    not for more than the largest reward at every step of the longest episode. One reward of any known size always fits.
    """
    env = make_env(recipe)
    declared, limit = getattr(env.unwrapped, "reward_range", None), getattr(env.spec, "max_episode_steps", None)
    with suppress(Exception, SystemExit):  # the environment was made only for this
        env.close()
    steps = limit or recipe.max_episode_steps or math.inf
    weight = min(steps, (1.0 - gamma**steps) / (1.0 - gamma) if gamma < 1.0 else STEPS)  # of a reward at every step
    rewards, returns = random_returns(recipe, spaces, gamma, seed)
    if declared is not None and not recipe.wrappers.clip_reward and all(map(math.isfinite, declared)):
        rewards += map(float, declared)
    least, most = min(0.0, *rewards), max(0.0, *rewards)  # an episode may end at any step
    spread = max(0.0, *returns) - min(0.0, *returns)
    low = min(least, max(weight * least, min(returns) - ROOM_BELOW * spread))
    high = max(most, min(weight * most, max(returns) + ROOM_ABOVE * spread))
    edge = EDGE * (high - low)
    return (float(f"{low - edge:.3g}"), float(f"{high + edge:.3g}")) if edge else UNKNOWN


def random_returns(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[list[float], list[float]]:
    """Rewards of random play, and the discounted returns from every step of it."""
    rewards: list[float] = []
    returns: list[float] = []
    begun = ended = 0
    for step in play_at_random(recipe, spaces, seed, STEPS):
        rewards.append(step.reward)
        if step.terminated or step.truncated or len(rewards) == STEPS:
            returns += discounted_returns(rewards[begun:], gamma)
            begun, ended = len(rewards), ended + 1
            if ended == EPISODES:
                break
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFailure.not_finite(spaces.env_id, "a reward")
    return rewards, returns


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
        self._updates = self._looks_at_clipping = 0

    def look(self, experience: Experience, gamma: float) -> None:
        """Compare the rewards of new experience and the returns of episodes that ended in it."""
        for row in experience.rows():
            rewards, valid, envs = (row.get(name) for name in ("rewards", "valid", "envs"))
            ended = row["terminated"] | row["truncated"]  # type: ignore[operator]
            for i, reward in enumerate(rewards.tolist()):  # type: ignore[union-attr]
                if valid is not None and not valid[i]:
                    continue
                earned = self._rewards[i if envs is None else envs[i]]
                earned.append(reward)
                self._meet(reward, "reward")
                if ended[i] or len(earned) == LONGEST:
                    returns = list(discounted_returns(earned, gamma))
                    self._meet(min(returns), "return")
                    self._meet(max(returns), "return")
                    earned.clear()

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

    def watch_clipping(self, clipped: Any) -> None:
        """Warn once if many targets of updates have been outside the support for a while."""
        self._updates += 1
        if self._updates % LOOK_EVERY or self._looks_at_clipping >= LOOKS:
            return
        share = read_metrics({"share": clipped})["share"]
        self._looks_at_clipping = self._looks_at_clipping + 1 if share > MUCH_CLIPPED else 0
        if self._looks_at_clipping == LOOKS:
            ends = "v_min is {:g} and v_max {:g}".format(*self.ends)
            warnings.warn(f"{share:.0%} of the targets are outside the support ({ends}); widen them.", stacklevel=2)

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
        """The inverse of `state_dict`; with another number of environments, which begin new episodes, no rewards."""
        if not any(self.moves):
            return
        low, high = map(float, state["support"]["ends"])
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"its support is from {low} to {high}")
        self.ends, self._reached = [low, high], None
        rewards = [earned.tolist() for earned in state["support"]["rewards"]]
        if len(rewards) == len(self._rewards):
            self._rewards = rewards
