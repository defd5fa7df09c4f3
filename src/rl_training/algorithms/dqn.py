"""DQN: Q-learning with a replay buffer and a target network (Mnih et al. 2015, Nature 518; arXiv:1312.5602).

y = r + gamma (1 - terminated) max_a Q_target(s', a), Huber loss. Also the scalar variants: double Q-learning
(van Hasselt et al. 2016, arXiv:1509.06461) by `double_q`; dueling, noisy, prioritized and n-step by network and batch;
h(r + gamma (1 - terminated) h^-1(max_a Q_target(s', a))) by `rescale_values` (Pohlen et al. 2018, arXiv:1805.11593).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_training.algorithms.base import Batch, Number, Setting
from rl_training.algorithms.q_learning import QLearning, SampleTerms, choose
from rl_training.ops.losses import bellman_target, double_q_values, huber, rescale, unscale


def dqn_terms(
    q_values: Tensor, actions: Tensor, targets: Tensor, huber_delta: float | Tensor | None = 1.0
) -> SampleTerms:
    """Huber losses of the taken actions' values, [B, A], [B], [B]; priorities |target - Q|."""
    chosen = choose(q_values, actions)
    losses, slopes = huber(chosen, targets, huber_delta)
    return SampleTerms(losses, slopes, (targets - chosen.detach()).abs_(), chosen, targets)


def dqn_loss(batch: Batch) -> dict[str, Tensor]:
    """From q_values [B, A], actions [B] and target_q_values [B]; `weights` [B] optional."""
    terms = dqn_terms(batch["q_values"], batch["actions"].long(), batch["target_q_values"].detach())
    return {name: values.mean() for name, values in terms.summary(batch.get("weights")).items()}


class DQN(QLearning):
    """The DQN learner. `q_network` is any module [B, ...] -> [B, A]."""

    huber_delta = Number("> 0", 1.0)
    rescale_values = Setting(default=False)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.make_target()

    def targets(self, rows: Batch) -> Tensor:
        """Bellman targets [B]."""
        next_q = self.next_outputs(rows)
        scores = self.next_scores(rows, next_q)
        next_values = double_q_values(q_selector=scores, q_value=next_q) if self.double_q else scores.amax(-1)
        if not self.rescale_values:
            return bellman_target(rows, self.gamma, next_values)
        return rescale(bellman_target(rows, self.gamma, unscale(next_values)))

    def terms(self, rows: Batch, outputs: Tensor, targets: Tensor) -> SampleTerms:
        """Huber losses."""
        return dqn_terms(outputs, rows["actions"], targets, self.huber_delta)
