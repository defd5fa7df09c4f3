"""FQF: quantiles at fractions that the network proposes per state (Yang et al. 2019, arXiv:1911.02140).

The quantile function is IQN's, trained at the midpoints of the fractions. The fractions minimise the 1-Wasserstein
error of the approximation: their loss has its exact gradient (proposition 1) towards tau_i, with the quantile function
held fixed, and an entropy bonus against collapse; one small layer on detached features learns it with its own RMSProp.
Target quantiles stand at the fractions that the online layer proposes for the next state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.base import Array, Batch
from rl_training.algorithms.ops.distributional import fraction_gradient
from rl_training.algorithms.q_learning import NumpyValues, QLearning, SampleTerms, choose, mask_scores
from rl_training.algorithms.quantile_huber import quantile_losses
from rl_training.errors import UserError


class FQF(QLearning):
    """The learner; `q_network` has `propose` and a `fraction_layer` beside what IQN asks for (see `MLPFQFNetwork`)."""

    def __init__(
        self, *, q_network: nn.Module, learning_rate: float = 1e-3, fraction_learning_rate: float = 2.5e-9,
        num_quantiles: int = 32, kappa: float = 1.0, entropy_coef: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(q_network=q_network, learning_rate=learning_rate, **options)
        if self.q_network.num_quantiles != num_quantiles:
            raise UserError(
                f"num_quantiles is {num_quantiles}; the network proposes {self.q_network.num_quantiles} fractions."
            )
        self.num_quantiles, self.kappa, self.entropy_coef = num_quantiles, kappa, entropy_coef
        self.fraction_optimizer = self.make_optimizer(
            "fraction_optimizer", self.q_network.fraction_layer.parameters(), fraction_learning_rate,
            kind="rmsprop", decay=0.95, eps=1e-5,
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
        chosen = choose(quantiles, mask_scores(scores, rows.get("next_action_masks")).argmax(-1))
        return torch.addcmul(rows["rewards"].unsqueeze(1), rows["discounts"].unsqueeze(1), chosen)

    def terms(self, rows: Batch, targets: Tensor) -> SampleTerms:
        """Quantile Huber losses at the midpoints, and the losses of the fractions."""
        network, actions = self.q_network, rows["actions"]
        features = network.features(rows["obs"])
        fractions = network.propose(features)
        quantile_hats = choose(network.quantiles(features, fractions.tau_hats), actions)
        losses = quantile_losses(quantile_hats, targets, fractions.tau_hats, self.kappa)
        hats = quantile_hats.detach()
        inner = fractions.taus[:, 1:-1]
        with torch.no_grad():
            quantiles_tau = choose(network.quantiles(features, inner), actions)
            slopes = fraction_gradient(quantiles_tau=quantiles_tau, quantile_hats=hats)
            q_values = (fractions.widths * hats).sum(-1)
        extras = {"fraction_loss": (slopes * inner).sum(-1).mean(), "entropy_loss": -fractions.entropy.mean()}
        return SampleTerms(losses, losses.detach(), q_values, targets, extras)

    def critic_step(self, rows: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """A step of the quantiles, then one of the fractions; neither reaches the other's parameters."""
        metrics, td_errors = super().critic_step(rows)
        self.fraction_optimizer.step(metrics["fraction_loss"] + self.entropy_coef * metrics["entropy_loss"])
        return {name: value.detach() for name, value in metrics.items()}, td_errors

    def expected_values(self, features: Tensor) -> Tensor:
        """Action values [B, A] of the online network: quantiles at the midpoints, weighted by the fractions' widths."""
        fractions = self.q_network.propose(features)
        return self.q_network.expected_values(features, fractions.tau_hats, fractions.widths)

    def action_values(self, obs: Tensor, deterministic: bool) -> Tensor:
        """[N, A]."""
        return self.expected_values(self.q_network.features(obs))

    def numpy_action_values(self) -> NumpyValues | None:
        """`action_values` in numpy."""
        make = getattr(self.q_network, "numpy_parts", None)
        parts = make() if make is not None else None
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
            return expected(psi, widths.cumsum(-1) - 0.5 * widths, widths, rng)

        return values

    @property
    def learning_rate(self) -> float:
        """Of the quantiles; the fractions have `fraction_learning_rate`."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.optimizer.learning_rate = value

    @property
    def fraction_learning_rate(self) -> float:
        """Of the fractions."""
        return self.fraction_optimizer.learning_rate

    @fraction_learning_rate.setter
    def fraction_learning_rate(self, value: float) -> None:
        self.fraction_optimizer.learning_rate = value
