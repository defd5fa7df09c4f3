"""ReBRAC in the registry: settings of TD3+BC's axes.

y = r + g (min_i Q'_i(s', a~) - b_2 |a~ - a'|^2), and the actor minimizes b_1 |mu(s) - a|^2 - Q / mean |Q| with
Q = min_i Q_i(s, mu(s)); three layers, LayerNorm in the critics, and large batches. In the authors' code the target
actor follows the actor as it was before its last step, and LayerNorm comes after the activation.
"""

from __future__ import annotations

from rl_training.algorithms.td3_bc import TD3BC
from rl_training.config.offline_params import TD3BCParams, offline_spec
from rl_training.config.params import with_defaults
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.run.workflows import train_function

REBRAC = with_defaults(
    TD3BCParams, "ReBRAC",
    learning_rate=1e-3, batch_size=1_024, hidden_sizes=(256, 256, 256), critic_layer_norm=True, q_weight=1.0,
    actor_bc_coef=0.01, critic_bc_coef=0.01, actor_q="min", normalize_states=False,
)  # fmt: skip

SPECS = [
    offline_spec(
        TD3BC, MLPTD3Model, name="rebrac", class_name="ReBRAC", year=2023, params=REBRAC,
        paper="Tarasov et al. 2023, Revisiting the Minimalist Approach to Offline Reinforcement Learning "
        "(arXiv:2305.09836)",
        scope="TD3+BC with a second penalty in the critics' targets, deeper networks and LayerNorm, from recorded data "
        "and then online; vectors and images.",
    )
]  # fmt: skip

train_rebrac = train_function(__name__, SPECS)
