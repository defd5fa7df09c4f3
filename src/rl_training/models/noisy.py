"""Noisy linear layers, and the base class of networks with them (Fortunato et al. 2018, arXiv:1706.10295).

Factorized Gaussian noise: w = mu + sigma f(e_out) f(e_in)^T with f(x) = sign(x) sqrt|x|. A layer draws nothing itself:
its owner draws one vector for the whole network from its own generator, so that a checkpoint covers every draw and a
captured function takes its noise as an argument.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import linear
from rl_training.speed.passes import Array, NumpyStep, linear_step


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

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy, with new noise at every call."""
        plain, inputs = linear_step(self), self.inputs
        if plain is None:
            return None
        weight_sigma, bias_sigma = self.weight_sigma.detach().numpy().T, self.bias_sigma.detach().numpy()

        def forward(x: Array, rng: np.random.Generator | None) -> Array:
            y = plain(x, None)
            if rng is not None:
                noise = rng.standard_normal(sum(weight_sigma.shape), dtype=np.float32)
                noise = np.copysign(np.sqrt(np.abs(noise)), noise)
                y += ((x * noise[:inputs]) @ weight_sigma + bias_sigma) * noise[inputs:]
            return y

        return forward


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
