"""Acting code that learners share: for deterministic policies (DDPG and its subclasses, NAF) and stochastic ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Carry, NumpyPolicy


class GaussianExploration(Algorithm):
    """A learner whose `model.actor(obs)` is mu(s) in [-1, 1] and that explores with Gaussian noise."""

    model: Any
    exploration_noise: float  # the deviation of the noise; a schedule may change it

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """mu(s), with Gaussian noise unless deterministic."""
        actions = self.model.actor(obs)
        if not deterministic:
            noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
            actions = (actions + self.exploration_noise * noise).clamp_(-1.0, 1.0)
        return ActOutput(actions)

    def numpy_policy(self) -> NumpyPolicy | None:
        """The same in numpy, if the acting network has a numpy form."""
        make = getattr(self.acting(), "numpy_policy", None)
        return None if make is None else make(lambda: self.exploration_noise)


class PolicyActing(Algorithm):
    """A learner of a `policy` that samples (`act`) and estimates values: the rollout family, GAIL."""

    policy: Any

    def acting(self) -> nn.Module:
        """Policy and normalizer."""
        policy: nn.Module = self.policy
        return policy

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """Actions, with the log-probabilities and values that a rollout stores with them."""
        out = self.policy.act(obs, deterministic=deterministic, generator=self.generator, action_masks=action_masks)
        return ActOutput(out.actions, {"logprobs": out.logprobs, "values": out.values})
