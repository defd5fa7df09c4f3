"""Networks of AWAC and IQL: a Gaussian actor that is not squashed, critics, and IQL's state values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import (
    ActorAndCritics,
    MLPEnsemble,
    ObservationInput,
    ObservationNetwork,
    encode,
    encoded_dim,
    mlp,
)
from rl_training.ops.policy import gaussian_log_prob
from rl_training.speed.passes import Array, NumpyPolicy


class GaussianActor(ObservationNetwork):
    """a ~ N(mean(s), deviation), with one deviation per dimension for all states; samples are clipped to [-1, 1]."""

    log_std_range: ClassVar[tuple[float, float]] = (-20.0, 2.0)

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int], activation: str, columns: Sequence[int] | None = None,
        **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.network = mlp(self.input_dim, hidden_sizes, action_dim, activation, output_gain=0.01, columns=columns)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def mean(self, obs: Tensor) -> Tensor:
        """[B, A]."""
        outputs: Tensor = self.network(self.features(obs))
        return outputs

    def forward(self, obs: Tensor) -> Tensor:
        """The deterministic action."""
        return self.mean(obs).clamp(-1.0, 1.0)

    def log_prob(self, obs: Tensor, actions: Tensor) -> Tensor:
        """log pi(a|s) [B], of the density before actions are clipped."""
        return gaussian_log_prob(actions, self.mean(obs), self.log_std.clamp(*self.log_std_range))

    def draw(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions made from standard normal `noise` [B, A]."""
        deviation = self.log_std.clamp(*self.log_std_range).exp()
        return torch.addcmul(self.mean(obs), deviation, noise).clamp(-1.0, 1.0)

    def numpy_policy(self) -> NumpyPolicy | None:
        """Acting in numpy; None where there is no numpy form."""
        forward, log_std = self.numpy_form(self.network), self.log_std.detach()
        if forward is None:
            return None

        def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
            actions = forward(obs, None)
            if not deterministic:
                deviation = np.exp(np.clip(log_std.numpy(), *self.log_std_range))
                actions = actions + deviation * rng.standard_normal(actions.shape, dtype=np.float32)
            return np.clip(actions, -1.0, 1.0)

        return act


class BoundedGaussianActor(GaussianActor):
    """A `GaussianActor` whose mean is bounded by tanh, as IQL's."""

    log_std_range = (-5.0, 2.0)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.network = nn.Sequential(*self.network, nn.Tanh())


class StateValues(nn.Module):
    """V(s) of features, through an `encoder` of its own if there is one."""

    def __init__(self, obs_dim: int, encoder: nn.Module | None, hidden_sizes: Sequence[int], activation: str) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        inputs = encoded_dim(obs_dim, encoder)
        self.network = MLPEnsemble(num_members=1, inputs=inputs, hidden_sizes=hidden_sizes, activation=activation)

    def forward(self, features: Tensor) -> Tensor:
        """[B, F] -> [B]."""
        return self.network.run(encode(self.encoder, features))[0]


class MLPAWACModel(ActorAndCritics):
    """`actor` with `log_prob` and `draw`, and `critics`; `q_values(obs, actions)` is [E, B]."""

    actor_kind: ClassVar[type[GaussianActor]] = GaussianActor

    def __init__(
        self, *, obs_dim: int, action_dim: int, num_critics: int = 2, critic_layer_norm: bool = False, **options: Any
    ) -> None:
        super().__init__(
            self.actor_kind, obs_dim=obs_dim, action_dim=action_dim, num_critics=num_critics,
            layer_norm=critic_layer_norm, **options,
        )  # fmt: skip

    q_values = ActorAndCritics.ensemble_values


class MLPIQLModel(MLPAWACModel):
    """Like AWAC's with a bounded mean, and `state_values(obs)` [B] of the network `values`."""

    actor_kind = BoundedGaussianActor

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu",
        encoder: nn.Module | None = None, observation_input: ObservationInput | None = None, **options: Any,
    ) -> None:  # fmt: skip
        shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
        options = {**options, "encoder": encoder, "observation_input": observation_input}
        super().__init__(obs_dim=obs_dim, action_dim=action_dim, **shape, **options)
        self.values = StateValues(obs_dim, encoder, **shape)

    def state_values(self, obs: Tensor) -> Tensor:
        """V(s): [B]."""
        values: Tensor = self.values(self.features(obs))
        return values
