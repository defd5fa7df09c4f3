"""DroQ in the registry: settings of SAC's axes.

REDQ's loop with two critics whose hidden layers are ReLU(LayerNorm(Dropout(W h + b))): dropout stands for the ensemble.
It is active wherever a critic is evaluated: in y = r + g (min_i Q'_i(s', a') - alpha log pi(a'|s')), in the critics'
loss, and in the actor's, alpha log pi - (1/2) sum_i Q_i; every critic has its own masks.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

DROQ = with_defaults(
    SACParams, "DroQ",
    learning_starts=5_000, gradient_updates_per_step=20, actor_update_interval=None, critic_dropout=0.01,
    critic_layer_norm=True, actor_q="mean",
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="droq", class_name="DroQ", year=2021, params=DROQ,
        paper="Hiraoka et al. 2021, Dropout Q-Functions for Doubly Efficient Reinforcement Learning (arXiv:2110.02034)",
        scope="SAC with many updates per step and two critics with dropout and LayerNorm; vectors and images.",
    )
]  # fmt: skip

train_droq = train_function(__name__, SPECS)
