"""C51: a categorical distribution of returns on fixed atoms (Bellemare et al. 2017, arXiv:1707.06887).

The target's distribution, shifted by the reward and shrunk by the discount, is projected onto the atoms; the loss is
the cross-entropy to it, which is also the priority. With `double_q`, a dueling noisy network, n-step returns and
prioritized replay this is Rainbow (Hessel et al. 2018, arXiv:1710.02298).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Array, Batch
from rl_training.algorithms.q_learning import QLearning, SampleTerms, choose
from rl_training.errors import UserError
from rl_training.ops.distributional import cross_entropy, outside_mass, project_categorical
from rl_training.ops.losses import bellman_target
from rl_training.speed.optimizer import move_support


class C51DQN(QLearning):
    """The C51 learner. `q_network` maps [B, ...] to logits [B, A, num_atoms] on atoms from `v_min` to `v_max`."""

    def __init__(self, *, v_min: float = -10.0, v_max: float = 10.0, num_atoms: int = 51, **settings: Any) -> None:
        if num_atoms < 2 or v_max <= v_min:
            raise UserError(f"the support has {num_atoms} atoms from {v_min} to {v_max}; v_max must be above v_min.")
        super().__init__(**settings)
        self.support: Tensor
        self.register_buffer("support", torch.linspace(v_min, v_max, num_atoms))
        self.make_target()

    def acting_tensors(self) -> list[Tensor]:
        """The tensors of the network, and the support."""
        return [*super().acting_tensors(), self.support]

    def widen_support(self, v_min: float, v_max: float) -> None:
        """Place the atoms from `v_min` to `v_max` and carry over what was learned (see `move_support`)."""
        move_support(self.support, v_min, v_max, self.q_network, self.target_network)

    def values(self, outputs: Tensor) -> Tensor:
        """Means of the distributions [B, A]."""
        return outputs.softmax(-1) @ self.support

    def numpy_values(self, outputs: Array) -> Array:
        """`values` in numpy."""
        weights = np.exp(outputs - outputs.max(-1, keepdims=True))
        means: Array = (weights @ self.support.numpy()) / weights.sum(-1)
        return means

    def targets(self, rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Projected distributions [B, K], their means [B] before the projection clips them, and how much it clips."""
        logits = self.next_outputs(rows)
        probs = choose(logits, self.next_scores(rows, logits).argmax(-1)).softmax(-1)
        atoms = bellman_target(rows, self.gamma, self.support.unsqueeze(0))
        projected = project_categorical(atoms=atoms, probs=probs, support=self.support)
        return projected, (probs * atoms).sum(-1), outside_mass(atoms, probs, self.support)

    def terms(self, rows: Batch, outputs: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> SampleTerms:
        """Cross-entropies to the projected distributions."""
        logits = choose(outputs, rows["actions"])
        losses, slopes = cross_entropy(logits=logits, target_probs=targets[0])
        q_values, metrics = logits.softmax(-1) @ self.support, {"clipped_targets": targets[2]}
        return SampleTerms(losses, slopes, losses, q_values, targets[1], metrics)
