"""Networks of DDPG: a deterministic actor and a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.blocks import ActorAndCritics, ObservationNetwork, mlp, noisy_policy
from rl_training.speed.passes import NumpyPolicy

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


class DeterministicActor(ObservationNetwork):
    """mu(s) in [-1, 1]: observations [B, ...] -> actions [B, A].

    After an `encoder`, its tanh is a `ReturningTanh`: thousands of features move mu with each step, so a critic that
    knows nothing yet can drive it to one bound in all states within 50 steps. There, tanh has no gradient left.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int], activation: str, columns: Sequence[int] | None = None,
        **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        layers = mlp(self.input_dim, hidden_sizes, action_dim, activation, output_gain=0.01, columns=columns)
        self.network = nn.Sequential(*layers, nn.Tanh())  # a small last layer: tanh starts where gradients pass

    def forward(self, obs: Tensor) -> Tensor:
        """Actions without noise."""
        outputs = self.network[:-1](self.features(obs))
        if self.encoder is None or not outputs.requires_grad:
            return outputs.tanh()
        return ReturningTanh.apply(outputs)

    def numpy_policy(self, deviation: Callable[[], float]) -> NumpyPolicy | None:
        """Acting in numpy, with noise of the current deviation; None where there is no numpy form."""
        return noisy_policy(self.numpy_form(self.network), deviation)


class MLPDDPGModel(ActorAndCritics):
    """`actor(obs)` [B, A] and `q_values(obs, actions)` [B]; options as in `ActorAndCritics`."""

    bounded_features = True

    def __init__(
        self, *, obs_dim: int, action_dim: int, num_critics: int = 1, critic_layer_norm: bool = False, **options: Any
    ) -> None:
        super().__init__(
            DeterministicActor, obs_dim=obs_dim, action_dim=action_dim, num_critics=num_critics,
            layer_norm=critic_layer_norm, **options,
        )  # fmt: skip

    def q_values(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values [B] of the first critic, which the actor maximizes; the others are not computed."""
        return self.critics(self.features(obs), actions, subset=FIRST)[0]

    expected_values = ActorAndCritics.ensemble_values
