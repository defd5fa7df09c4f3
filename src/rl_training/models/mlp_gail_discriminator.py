"""The discriminator of GAIL: from vectors or, through an encoder, from images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.models.blocks import ObservationNetwork, encode, mlp


class MLPGAILDiscriminator(ObservationNetwork):
    """D(s, a) as a logit [B], positive where a pair looks like the expert's.

    `encoder` reads images, and an `observation_input` with a size normalizes vectors. The last layer starts at 0, so an
    untrained discriminator gives every pair the same probability. With `absorbing_states` one more input marks the
    state after an episode's end, which has no observation and no action.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int] = (64, 64), activation: str = "tanh",
        action_kind: str = "discrete", action_sizes: Sequence[int] | None = None, absorbing_states: bool = False,
        **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.continuous, self.absorbing_states = action_kind == "continuous", absorbing_states
        self.action_sizes = tuple(action_sizes or (action_dim,))
        columns = self.input_dim + action_dim + absorbing_states
        self.network = mlp(columns, hidden_sizes, 1, activation, output_gain=0.0)

    def forward(self, obs: Tensor, actions: Tensor, absorbing: Tensor | None = None) -> Tensor:
        """Logits [B] of raw observations [B, ...] and actions [B] or [B, K]; `absorbing` [B] is bool."""
        return self.logits(*self.prepare(obs, actions, absorbing))

    def prepare(self, obs: Tensor, actions: Tensor, absorbing: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Both as floats that can be interpolated; choices are one-hot.

        Actions are clipped as the environment clips them. The expert's actions are clipped, so the tails of a Gaussian
        would reveal the policy even if both act the same.
        """
        obs = self.observation_input(obs)
        if self.continuous:
            actions = actions.float().clamp(-1.0, 1.0)
        else:
            columns = actions.long().reshape(len(actions), -1).unbind(-1)
            pairs = zip(columns, self.action_sizes, strict=True)
            actions = torch.cat([F.one_hot(column, size) for column, size in pairs], -1).float()
        if self.absorbing_states:
            ended = torch.zeros_like(actions[:, :1]) if absorbing is None else absorbing.unsqueeze(-1).to(actions.dtype)
            obs = obs * (1.0 - ended).view(-1, *[1] * (obs.dim() - 1))
            actions = torch.cat([actions * (1.0 - ended), ended], -1)
        return obs, actions

    def logits(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Logits [B] from the output of `prepare`."""
        return self.network(torch.cat([encode(self.encoder, obs), actions], -1)).squeeze(-1)
