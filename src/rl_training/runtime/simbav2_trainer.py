"""SimbaV2 in the registry: settings of SAC's axes.

n(x) = x / |x|. With observations x normalized as SimBa's, h_0 = n(s_0 W_0 n([x, 3])), and a block is
h_{k+1} = n(h_k + a_k (y - h_k)) with y = n(W2 relu(s_k W1 h_k)); the outputs are W2 (s W1 h_K) + b. Each output's
weights have norm 1, at the start and after every step; a and s are learned scales of each unit. The target critics
are a plain moving average.

Critics predict probabilities p of 101 returns z in [-5, 5] and learn, by cross-entropy, the projection of the
distribution of r + g (z - alpha log pi(a'|s')) under the target critic with the smaller mean. Rewards are divided by
max(sqrt(var G), max |G| / 5), with the discounted return G of every step. The learning rates fall linearly to half.

The published code has one critic where episodes do not terminate (`num_critics: 1`), clips no normalized observation
(here at 10), and takes the temperature's step on alpha, not log alpha. Its sum over critics is a mean here.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.config.rollout_params import NORMALIZED_OBSERVATIONS
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

SIMBAV2 = with_defaults(
    SACParams, "SimBaV2",
    learning_rate=1e-4, learning_rate_decay="linear", architecture="hypersphere", hidden_sizes=(128,),
    critic_hidden_sizes=(512, 512), num_atoms=101, return_bound=5.0, actor_first=True, observation_statistics="steps",
    initial_alpha=0.01, target_entropy_per_dimension=-0.5, learning_starts=5_000,
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="simbav2", class_name="SimBaV2", year=2025, params=SIMBAV2,
        paper="Lee et al. 2025, Hyperspherical Normalization for Scalable Deep Reinforcement Learning "
        "(arXiv:2502.15280)",
        scope="SAC with features and weights on the unit sphere, a categorical critic, and scaled rewards; "
        "vectors and images.",
        defaults={"log_interval": 1_000, "total_timesteps": 20_000, "env_kwargs": NORMALIZED_OBSERVATIONS},
    )
]  # fmt: skip

train_simbav2 = train_function(__name__, SPECS)
