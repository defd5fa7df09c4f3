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
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.algorithms.base import Array, Batch, attribute_of
from rl_training.algorithms.ops.distributional import fraction_gradient
from rl_training.algorithms.optimization import Backward
from rl_training.algorithms.q_learning import NumpyValues, QLearning, SampleTerms, choose, mask_scores
from rl_training.algorithms.quantile_huber import quantile_losses
from rl_training.errors import UserError


def fraction_logit_gradient(on_inner: Tensor, widths: Tensor, entropy: Tensor, entropy_coef: float) -> Tensor:
    """The gradient [B, N] at the fractions' logits of mean_b(sum_i on_inner_i tau_i - entropy_coef * entropy).

    tau_i is the sum of the first i widths, and widths [B, N] are the softmax of the logits.
    """
    on_widths = F.pad(on_inner.flip(-1).cumsum(-1).flip(-1), (0, 1))
    on_logits = widths * (on_widths - (on_widths * widths).sum(-1, keepdim=True))
    if entropy_coef:
        on_logits += entropy_coef * torch.xlogy(widths, widths).addcmul_(widths, entropy.unsqueeze(-1))
    return on_logits / len(widths)


class FQF(QLearning):
    """The learner; `q_network` has `propose` and a `fraction_layer` beside what IQN asks for (see `MLPFQFNetwork`)."""

    learning_rate = attribute_of("optimizer", "learning_rate")  # of the quantiles alone
    optimizer_eps = attribute_of("optimizer", "eps")
    fraction_learning_rate = attribute_of("fraction_optimizer", "learning_rate")

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
        features, fractions, outputs, gradients = self.evaluate_midpoints(rows["obs"])
        hats = choose(outputs, actions)
        losses, slopes = quantile_losses(hats, targets, fractions.tau_hats, self.kappa)
        inner = fractions.taus[:, 1:-1]
        on_inner = fraction_gradient(
            quantiles_tau=choose(network.quantiles(features, inner), actions), quantile_hats=hats
        )
        even = torch.arange(1, self.num_quantiles, device=inner.device) / self.num_quantiles
        metrics = {
            "fraction_loss": (on_inner * inner).sum(-1), "entropy_loss": -fractions.entropy,
            "fraction_shift": (inner - even).abs().amax(-1),  # how far the fractions are from even ones
        }  # fmt: skip
        on_logits = fraction_logit_gradient(on_inner, fractions.widths, fractions.entropy, self.entropy_coef)
        return SampleTerms(
            outputs, gradients, losses, slopes, losses, (fractions.widths * hats).sum(-1), targets, metrics,
            head_gradients=[on_logits.t() @ features, on_logits.sum(0)],
        )  # fmt: skip

    def evaluate_midpoints(self, obs: Tensor) -> tuple[Tensor, Any, Tensor, Backward]:
        """Features [B, D], the fractions proposed for them, quantiles at their midpoints and their backward pass."""
        network = self.q_network
        found = network.features_with_gradients(obs)
        if found is not None:
            features, into_trunk = found
            fractions = network.propose(features)
            outputs, backward = network.quantiles_with_gradients(features, fractions.tau_hats)
            return features, fractions, outputs, lambda grad: network.join_gradients(into_trunk, backward(grad))
        with torch.enable_grad():
            features = network.features(obs)
        fractions = network.propose(features)
        evaluated = self.optimizer.evaluate(network.quantiles, None, features, fractions.tau_hats)
        return features.detach(), fractions, *evaluated

    def step_head(self, terms: SampleTerms) -> None:
        """A step of the fractions; neither optimizer reaches the other's parameters."""
        self.fraction_optimizer.apply_gradients(terms.head_gradients)

    def expected_values(self, features: Tensor) -> Tensor:
        """Action values [B, A] of the online network: quantiles at the midpoints, weighted by the fractions' widths."""
        fractions = self.q_network.propose(features)
        return self.q_network.expected_values(features, fractions.tau_hats, fractions.widths)

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
            return expected(psi, widths.cumsum(-1) - 0.5 * widths, widths, rng)

        return values
