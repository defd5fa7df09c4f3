"""Networks for the spaces of an environment, and learners that use them, with the arguments common to all."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.mbpo import MBPO
from rl_training.config.own_network import OwnEncoder
from rl_training.config.params import Params, Reason
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError
from rl_training.models.blocks import ImageEncoder, MixedEncoder, MixedInput, ObservationInput, encoded_dim
from rl_training.models.ensemble import ActorAndCritics
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel

LINEAR_HEADS = Reason(  # of `make_policy`
    ("hidden_sizes", "activation"), "actor and critic are linear heads on the convolutions of an image",
    lambda p: p.network is None, lambda spaces: spaces.obs_kind == "image",
)  # fmt: skip
Network = TypeVar("Network", bound=nn.Module)
Learner = TypeVar("Learner", bound=Algorithm)
ModelLearner = TypeVar("ModelLearner", bound=MBPO)


def make_input(spaces: EnvSpaces, normalize: bool | None = None) -> ObservationInput:
    """The layer that reads raw observations of these spaces; `normalize` overrides whether vectors are normalized."""
    if spaces.obs_kind == "image":
        return ObservationInput(image_scale=spaces.image_scale)
    normalize = spaces.normalize_observations if normalize is None else normalize
    if spaces.obs_kind == "mixed":
        parts, vector_size = spaces.image_parts, len(spaces.vector_columns)
        shapes, scales = [part.shape for part in parts], [part.scale for part in parts]
        return MixedInput(shapes, scales, vector_size, normalize=normalize and vector_size > 0)
    return ObservationInput(normalize_size=spaces.obs_dim if normalize else None)


def make_network(kind: type[Network], params: Params, spaces: EnvSpaces, **others: Any) -> Network:
    """Make a network for these spaces, with the hyper-parameters that its constructor names; `others` override them."""
    common: dict[str, Any] = {"obs_dim": spaces.obs_dim, "action_dim": spaces.action_dim}
    common["observation_input"] = make_input(spaces)
    if "encoder" not in others:
        is_bounded = issubclass(kind, ActorAndCritics) and kind.bounded_features
        common["encoder"] = make_encoder(params, spaces, bounded=is_bounded)
    if spaces.critic_obs:
        common["actor_columns"] = find_actor_columns(params, spaces, common["encoder"])
    return kind(**common | params.arguments_of(kind) | others)


def find_actor_columns(params: Params, spaces: EnvSpaces, encoder: nn.Module | None) -> list[int]:
    """The columns of a network's features that the actor sees: those of images, then of its part of the vector."""
    if params.network is not None:
        raise UserError(f"critic_obs is {list(spaces.critic_obs)}, which network does not support; leave one out.")
    images = encoded_dim(spaces.obs_dim, encoder) - len(spaces.vector_columns)
    return [*range(images), *(images + spaces.actor_columns).tolist()]


def any_kind(spaces: EnvSpaces) -> dict[str, Any]:
    """The additional arguments of a network for every kind of action."""
    return {"action_kind": spaces.action_kind, "action_sizes": spaces.action_sizes}


def make_encoder(params: Params, spaces: EnvSpaces, *, bounded: bool = False) -> nn.Module | None:
    """The module before the hidden layers: the user's own network, convolutions for images, None for a vector."""
    if params.network is not None:
        return OwnEncoder(params.network, spaces)
    if spaces.obs_kind == "mixed":
        return MixedEncoder([part.shape for part in spaces.image_parts], len(spaces.vector_columns), bounded=bounded)
    return ImageEncoder(spaces.obs_shape, bounded=bounded) if spaces.obs_kind == "image" else None


def make_policy(params: Params, spaces: EnvSpaces) -> MLPActorCritic:
    """Actor and critic for these spaces: MLPs of `hidden_sizes`; for pure images, linear heads on a shared CNN."""
    sizes = () if spaces.obs_kind == "image" and params.network is None else params.hidden_sizes
    return make_network(MLPActorCritic, params, spaces, hidden_sizes=sizes, **any_kind(spaces))


def build_on_policy(
    learner: type[Learner], params: Params, spaces: EnvSpaces, *, scales_rewards: bool = True
) -> Learner:
    """A learner with a new policy."""
    scale: dict[str, Any] = {"normalize_rewards": True} if spaces.normalize_rewards and scales_rewards else {}
    return learner(policy=make_policy(params, spaces), **scale, **params.arguments_of(learner))


def build_on_model(learner: type[Learner], kind: type[nn.Module], params: Params, spaces: EnvSpaces) -> Learner:
    """A learner of continuous actions with new networks."""
    model = make_network(kind, params, spaces)
    return learner(model=model, **params.arguments_of(learner))


def build_on_ensemble(learner: type[ModelLearner], params: Any, spaces: EnvSpaces) -> ModelLearner:
    """SAC with a new ensemble that models the environment."""
    policy_model = make_network(MLPSACModel, params, spaces)
    dynamics_model = MLPMOPOEnsembleModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.model_hidden_sizes,
        num_ensembles=params.num_ensembles,
    )  # fmt: skip
    arguments = params.arguments_of(learner)
    arguments.pop("learning_rate")  # the same as policy_learning_rate
    return learner(policy_model=policy_model, dynamics_model=dynamics_model, **arguments)
