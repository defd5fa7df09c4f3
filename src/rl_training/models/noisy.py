"""Noisy linear layers and what a network with them shares (Fortunato et al. 2018, arXiv:1706.10295).

Factorised Gaussian noise: w = mu + sigma f(e_out) f(e_in)^T with f(x) = sign(x) sqrt|x|. A layer draws nothing itself:
its owner draws one vector for the whole network from its own generator and hands it out, so that every draw of a run is
in the checkpoint and a captured function takes its noise as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.models.blocks import NUMPY_ACTIVATIONS, linear

Array = NDArray[Any]
NumpyStep = Callable[[Array, "np.random.Generator | None"], Array]  # x [N, D] and a generator, None for mean weights
MOST_NUMPY_WEIGHTS = 2 * 256 * 256  # above this a torch layer is as fast


class NoisyLinear(nn.Module):
    """A linear layer with learned deviations; without noise it uses its mean weights."""

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))
        self.noise: tuple[Tensor, Tensor] | None = None  # f(e_in) [inputs], f(e_out) [outputs]

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        if self.noise is None:
            return F.linear(x, self.weight, self.bias)
        noise_in, noise_out = self.noise
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(noise_out, noise_in))
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, noise_out))


class NoisyNetwork(nn.Module):
    """A network whose `NoisyLinear` layers, if it has any, get their noise together."""

    _noisy_layers: list[NoisyLinear] | None = None
    _noise_sizes: list[int]

    def noisy_layers(self) -> list[NoisyLinear]:
        """The layers that need noise, in a fixed order."""
        if self._noisy_layers is None:
            self._noisy_layers = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]
            self._noise_sizes = [size for layer in self._noisy_layers for size in (layer.inputs, layer.outputs)]
        return self._noisy_layers

    @property
    def noise_dim(self) -> int:
        """Numbers that one draw of noise has; 0 for a network without noise."""
        return sum(layer.inputs + layer.outputs for layer in self.noisy_layers())

    def draw_noise(self, count: int, generator: torch.Generator) -> Tensor:
        """`count` independent draws for the whole network [count, noise_dim], f already applied."""
        noise = torch.empty(count, self.noise_dim, device=generator.device).normal_(generator=generator)
        return noise.abs().sqrt_().copysign_(noise)

    def set_noise(self, noise: Tensor | None) -> None:
        """Use one draw [noise_dim] in every later forward pass; None for the mean weights."""
        layers = self.noisy_layers()
        if noise is None:
            for layer in layers:
                layer.noise = None
            return
        pieces = noise.split(self._noise_sizes)
        for i, layer in enumerate(layers):
            layer.noise = (pieces[2 * i], pieces[2 * i + 1])


def make_layer(inputs: int, outputs: int, *, noisy: bool, gain: float = math.sqrt(2.0)) -> nn.Module:
    """A linear layer, plain with orthogonal weights or noisy."""
    return NoisyLinear(inputs, outputs) if noisy else linear(inputs, outputs, gain)


def numpy_step(layer: nn.Module) -> NumpyStep | None:
    """A layer in numpy on the same memory, or None where that is not possible or not faster."""
    if isinstance(layer, nn.Sequential):
        return numpy_chain([numpy_step(part) for part in layer])
    if type(layer) in NUMPY_ACTIVATIONS:
        activation = NUMPY_ACTIVATIONS[type(layer)]
        return lambda x, rng: activation(x)
    if not isinstance(layer, (nn.Linear, NoisyLinear)):
        make = getattr(layer, "numpy_step", None)
        return make() if make is not None else None
    if layer.weight.device.type != "cpu" or layer.weight.numel() > MOST_NUMPY_WEIGHTS:
        return None
    weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()

    def plain(x: Array, rng: np.random.Generator | None) -> Array:
        x = x @ weight
        x += bias
        return x

    if isinstance(layer, nn.Linear):
        return plain
    inputs, outputs = layer.inputs, layer.outputs
    weight_sigma, bias_sigma = layer.weight_sigma.detach().numpy().T, layer.bias_sigma.detach().numpy()

    def noisy(x: Array, rng: np.random.Generator | None) -> Array:
        y = plain(x, None)
        if rng is not None:
            noise = rng.standard_normal(inputs + outputs, dtype=np.float32)
            noise = np.copysign(np.sqrt(np.abs(noise)), noise)
            y += ((x * noise[:inputs]) @ weight_sigma + bias_sigma) * noise[inputs:]
        return y

    return noisy


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
