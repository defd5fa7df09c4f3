"""FlashSAC in the registry: settings of SAC's axes.

Actor and critics are h_0 = W0 BN(x), h_{k+1} = h_k + relu(BN(W2 relu(BN(W1 h_k)))), and W RMS(h_K) + b. Each output's
weights have norm 1, scales and shifts of BN together the squared norm of their number, and scales of RMS too, at the
start and after every step. What learns is normalized by batch statistics of (s, s') in one pass: the actor in its own
step, the critics, and the target critics, a moving average of the critics' parameters. Everything else reads running
statistics. Actor and temperature learn every second update, before the critics.

Critics predict probabilities of 101 returns and learn as SimbaV2's do, with its scale of rewards. The target entropy is
that of a Gaussian of deviation 0.15, log(2 pi e 0.15^2) / 2 for each dimension. Noise in actions is held for n of at
most 16 steps, with P(n) ~ 1 / n^2, the same n for all environments. The learning rates fall by a cosine to half.

In the published code, the learning rates of actor and temperature fall half as far, because they learn half as often.
"""

from __future__ import annotations

import math

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

DEVIATION = 0.15  # of the Gaussian that has the target entropy

FLASH_SAC = with_defaults(
    SACParams, "FlashSAC",
    learning_rate_decay="cosine", architecture="unit_batch_norm", hidden_sizes=(128, 128),
    critic_hidden_sizes=(256, 256), num_atoms=101, return_bound=5.0, joint_forward="both", actor_first=True,
    actor_update_interval=2, noise_repeat=16, tau=0.01, initial_alpha=0.01, batch_size=512, learning_starts=10_000,
    target_entropy_per_dimension=0.5 * math.log(2.0 * math.pi * math.e * DEVIATION**2), buffer_capacity=1_000_000,
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="flash_sac", class_name="FlashSAC", year=2026, params=FLASH_SAC,
        paper="Kim et al. 2026, FlashSAC: Fast and Stable Off-Policy Reinforcement Learning for High-Dimensional Robot "
        "Control (arXiv:2604.04539)",
        scope="SAC with batch normalization of unit weights, a categorical critic, scaled rewards, and noise that is "
        "held; vectors and images.",
    )
]  # fmt: skip

train_flash_sac = train_function(__name__, SPECS)
