"""E networks of one shape as one batched network, so that twin critics cost one call instead of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import activation_layer, encode


class _Layer(NamedTuple):
    """Parameters of E linear layers, [E, in, out] and [E, 1, out], and of the normalization after them."""

    weight: Tensor
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None


class MLPEnsemble(nn.Module):
    """E independent MLPs: [B, inputs], the same rows for all, or [E, B, inputs] -> [E, B, outputs], or [E, B] for one.

    `layer_norm` puts LayerNorm between each hidden linear layer and its activation (RLPD). Weights are orthogonal,
    drawn for each member.
    """

    def __init__(
        self, *, num_members: int, inputs: int, hidden_sizes: Sequence[int] = (256, 256), outputs: int = 1,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_members, self.outputs, self.layer_norm = num_members, outputs, layer_norm
        self.activation = activation_layer(activation)
        if isinstance(self.activation, nn.ReLU):
            self.activation.inplace = True  # no backward pass needs the values that the ReLU overwrites
        self._layers: list[_Layer] = []  # plain references to the parameters: reading a ParameterList is slow
        sizes = [inputs, *hidden_sizes, outputs]
        for i, (before, after) in enumerate(pairwise(sizes)):
            hidden = i < len(sizes) - 2
            weight = torch.empty(num_members, before, after)
            for member in weight:
                nn.init.orthogonal_(member, math.sqrt(2.0) if hidden else 1.0)
            parts = {"weight": weight, "bias": torch.zeros(num_members, 1, after)}
            if layer_norm and hidden:
                parts |= {"scale": torch.ones(num_members, 1, after), "shift": torch.zeros(num_members, 1, after)}
            for name, value in parts.items():
                self.register_parameter(f"{name}{i}", nn.Parameter(value))
            self._layers.append(_Layer(*(getattr(self, f"{name}{i}", None) for name in _Layer._fields)))  # type: ignore[arg-type]

    def _select_layers(self, subset: Tensor | slice) -> list[_Layer]:
        return [_Layer(*(_select(p, subset) for p in layer)) for layer in self._layers]  # type: ignore[arg-type]

    def run(self, x: Tensor, subset: Tensor | slice | None = None) -> Tensor:
        """Outputs of every member, or only of those in `subset` (indices [M] or a slice); others are not computed."""
        layers = self._layers if subset is None else self._select_layers(subset)
        if x.dim() == 2:
            x = x.expand(layers[0].weight.shape[0], *x.shape)
        for layer in layers[:-1]:
            x = torch.baddbmm(layer.bias, x, layer.weight)
            if layer.scale is not None and layer.shift is not None:
                x = torch.addcmul(layer.shift, F.layer_norm(x, x.shape[-1:]), layer.scale)
            x = self.activation(x)
        head = layers[-1]
        if self.outputs > 1:
            return torch.baddbmm(head.bias, x, head.weight)
        # A batched product with one column is 5 times slower than this.
        return (x * head.weight.mT).sum(-1) + head.bias.squeeze(-1)

    @torch.no_grad()
    def combine_outputs(self, weights: Tensor, offsets: Tensor) -> None:
        """Change the last layer so that the outputs [K] become `weights` [K, K] @ outputs + `offsets`."""
        head = self._layers[-1]
        head.weight.copy_(head.weight @ weights.T)
        head.bias.copy_(head.bias @ weights.T + offsets)


class CriticEnsemble(MLPEnsemble):
    """E critics on (features, actions): [B, F], [B, A] -> [E, B], or [E, B, outputs] for several outputs.

    All of them read the features through one `encoder`, if there is one.
    """

    def __init__(self, *, num_critics: int, encoder: nn.Module | None = None, **shape: Any) -> None:
        super().__init__(num_members=num_critics, **shape)
        self.encoder = encoder

    def forward(self, features: Tensor, actions: Tensor, subset: Tensor | slice | None = None) -> Tensor:
        """Values of every critic, or only of those in `subset`."""
        return self.run(torch.cat([encode(self.encoder, features), actions], -1), subset)


def _select(parameter: Tensor | None, subset: Tensor | slice) -> Tensor | None:
    if parameter is None:
        return None
    return parameter[subset] if isinstance(subset, slice) else parameter.index_select(0, subset)
