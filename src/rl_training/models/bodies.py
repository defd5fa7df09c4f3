"""Bodies of SAC's networks other than MLPs: the layers between an observation's features and the outputs.

A body is E networks of one shape as one batched network, for an ensemble of critics or, with E = 1, for an actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.blocks import activation_layer, encode
from rl_training.models.normalization import BatchRenorm
from rl_training.speed.passes import Columns

EXPANSION = 4  # of a residual block


Draw = Callable[[Tensor], Any]  # initial weights [I, O] of one linear layer, in place


def orthogonal(gain: float) -> Draw:
    """Orthogonal weights."""
    return lambda weight: nn.init.orthogonal_(weight, gain)


def he_normal(weight: Tensor) -> None:
    """Normal weights with the variance 2 / I (He et al. 2015)."""
    nn.init.normal_(weight, std=math.sqrt(2.0 / len(weight)))


class BatchedLinear(nn.Module):
    """E linear layers with weights drawn for each, and zero biases: [E, B, I] -> [E, B, O]."""

    def __init__(self, members: int, inputs: int, outputs: int, draw: Draw | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))
        for member in self.weight.detach():
            (draw or orthogonal(math.sqrt(2.0)))(member)

    def forward(self, x: Tensor) -> Tensor:
        """x W + b for each member."""
        return torch.baddbmm(self.bias, x, self.weight)


class Shape(NamedTuple):
    """The shape of a network, which reads only these `columns` of its inputs if they are given.

    A head of several layers is one for each of so many `groups` of outputs.
    """

    inputs: int
    hidden_sizes: Sequence[int]
    outputs: int = 1
    activation: str = "relu"
    columns: Sequence[int] | None = None
    groups: int = 1


class Body(nn.Module):
    """E networks of one shape: rows [B, I], the same for all, or [E, B, I] -> [E, B, O]."""

    by_batch = False  # whether `forward` takes this, to normalize by the statistics of its batch
    bounds_log_std = False  # whether tanh bounds the log deviations of an actor with this body; else they are clipped

    def __init__(self, num_members: int, shape: Shape) -> None:
        super().__init__()
        self.num_members, columns = num_members, shape.columns
        self.inputs = shape.inputs if columns is None else len(columns)
        self.columns = None if columns is None else Columns(columns)

    def rows(self, x: Tensor) -> Tensor:
        """What the first layer reads, [E, B, I]: all inputs, or only the `columns`."""
        x = x if self.columns is None else self.columns(x)
        return x if x.dim() == 3 else x.expand(self.num_members, *x.shape)


class BatchRenormBody(Body):
    """Batch renormalization of the input and after every activation, as in CrossQ (Bhatt et al. 2024)."""

    by_batch = True

    def __init__(self, num_members: int, shape: Shape) -> None:
        super().__init__(num_members, shape)
        widths = [self.inputs, *shape.hidden_sizes]
        self.norms = nn.ModuleList(BatchRenorm(num_members, width) for width in widths)
        self.hidden = nn.ModuleList(BatchedLinear(num_members, *sizes) for sizes in pairwise(widths))
        self.head = BatchedLinear(num_members, widths[-1], shape.outputs, orthogonal(1.0))
        self.activation = activation_layer(shape.activation)

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """Outputs, from running statistics, or `by_batch` from those of these rows."""
        first, *norms = self.norms
        x = first(self.rows(x), by_batch)
        for layer, norm in zip(self.hidden, norms, strict=True):
            x = norm(self.activation(layer(x)), by_batch)
        outputs: Tensor = self.head(x)
        return outputs


class BatchedLayerNorm(nn.Module):
    """E layer normalizations: [E, B, D] -> [E, B, D]."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, width))
        self.shift = nn.Parameter(torch.zeros(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Each row by its own mean and deviation."""
        return torch.addcmul(self.shift, F.layer_norm(x, x.shape[-1:]), self.scale)


class ResidualBlock(nn.Module):
    """x + W2 f(W1 LayerNorm(x)), with a hidden layer `EXPANSION` times as wide."""

    def __init__(self, members: int, width: int, activation: str) -> None:
        super().__init__()
        self.norm = BatchedLayerNorm(members, width)
        self.widen = BatchedLinear(members, width, EXPANSION * width, he_normal)
        self.narrow = BatchedLinear(members, EXPANSION * width, width, he_normal)
        self.activation = activation_layer(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[E, B, D] -> [E, B, D]."""
        change: Tensor = self.narrow(self.activation(self.widen(self.norm(x))))
        return x + change


class ResidualBody(Body):
    """A linear layer, a residual block for each hidden size, and LayerNorm, as in SimBa (Lee et al. 2024)."""

    bounds_log_std = True

    def __init__(self, num_members: int, shape: Shape) -> None:
        super().__init__(num_members, shape)
        width, sizes = width_of_blocks(shape.hidden_sizes, self.inputs), shape.hidden_sizes
        self.embed: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        if sizes:
            self.embed = BatchedLinear(num_members, self.inputs, width, orthogonal(1.0))
            self.norm = BatchedLayerNorm(num_members, width)
        self.blocks = nn.Sequential(*(ResidualBlock(num_members, width, shape.activation) for _ in sizes))
        self.head = BatchedLinear(num_members, width, shape.outputs, orthogonal(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        outputs: Tensor = self.head(self.norm(self.blocks(self.embed(self.rows(x)))))
        return outputs


def width_of_blocks(hidden_sizes: Sequence[int], inputs: int) -> int:
    """The width of residual blocks, which all have the same; without blocks, that of the inputs."""
    if len(set(hidden_sizes)) > 1:
        sizes = list(hidden_sizes)
        raise UserError(f"hidden_sizes is {sizes}; residual blocks need one width, given once for each block.")
    return hidden_sizes[0] if hidden_sizes else inputs


class BodyCritics(nn.Module):
    """E critics with a body: (features [B, F], actions [B, A]) -> [E, B], or [E, B, outputs] for several outputs."""

    dropout = 0.0

    def __init__(
        self, *, body: type[Body], num_critics: int, encoder: nn.Module | None = None, outputs: int = 1, **shape: Any
    ) -> None:
        super().__init__()
        self.num_members, self.outputs, self.encoder = num_critics, outputs, encoder
        self.body = body(num_critics, Shape(outputs=outputs, **shape))

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
