"""Networks for the spaces of an environment, the user's own among them, and learners that use them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.mbpo import MBPO
from rl_training.envs.factory import check_module, import_entry_point
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError, kind_and_line
from rl_training.models.blocks import (
    ActorAndCritics,
    DatasetNorm,
    ImageEncoder,
    MixedEncoder,
    MixedInput,
    ObservationInput,
    ObservationNorm,
    encoded_dim,
)
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.recurrent_actor_critic import RecurrentActorCritic

if TYPE_CHECKING:
    from rl_training.config.params import Params

AnyParams = TypeVar("AnyParams", bound=Any)
UNSTEADY = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
Network = TypeVar("Network", bound=nn.Module)
Learner = TypeVar("Learner", bound=Algorithm)
ModelLearner = TypeVar("ModelLearner", bound=MBPO)


@dataclass(frozen=True)
class UserNetwork:
    """A module, or a class or function that makes one for an `EnvSpaces`.

    A file stores only its `name`: `module:name` can be imported again, anything else must be passed again.
    """

    name: str
    given: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def read(cls, value: Any) -> UserNetwork | None:
        """Read the setting `network`."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, nn.Module):
            return cls(type(value).__name__, value)
        if not callable(value):
            known = "a torch.nn.Module, a class or function of the spaces that makes one, or module:name"
            raise ValueError(f"a {type(value).__name__} is not a network; give {known}")
        module, name = (getattr(value, key, "") for key in ("__module__", "__qualname__"))
        importable = module not in ("", "__main__") and name.isidentifier()
        return cls(f"{module}:{name}" if importable else name.rpartition(".")[2] or type(value).__name__, value)

    def resolve(self, named: Sequence[str]) -> UserNetwork:
        """Import the module or its maker if only its name is known; a function only if the user named it."""
        if self.given is not None:
            return self
        module, _, name = self.name.partition(":")
        if not name:
            again = "give the module, class or function itself, as in load(path, network=...)"
            raise UserError(f"network is {self.name!r}, which cannot be imported by that name; {again}.")
        trusted = self.name in named or module in named
        if not trusted:
            check_module("network", self.name)
        return replace(self, given=import_entry_point("network", self.name, nn.Module, trusted, "--set network="))

    def make(self, spaces: EnvSpaces) -> nn.Module:
        """Make a module: a new one, or a copy of the one that was given."""
        if isinstance(self.given, nn.Module):
            return copy.deepcopy(self.given)
        try:
            made = self.given(spaces)
        except Exception as error:
            what = f"network {self.name} cannot be made for {spaces.env_id}"
            raise UserError(f"{what}: {kind_and_line(error)}.") from error
        if not isinstance(made, nn.Module):
            raise UserError(f"network {self.name} made a {type(made).__name__}; it must make a torch.nn.Module.")
        return made

    def __deepcopy__(self, memo: Any) -> UserNetwork:
        """Return the same object: it never changes, and a given module may be large."""
        return self


class OwnEncoder(nn.Module):
    """The user's module instead of the package's encoders: observations as floats [B, ...] -> features [B, out_dim].

    It is tested on two rows of zeros, so that errors are reported before a run starts.
    """

    def __init__(self, source: UserNetwork, spaces: EnvSpaces) -> None:
        super().__init__()
        self.source = source
        rows = torch.zeros(2, *((spaces.obs_dim,) if spaces.obs_kind == "mixed" else spaces.obs_shape))
        self.network = source.make(spaces).to(rows.device)
        for part in self.network.modules():
            if isinstance(part, UNSTEADY):
                kind = type(part).__name__
                why = "a policy must act as it was trained, and a resume must be exact"
                raise UserError(f"network {source.name} has a {kind}; {why}, so leave it out (LayerNorm is fine).")
        try:
            with torch.no_grad():
                features = self.network(rows)
        except Exception as error:
            shape = f"{list(rows.shape)} of {spaces.env_id}"
            raise UserError(f"network {source.name} fails on observations {shape}: {kind_and_line(error)}.") from error
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 2 or not features.shape[1]:
            found = list(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise UserError(f"network {source.name} returned {found} for 2 observations; it must be features [2, F].")
        self.out_dim = features.shape[1]

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] -> [B, out_dim]."""
        features: Tensor = self.network(obs)
        return features


def resolve_network(params: AnyParams, named: Sequence[str]) -> AnyParams:
    """The hyper-parameters with the user's network imported, if they have one."""
    if params.network is None:
        return params
    return params.model_copy(update={"network": params.network.resolve(named)})  # type: ignore[no-any-return]


def give_network(params: AnyParams, network: Any, where: Any) -> AnyParams:
    """The hyper-parameters from a file, with the network that the user passed again, or names that may be called."""
    if network is None or isinstance(network, tuple):
        return resolve_network(params, network or ())
    if params.network is None:
        raise UserError(f"network is given, but {where} was trained without one of your own; leave it out.")
    given = UserNetwork.read(network)
    assert given is not None
    return resolve_network(params.model_copy(update={"network": given}), (given.name,))  # type: ignore[no-any-return]


def network_of(algorithm: nn.Module) -> Any:
    """The network that the user gave for a learner, or None."""
    return next((part.source.given for part in algorithm.modules() if isinstance(part, OwnEncoder)), None)


def make_input(
    spaces: EnvSpaces, normalize: bool | None = None, norm: type[ObservationNorm] = ObservationNorm
) -> ObservationInput:
    """The layer that reads raw observations of these spaces; `normalize` overrides whether vectors are normalized."""
    if spaces.obs_kind == "image":
        return ObservationInput(image_scale=spaces.image_scale)
    normalize = spaces.normalize_observations if normalize is None else normalize
    if spaces.obs_kind == "mixed":
        parts, vector_size = spaces.image_parts, len(spaces.vector_columns)
        shapes, scales = [part.shape for part in parts], [part.scale for part in parts]
        return MixedInput(shapes, scales, vector_size, normalize=normalize and vector_size > 0, norm=norm)
    return ObservationInput(normalize_size=spaces.obs_dim if normalize else None, norm=norm)


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


def make_encoder(params: Params, spaces: EnvSpaces, **options: bool) -> nn.Module | None:
    """The module before the hidden layers: the user's own network, convolutions for images, None for a vector.

    `options` are those of `ImageEncoder`.
    """
    if params.network is not None:
        return OwnEncoder(params.network, spaces)
    if spaces.obs_kind == "mixed":
        return MixedEncoder([part.shape for part in spaces.image_parts], len(spaces.vector_columns), **options)
    return ImageEncoder(spaces.obs_shape, **options) if spaces.obs_kind == "image" else None


def make_policy(params: Params, spaces: EnvSpaces) -> nn.Module:
    """Actor and critic for these spaces: MLPs of the widths given; for pure images, linear heads on a shared CNN.

    They may share a memory, which is then between the observation or the CNN and these layers.
    """
    is_linear = spaces.obs_kind == "image" and params.network is None
    heads: dict[str, Any] = {"hidden_sizes": (), "critic_hidden_sizes": None} if is_linear else {}
    heads |= any_kind(spaces)
    if getattr(params, "memory", "none") == "none":
        return make_network(MLPActorCritic, params, spaces, **heads)
    return make_network(RecurrentActorCritic, params, spaces, **params.arguments_of(MLPActorCritic) | heads)


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


def build_on_data(learner: type[Learner], kind: type[nn.Module], params: Any, spaces: EnvSpaces) -> Learner:
    """As `build_on_model`, with observations normalized by the recorded data if the parameters say so.

    The wrapper `normalize_observation`, which a user has to ask for, replaces this.
    """
    if not params.normalize_states or spaces.normalize_observations:
        return build_on_model(learner, kind, params, spaces)
    model = make_network(kind, params, spaces, observation_input=make_input(spaces, True, DatasetNorm))
    return learner(model=model, **params.arguments_of(learner))


def build_on_ensemble(learner: type[ModelLearner], params: Any, spaces: EnvSpaces) -> ModelLearner:
    """SAC with a new ensemble that models the environment."""
    policy_model = make_network(MLPSACModel, params, spaces)
    dynamics_model = MLPMOPOEnsembleModel(
        obs_dim=spaces.obs_dim, action_dim=spaces.action_dim, hidden_sizes=params.model_hidden_sizes,
        num_ensembles=params.num_ensembles, logvar_units=params.logvar_units,
    )  # fmt: skip
    arguments = params.arguments_of(learner)
    arguments.pop("learning_rate")  # the same as policy_learning_rate
    return learner(policy_model=policy_model, dynamics_model=dynamics_model, **arguments)
