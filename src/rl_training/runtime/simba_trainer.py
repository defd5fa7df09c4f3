"""SimBa in the registry: settings of SAC's axes.

Running statistics normalize observations; they move with every step that is taken, and stored observations stay raw.
Actor and critics are h_0 = W s, h_{k+1} = h_k + W2 relu(W1 LayerNorm(h_k)) with a hidden layer four times as wide, and
a linear layer on LayerNorm(h_K). The log deviation is -10 + 6 (1 + tanh(x)). An update takes the steps of the actor, of
the temperature and of the critics, in this order, by AdamW; the target entropy is -|A| / 2.

The published code has one critic where episodes do not terminate (`num_critics: 1`), clips no normalized observation
(here at 10), and takes the temperature's step on alpha, not log alpha.
"""

from __future__ import annotations

from rl_training.algorithms.sac import SAC
from rl_training.config.params import with_defaults
from rl_training.config.replay_params import SACParams, continuous_spec
from rl_training.config.rollout_params import NORMALIZED_OBSERVATIONS
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function

SIMBA = with_defaults(
    SACParams, "SimBa",
    learning_rate=1e-4, optimizer="adamw", weight_decay=0.01, architecture="residual", hidden_sizes=(128,),
    critic_hidden_sizes=(512, 512), actor_first=True, observation_statistics="steps", initial_alpha=0.01,
    target_entropy_per_dimension=-0.5, learning_starts=5_000,
)  # fmt: skip

SPECS = [
    continuous_spec(
        SAC, MLPSACModel, name="simba", class_name="SimBa", year=2024, params=SIMBA,
        paper="Lee et al. 2024, SimBa: Simplicity Bias for Scaling Up Parameters in Deep Reinforcement Learning "
        "(arXiv:2410.09754)",
        scope="SAC with residual networks, normalized observations and AdamW; vectors and images.",
        defaults={"log_interval": 1_000, "total_timesteps": 20_000, "env_kwargs": NORMALIZED_OBSERVATIONS},
    )
]  # fmt: skip

train_simba = train_function(__name__, SPECS)
