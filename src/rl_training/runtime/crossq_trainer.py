"""CrossQ in the registry: settings of SAC's axes.

Actor and critics have batch renormalization of their input and after every hidden layer, and there are no target
networks. One pass of the critics over both (s, a) and (s', a') normalizes them by the statistics of both and gives
y = r + g (min_i Q_i(s', a') - alpha log pi(a'|s')), without a gradient, and the loss (Q_i(s, a) - y)^2, whose gradient
passes through these statistics. a' comes from the running statistics of the actor. In the actor's loss,
alpha log pi - min_i Q_i, the actor has the statistics of its batch and the critics have their running ones.

The published loss is half the sum over critics; here it is the mean, which for Adam is the same.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

CROSSQ = with_defaults(
    SACParams, "CrossQ",
    learning_rate=1e-3, adam_beta1=0.5, architecture="batch_renorm", critic_hidden_sizes=(2048, 2048),
    target_networks=False, joint_forward="critics", actor_update_interval=3, learning_starts=5_000,
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="crossq", class_name="CrossQ", year=2024, params=CROSSQ,
        paper="Bhatt et al. 2024, CrossQ: Batch Normalization in Deep Reinforcement Learning for Greater Sample "
        "Efficiency and Simplicity (arXiv:1902.05605)",
        scope="SAC with batch renormalization, wide critics and no target networks; vectors and images.",
    )
]  # fmt: skip

train_crossq = train_function(__name__, SPECS)
