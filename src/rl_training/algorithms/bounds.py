"""Bounds of the numbers that learners' constructors take, by name; they are the same for every learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    ">= 0": (
        lambda x: x >= 0,
        "learning_rate critic_learning_rate actor_learning_rate policy_learning_rate model_learning_rate "
        "world_model_learning_rate fraction_learning_rate discriminator_learning_rate alpha ent_coef vf_coef kl_coef "
        "entropy_coef penalty_coef gradient_penalty exploration_noise policy_noise noise_clip kappa free_nats "
        "discriminator_updates",
    ),
    "> 0": (
        lambda x: x > 0,
        "value_learning_rate max_kl cg_damping max_grad_norm optimizer_eps clip_coef rho_clip c_clip pg_rho_clip "
        "kl_target target_kl initial_alpha action_gradient_clip",
    ),
    ">= 1": (
        lambda x: x >= 1,
        "cg_iterations line_search_steps update_epochs minibatch_size value_updates value_minibatch_size "
        "target_update_interval policy_delay actor_update_interval num_quantiles num_target_quantiles "
        "num_acting_quantiles imagination_horizon discriminator_batch_size",
    ),
    "in [0, 1]": (lambda x: 0 <= x <= 1, "gamma gae_lambda epsilon"),
    "in (0, 1]": (lambda x: 0 < x <= 1, "tau"),
    "in (0, 1)": (lambda x: 0 < x < 1, "line_search_shrink"),
}
BOUNDS = {name: (bound, holds) for bound, (holds, names) in _ARGUMENTS.items() for name in names.split()}


def check_bounds(arguments: Mapping[str, Any]) -> None:
    """Refuse the first number that is out of its bounds; None (not set) and strings are skipped."""
    for name, value in arguments.items():
        if name in BOUNDS and isinstance(value, (int, float)):
            bound, holds = BOUNDS[name]
            if not holds(value):
                raise ValueError(f"{name} must be {bound}, got {value}")
