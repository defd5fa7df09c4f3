"""GAIL in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rl_training.algorithms.gail import GAIL
from rl_training.algorithms.ppo import PPO
from rl_training.config.networks import any_kind, build_on_policy, make_input, make_network
from rl_training.config.params import Reason, Reasons, Widths
from rl_training.config.replay_params import ExpertParams
from rl_training.config.rollout_params import ACTION_KINDS
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.rollout_store import DemonstrationStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_gail_discriminator import MLPGAILDiscriminator
from rl_training.run.workflows import train_function
from rl_training.runtime.ppo_trainer import PPOParams


class GAILParams(PPOParams, ExpertParams):
    """Hyper-parameters of GAIL."""

    unused: ClassVar[Reasons] = (
        Reason(
            ("discriminator_learning_rate", "discriminator_batch_size", "gradient_penalty"),
            "discriminator_updates is 0", lambda p: not p.discriminator_updates,
        ),
        Reason(("normalize_inputs",), "images are not normalized", where=lambda spaces: spaces.obs_kind == "image"),
    )  # fmt: skip

    num_steps: int = Field(128, ge=1, le=1_000_000, description="Steps of each environment per rollout.")
    update_epochs: int = Field(4, ge=1, le=10_000, description="Passes over each rollout.")
    minibatch_size: int = Field(256, ge=2, description="Rows per gradient step.")
    discriminator_learning_rate: float = Field(5e-4, ge=0, le=10, description="Learning rate of the discriminator.")
    discriminator_updates: int = Field(2, ge=0, le=10_000, description="Discriminator steps per rollout; 0: none.")
    discriminator_batch_size: int = Field(
        512, ge=1, le=10**6, description="Steps of the expert, and as many of the policy, per discriminator step."
    )
    discriminator_hidden_sizes: Widths = Field((64, 64), description="Widths of the discriminator's hidden layers.")
    normalize_inputs: bool = Field(True, description="Normalize vectors for the discriminator.")
    reward_form: Literal["softplus", "log_d", "logit"] = Field(
        "softplus", description="Reward from the discriminator D: -log(1 - D), log D, or its logit."
    )
    gradient_penalty: float = Field(
        0.0, ge=0, description="Weight of (||dD|| - 1)^2 between the expert's steps and the policy's; 10 is usual."
    )
    absorbing_states: bool = Field(
        False, description="Continue ended episodes in an absorbing state, for the discriminator and in the reward."
    )

    def find_unused(self, spaces: EnvSpaces | None = None) -> dict[str, str]:
        """As PPO's, without the activation, which the discriminator always has."""
        return {name: why for name, why in super().find_unused(spaces).items() if name != "activation"}

    @model_validator(mode="after")
    def _sees_everything(self) -> GAILParams:
        if self.critic_obs:
            raise ValueError(f"critic_obs is {list(self.critic_obs)}; gail has no groups of observations, leave it out")
        return self

    @model_validator(mode="after")
    def _remembers_nothing(self) -> GAILParams:
        if self.memory != "none":
            raise ValueError(f"memory is {self.memory!r}; gail, whose discriminator sees no history, takes only 'none'")
        return self

    @model_validator(mode="after")
    def _end_has_a_worth(self) -> GAILParams:
        if self.absorbing_states and self.gamma == 1:
            raise ValueError("gamma is 1; with absorbing_states it must be below 1, or an end has infinite value")
        return self


def build(params: GAILParams, spaces: EnvSpaces) -> GAIL:
    """Build the learner with a new PPO and a new discriminator."""
    discriminator = make_network(
        MLPGAILDiscriminator, params, spaces, hidden_sizes=params.discriminator_hidden_sizes, **any_kind(spaces),
        observation_input=make_input(spaces, params.normalize_inputs),
    )  # fmt: skip
    ppo = build_on_policy(PPO, params, spaces)
    return GAIL(ppo=ppo, discriminator=discriminator, **params.arguments_of(GAIL))


SPECS = [
    AlgorithmSpec(
        name="gail", class_name="GAIL", year=2016, lane="demonstrations",
        paper="Ho and Ermon 2016, Generative Adversarial Imitation Learning (arXiv:1606.03476)",
        scope="PPO on a discriminator's reward, three reward forms, gradient penalty, absorbing states; every action "
        "kind, vectors and images.",
        params=GAILParams, learner=GAIL, build=build, store=DemonstrationStore, action_kinds=ACTION_KINDS,
        normalizes_rewards=True, defaults={"num_envs": 8, "total_timesteps": 300_000},
    )
]  # fmt: skip

train_gail = train_function(__name__, SPECS)
