"""Networks of SAC and RLPD: a tanh-squashed Gaussian actor and an ensemble of critics, MLPs or with another body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import ActorAndCritics, ObservationNetwork, mlp
from rl_training.models.bodies import BatchRenormBody, Body, BodyCritics, ResidualBody, Shape
from rl_training.models.hypersphere import BatchNormBody, SphericalBody
from rl_training.ops.policy import tanh_log_det
from rl_training.speed.passes import Array, NumpyPolicy

LOG_STD_RANGE = (-20.0, 2.0)
TANH_LOG_STD_RANGE = (-10.0, 2.0)  # of SimBa and its successors: a raw 0 is -4
BODIES: dict[str, type[Body]] = {  # by architecture; "mlp" has none
    "batch_renorm": BatchRenormBody, "residual": ResidualBody, "hypersphere": SphericalBody,
    "unit_batch_norm": BatchNormBody,
}  # fmt: skip
HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class SampledActions(NamedTuple):
    """Actions [B, A] in [-1, 1] and their log-probabilities [B]."""

    actions: Tensor
    logprobs: Tensor


class SquashedGaussianActor(ObservationNetwork):
    """a = tanh(u) with u ~ N(mean(s), deviation(s)): one network with the outputs mean and log deviation.

    `architecture` is "mlp" or the name of one of `BODIES`, whose modes `gaussian` and `sample` take.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int], activation: str, columns: Sequence[int] | None = None,
        architecture: str = "mlp", **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.action_dim = action_dim
        shape = Shape(self.input_dim, hidden_sizes, 2 * action_dim, activation, columns, groups=2)
        body = BODIES.get(architecture)
        self.bounds_log_std = body is not None and body.bounds_log_std
        if body is None:
            self.network: nn.Module = mlp(*shape[:4], output_gain=0.01, columns=columns)
        else:
            self.network = body(1, shape)

    def forward(self, obs: Tensor) -> Tensor:
        """The deterministic action tanh(mean)."""
        return self.gaussian(obs)[0].tanh()

    def gaussian(self, obs: Tensor, **mode: bool) -> tuple[Tensor, Tensor]:
        """Mean and log deviation of u, each [B, A]."""
        outputs = self.network(self.features(obs), **mode).flatten(0, -2)  # a body's are [1, B, 2A]
        mean, log_std = outputs.chunk(2, -1)
        if self.bounds_log_std:
            low, high = TANH_LOG_STD_RANGE
            return mean, low + 0.5 * (high - low) * (1.0 + log_std.tanh())
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def draw(self, obs: Tensor, noise: Tensor) -> Tensor:
        """The actions of `sample`."""
        mean, log_std = self.gaussian(obs)
        return torch.addcmul(mean, log_std.exp(), noise).tanh()

    def sample(self, obs: Tensor, noise: Tensor, **mode: bool) -> SampledActions:
        """Actions made from standard normal `noise` [B, A]; the gradient passes through them."""
        mean, log_std = self.gaussian(obs, **mode)
        u = torch.addcmul(mean, log_std.exp(), noise)
        # gaussian_log_prob(u, mean, log_std) with (u - mean) / std = noise put in: nothing to cancel in the gradient
        gaussian = -torch.add(log_std, noise.square(), alpha=0.5).sum(-1) - self.action_dim * HALF_LOG_2PI
        return SampledActions(u.tanh(), gaussian - tanh_log_det(u))

    def numpy_policy(self) -> NumpyPolicy | None:
        """Acting in numpy; None where there is no numpy form."""
        forward, size = self.numpy_form(self.network), self.action_dim
        if forward is None:
            return None

        def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
            outputs = forward(obs, None)
            u = outputs[:, :size]
            if not deterministic:
                log_std = np.clip(outputs[:, size:], *LOG_STD_RANGE)
                u = u + np.exp(log_std) * rng.standard_normal(u.shape, dtype=np.float32)
            return np.tanh(u)

        return act


class MLPSACModel(ActorAndCritics):
    """`actor`, `critics`, and `sample_actions(obs)` -> actions, logprobs; `q_values(obs, actions)` is [E, B].

    With `num_quantiles` or `num_atoms` K, critics and `q_values` have K outputs each: [E, B, K]. The `architecture` is
    "mlp", which may have LayerNorm and dropout in the critics, or the name of one of `BODIES`.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, num_critics: int = 2, critic_layer_norm: bool = False,
        critic_dropout: float = 0.0, num_quantiles: int | None = None, num_atoms: int | None = None,
        architecture: str = "mlp", **options: Any,
    ) -> None:  # fmt: skip
        of_mlp = {"layer_norm": critic_layer_norm, "dropout": critic_dropout}
        body = BODIES.get(architecture)
        options |= of_mlp if body is None else {"body": body}
        super().__init__(
            partial(SquashedGaussianActor, architecture=architecture), obs_dim=obs_dim, action_dim=action_dim,
            num_critics=num_critics, outputs=num_quantiles or num_atoms or 1, **options,
        )  # fmt: skip
        self.num_critics = num_critics
        self.by_batch = body is not None and body.by_batch

    def make_critics(self, **options: Any) -> Any:
        """Critics with this body, or MLPs."""
        return BodyCritics(**options) if "body" in options else super().make_critics(**options)

    def sample_actions(self, obs: Tensor, generator: torch.Generator | None = None) -> SampledActions:
        """Draw actions, with their log-probabilities."""
        noise = torch.randn(len(obs), self.action_dim, generator=generator, device=obs.device)
        return self.actor.sample(obs, noise)

    q_values = ActorAndCritics.ensemble_values
