"""Bodies of SAC's networks other than MLPs: the layers between an observation's features and the outputs.

A body is E networks of one shape as one batched network, for an ensemble of critics or, with E = 1, for an actor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.models.blocks import activation_layer, encode
from rl_training.models.normalization import BatchRenorm
from rl_training.speed.passes import Columns


class BatchedLinear(nn.Module):
    """E linear layers with orthogonal weights, drawn for each, and zero biases: [E, B, I] -> [E, B, O]."""

    def __init__(self, members: int, inputs: int, outputs: int, gain: float = math.sqrt(2.0)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))
        for member in self.weight.detach():
            nn.init.orthogonal_(member, gain)

    def forward(self, x: Tensor) -> Tensor:
        """x W + b for each member."""
        return torch.baddbmm(self.bias, x, self.weight)


class Body(nn.Module):
    """E networks of one shape: rows [B, I], the same for all, or [E, B, I] -> [E, B, O]."""

    by_batch = False  # whether `forward` takes this, to normalize by the statistics of its batch

    def __init__(self, num_members: int, inputs: int, columns: Sequence[int] | None) -> None:
        super().__init__()
        self.num_members, self.inputs = num_members, inputs if columns is None else len(columns)
        self.columns = None if columns is None else Columns(columns)

    def rows(self, x: Tensor) -> Tensor:
        """What the first layer reads, [E, B, I]: all inputs, or only the `columns`."""
        x = x if self.columns is None else self.columns(x)
        return x if x.dim() == 3 else x.expand(self.num_members, *x.shape)


class BatchRenormBody(Body):
    """Batch renormalization of the input and after every activation, as in CrossQ (Bhatt et al. 2024)."""

    by_batch = True

    def __init__(
        self, *, num_members: int, inputs: int, hidden_sizes: Sequence[int], outputs: int, activation: str,
        columns: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_members, inputs, columns)
        widths = [self.inputs, *hidden_sizes]
        self.norms = nn.ModuleList(BatchRenorm(num_members, width) for width in widths)
        self.hidden = nn.ModuleList(BatchedLinear(num_members, *sizes) for sizes in pairwise(widths))
        self.head = BatchedLinear(num_members, widths[-1], outputs, gain=1.0)
        self.activation = activation_layer(activation)

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """Outputs, from running statistics, or `by_batch` from those of these rows."""
        first, *norms = self.norms
        x = first(self.rows(x), by_batch)
        for layer, norm in zip(self.hidden, norms, strict=True):
            x = norm(self.activation(layer(x)), by_batch)
        outputs: Tensor = self.head(x)
        return outputs


BODIES: dict[str, Any] = {"batch_renorm": BatchRenormBody}


class BodyCritics(nn.Module):
    """E critics with a body: (features [B, F], actions [B, A]) -> [E, B], or [E, B, outputs] for several outputs."""

    def __init__(
        self, *, architecture: str, num_critics: int, encoder: nn.Module | None = None, outputs: int = 1, **shape: Any
    ) -> None:
        super().__init__()
        self.num_members, self.outputs, self.encoder = num_critics, outputs, encoder
        self.body = BODIES[architecture](num_members=num_critics, outputs=outputs, **shape)

    def draw_masks(self, members: int, rows: int, generator: torch.Generator) -> None:
        """There is no dropout."""

    def forward(
        self, features: Tensor, actions: Tensor, subset: Tensor | slice | None = None, masks: None = None,
        **mode: bool,
    ) -> Tensor:  # fmt: skip
        """Values of every critic, or only of those in `subset`; the mode is the body's."""
        outputs: Tensor = self.body(torch.cat([encode(self.encoder, features), actions], -1), **mode)
        outputs = outputs.squeeze(-1) if self.outputs == 1 else outputs
        return outputs if subset is None else outputs[subset]
