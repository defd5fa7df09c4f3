"""The support of a categorical distribution of returns: given, or derived from random play and widened in a run."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rl_training.config.params import Facts, Reason, Reasons
from rl_training.data.support import EDGE, discounted_returns
from rl_training.envs.factory import make_env
from rl_training.envs.random_play import play_at_random
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.validation import StrictModel

EPISODES, STEPS = 10, 5_000  # limits of random play
UNKNOWN = (-10.0, 10.0)  # if random play earns no reward: the support of Bellemare et al. 2017
ROOM_ABOVE, ROOM_BELOW = 3.0, 1.0  # ranges of random returns that learning may gain, or lose


class SupportParams(StrictModel):
    """Hyper-parameters of a categorical head; a part of `Params`."""

    fixed: ClassVar[Reasons] = (Reason(("v_min", "v_max"), "the atoms are placed when the learner is built"),)

    v_min: float | None = Field(None, description="Smallest return of the distribution; null: measured, then widened.")
    v_max: float | None = Field(None, description="Largest return of the distribution; null: measured, then widened.")
    num_atoms: int = Field(51, ge=2, le=10_001, description="Number of atoms of the distribution.")
    widen_support: Literal["auto", "none", "v_min", "v_max", "both"] = Field(
        "auto", description="Which ends move outward when a return beyond them is stored; auto: those that are null."
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

    @property
    def facts(self) -> Facts:
        """As the base class, plus the support, which has both ends after `settle`."""
        inherited: Facts = super().facts  # type: ignore[misc]
        return inherited._replace(has_support=self.v_min is not None)

    def settle(self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int) -> Any:
        """A copy with both ends of the support set."""
        open_ends = self.v_min is None, self.v_max is None
        moving = {(False, False): "none", (True, False): "v_min", (False, True): "v_max", (True, True): "both"}
        widened = {"widen_support": moving[open_ends] if self.widen_support == "auto" else self.widen_support}
        if not any(open_ends):
            return self.model_copy(update=widened)
        low, high = derive_support(recipe, spaces, self.largest("gamma"), seed)  # type: ignore[attr-defined]
        low = low if self.v_min is None else self.v_min
        high = high if self.v_max is None else self.v_max
        if high <= low:  # the given end is beyond everything that was seen
            low, high = (low, low + 1.0) if self.v_max is None else (high - 1.0, high)
        return self.model_copy(update={"v_min": low, "v_max": high, **widened})


def derive_support(recipe: EnvRecipe, spaces: EnvSpaces, gamma: float, seed: int) -> tuple[float, float]:
    """The ends at the start of a run, from a few random episodes and the `reward_range` that environments may declare.

    They leave room for `ROOM_ABOVE` times the range of random returns above those, and `ROOM_BELOW` times below, but
    not for more than the largest reward at every step of the longest episode. One reward of any known size always fits.
    """
    if recipe.made:
        what = f"v_min or v_max is not given, and random play to measure it needs one environment, but {recipe.env_id}"
        raise UserError(f"{what} is a Simulator; give both in algo_kwargs.")
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
