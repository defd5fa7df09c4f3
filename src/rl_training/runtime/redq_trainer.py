"""REDQ in the registry: settings of SAC's axes.

G times per environment step, all N critics learn y = r + g (min_{i in S} Q'_i(s', a') - alpha log pi(a'|s')) on a new
batch with a new random subset S, and their targets move. The last of the G updates has the step of the actor, on
alpha log pi - (1/N) sum_i Q_i, and of the temperature.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

REDQ = with_defaults(
    SACParams, "REDQ",
    learning_starts=5_000, gradient_updates_per_step=20, actor_update_interval=None, num_critics=10,
    critic_subset_size=2, actor_q="mean",
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="redq", class_name="REDQ", year=2021, params=REDQ,
        paper="Chen et al. 2021, Randomized Ensembled Double Q-Learning: Learning Fast Without a Model "
        "(arXiv:2101.05982)",
        scope="SAC with many updates per step, ten critics and targets from two of them; vectors and images.",
    )
]  # fmt: skip

train_redq = train_function(__name__, SPECS)
