"""PQN in the registry: hyper-parameters, build and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.pqn import PQN
from rl_training.config.networks import make_encoder, make_network
from rl_training.config.params import Activation, EpsilonParams, OptimizerKind, Reason, Reasons, Widths
from rl_training.config.rollout_params import EpochParams, LaggedParams
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.rollout_store import RolloutStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.run.workflows import train_function


class PQNParams(EpsilonParams, EpochParams, LaggedParams):
    """Hyper-parameters of PQN."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("hidden_sizes", "activation"), "the values are linear in the features of an image's convolutions",
            lambda p: p.network is None, lambda spaces: spaces.obs_kind == "image",
        ),
    )  # fmt: skip

    learning_rate: float = Field(5e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    optimizer: OptimizerKind = Field("radam", description="Optimizer; rmsprop_tf has its epsilon inside the root.")
    optimizer_eps: float = Field(1e-8, gt=0, le=1, description="Epsilon of the optimizer.")
    max_grad_norm: float | None = Field(10.0, gt=0, description="Maximum gradient norm; null: no clipping.")
    hidden_sizes: Widths = Field((128, 128), description="Widths of the hidden layers.")
    activation: Activation = Field("relu", description="Activation of the hidden layers.")
    layer_norm: bool = Field(True, description="LayerNorm before every activation; without it, Q may diverge.")
    num_steps: int = Field(32, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    gae_lambda: float = Field(0.65, ge=0, le=1, description="Trace decay of the returns; 0 gives one-step targets.")
    update_epochs: int = Field(2, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int | None = Field(128, ge=1, description="Rows per gradient step; null: the whole rollout.")


def build(params: PQNParams, spaces: EnvSpaces) -> PQN:
    """The learner with a new network: hidden layers, or for images convolutions with one hidden layer after them."""
    encoder = make_encoder(params, spaces, layer_norm=params.layer_norm)
    sizes = () if spaces.obs_kind == "image" and params.network is None else params.hidden_sizes
    network = make_network(MLPQNetwork, params, spaces, encoder=encoder, hidden_sizes=sizes)
    return PQN(q_network=network, normalize_rewards=spaces.normalize_rewards, **params.arguments_of(PQN))


SPECS = [
    AlgorithmSpec(
        name="pqn", class_name="PQN", year=2024, lane="rollout",
        paper="Gallici et al. 2025, Simplifying Deep Temporal Difference Learning (arXiv:2407.04811)",
        scope="Q(lambda) on rollouts with LayerNorm, without replay and target network; "
        "discrete actions, masks, vectors and images.",
        params=PQNParams, learner=PQN, build=build, store=RolloutStore, action_kinds=("discrete",),
        normalizes_rewards=True,
        defaults={"num_envs": 32, "log_interval": 10, "total_timesteps": 500_000},
    )
]  # fmt: skip

train_pqn = train_function(__name__, SPECS)
