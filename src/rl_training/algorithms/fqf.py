"""FQF: quantiles at fractions that the network proposes per state (Yang et al. 2019, arXiv:1911.02140).

The quantile function is IQN's, trained at the midpoints of the fractions. The fractions minimize the 1-Wasserstein
error of the approximation: their loss has its exact gradient (proposition 1) in tau_i, with the quantile function
held fixed, and an entropy bonus against collapse; one small layer on detached features learns it with its own RMSProp.
Target quantiles are taken at the fractions that the online layer proposes for the next state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Array, Batch, Number, Setting
from rl_training.algorithms.q_learning import NumpyValues, QLearning, SampleTerms, choose
from rl_training.errors import UserError
from rl_training.ops.distributional import fraction_gradient, quantile_huber
from rl_training.ops.losses import bellman_target
from rl_training.ops.policy import mask_actions
from rl_training.speed.optimizer import Backward


class FQF(QLearning):
    """The FQF learner. `q_network` has `propose`, a `fraction_layer`, and what IQN needs (see `MLPFQFNetwork`)."""

    kappa = Number(">= 0", 1.0, read="by value")
    entropy_coef = Number(">= 0", 0.0)
    fraction_learning_rate = Number(">= 0", 2.5e-9)
    num_quantiles = Setting(">= 1", 32)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        proposed = self.q_network.num_quantiles
        if proposed != self.num_quantiles:
            raise UserError(f"num_quantiles is {self.num_quantiles}; the network proposes {proposed} fractions.")
        self.fraction_optimizer = self.make_optimizer(
            "fraction_optimizer", self.q_network.fraction_layer.parameters(),
            kind="rmsprop", decay=0.95, eps=1e-5, max_grad_norm=None,
        )  # fmt: skip
        self.make_target()

    def value_parameters(self) -> list[nn.Parameter]:
        """All but the fraction layer."""
        fractions = {id(p) for p in self.q_network.fraction_layer.parameters()}
        return [p for p in self.q_network.parameters() if id(p) not in fractions]

    def targets(self, rows: Batch) -> Tensor:
        """Target quantiles [B, N]."""
        features = self.target_network.features(rows["next_obs"])
        fractions = self.q_network.propose(features)
        quantiles = self.target_network.quantiles(features, fractions.tau_hats)
        if self.double_q:
            scores = self.expected_values(self.q_network.features(rows["next_obs"]))
        else:
            scores = torch.matmul(quantiles, fractions.widths.unsqueeze(-1)).squeeze(-1)
        chosen = choose(quantiles, mask_actions(scores, rows.get("next_action_masks")).argmax(-1))
        return bellman_target(rows, self.gamma, chosen)

    def trace(self, rows: Any) -> tuple[Tensor, Backward]:
        """Quantiles [B, A, N] at the midpoints of the network's proposed fractions, which it adds to rows."""
        features = self.q_network.features(rows["obs"])
        fractions = self.q_network.propose(features)
        rows.update(features=features.detach(), fractions=fractions)
        return self.optimizer.trace(self.q_network.quantiles, features, fractions.tau_hats)

    def terms(self, rows: Any, outputs: Tensor, targets: Tensor) -> SampleTerms:
        """Quantile Huber losses at the midpoints, and the loss of the fractions."""
        actions, fractions = rows["actions"], rows["fractions"]
        hats, inner = choose(outputs, actions), fractions.taus[:, 1:-1]
        losses, slopes = quantile_huber(quantiles=hats, targets=targets, taus=fractions.tau_hats, kappa=self.kappa)
        with torch.no_grad():
            edges = choose(self.q_network.quantiles(rows["features"], inner), actions)
        fraction_losses = (fraction_gradient(quantiles_tau=edges, quantile_hats=hats) * inner).sum(-1)
        even = torch.arange(1, self.num_quantiles, device=inner.device) / self.num_quantiles
        metrics = {
            "fraction_loss": fraction_losses, "entropy_loss": -fractions.entropy,
            "fraction_shift": (inner.detach() - even).abs().amax(-1),  # how far the fractions are from even ones
        }  # fmt: skip
        head_loss = (fraction_losses - self.entropy_coef * fractions.entropy).mean()
        q_values = (fractions.widths.detach() * hats).sum(-1)
        return SampleTerms(losses, slopes, losses, q_values, targets, metrics, head_loss)

    def step_head(self, terms: SampleTerms) -> None:
        """Take a gradient step on the fractions; neither optimizer changes the other's parameters."""
        assert terms.head_loss is not None
        self.fraction_optimizer.step(terms.head_loss)

    def expected_values(self, features: Tensor) -> Tensor:
        """Action values [B, A] of the online network: quantiles at the midpoints, weighted by the fractions' widths."""
        fractions = self.q_network.propose(features)
        values: Tensor = self.q_network.expected_values(features, fractions.tau_hats, fractions.widths)
        return values

    def action_values(self, obs: Tensor, deterministic: bool) -> Tensor:
        """[N, A]."""
        return self.expected_values(self.q_network.features(obs))

    def numpy_action_values(self) -> NumpyValues | None:
        """`action_values` in numpy."""
        parts = self.numpy_form("numpy_parts")
        if parts is None:
            return None
        features, expected = parts
        layer = self.q_network.fraction_layer
        weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()

        def values(obs: Array, rng: np.random.Generator | None) -> Array:
            psi = features(obs, rng)
            logits = psi @ weight + bias
            widths = np.exp(logits - logits.max(-1, keepdims=True))
            widths /= widths.sum(-1, keepdims=True)
            means: Array = expected(psi, widths.cumsum(-1) - 0.5 * widths, widths, rng)
            return means

        return values
