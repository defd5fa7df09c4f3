"""`CriticEnsemble`: E critics of one shape as one batched network, so that twins cost one call and not two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import activation_layer


class _Layer(NamedTuple):
    """Parameters of E linear layers, [E, in, out] and [E, 1, out], and of the normalisation after them."""

    weight: Tensor
    bias: Tensor
    scale: Tensor | None
    shift: Tensor | None


class CriticEnsemble(nn.Module):
    """E independent MLPs on (features, actions): [B, F], [B, A] -> [E, B], or [E, B, outputs] for several outputs.

    `layer_norm` puts LayerNorm between each hidden linear layer and its activation (RLPD). Weights are orthogonal, each
    critic's its own.
    """

    def __init__(
        self, *, num_critics: int, inputs: int, hidden_sizes: Sequence[int] = (256, 256), outputs: int = 1,
        activation: str = "relu", layer_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_critics, self.outputs, self.layer_norm = num_critics, outputs, layer_norm
        self.activation = activation_layer(activation)
        if isinstance(self.activation, nn.ReLU):
            self.activation.inplace = True  # no layer's backward needs what the ReLU overwrites
        self._layers: list[_Layer] = []  # plain references to the parameters: reading a ParameterList is slow
        sizes = [inputs, *hidden_sizes, outputs]
        for i, (before, after) in enumerate(pairwise(sizes)):
            hidden = i < len(sizes) - 2
            weight = torch.empty(num_critics, before, after)
            for critic in weight:
                nn.init.orthogonal_(critic, math.sqrt(2.0) if hidden else 1.0)
            parts = {"weight": weight, "bias": torch.zeros(num_critics, 1, after)}
            if layer_norm and hidden:
                parts |= {"scale": torch.ones(num_critics, 1, after), "shift": torch.zeros(num_critics, 1, after)}
            for name, value in parts.items():
                self.register_parameter(f"{name}{i}", nn.Parameter(value))
            self._layers.append(_Layer(*(getattr(self, f"{name}{i}", None) for name in _Layer._fields)))  # type: ignore[arg-type]

    def forward(self, features: Tensor, actions: Tensor, subset: Tensor | slice | None = None) -> Tensor:
        """Values of every critic, or only of those in `subset` (indices [M] or a slice), which costs only those."""
        x = torch.cat([features, actions], -1)
        layers = self._layers
        if subset is not None:
            layers = [_Layer(*(_select(p, subset) for p in layer)) for layer in layers]  # type: ignore[arg-type]
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


def _select(parameter: Tensor | None, subset: Tensor | slice) -> Tensor | None:
    if parameter is None:
        return None
    return parameter[subset] if isinstance(subset, slice) else parameter.index_select(0, subset)
