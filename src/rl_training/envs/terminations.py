"""Environments whose termination is a known function of the next observation, for rollouts through a learned model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_training.envs.recipe import EnvRecipe

Ends = Callable[[Any], Any]  # next observations [B, O], an array or a tensor -> whether the episode ends there [B]


def never(obs: Any) -> Any:
    """No step ends the episode."""
    return obs[:, 0] != obs[:, 0]


def inverted_pendulum(obs: Any) -> Any:
    """The pole leans more than 0.2 rad."""
    return ~(abs(obs[:, 1]) <= 0.2)


def hopper(obs: Any) -> Any:
    """The torso is low or leans, or a part of the state has left its range or is NaN."""
    return ~((obs[:, 0] > 0.7) & (abs(obs[:, 1]) < 0.2) & (abs(obs[:, 1:]) < 100.0).all(-1))


def walker2d(obs: Any) -> Any:
    """The torso is low, high or leans."""
    return ~((obs[:, 0] > 0.8) & (obs[:, 0] < 2.0) & (abs(obs[:, 1]) < 1.0))


def ant(obs: Any) -> Any:
    """The torso is low or high, or the state is not finite."""
    return ~((obs[:, 0] >= 0.2) & (obs[:, 0] <= 1.0) & (abs(obs) < float("inf")).all(-1))


def mountain_car(obs: Any) -> Any:
    """The car has reached the flag and does not roll back."""
    return (obs[:, 0] >= 0.45) & (obs[:, 1] >= 0.0)


KNOWN: dict[str, Ends] = {
    "Pendulum-v1": never, "HalfCheetah-v5": never, "Swimmer-v5": never, "Reacher-v5": never, "Pusher-v5": never,
    "InvertedPendulum-v5": inverted_pendulum, "Hopper-v5": hopper, "Walker2d-v5": walker2d, "Ant-v5": ant,
    "MountainCarContinuous-v0": mountain_car,
}  # fmt: skip


def known_termination(recipe: EnvRecipe) -> Ends | None:
    """The termination function, if it is known and no option or wrapper of the recipe may change it."""
    return KNOWN.get(recipe.env_id) if recipe.is_plain and not recipe.kwargs else None
