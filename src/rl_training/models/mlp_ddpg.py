"""Networks of DDPG: a deterministic actor and a critic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, encode, encoded_dim, mlp, numpy_input
from rl_training.models.ensemble import CriticEnsemble
from rl_training.speed.passes import Array, numpy_forward

# obs [N, ...], masks (unused here), generator, deterministic -> actions [N, A]
NumpyPolicy = Callable[[Array, "Array | None", np.random.Generator, bool], Array]

FIRST = slice(0, 1)  # of the critics: the one that the actor maximizes


class ReturningTanh(torch.autograd.Function):
    """tanh with a way back from its ends: a gradient that leads toward 0 passes unchanged.

    One that leads away from 0 is multiplied by 1 - tanh^2, as usual. So steps become smaller toward a bound but not
    away from it, as with the inverted gradients of Hausknecht & Stone 2016 (arXiv:1511.04143).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """tanh(x)."""
        outputs = x.tanh()
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:
        """Gradients of a loss that is minimized, so a step goes against them."""
        (outputs,) = ctx.saved_tensors
        return torch.where(gradients * outputs < 0, gradients * (1.0 - outputs.square()), gradients)


class DeterministicActor(nn.Module):
    """mu(s) in [-1, 1]: observations [B, ...] -> actions [B, A].

    After an `encoder`, its tanh is a `ReturningTanh`: thousands of features move mu with each step, so a critic that
    knows nothing yet can drive it to one bound in all states within 50 steps. There, tanh has no gradient left.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int], activation: str,
        observation_input: ObservationInput | None = None, encoder: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.observation_input, self.encoder = observation_input or ObservationInput(), encoder
        layers = mlp(encoded_dim(obs_dim, encoder), hidden_sizes, action_dim, activation, output_gain=0.01)
        self.network = nn.Sequential(*layers, nn.Tanh())  # a small last layer: tanh starts where gradients pass

    def forward(self, obs: Tensor) -> Tensor:
        """Actions without noise."""
        x = encode(self.encoder, self.observation_input(obs))
        outputs = self.network[:-1](x)
        if self.encoder is None or not outputs.requires_grad:
            return outputs.tanh()
        return ReturningTanh.apply(outputs)

    def numpy_policy(self, deviation: Callable[[], float]) -> NumpyPolicy | None:
        """Acting in numpy on the same weights, with noise of the current deviation; None on a GPU or if large."""
        prepare, forward = numpy_input(self.observation_input), numpy_forward(self.network)
        if self.encoder is not None or prepare is None or forward is None:
            return None
        return noisy_policy(lambda obs: forward(prepare(obs)), deviation)


def noisy_policy(forward: Callable[[Array], Array], deviation: Callable[[], float]) -> NumpyPolicy:
    """mu(s) in numpy, with clipped Gaussian noise unless deterministic."""

    def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
        actions = forward(obs)
        if not deterministic:
            actions = actions + deviation() * rng.standard_normal(actions.shape, dtype=np.float32)
            np.clip(actions, -1.0, 1.0, out=actions)
        return actions

    return act


class ActorAndCritics(nn.Module):
    """An `actor` of the given kind and `critics`, which share nothing but the observation's input layer.

    With an `encoder`, the actor has one and the critics share another, initially a copy, each trained by its own loss.
    With a shared encoder, the actor's gradient spoils the features that the critics need (Yarats et al. 2021,
    arXiv:1910.01741). Those authors drop that gradient, which is cheaper but ties actor and critics together; here they
    have their own optimizers and targets. `critic_options` are those of `CriticEnsemble`.
    """

    bounded_features = False  # whether its `ImageEncoder` is `bounded`, as deterministic actors need

    def __init__(
        self, actor: type[nn.Module], *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu", observation_input: ObservationInput | None = None, encoder: nn.Module | None = None,
        **critic_options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_dim = action_dim
        shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
        self.actor: Any = actor(
            obs_dim=obs_dim, action_dim=action_dim, observation_input=observation_input, encoder=encoder, **shape
        )
        inputs = encoded_dim(obs_dim, encoder) + action_dim
        self.critics = CriticEnsemble(inputs=inputs, encoder=copy.deepcopy(encoder), **shape, **critic_options)

    def features(self, obs: Tensor) -> Tensor:
        """The input of the critics, before their encoder."""
        return self.actor.observation_input(obs)

    def ensemble_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values of every critic [E, B]."""
        return self.critics(self.features(obs), actions)


class MLPDDPGModel(ActorAndCritics):
    """`actor(obs)` [B, A] and `q_values(obs, actions)` [B]; options as in `ActorAndCritics`."""

    num_critics = 1
    bounded_features = True

    def __init__(self, *, obs_dim: int, action_dim: int, **options: Any) -> None:
        super().__init__(
            DeterministicActor, obs_dim=obs_dim, action_dim=action_dim, num_critics=self.num_critics, **options
        )

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values [B] of the first critic, which the actor maximizes; the others are not computed."""
        return self.critics(self.features(obs), actions, subset=FIRST)[0]
