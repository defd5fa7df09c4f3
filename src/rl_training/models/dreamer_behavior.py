"""Dreamer's behavior: actors for choices and for continuous actions, and the critic, all on features [..., F].

Actions have three forms: `raw` is what the actor drew and what its density refers to, `as_input` gives what the world
model reads, and `as_action` what the policy returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.dreamer import TwoHotHead, norm_mlp, sample_one_hot
from rl_training.ops.policy import categorical_entropy, gaussian_entropy, gaussian_log_prob

STD_RANGE = (0.1, 1.0)
OUTPUT_GAIN = 0.01  # a new policy is close to uniform


class Critic(TwoHotHead):
    """The return from a state onward."""


class CategoricalActor(nn.Module):
    """One choice out of `action_dim`; raw is one-hot [..., A]. A little of the uniform policy is mixed in."""

    def __init__(
        self, *, feature_dim: int, action_dim: int, hidden_sizes: Sequence[int], activation: str = "silu",
        unimix: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_dim, self.unimix = action_dim, unimix
        self.network = norm_mlp(feature_dim, hidden_sizes, action_dim, activation, OUTPUT_GAIN)

    def draw_noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Uniform noise [*shape, 1] for `sample`."""
        return torch.rand(*shape, 1, generator=generator, device=generator.device)

    def probabilities(self, features: Tensor) -> Tensor:
        """[..., F] -> [..., A]."""
        return self.network(features).float().softmax(-1) * (1.0 - self.unimix) + self.unimix / self.action_dim

    def sample(self, features: Tensor, noise: Tensor | None) -> Tensor:
        """Raw actions; the most likely ones without noise."""
        return sample_one_hot(self.probabilities(features), noise)

    def evaluate(self, features: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of raw actions, and entropies, each [...]."""
        log_probs = self.probabilities(features).log()
        return (log_probs * raw).sum(-1), categorical_entropy(log_probs)

    def as_input(self, raw: Tensor) -> Tensor:
        """One-hot, unchanged."""
        return raw

    def as_action(self, raw: Tensor) -> Tensor:
        """Integers [...]."""
        return raw.argmax(-1)

    def input_of(self, actions: Tensor) -> Tensor:
        """Replayed actions [...] as the world model reads them, [..., A]."""
        return F.one_hot(actions.long(), self.action_dim).float()


class GaussianActor(nn.Module):
    """Independent Gaussians with means in (-1, 1); raw is unbounded, the action is clipped to [-1, 1]."""

    def __init__(
        self, *, feature_dim: int, action_dim: int, hidden_sizes: Sequence[int], activation: str = "silu"
    ) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.network = norm_mlp(feature_dim, hidden_sizes, 2 * action_dim, activation, OUTPUT_GAIN)

    def draw_noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Standard normal noise [*shape, A] for `sample`."""
        return torch.randn(*shape, self.action_dim, generator=generator, device=generator.device)

    def gaussian(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log deviation, each [..., A]; the deviation starts near its upper end."""
        mean, spread = self.network(features).float().chunk(2, -1)
        low, high = STD_RANGE
        return mean.tanh(), (low + (high - low) * torch.sigmoid(spread + 2.0)).log()

    def sample(self, features: Tensor, noise: Tensor | None) -> Tensor:
        """Raw actions; the mean without noise."""
        mean, log_std = self.gaussian(features)
        return mean if noise is None else torch.addcmul(mean, log_std.exp(), noise)

    def evaluate(self, features: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Log-densities of raw actions, and entropies, each [...]."""
        mean, log_std = self.gaussian(features)
        return gaussian_log_prob(raw, mean, log_std), gaussian_entropy(log_std)

    def as_input(self, raw: Tensor) -> Tensor:
        """Clipped, as by the environment."""
        return raw.clamp(-1.0, 1.0)

    def as_action(self, raw: Tensor) -> Tensor:
        """Clipped."""
        return raw.clamp(-1.0, 1.0)

    def input_of(self, actions: Tensor) -> Tensor:
        """Replayed actions, unchanged."""
        return actions.float()
