"""Policy and value networks of the rollout family, for every kind of action, from vectors or through an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import ObservationNetwork, mlp
from rl_training.models.distributions import (
    Categorical,
    DiagonalGaussian,
    Distribution,
    make_categorical,
    sample_in_numpy,
)
from rl_training.speed.passes import Array, Backward, NumpyPolicy, WrittenOut, run_network
from rl_training.speed.private_torch import differentiate


class PolicyOutput(NamedTuple):
    """Sampled actions with their log-probabilities [B], values [B] and entropy [B]."""

    actions: Tensor
    logprobs: Tensor
    values: Tensor
    entropy: Tensor


class Evaluation(NamedTuple):
    """Given actions under the policy: log-probabilities [B], values [B], entropy [B]."""

    logprobs: Tensor
    values: Tensor
    entropy: Tensor


class MLPActorCritic(ObservationNetwork):
    """Actor and critic with separate MLPs on the observation, or both on the features of one `encoder`.

    `action_kind` "discrete" has `action_dim` choices; "continuous" has `action_dim` dimensions and a state-independent
    deviation; "multi_discrete" and "multi_binary" have `action_sizes` choices per factor, independent given the state.
    With `actor_columns`, the actor sees only these columns of the features, the critic all of them. The critic has the
    actor's widths unless it has its own.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int] = (64, 64),
        critic_hidden_sizes: Sequence[int] | None = None, activation: str = "tanh",
        action_kind: str = "discrete", action_sizes: Sequence[int] | None = None,
        initial_log_std: float = 0.0, actor_columns: Sequence[int] | None = None, **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.action_kind = action_kind
        self.action_sizes = tuple(action_sizes or (action_dim,))
        self.actor = mlp(self.input_dim, hidden_sizes, action_dim, activation, output_gain=0.01, columns=actor_columns)
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = mlp(self.input_dim, sizes, 1, activation)
        self.log_std = nn.Parameter(torch.full((action_dim,), initial_log_std)) if action_kind == "continuous" else None
        self._both, self._critic = WrittenOut(), WrittenOut()

    def distribution(self, obs: Tensor, action_masks: Tensor | None = None) -> Distribution:
        """The policy at observations [B, ...]."""
        # With a gradient, by autograd alone, since TRPO differentiates it repeatedly.
        return self._distribution_of(run_network(self.actor, self.features(obs)), action_masks)

    def _distribution_of(self, outputs: Tensor, action_masks: Tensor | None) -> Distribution:
        if self.log_std is not None:
            return DiagonalGaussian(outputs, self.log_std)
        return make_categorical(outputs, self.action_kind, self.action_sizes, action_masks)

    def values(self, obs: Tensor) -> Tensor:
        """State values [B]."""
        return self.values_of(self.features(obs))

    def values_of(self, features: Tensor) -> Tensor:
        """State values [B] from the output of `features`."""
        return self._critic(features, self.critic)[0].squeeze(-1)

    def evaluate(self, obs: Tensor, action_masks: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """The policy and the values [B] at observations [B, ...]."""
        outputs, values = self._both(self.features(obs), self.actor, self.critic)
        return self._distribution_of(outputs, action_masks), values.squeeze(-1)

    def act(
        self, obs: Tensor, *, deterministic: bool = False, generator: torch.Generator | None = None,
        action_masks: Tensor | None = None,
    ) -> PolicyOutput:  # fmt: skip
        """Sample (or take the mode of) the policy at observations [B, ...]."""
        policy, values = self.evaluate(obs, action_masks)
        actions = policy.mode() if deterministic else policy.sample(generator)
        return PolicyOutput(actions, policy.log_prob(actions), values, policy.entropy())

    def evaluate_actions(self, obs: Tensor, actions: Tensor, action_masks: Tensor | None = None) -> Evaluation:
        """Log-probabilities, values and entropy for a loss."""
        policy, values = self.evaluate(obs, action_masks)
        return Evaluation(policy.log_prob(actions), values, policy.entropy())

    def trace(
        self, obs: Tensor, actions: Tensor, action_masks: Tensor | None = None
    ) -> tuple[Evaluation, Backward] | None:
        """`evaluate_actions` without a graph, and a function that maps slopes of its three outputs (None for an entropy
        of weight 0) to gradients of `parameters()`; None if autograd is needed, as after an encoder."""
        compiled = torch.compiler.is_compiling() and self.action_kind != "discrete"  # others use autograd below
        if self.encoder is not None or compiled:
            return None
        traced = self._both.trace(self.features(obs), self.actor, self.critic)
        if traced is None:
            return None
        (outputs, values), backward = traced
        outputs.requires_grad_(self.action_kind != "discrete")  # a Categorical has a hand-written gradient
        leaves = (outputs,) if self.log_std is None else (outputs, self.log_std)
        policy = self._distribution_of(outputs, action_masks)
        logprobs, entropy = policy.log_prob(actions), policy.entropy()

        def gradients(on_logprobs: Tensor, on_values: Tensor, on_entropy: Tensor | None) -> Sequence[Tensor | None]:
            on_log_std: Sequence[Tensor] = ()
            if isinstance(policy, Categorical):
                on_outputs = policy.gradient(actions, on_logprobs, on_entropy)
            elif on_entropy is None:
                on_outputs, *on_log_std = differentiate((logprobs,), (on_logprobs,), inputs=leaves)
            else:
                on_outputs, *on_log_std = differentiate((logprobs, entropy), (on_logprobs, on_entropy), inputs=leaves)
            on_networks = backward(on_outputs, on_values.unsqueeze(-1))
            return [*on_log_std, *on_networks] if on_log_std else on_networks

        return Evaluation(logprobs.detach(), values.squeeze(-1), entropy.detach()), gradients

    def trace_values(self, features: Tensor) -> tuple[Tensor, Backward]:
        """`values_of` without a graph, and a function that maps its slopes to gradients of the critic's parameters."""
        traced = self._critic.trace(features, self.critic)
        if traced is not None:
            return traced[0][0].squeeze(-1), lambda slopes: traced[1](slopes.unsqueeze(-1))
        values, parameters = self.values_of(features), tuple(self.critic.parameters())
        return values.detach(), lambda slopes: differentiate((values,), (slopes,), inputs=parameters)

    def actor_parameters(self) -> list[nn.Parameter]:
        """The parameters that the policy depends on, including the encoder's."""
        critic = {id(p) for p in self.critic.parameters()}
        return [p for p in self.parameters() if id(p) not in critic]

    def numpy_policy(self) -> NumpyPolicy | None:
        """Acting in numpy; None where there is no numpy form."""
        forward = self.numpy_form(self.actor)
        if forward is None:
            return None
        if self.log_std is not None:
            log_std = self.log_std.detach().numpy()

            def act_gaussian(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
                mean = forward(obs, None)
                if deterministic:
                    return mean
                return mean + np.exp(log_std) * rng.standard_normal(mean.shape, dtype=np.float32)

            return act_gaussian
        return sample_in_numpy(forward, self.action_kind, self.action_sizes)
