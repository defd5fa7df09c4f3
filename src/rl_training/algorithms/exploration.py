"""`GaussianExploration`: acting shared by the learners of a deterministic policy (DDPG and its children, NAF)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import ActOutput, Algorithm, Carry, NumpyPolicy


class GaussianExploration(Algorithm):
    """A learner whose `model.actor(obs)` is mu(s) in [-1, 1], which it explores around by Gaussian noise."""

    model: Any
    exploration_noise: float  # the deviation of the noise; a schedule may move it

    @torch.no_grad()
    def act(self, obs: Tensor, carry: Carry = None, *, deterministic: bool = False, **_: Any) -> ActOutput:
        """mu(s), with Gaussian noise unless deterministic."""
        actions = self.model.actor(obs)
        if not deterministic:
            noise = torch.randn(actions.shape, generator=self.generator, device=actions.device)
            actions = (actions + self.exploration_noise * noise).clamp_(-1.0, 1.0)
        return ActOutput(actions)

    def numpy_policy(self) -> NumpyPolicy | None:
        """The same in numpy, where the network that acts has such a form."""
        make = getattr(self.acting(), "numpy_policy", None)
        return None if make is None else make(lambda: self.exploration_noise)
