"""Actor and critic with a memory: encoder, GRU or LSTM, and an `MLPActorCritic` on its output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, ObservationNetwork
from rl_training.models.memory import Memory, Recall
from rl_training.models.mlp_actor_critic import MLPActorCritic


class RecurrentActorCritic(ObservationNetwork):
    """`heads` act on the output of a `memory` that actor and critic share.

    A learner first asks what the heads read (`remember`, `outputs`), then the heads.
    """

    def __init__(
        self, *, memory: str, memory_size: int = 128, memory_layers: int = 1, obs_dim: int,
        observation_input: ObservationInput | None = None, encoder: nn.Module | None = None, **heads: Any,
    ) -> None:  # fmt: skip
        super().__init__(obs_dim=obs_dim, observation_input=observation_input, encoder=encoder)
        self.memory = Memory(memory, self.input_dim, memory_size, memory_layers)
        self.heads = MLPActorCritic(obs_dim=memory_size, **heads)

    def outputs(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """Outputs of the memory [T * N, size] for observations [T * N, ...], ordered by time (see `Recall`)."""
        x = self.features(obs).unflatten(0, starts.shape)
        return self.memory(x, Recall(state, starts)).flatten(0, 1)

    def states(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, N, S] after each of these observations."""
        return self.memory.follow(self.features(obs).unflatten(0, starts.shape), Recall(state, starts))[1]

    def remember(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the outputs [N, size] for observations [N, ...], and the states [N, S] after them; starts are [N].

        Nothing is read on the host.
        """
        outputs, states = self.memory.follow(self.features(obs).unsqueeze(0), Recall(state, starts.unsqueeze(0)))
        return outputs[0], states[0]
