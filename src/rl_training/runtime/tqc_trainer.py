"""TQC in the registry: settings of SAC's axes.

With N critics of M quantiles, pooled and sorted at (s', a') as z_1 <= z_2 <= ..., the targets are
y_j = r + g (z_j - alpha log pi(a'|s')), j = 1 ... N (M - d). Every quantile of every critic learns them by the quantile
Huber loss; the actor minimizes alpha log pi - mean of all quantiles, of which none is dropped.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

TQC = with_defaults(
    SACParams, "TQC",
    num_critics=5, critic_hidden_sizes=(512, 512, 512), num_quantiles=25, top_quantiles_to_drop=2, actor_q="mean",
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="tqc", class_name="TQC", year=2020, params=TQC,
        paper="Kuznetsov et al. 2020, Controlling Overestimation Bias with Truncated Mixture of Continuous "
        "Distributional Quantile Critics (arXiv:2005.04269)",
        scope="SAC with critics that predict quantiles; the target leaves out the largest; vectors and images.",
    )
]  # fmt: skip

train_tqc = train_function(__name__, SPECS)
