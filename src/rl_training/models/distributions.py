"""Action distributions of policies: sample, mode, log_prob, entropy and KL, on `ops.policy`; here actions are masked.

Lighter than `torch.distributions`, whose argument checks cost more than a small network's forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_training.ops import policy
from rl_training.ops.policy import mask_actions
from rl_training.speed.passes import Array, NumpyPolicy, NumpyStep, mask_in_numpy

MASKED_LOGIT = -1e8  # finite, so that 0 probability times this is 0 and not NaN


class Distribution(Protocol):
    """A batch of B action distributions."""

    def sample(self, generator: torch.Generator | None = None, noise: Tensor | None = None) -> Tensor:
        """Draw actions; `noise` drawn earlier (Gumbel [B, A] or Gaussian [B, D]) replaces the generator."""

    def mode(self) -> Tensor: ...

    def log_prob(self, actions: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...

    def kl(self, other: Any) -> Tensor:
        """KL(self || other) [B]."""

    def detach(self) -> Any:
        """The same numbers without a gradient."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            setattr(copied, name, [part.detach() for part in value] if isinstance(value, list) else value.detach())
        return copied


class Categorical(Distribution):
    """One choice out of A: logits [B, A], actions [B]."""

    _entropy: Tensor | None = None  # cached, because a loss and its gradient both need it

    def __init__(self, logits: Tensor, masks: Tensor | None = None) -> None:
        scores = logits if masks is None else mask_actions(logits, masks, MASKED_LOGIT)
        self.log_probs = scores.log_softmax(-1)

    def sample(self, generator: torch.Generator | None = None, noise: Tensor | None = None) -> Tensor:
        """Draw by the Gumbel trick: argmax of log-probabilities plus noise (minus the log of exponential draws)."""
        if noise is None:
            noise = torch.empty_like(self.log_probs).exponential_(generator=generator).log_().neg_()
        return (self.log_probs + noise).argmax(-1)

    def mode(self) -> Tensor:
        """The most likely choice."""
        return self.log_probs.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B]."""
        return policy.categorical_log_prob(self.log_probs, actions)

    def entropy(self) -> Tensor:
        """[B]."""
        if self._entropy is None:
            self._entropy = policy.categorical_entropy(self.log_probs)
        return self._entropy

    def gradient(self, actions: Tensor, on_logprobs: Tensor, on_entropy: Tensor | None) -> Tensor:
        """Gradient [B, A] with respect to the logits, from those with respect to `log_prob` and `entropy` [B]."""
        with torch.no_grad():  # not a decorator, which would split a compiled step in two
            probs = self.log_probs.exp()
            weights = -on_logprobs.unsqueeze(-1)
            if on_entropy is not None:  # dH/dlogit = -p (log p + H)
                weights = weights - on_entropy.unsqueeze(-1) * (self.log_probs + self.entropy().unsqueeze(-1))
            return (probs * weights).scatter_add_(-1, actions.long().unsqueeze(-1), on_logprobs.unsqueeze(-1))

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other) [B]."""
        return policy.categorical_kl(self.log_probs, other.log_probs)


class MultiCategorical(Distribution):
    """K independent choices: logits [B, sum(sizes)], actions [B, K]."""

    def __init__(self, logits: Tensor, sizes: Sequence[int], masks: Tensor | None = None) -> None:
        pieces = logits.split(list(sizes), -1)
        allowed = [None] * len(pieces) if masks is None else masks.split(list(sizes), -1)
        self.parts = [Categorical(piece, mask) for piece, mask in zip(pieces, allowed, strict=True)]

    @property
    def log_probs(self) -> Tensor:
        """Of every choice's options, one after the other: [B, sum(sizes)]."""
        return torch.cat([part.log_probs for part in self.parts], -1)

    def sample(self, generator: torch.Generator | None = None, noise: Tensor | None = None) -> Tensor:
        """Draw every choice."""
        sizes = [part.log_probs.shape[-1] for part in self.parts]
        pieces = [None] * len(sizes) if noise is None else noise.split(sizes, -1)
        return torch.stack([part.sample(generator, piece) for part, piece in zip(self.parts, pieces, strict=True)], -1)

    def mode(self) -> Tensor:
        """The most likely choices."""
        return torch.stack([part.mode() for part in self.parts], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B], summed over the choices."""
        return torch.stack([p.log_prob(a) for p, a in zip(self.parts, actions.unbind(-1), strict=True)]).sum(0)

    def entropy(self) -> Tensor:
        """[B], summed over the choices."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: MultiCategorical) -> Tensor:
        """KL(self || other) [B], summed over the choices."""
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)


class DiagonalGaussian(Distribution):
    """Independent Gaussians: mean [B, D], log deviation [D] or [B, D]; the environment clips, the density does not."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, generator: torch.Generator | None = None, noise: Tensor | None = None) -> Tensor:
        """Draw [B, D]."""
        if noise is None:
            noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B], summed over dimensions."""
        return policy.gaussian_log_prob(actions, self.mean, self.log_std)

    def entropy(self) -> Tensor:
        """[B], summed over dimensions."""
        return policy.gaussian_entropy(self.log_std).expand(self.mean.shape[:-1])

    def kl(self, other: DiagonalGaussian) -> Tensor:
        """KL(self || other) [B]."""
        return policy.gaussian_kl(self.mean, self.log_std, other.mean, other.log_std)


def make_categorical(
    logits: Tensor, action_kind: str, sizes: Sequence[int], masks: Tensor | None = None
) -> Categorical | MultiCategorical:
    """The distribution of "discrete" actions, or of several choices of these sizes."""
    return Categorical(logits, masks) if action_kind == "discrete" else MultiCategorical(logits, sizes, masks)


def sample_in_numpy(logits: NumpyStep, action_kind: str, sizes: Sequence[int]) -> NumpyPolicy:
    """Mode and samples of `make_categorical` in numpy, from a network's logits."""
    ends = np.cumsum(sizes)

    def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
        scores = logits(obs, None)
        if not deterministic:  # Gumbel: the argmax of logits plus this noise is a sample
            scores -= np.log(rng.standard_exponential(scores.shape, dtype=np.float32) + 1e-10)
        scores = mask_in_numpy(scores, masks)
        if action_kind == "discrete":
            return scores.argmax(-1)
        return np.stack([scores[:, end - size : end].argmax(-1) for end, size in zip(ends, sizes, strict=True)], -1)

    return act
