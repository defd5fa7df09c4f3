"""Networks of discrete SAC: a categorical actor, and critics that value every action at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rl_training.models.blocks import CriticEnsemble, ObservationNetwork, encode, encoded_dim, mlp
from rl_training.models.distributions import Categorical, MultiCategorical, make_categorical, sample_in_numpy
from rl_training.speed.passes import NumpyPolicy


class CategoricalActor(ObservationNetwork):
    """Logits [B, S] of one choice, or of several that are independent given the observation."""

    def __init__(
        self, *, action_kind: str, action_sizes: Sequence[int], hidden_sizes: Sequence[int], activation: str,
        columns: Sequence[int] | None = None, **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.action_kind, self.action_sizes = action_kind, tuple(action_sizes)
        self.network = mlp(
            self.input_dim, hidden_sizes, sum(action_sizes), activation, output_gain=0.01, columns=columns
        )

    def distribution(self, obs: Tensor, masks: Tensor | None = None) -> Categorical | MultiCategorical:
        """The policy at observations [B, ...]."""
        return make_categorical(self.network(self.features(obs)), self.action_kind, self.action_sizes, masks)

    def numpy_policy(self) -> NumpyPolicy | None:
        """Acting in numpy; None where there is no numpy form."""
        logits = self.numpy_form(self.network)
        return None if logits is None else sample_in_numpy(logits, self.action_kind, self.action_sizes)


class MLPDiscreteSACModel(nn.Module):
    """`actor`, and `critics` with the values of all S options; both share nothing but the observation's input layer.

    With an `encoder`, each has its own. With `actor_columns`, the actor sees only these columns of its features.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256),
        critic_hidden_sizes: Sequence[int] | None = None, activation: str = "relu",
        action_kind: str = "discrete", action_sizes: Sequence[int] | None = None, num_critics: int = 2,
        encoder: nn.Module | None = None, actor_columns: Sequence[int] | None = None, **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.action_sizes = tuple(action_sizes or (action_dim,))
        self.actor = CategoricalActor(
            obs_dim=obs_dim, action_kind=action_kind, action_sizes=self.action_sizes, encoder=encoder,
            columns=actor_columns, hidden_sizes=hidden_sizes, activation=activation, **inputs,
        )  # fmt: skip
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critics = CriticEnsemble(
            num_critics=num_critics, inputs=encoded_dim(obs_dim, encoder), outputs=action_dim,
            encoder=copy.deepcopy(encoder), hidden_sizes=sizes, activation=activation,
        )  # fmt: skip

    def values(self, critics: CriticEnsemble, obs: Tensor) -> Tensor:
        """What these critics (its own, or targets) say of every option: [B, ...] -> [E, B, S]."""
        values = critics.run(encode(critics.encoder, self.actor.observation_input(obs)))
        return values.view(*values.shape[:2], -1)  # a single option has no dimension of its own
