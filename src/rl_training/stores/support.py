"""The support of a categorical distribution of returns: given, or derived from rewards before a run."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from pydantic import Field, model_validator

from rl_training.envs.factory import make_env
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure
from rl_training.runtime.random_play import play_at_random
from rl_training.validation import StrictModel

FIXED_ATOMS = "the atoms are placed once, when the learner is built"
EPISODES, STEPS = 10, 5_000  # limits of random play
UNKNOWN = (-10.0, 10.0)  # if random play earns no reward: the support of Bellemare et al. 2017
ROOM_ABOVE, ROOM_BELOW = 3.0, 1.0  # ranges of random returns that learning may gain, or lose
EDGE = 0.05  # of the support, on both sides


class SupportParams(StrictModel):
    """Hyper-parameters of a categorical head; a part of `Params`."""

    v_min: float | None = Field(None, description="Smallest return of the distribution; null: measured.")
    v_max: float | None = Field(None, description="Largest return of the distribution; null: measured.")
    num_atoms: int = Field(51, ge=2, le=10_001, description="Number of atoms of the distribution.")

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
        if self.v_min is not None and self.v_max is not None:
            return self
        schedule = self.schedules.get("gamma")  # type: ignore[attr-defined]
        gamma = self.gamma if schedule is None else max(schedule.value(0.0), schedule.value(1.0))  # type: ignore[attr-defined]
        low, high = derive_support(recipe, spaces, gamma, seed)
        low = low if self.v_min is None else self.v_min
        high = high if self.v_max is None else self.v_max
        if high <= low:  # the given end is beyond everything that was seen
            low, high = (low, low + 1.0) if self.v_max is None else (high - 1.0, high)
        return self.model_copy(update={"v_min": low, "v_max": high})


def derive_support(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[float, float]:
    """Ends that returns will rarely exceed, from the environment's `reward_range` or a few random episodes.

    The largest reward at every step of the longest episode is an upper bound. If rewards are rare, that bound is far
    too high, so the support also allows at most `ROOM_ABOVE` times the range of random returns above them.
    """
    env = make_env(recipe)
    declared, limit = getattr(env.unwrapped, "reward_range", None), getattr(env.spec, "max_episode_steps", None)
    with suppress(Exception, SystemExit):  # the environment was made only for this
        env.close()
    steps = limit or recipe.max_episode_steps or math.inf
    weight = min(steps, (1.0 - gamma**steps) / (1.0 - gamma) if gamma < 1.0 else STEPS)  # of a reward at every step
    if declared is not None and not recipe.wrappers.clip_reward and all(map(math.isfinite, declared)):
        low, high = (weight * float(reward) for reward in declared)
    else:
        rewards, returns = random_returns(recipe, spaces, gamma, seed)
        spread = max(0.0, *returns) - min(0.0, *returns)
        low = max(weight * min(rewards), min(returns) - ROOM_BELOW * spread)
        high = min(weight * max(rewards), max(returns) + ROOM_ABOVE * spread)
    low, high = min(0.0, low), max(0.0, high)  # an episode may end at any step
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
            total = 0.0
            for earned in reversed(rewards[begun:]):
                total = earned + gamma * total
                returns.append(total)
            begun, ended = len(rewards), ended + 1
            if ended == EPISODES:
                break
    if not all(map(math.isfinite, rewards)):
        raise EnvironmentFailure.not_finite(spaces.env_id, "a reward")
    return rewards, returns
