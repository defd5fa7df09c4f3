"""Shared by the DQN family: acting, target network, noise, and the gradient step; a head adds targets and losses.

There is one learner per head (scalar, categorical, quantile, implicit, fully parameterized). Double Q-learning is an
option here, dueling and noisy layers belong to the network, and n-step returns and priorities come with the batch. A
network with memory learns from sequences (`q_sequences.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.base import ActOutput, Algorithm, Array, Batch, Carry, Number, Setting, UpdateResult
from rl_training.algorithms.q_sequences import COLUMNS, sequence_priorities, sequence_rows, trace_sequences
from rl_training.ops.losses import chosen_slopes, index_actions, transition_columns, weighted_mean
from rl_training.ops.policy import mask_actions
from rl_training.play import random_actions
from rl_training.speed.optimizer import Backward, TargetNetwork
from rl_training.speed.passes import NumpyPolicy, mask_in_numpy

# obs [N, D] and a generator (None: deterministic) -> action values [N, A]
NumpyValues = Callable[[Array, "np.random.Generator | None"], Array]


class SampleTerms(NamedTuple):
    """Losses [B] of a batch, unweighted, and their slopes at the taken action's outputs ([B] or [B, K]); priorities
    [B]; values and targets [B, ...] for metrics. A head may add metrics, and a loss for its own optimizer.
    """

    losses: Tensor
    slopes: Tensor
    td_errors: Tensor
    q_values: Tensor
    targets: Tensor
    metrics: dict[str, Tensor] | None = None
    head_loss: Tensor | None = None

    def summary(self, weights: Tensor | None) -> dict[str, Tensor]:
        """The loss of the whole batch, and the values whose mean is each metric."""
        return {
            "loss": weighted_mean(self.losses, weights), "q_value_mean": self.q_values, "target_mean": self.targets,
            "td_error_mean": self.td_errors, **(self.metrics or {}),
        }  # fmt: skip


class EpsilonGreedy(Algorithm):
    """A learner of action values that acts on the best one, or with probability `epsilon` on any."""

    epsilon = Number("in [0, 1]", 0.0, read="to act")

    def __init__(self, *, q_network: nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.q_network: Any = q_network
        self.noisy = bool(getattr(q_network, "noise_dim", 0))

    def values(self, outputs: Tensor) -> Tensor:
        """Action values [B, A] from the network's outputs."""
        return outputs

    def numpy_values(self, outputs: Array) -> Array:
        """`values` in numpy."""
        return outputs

    def action_values(self, obs: Tensor, deterministic: bool) -> Tensor:
        """Values [N, A] of the online network, for acting."""
        return self.values(self.q_network(obs))

    @property
    def has_memory(self) -> bool:
        """Whether the network remembers earlier observations."""
        return getattr(self.q_network, "memory", None) is not None

    def initial_carry(self, n: int) -> Carry:
        """Zeros [n, S]; None without a memory."""
        return self.q_network.memory.initial_state(n) if self.has_memory else None

    def remembered_values(self, obs: Tensor, carry: Carry, is_first: Tensor | None) -> tuple[Tensor, Carry]:
        """Values [N, A] of a network with memory, for acting, and the memory after these observations."""
        carry = self.initial_carry(len(obs)) if carry is None else carry
        is_first = torch.zeros_like(carry[:, 0], dtype=torch.bool) if is_first is None else is_first
        outputs, carry = self.q_network.remember(obs, carry, is_first)
        return self.values(outputs), carry

    def acting(self) -> nn.Module:
        """The online network."""
        network: nn.Module = self.q_network
        return network

    @torch.no_grad()
    def act(
        self, obs: Tensor, carry: Any = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """The best action, or with probability `epsilon` any legal one; with fresh noise unless deterministic."""
        if self.noisy:
            self.q_network.set_noise(None if deterministic else self.q_network.draw_noise(1, self.generator)[0])
        if self.has_memory:
            values, carry = self.remembered_values(obs, carry, is_first)
        else:
            values = self.action_values(obs, deterministic)
        scores = mask_actions(values, action_masks)
        if not deterministic and (isinstance(self.epsilon, Tensor) or self.epsilon > 0.0):
            draws = scores.new_empty(len(scores), scores.shape[1] + 1).uniform_(generator=self.generator)
            explore = draws[:, :1] < self.epsilon
            scores = torch.where(explore, mask_actions(draws[:, 1:], action_masks), scores)
        return ActOutput(scores.argmax(-1), {"states": carry} if self.has_memory else {}, carry)

    def numpy_form(self, method: str) -> Any:
        """The numpy form that the network's `method` returns; None if it has no such method or form."""
        make = getattr(self.q_network, method, None)
        return None if make is None else make()

    def numpy_action_values(self) -> NumpyValues | None:
        """`action_values` in numpy, where the network has a numpy form."""
        network = self.numpy_form("numpy_network")
        return None if network is None else lambda obs, rng: self.numpy_values(network(obs, rng))

    def numpy_policy(self) -> NumpyPolicy | None:
        """`act` in numpy, where the head and the network have a numpy form."""
        values = self.numpy_action_values()
        if values is None:
            return None
        num_actions = int(self.q_network.action_dim)

        def act(obs: Array, masks: Array | None, rng: np.random.Generator, deterministic: bool) -> Array:
            explore = None
            if not deterministic and self.epsilon > 0.0:
                explore = rng.random(len(obs)) < self.epsilon
                if explore.all():  # no row needs the network
                    return random_actions(rng, len(obs), (num_actions,), masks)
            actions: Array = mask_in_numpy(values(obs, None if deterministic else rng), masks).argmax(-1)
            if explore is not None and explore.any():
                actions = np.where(explore, random_actions(rng, len(obs), (num_actions,), masks), actions)
            return actions

        return act


class QLearning(EpsilonGreedy):
    """A learner of action values from transitions; `q_network` is any module [B, ...] -> [B, A] or as the head needs.

    `target_update_interval` counts updates; `tau` below 1 moves the target only that share of the way each time.
    A batch holds obs, actions, rewards, next_obs and `dones` or `terminated`, or `discounts` (which override them);
    `weights` of the loss and `next_action_masks` [B, A], true where an action is legal, are optional.
    """

    steps = ("critic_step",)
    graphs = ("update_step",)
    learning_rate = Number(">= 0", 3e-4)
    gamma = Number("in [0, 1]", 0.99)
    tau = Number("in (0, 1]", 1.0)
    max_grad_norm = Number("> 0", 10.0)
    target_update_interval = Setting(">= 1", 500)
    double_q = Setting(default=False)
    burn_in = Setting(">= 0", 0)
    priority_eta = Number("in [0, 1]", 0.9)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.optimizer = self.make_optimizer("optimizer", self.value_parameters())
        self.last_td_errors: Tensor | None = None

    def value_parameters(self) -> list[nn.Parameter]:
        """The parameters that the value loss trains."""
        return list(self.q_network.parameters())

    def make_target(self) -> None:
        """Copy the network; call it last in a constructor, when every optimizer has flattened its parameters."""
        self.target = TargetNetwork(self.q_network)
        self.target_network: Any = self.target.network

    # what a head implements, with `values`, `numpy_values` and `action_values` --------------------------------

    def targets(self, rows: Batch) -> Any:
        """The targets for the value of the action taken; called without gradients."""
        raise NotImplementedError

    def trace(self, rows: Any) -> tuple[Tensor, Backward]:
        """Outputs of the online network, and a function that maps a loss's slopes at them to gradients."""
        if self.has_memory:
            return trace_sequences(rows, self.burn_in, self.q_network, self.target_network, self.optimizer)
        return self.optimizer.trace(self.q_network, rows["obs"])

    def terms(self, rows: Batch, outputs: Tensor, targets: Any) -> SampleTerms:
        """Losses of the transitions and their slopes."""
        raise NotImplementedError

    def step_head(self, terms: SampleTerms) -> None:
        """Train the parts that only this head has, after the values."""

    # the update ------------------------------------------------------------------------------------------------

    def draws(self, count: int) -> dict[str, Tensor]:
        """Random numbers of one update of `count` transitions: noise for the online, selecting and target network."""
        return {"noise": self.q_network.draw_noise(3, self.generator)} if self.noisy else {}

    def rows(self, batch: Batch, draws: Batch) -> dict[str, Any]:
        """The batch, as transitions, and the draws."""
        rows = sequence_rows(batch, self.burn_in) if self.has_memory else dict(batch)
        return {**rows, "actions": rows["actions"].long(), **draws}

    def critic_step(self, batch: Batch, draws: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step; straight-line code that draws nothing, reads no tensor and branches on none."""
        rows = self.rows(batch, draws)
        noise = rows.get("noise")
        if noise is not None:
            self.q_network.set_noise(noise[0])
            self.target_network.set_noise(noise[2])
        outputs, backward = self.trace(rows)
        if noise is not None:
            self.q_network.set_noise(noise[1])
        with torch.no_grad():
            targets = self.targets(rows)
        terms = self.terms(rows, outputs, targets)
        slopes = chosen_slopes(terms.slopes, rows["actions"], outputs, rows.get("weights"))
        metrics = terms.summary(rows.get("weights"))
        metrics["grad_norm"] = self.optimizer.apply_gradients(backward(slopes))
        self.step_head(terms)
        if noise is not None:
            self.q_network.set_noise(None)
        if not self.has_memory:
            return metrics, terms.td_errors
        errors, taken = (column.view(rows["steps"]) for column in (terms.td_errors, rows["taken"]))
        return metrics, sequence_priorities(errors, taken, self.priority_eta)

    def update_step(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Take a gradient step with new draws; return metrics and priorities [B]."""
        return self.critic_step(batch, self.draws(len(batch["actions"])))

    def learn(self, batch: Batch) -> UpdateResult:
        """Take one gradient step, then update the target if that is due."""
        obs = batch["obs"]
        if self.has_memory:
            columns, obs = {name: batch[name] for name in COLUMNS if name in batch}, obs.flatten(0, 1)
        else:
            columns = transition_columns(batch)
        metrics, self.last_td_errors = self.update_step(columns)
        observation_input = getattr(self.q_network, "observation_input", None)
        if observation_input is not None:
            observation_input.update(obs)
        if (self.num_updates + 1) % self.target_update_interval == 0:
            if self.tau < 1.0:
                self.target.polyak_(self.tau)
            else:
                self.target.copy_()
        return UpdateResult(metrics, priorities=self.last_td_errors)

    def next_outputs(self, rows: Batch) -> Tensor:
        """The target network's outputs at the next observations."""
        outputs: Tensor = rows["next_target"] if self.has_memory else self.target_network(rows["next_obs"])
        return outputs

    def next_scores(self, rows: Batch, outputs: Tensor) -> Tensor:
        """Scores [B, A] that choose the next action: the target's own, or the online network's with double Q-learning.

        `outputs` are the target network's at the next observations. An illegal action is never chosen.
        """
        if self.double_q:
            outputs = rows["next_online"] if self.has_memory else self.q_network(rows["next_obs"])
        return mask_actions(self.values(outputs), rows.get("next_action_masks"))


def choose(outputs: Tensor, actions: Tensor) -> Tensor:
    """The entry of each row's action: [B, A], [B] -> [B], or [B, A, K], [B] -> [B, K]."""
    return outputs.gather(1, index_actions(actions, outputs)).squeeze(1)
