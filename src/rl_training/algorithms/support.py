"""Moves the atoms of a learner of categorical returns (C51, Rainbow, D4PG) and keeps what it has learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.ops.distributional import carry_over


@torch.no_grad()
def move_support(support: Tensor, v_min: float, v_max: float, *heads: Any) -> None:
    """Spread `support` [K] from `v_min` to `v_max`, and change the last layers of the `heads` that predict on it.

    All of it happens in place, so captured steps and numpy policies see it. Predicted means stay the same within about
    half the distance of two new atoms.
    """
    wider = torch.linspace(v_min, v_max, len(support), device="cpu").to(support)
    if torch.equal(wider, support):
        return
    weights, offsets = carry_over(support, wider)
    for head in heads:
        head.combine_outputs(weights, offsets)
    support.copy_(wider)
