"""Actor and critic with a memory: encoder, GRU or LSTM, and an `MLPActorCritic` on its output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, ObservationNetwork
from rl_training.models.memory import Memory, Recall
from rl_training.models.mlp_actor_critic import Evaluation, MLPActorCritic
from rl_training.speed.passes import NumpyPolicy
from rl_training.speed.recurrent_passes import NumpyMemory

KEEP_BIAS = 1.0  # as in IMPALA's LSTM; with 0, half of the state is gone after a step

class RolloutEvaluation(NamedTuple):
    """An `Evaluation` [M, L], and the values [M] of one more observation after each sequence."""

    logprobs: Tensor
    values: Tensor
    entropy: Tensor
    last_values: Tensor


class RecurrentActorCritic(ObservationNetwork):
    """`heads` act on the output of a `memory` that actor and critic share.

    For learning, observations are whole sequences [M, L, ...], with the `state` [M, S] before each of them, and with
    `starts` [M, L], true where an episode starts.
    """

    def __init__(
        self, *, memory: str, memory_size: int = 128, memory_layers: int = 1, obs_dim: int,
        observation_input: ObservationInput | None = None, encoder: nn.Module | None = None, **heads: Any,
    ) -> None:  # fmt: skip
        super().__init__(obs_dim=obs_dim, observation_input=observation_input, encoder=encoder)
        self.memory = Memory(memory, self.input_dim, memory_size, memory_layers, KEEP_BIAS)
        self.heads = MLPActorCritic(obs_dim=memory_size, **heads)

    def remember(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """One step: what the heads read [N, size] for observations [N, ...], and the states [N, S] after them.

        Nothing is read on the host.
        """
        outputs, states = self.memory.follow(self.features(obs).unsqueeze(0), Recall(state, starts.unsqueeze(0)))
        return outputs[0], states[0]

    @torch.no_grad()
    def states(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, N, S] after each of the observations [T, N, ...], which here have time first."""
        x = self.features(obs.flatten(0, 1)).unflatten(0, starts.shape)
        return self.memory.follow(x, Recall(state, starts))[1]

    def outputs(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """What the heads read for sequences: [M, L, size]."""
        x = self.features(obs.flatten(0, 1)).unflatten(0, starts.shape)
        return self.memory(x.transpose(0, 1), Recall(state, starts.t())).transpose(0, 1)

    def evaluate_actions(
        self, obs: Tensor, actions: Tensor, action_masks: Tensor | None, state: Tensor, starts: Tensor
    ) -> Evaluation:
        """Log-probabilities, values and entropy [M, L] for a loss."""
        return self._evaluate(self.outputs(obs, state, starts), actions, action_masks)

    def evaluate_rollout(
        self, obs: Tensor, actions: Tensor, action_masks: Tensor | None, state: Tensor, starts: Tensor
    ) -> RolloutEvaluation:
        """The same for observations and starts of one more step [M, L + 1], whose values come last."""
        outputs = self.outputs(obs, state, starts)
        found = self._evaluate(outputs[:, :-1], actions, action_masks)
        return RolloutEvaluation(*found, self.heads.values(outputs[:, -1]))

    def numpy_memory(self) -> NumpyMemory | None:
        """What the heads read, and the states after it, in numpy; None where torch is as fast."""
        prepare, remember = self.numpy_form(), self.memory.numpy_memory()
        if prepare is None or remember is None:
            return None
        return lambda obs, states, starts: remember(prepare(obs, None), states, starts)

    def numpy_policy(self) -> NumpyPolicy | None:
        """The heads in numpy, on what `numpy_memory` returns; None without it."""
        return None if self.numpy_memory() is None else self.heads.numpy_policy()

    def _evaluate(self, outputs: Tensor, actions: Tensor, action_masks: Tensor | None) -> Evaluation:
        masks = None if action_masks is None else action_masks.flatten(0, 1)
        found = self.heads.evaluate_actions(outputs.flatten(0, 1), actions.flatten(0, 1), masks)
        return Evaluation(*(column.unflatten(0, outputs.shape[:2]) for column in found))
