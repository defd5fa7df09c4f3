"""Bodies whose weights have norm 1: SimbaV2's, whose features are on the unit sphere too, and FlashSAC's.

The optimizer of such a network calls `project_` of each layer after every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_training.models.blocks import activation_layer
from rl_training.models.bodies import EXPANSION, Body, Shape, width_of_blocks
from rl_training.models.normalization import UnitBatchNorm

LEAST_NORM = 1e-8
EXTRA_INPUT = 3.0  # keeps the size of an observation, which the norm would lose


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """x / |x| along one dimension."""
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp(min=LEAST_NORM)


class UnitLinear(nn.Module):
    """E linear layers without biases, whose weights of each output have norm 1: [E, B, I] -> [E, B, O]."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        for member in self.weight.detach():
            nn.init.orthogonal_(member)
        self.project_()

    def forward(self, x: Tensor) -> Tensor:
        """x W for each member."""
        return torch.bmm(x, self.weight)

    @torch.no_grad()
    def project_(self) -> None:
        """Back to norm 1, over the inputs of each output."""
        self.weight.copy_(unit(self.weight, 1))


class Scaler(nn.Module):
    """E scales per unit, first `initial`, learned as if they were `scale`: [E, B, D] -> [E, B, D]."""

    def __init__(self, members: int, width: int, initial: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((members, 1, width), scale))
        self.ratio = initial / scale

    def forward(self, x: Tensor) -> Tensor:
        """x times the scales."""
        return x * (self.scale * self.ratio)


class SphericalBlock(nn.Module):
    """The unit vector of h + a (y - h), where y is that of W2 f(scaled W1 h), four times as wide inside."""

    def __init__(self, members: int, width: int, blocks: int, activation: str) -> None:
        super().__init__()
        inner = math.sqrt(2.0 / width) / math.sqrt(EXPANSION)
        self.widen, self.narrow = (
            UnitLinear(members, *sizes) for sizes in ((width, EXPANSION * width), (EXPANSION * width, width))
        )
        self.inner = Scaler(members, EXPANSION * width, inner, inner)
        self.share = Scaler(members, width, 1.0 / (blocks + 1), 1.0 / math.sqrt(width))
        self.activation = activation_layer(activation)

    def forward(self, h: Tensor) -> Tensor:
        """[E, B, D] -> [E, B, D], on the sphere both."""
        y = unit(self.narrow(self.activation(self.inner(self.widen(h))) + LEAST_NORM))
        return unit(h + self.share(y - h))


class SphericalHead(nn.Module):
    """W2 (scaled W1 z) + b, with a W1 and W2 of its own for each of several groups of outputs."""

    def __init__(self, members: int, width: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(UnitLinear(members, width, width) for _ in range(groups))
        self.scalers = nn.ModuleList(Scaler(members, width) for _ in range(groups))
        self.last = nn.ModuleList(UnitLinear(members, width, outputs // groups) for _ in range(groups))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, z: Tensor) -> Tensor:
        """[E, B, D] -> [E, B, outputs]."""
        groups = zip(self.first, self.scalers, self.last, strict=True)
        return torch.cat([last(scaler(first(z))) for first, scaler, last in groups], -1) + self.bias


class SphericalBody(Body):
    """Features and weights on the unit sphere, as in SimbaV2 (Lee et al. 2025); a block for each hidden size."""

    bounds_log_std = True

    def __init__(self, num_members: int, shape: Shape) -> None:
        super().__init__(num_members, shape)
        sizes = shape.hidden_sizes
        width = width_of_blocks(sizes, self.inputs + 1)
        initial = math.sqrt(2.0 / width)
        self.embed = UnitLinear(num_members, self.inputs + 1, width)
        self.scaler = Scaler(num_members, width, initial, initial)
        blocks = (SphericalBlock(num_members, width, len(sizes), shape.activation) for _ in sizes)
        self.blocks = nn.Sequential(*blocks)
        self.head = SphericalHead(num_members, width, shape.outputs, shape.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x = self.rows(x)
        x = unit(torch.cat([x, torch.full_like(x[..., :1], EXTRA_INPUT)], -1))
        outputs: Tensor = self.head(self.blocks(unit(self.scaler(self.embed(x)))))
        return outputs


class UnitRMSNorm(nn.Module):
    """Rows divided by the root of their mean square, with scales of the squared sum D: [E, B, D] -> [E, B, D]."""

    eps = 1e-6

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Each row by itself."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.scale

    @torch.no_grad()
    def project_(self) -> None:
        """Back to this sum."""
        self.scale.copy_(unit(self.scale) * math.sqrt(self.scale.shape[-1]))


class BatchNormBlock(nn.Module):
    """x + f(BN(W2 f(BN(W1 x)))), four times as wide inside."""

    def __init__(self, members: int, width: int, activation: str) -> None:
        super().__init__()
        inner = EXPANSION * width
        self.widen, self.wide_norm = UnitLinear(members, width, inner), UnitBatchNorm(members, inner)
        self.narrow, self.norm = UnitLinear(members, inner, width), UnitBatchNorm(members, width)
        self.activation = activation_layer(activation)

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """[E, B, D] -> [E, B, D]."""
        inside = self.activation(self.wide_norm(self.widen(x), by_batch))
        change: Tensor = self.activation(self.norm(self.narrow(inside), by_batch))
        return x + change


class BatchNormBody(Body):
    """Batch normalization with unit weights, as in FlashSAC; a residual block for each hidden size."""

    by_batch = bounds_log_std = True

    def __init__(self, num_members: int, shape: Shape) -> None:
        super().__init__(num_members, shape)
        sizes, width = shape.hidden_sizes, width_of_blocks(shape.hidden_sizes, self.inputs)
        self.input_norm = UnitBatchNorm(num_members, self.inputs)
        self.embed = UnitLinear(num_members, self.inputs, width)
        self.blocks = nn.ModuleList(BatchNormBlock(num_members, width, shape.activation) for _ in sizes)
        self.norm = UnitRMSNorm(num_members, width)
        self.head = UnitLinear(num_members, width, shape.outputs)
        self.bias = nn.Parameter(torch.zeros(num_members, 1, shape.outputs))

    def forward(self, x: Tensor, by_batch: bool = False) -> Tensor:
        """Outputs, from running statistics, or `by_batch` from those of these rows."""
        x = self.embed(self.input_norm(self.rows(x), by_batch))
        for block in self.blocks:
            x = block(x, by_batch)
        outputs: Tensor = self.head(self.norm(x)) + self.bias
        return outputs
