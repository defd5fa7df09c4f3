"""Small networks in numpy on the same memory, for acting: with 8 rows a numpy layer costs a third of a torch layer.

The arrays are views, so they always show in-place updates. A form is None if there is none, or if it would not be
faster: with an encoder, on a GPU, for wide layers. A module of another kind provides its own as `numpy_step()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]
NumpyStep = Callable[[Array, "np.random.Generator | None"], Array]  # x [N, D] and a generator, None for mean weights
MOST_WEIGHTS = 2 * 256 * 256  # of a layer; above this a torch layer is as fast
NUMPY_ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Array]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x), nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
}  # fmt: skip


def numpy_step(layer: nn.Module, most_weights: int = MOST_WEIGHTS) -> NumpyStep | None:
    """A layer, or layers one after the other."""
    if isinstance(layer, nn.Sequential):
        return numpy_chain([numpy_step(part, most_weights) for part in layer])
    if type(layer) in NUMPY_ACTIVATIONS:
        activation = NUMPY_ACTIVATIONS[type(layer)]
        return lambda x, rng: activation(x)
    if isinstance(layer, nn.Linear):
        return linear_step(layer, most_weights)
    make = getattr(layer, "numpy_step", None)
    return None if make is None else make()


def linear_step(layer: Any, most_weights: int = MOST_WEIGHTS) -> NumpyStep | None:
    """x W' + b of a layer with `weight` and `bias`."""
    if layer.weight.device.type != "cpu" or layer.weight.numel() > most_weights:
        return None
    weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()

    def forward(x: Array, rng: np.random.Generator | None) -> Array:
        x = x @ weight
        x += bias
        return x

    return forward


def mask_in_numpy(scores: Array, legal: Array | None) -> Array:
    """`ops.losses.mask_actions` in numpy."""
    if legal is None:
        return scores
    return np.where(legal | ~legal.any(-1, keepdims=True), scores, -np.inf)


def numpy_chain(steps: list[NumpyStep | None]) -> NumpyStep | None:
    """Steps one after the other; None when one of them is missing."""
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None

    def forward(x: Array, rng: np.random.Generator | None) -> Array:
        for step in known:
            x = step(x, rng)
        return x

    return forward

