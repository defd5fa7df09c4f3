"""The DQN family in the registry: hyper-parameters per head, build, and the named presets of its axes."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import nn

from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.fqf import FQF
from rl_training.algorithms.iqn import IQN
from rl_training.algorithms.q_learning import QLearning
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.config.networks import make_network
from rl_training.config.params import OF_EPSILON, EpsilonParams, Reason, Reasons, Schedule, Widths, with_defaults
from rl_training.config.replay_params import SequenceReplayParams, SupportParams
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.replay_store import ReplayStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.blocks import ImageEncoder
from rl_training.models.mlp_fqf_network import MLPFQFNetwork, MLPIQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.run.workflows import train_function


class QLearningParams(EpsilonParams, SequenceReplayParams):
    """Hyper-parameters of the DQN family."""

    unused: ClassVar[Reasons] = (
        Reason(OF_EPSILON, "noisy is true, and noisy layers explore instead", lambda p: p.noisy),
        Reason(
            ("hidden_sizes",), "head_hidden_sizes has the widths of the layers after the convolutions of an image",
            lambda p: p.network is None, lambda spaces: spaces.obs_kind == "image",
        ),
        Reason(("head_hidden_sizes",), "network replaces the convolutions", lambda p: p.network is not None),
        Reason(
            ("head_hidden_sizes",), "observations are not images; hidden_sizes has the widths of the layers",
            where=lambda spaces: spaces.obs_kind != "image",
        ),
    )  # fmt: skip

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    max_grad_norm: float | None = Field(10.0, gt=0, description="Maximum gradient norm; null: no clipping.")
    batch_size: int = Field(128, ge=1, le=10**6, description="Transitions per update.")
    target_update_interval: int = Field(1, ge=1, description="Updates between updates of the target network.")
    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target network; 1 copies the online one.")
    double_q: bool = Field(False, description="Choose the next action with the online network.")
    dueling: bool = Field(False, description="Compute state value and advantages in separate streams.")
    noisy: bool = Field(False, description="Explore with noisy layers instead of epsilon.")
    head_hidden_sizes: Widths | None = Field(
        None, description="For images, widths of the layers after the convolutions; null: 512 (small images: 128)."
    )

    def built_in_schedules(self) -> dict[str, Schedule]:
        """Epsilon falls, unless noisy layers explore; importance weights follow the replay store's schedule."""
        schedules = super().built_in_schedules()
        if self.noisy:
            del schedules["epsilon"]
        return schedules


class DQNParams(QLearningParams):
    """Hyper-parameters of DQN and its scalar variants."""

    huber_delta: float | None = Field(
        1.0, gt=0, description="Error at which the Huber loss becomes linear; null: half the squared error everywhere."
    )
    rescale_values: bool = Field(False, description="Predict h(return), h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x.")


class C51DQNParams(SupportParams, QLearningParams):
    """Hyper-parameters of C51 and Rainbow."""


class QRDQNParams(QLearningParams):
    """Hyper-parameters of QR-DQN."""

    num_quantiles: int = Field(50, ge=1, le=10_000, description="Quantiles of the distribution.")
    kappa: float = Field(
        1.0, ge=0, description="Error at which the Huber loss becomes linear; 0: the plain quantile loss."
    )


class FractionParams(QRDQNParams):
    """Quantiles at fractions that are inputs of the network, which has no memory."""

    @model_validator(mode="after")
    def _has_no_memory(self) -> FractionParams:
        if self.memory != "none":
            others = "dqn, c51_dqn and qr_dqn can have a memory"
            raise ValueError(f"memory is {self.memory!r}; with a network of fractions it must be none ({others})")
        return self


class IQNParams(FractionParams):
    """Hyper-parameters of IQN."""

    num_quantiles: int = Field(8, ge=1, le=10_000, description="Fractions per transition for the online quantiles.")
    num_target_quantiles: int = Field(8, ge=1, le=10_000, description="Fractions per transition for the target.")
    num_acting_quantiles: int = Field(32, ge=1, le=10_000, description="Fractions for choosing an action.")
    embedding_dim: int = Field(64, ge=1, le=10_000, description="Number of cosines that embed a fraction.")


class FQFParams(FractionParams):
    """Hyper-parameters of FQF."""

    num_quantiles: int = Field(32, ge=2, le=10_000, description="Fractions proposed per state.")
    embedding_dim: int = Field(64, ge=1, le=10_000, description="Number of cosines that embed a fraction.")
    fraction_learning_rate: float = Field(2.5e-9, ge=0, le=10, description="Rate of the fraction layer's RMSProp.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the fractions' entropy, which keeps them apart.")


HEADS: dict[type[QLearning], tuple[type[QLearningParams], type[nn.Module], str]] = {
    DQN: (DQNParams, MLPQNetwork, ""), C51DQN: (C51DQNParams, MLPQNetwork, "num_atoms"),
    QRDQN: (QRDQNParams, MLPQNetwork, "num_quantiles"), IQN: (IQNParams, MLPIQNNetwork, ""),
    FQF: (FQFParams, MLPFQFNetwork, ""),
}  # fmt: skip  # hyper-parameters, network, and which of them is the number of its outputs per action


def build(learner: type[QLearning], params: QLearningParams, spaces: EnvSpaces) -> QLearning:
    """Build a head with a new network of hidden layers, after convolutions for images.

    The layer after the convolutions belongs to the head, so it is noisy, or one per stream, as in the papers. In IQN
    and FQF it comes after the product of the convolutions' features with the embedded fractions.
    """
    _, network, outputs = next(HEADS[part] for part in learner.__mro__ if part in HEADS)  # a subclass has its base's
    others: dict[str, Any] = {"num_outputs": getattr(params, outputs)} if outputs else {}
    if spaces.obs_kind == "image" and params.network is None:
        encoder = ImageEncoder(spaces.obs_shape, out_dim=0)
        sizes = (encoder.width,) if params.head_hidden_sizes is None else params.head_hidden_sizes
        multiplies = issubclass(network, MLPIQNNetwork)
        others |= {"hidden_sizes": (), "head_sizes": sizes} if multiplies else {"hidden_sizes": sizes}
        others["encoder"] = encoder
    return learner(q_network=make_network(network, params, spaces, **others), **params.arguments_of(learner))


def make_spec(
    name: str, class_name: str, year: int, learner: type[QLearning], paper: str, scope: str, **axes: Any
) -> AlgorithmSpec:
    """One entry: a head with its axes set."""
    params = HEADS[learner][0]
    return AlgorithmSpec(
        name=name, class_name=class_name, year=year, lane="replay", paper=paper, scope=f"{scope}; discrete actions.",
        params=with_defaults(params, class_name, **axes) if axes else params, learner=learner,
        build=partial(build, learner), store=ReplayStore, action_kinds=("discrete",),
        defaults={"log_interval": 100, "total_timesteps": 50_000},
    )  # fmt: skip


SPECS = [
    make_spec(
        "dqn", "DQN", 2015, DQN,
        "Mnih et al. 2015, Human-level control through deep reinforcement learning (Nature 518)",
        "Replay, target network, Huber loss, epsilon-greedy; every axis of the family as a switch",
    ),
    make_spec(
        "double_dqn", "DoubleDQN", 2016, DQN,
        "van Hasselt et al. 2016, Deep Reinforcement Learning with Double Q-learning (arXiv:1509.06461)",
        "DQN whose online network chooses the next action", double_q=True,
    ),
    make_spec(
        "dueling_dqn", "DuelingDQN", 2016, DQN,
        "Wang et al. 2016, Dueling Network Architectures for Deep Reinforcement Learning (arXiv:1511.06581)",
        "Double DQN with streams for value and advantages", dueling=True, double_q=True,
    ),
    make_spec(
        "prioritized_dqn", "PrioritizedDQN", 2016, DQN,
        "Schaul et al. 2016, Prioritized Experience Replay (arXiv:1511.05952)",
        "Double DQN with proportional prioritized replay", prioritized=True, double_q=True,
    ),
    make_spec(
        "n_step_dqn", "NStepDQN", 2016, DQN,
        "Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning (arXiv:1602.01783), n-step Q-learning",
        "DQN with returns of several steps from replay, without off-policy correction", n_step=3,
    ),
    make_spec(
        "c51_dqn", "C51DQN", 2017, C51DQN,
        "Bellemare et al. 2017, A Distributional Perspective on Reinforcement Learning (arXiv:1707.06887)",
        "Categorical distribution of returns on fixed atoms",
    ),
    make_spec(
        "noisy_dqn", "NoisyDQN", 2018, DQN, "Fortunato et al. 2018, Noisy Networks for Exploration (arXiv:1706.10295)",
        "DQN that explores with factorized Gaussian noise in its last two layers", noisy=True,
    ),
    make_spec(
        "qr_dqn", "QRDQN", 2018, QRDQN,
        "Dabney et al. 2018, Distributional Reinforcement Learning with Quantile Regression (arXiv:1710.10044)",
        "Quantiles of the return at fixed fractions",
    ),
    make_spec(
        "rainbow_dqn", "RainbowDQN", 2018, C51DQN,
        "Hessel et al. 2018, Rainbow: Combining Improvements in Deep Reinforcement Learning (arXiv:1710.02298)",
        "C51 + double + dueling in distribution space + noisy + prioritized + n-step",
        double_q=True, dueling=True, noisy=True, prioritized=True, n_step=3, prioritized_alpha=0.5,
    ),
    make_spec(
        "iqn", "IQN", 2018, IQN,
        "Dabney et al. 2018, Implicit Quantile Networks for Distributional Reinforcement Learning (arXiv:1806.06923)",
        "Quantiles of the return at random fractions; risk-neutral",
    ),
    make_spec(
        "r2d2", "R2D2", 2019, DQN,
        "Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning (ICLR 2019)",
        "Dueling double DQN with an LSTM, prioritized sequences with stored state and burn-in, n-step returns and "
        "rescaled values; its network reads observations only, without the last action and reward",
        memory="lstm", memory_size=512, sequence_length=80, burn_in=40, sequence_period=40, double_q=True, dueling=True,
        n_step=5, prioritized=True, prioritized_alpha=0.9, prioritized_beta_start=0.6, prioritized_beta_end=0.6,
        rescale_values=True, huber_delta=None, gamma=0.997, learning_rate=1e-4, optimizer_eps=1e-3, batch_size=64,
        tau=1.0, target_update_interval=2_500, max_grad_norm=40.0,
    ),
    make_spec(
        "fqf", "FQF", 2019, FQF,
        "Yang et al. 2019, Fully Parameterized Quantile Function for Distributional RL (arXiv:1911.02140)",
        "Quantiles of the return at fractions that the network proposes",
    ),
]  # fmt: skip

train_dqn = train_function(__name__, SPECS)
