"""Dreamer in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from rl_training.algorithms.dreamer import Dreamer
from rl_training.config.networks import make_input
from rl_training.config.params import Activation, Facts, Reason, Reasons, Widths
from rl_training.config.replay_params import SequenceParams
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.replay_store import SequenceStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models import dreamer
from rl_training.run.workflows import train_function

RATES = ("world_model_learning_rate", "actor_learning_rate", "critic_learning_rate")


class DreamerParams(SequenceParams):
    """Hyper-parameters of Dreamer."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("learning_rate",), f"{', '.join(RATES)} are given and replace it",
            lambda p: all(name in p.schedules or getattr(p, name) is not None for name in RATES),
        ),
    )  # fmt: skip

    size: Literal["xxs", "xs", "s", "m", "l", "xl"] = Field("s", description="Size of all networks.")
    hidden_sizes: Widths = Field((), description="Widths of the MLPs; empty: given by `size`.")
    activation: Activation = Field("silu", description="Activation of the hidden layers.")
    num_bins: int = Field(255, ge=3, le=10_000, description="Bins for rewards and returns: symexp of equal steps.")
    gamma: float = Field(0.997, ge=0, le=1, description="Discount per environment step.")
    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of each part whose own is null.")
    world_model_learning_rate: float | None = Field(None, ge=0, le=10, description="Learning rate of the world model.")
    actor_learning_rate: float | None = Field(None, ge=0, le=10, description="Learning rate of the actor.")
    critic_learning_rate: float | None = Field(None, ge=0, le=10, description="Learning rate of the critic.")
    optimizer_eps: float = Field(1e-8, gt=0, le=1, description="Epsilon of the optimizers.")
    max_grad_norm: float | None = Field(100.0, gt=0, description="Maximum gradient norm; null: no clipping.")
    imagination_horizon: int = Field(15, ge=1, le=1_000, description="Steps of an imagined episode.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Trace decay of the imagined returns.")
    entropy_coef: float = Field(3e-4, ge=0, description="Weight of the policy's entropy.")
    free_nats: float = Field(1.0, ge=0, description="KL per state below which the KL loss has no effect.")
    tau: float = Field(0.02, gt=0, le=1, description="Polyak factor of the slow critic per update.")
    capture: bool = Field(True, description="Whether `accelerate` may capture or compile the update.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus what is captured, and the widest layer of the MLPs or of the RSSM."""
        size = dreamer.SIZES[self.size]
        widest = max(size.deter, size.hidden, *(self.hidden_sizes or (size.units,)))
        return super().facts._replace(captured="update" if self.capture else "", widest=widest)


def build(params: DreamerParams, spaces: EnvSpaces) -> Dreamer:
    """Build the learner with new networks."""
    if spaces.has_action_mask:
        raise UserError(f"dreamer does not support the action masks of {spaces.env_id}; ppo and dqn do.")
    if params.network is not None:
        raise UserError(f"dreamer has a world model in place of a network; leave network {params.network.name} out.")
    size = dreamer.SIZES[params.size]
    layers: dict[str, Any] = {
        "hidden_sizes": params.hidden_sizes or (size.units,) * size.layers, "activation": params.activation,
    }  # fmt: skip
    shape: dict[str, Any] = {"obs_shape": spaces.obs_shape, "depth": size.depth}
    kinds: tuple[Any, Any] = dreamer.Encoder, dreamer.Decoder
    if spaces.obs_kind == "mixed":
        vector = [(len(spaces.vector_columns),)] if len(spaces.vector_columns) else []
        shape = {"shapes": [*(part.shape for part in spaces.image_parts), *vector], "depth": size.depth}
        kinds = dreamer.PartsEncoder, dreamer.PartsDecoder
    encoder = kinds[0](**shape, **layers)
    activation = params.activation
    rssm = dreamer.RSSM(embed_dim=encoder.embed_dim, action_dim=spaces.action_dim, size=size, activation=activation)
    layers["feature_dim"] = rssm.feature_dim
    world_model = dreamer.WorldModel(
        encoder=encoder, rssm=rssm, decoder=kinds[1](**shape, **layers),
        reward_head=dreamer.RewardHead(num_bins=params.num_bins, **layers),
        continue_head=dreamer.ContinueHead(**layers), observation_input=make_input(spaces),
    )  # fmt: skip
    kind = dreamer.GaussianActor if spaces.action_kind == "continuous" else dreamer.CategoricalActor
    # The schedule of the common rate does not apply to a rate with its own schedule.
    own_rates = {name: s.start for name, s in params.schedules.items() if name in RATES}
    return Dreamer(
        world_model=world_model, actor=kind(action_dim=spaces.action_dim, **layers),
        critic=dreamer.Critic(num_bins=params.num_bins, **layers), **{**params.arguments_of(Dreamer), **own_rates},
    )  # fmt: skip


SPECS = [
    AlgorithmSpec(
        name="dreamer", class_name="Dreamer", year=2023, lane="sequences",
        paper="Hafner et al. 2023, Mastering Diverse Domains through World Models (arXiv:2301.04104)",
        scope="DreamerV3: RSSM with categorical latents, two-hot symlog heads, REINFORCE in imagination, return "
        "normalization; vectors and images, discrete and continuous actions. Differences from the paper: no "
        "replay-value loss and no stored latents (values come only from dreams, and windows start from zeros, "
        "which takes more steps on long sparse tasks); Adam and norm clipping instead of LaProp and AGC (learning "
        "rates do not carry over between sizes, so presets set their own); LayerNorm instead of RMSNorm, one "
        "prior layer instead of two (a smaller model), cross-entropy instead of MSE on images.",
        params=DreamerParams, learner=Dreamer, build=build, store=SequenceStore,
        action_kinds=("discrete", "continuous"), defaults={"log_interval": 50, "total_timesteps": 100_000},
    )
]  # fmt: skip

train_dreamer = train_function(__name__, SPECS)
