"""Action values, or their distributions, of discrete actions: plain or dueling, with or without noisy layers.

Noisy layers (Fortunato et al. 2018, arXiv:1706.10295) have factorized Gaussian noise: w = mu + sigma f(e_out) f(e_in)^T
with f(x) = sign(x) sqrt|x|. A layer draws nothing itself: its owner draws one vector for the whole network from its own
generator, so that a checkpoint covers every draw and a captured function takes its noise as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import ObservationNetwork, activation_layer, linear
from rl_training.models.memory import Memory, Recall
from rl_training.speed.passes import (
    MOST_WEIGHTS,
    Array,
    Backward,
    NumpyStep,
    WrittenOut,
    linear_step,
    numpy_chain,
    numpy_step,
)
from rl_training.speed.recurrent_passes import NumpyMemory

KEEP_BIAS = 1.0  # of a memory


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


class NoisyNetwork(ObservationNetwork):
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
        pieces = () if noise is None else noise.split(self._noise_sizes)
        for i, layer in enumerate(layers):
            layer.noise = None if noise is None else (pieces[2 * i], pieces[2 * i + 1])


def make_layer(inputs: int, outputs: int, *, noisy: bool, gain: float = math.sqrt(2.0)) -> nn.Module:
    """A linear layer, plain with orthogonal weights or noisy."""
    return NoisyLinear(inputs, outputs) if noisy else linear(inputs, outputs, gain)


def hidden_layers(
    inputs: int, sizes: Sequence[int], activation: str, *, noisy: bool, layer_norm: bool = False
) -> tuple[nn.Sequential, int]:
    """Layers of these widths and the width they end with; with `noisy` the last of them has noise.

    Only the last: layers that read the observation have no noise, like the convolutions of the paper's network.
    """
    layers: list[nn.Module] = []
    for i, size in enumerate(sizes):
        layers.append(make_layer(inputs, size, noisy=noisy and i == len(sizes) - 1))
        layers += [nn.LayerNorm(size)] * layer_norm + [activation_layer(activation)]
        inputs = size
    return nn.Sequential(*layers), inputs


class DuelingHead(nn.Module):
    """V + A - mean over actions of A, each stream with its own hidden layer (Wang et al. 2016, eq. 9).

    With several outputs per action, the same sum for each output, as in Rainbow: [..., D] -> [..., A * K].
    """

    def __init__(self, inputs: int, width: int, action_dim: int, outputs: int, activation: str, *, noisy: bool) -> None:
        super().__init__()
        self.width, self.action_dim, self.outputs = width, action_dim, outputs
        self.hidden = make_layer(inputs, 2 * width, noisy=noisy)  # the hidden layers of both streams, as one
        self.activation = activation_layer(activation)
        self.value = make_layer(width, outputs, noisy=noisy, gain=1.0)
        self.advantage = make_layer(width, action_dim * outputs, noisy=noisy, gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., A * K]."""
        value, advantage = self.activation(self.hidden(x)).split(self.width, -1)
        advantages = self.advantage(advantage).unflatten(-1, (self.action_dim, self.outputs))
        baseline = self.value(value).unsqueeze(-2) - advantages.mean(-2, keepdim=True)
        return (advantages + baseline).flatten(-2)

    def output_layers(self) -> list[nn.Module]:
        """The layers whose outputs are summed; a constant added to the first one's bias reaches every action."""
        return [self.value, self.advantage]

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy."""
        hidden, value, advantage = numpy_step(self.hidden), numpy_step(self.value), numpy_step(self.advantage)
        activation = numpy_step(self.activation)
        if hidden is None or activation is None or value is None or advantage is None:
            return None
        width, shape = self.width, (self.action_dim, self.outputs)

        def forward(x: Array, rng: np.random.Generator | None) -> Array:
            streams = activation(hidden(x, rng), None)
            advantages = advantage(streams[..., width:], rng).reshape(*x.shape[:-1], *shape)
            advantages += (value(streams[..., :width], rng) - advantages.mean(-2))[..., None, :]
            return advantages.reshape(*x.shape[:-1], -1)

        return forward


def value_layers(
    inputs: int, sizes: Sequence[int], action_dim: int, outputs: int, activation: str, *, dueling: bool, noisy: bool,
    layer_norm: bool = False,
) -> tuple[nn.Sequential, nn.Module]:  # fmt: skip
    """Hidden layers of these widths, and the head after them: [..., inputs] -> [..., A * K].

    `dueling` gives value and advantage their own last hidden layers, inside the head; `noisy` makes the last hidden
    layer and the output layer noisy; `layer_norm` puts LayerNorm before the activations outside the head.
    """
    if dueling:
        width = sizes[-1] if sizes else inputs
        hidden, inputs = hidden_layers(inputs, sizes[:-1], activation, noisy=False, layer_norm=layer_norm)
        return hidden, DuelingHead(inputs, width, action_dim, outputs, activation, noisy=noisy)
    hidden, inputs = hidden_layers(inputs, sizes, activation, noisy=noisy, layer_norm=layer_norm)
    return hidden, make_layer(inputs, action_dim * outputs, noisy=noisy, gain=1.0)


class MLPQNetwork(NoisyNetwork):
    """Observations [B, ...] -> action values [B, A], or [B, A, K] with `num_outputs` K (logits, quantiles).

    `dueling`, `noisy` and `layer_norm` are those of `value_layers`. With an `encoder`, its features replace the
    observation. With a `memory` ("gru" or "lstm"), which reads them first, a call needs its state [N, S] and `starts`
    [T, N] (see `Recall`), and B is T * N.
    """

    def __init__(
        self, *, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu",
        num_outputs: int | None = None, dueling: bool = False, noisy: bool = False, layer_norm: bool = False,
        memory: str = "none", memory_size: int = 256, memory_layers: int = 1, **inputs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**inputs)
        self.action_dim = action_dim
        self.output_shape = (action_dim,) if num_outputs is None else (action_dim, num_outputs)
        self.memory = None
        if memory != "none":
            self.memory = Memory(memory, self.input_dim, memory_size, memory_layers, KEEP_BIAS)
        self.trunk, self.head = value_layers(
            self.input_dim if self.memory is None else memory_size, hidden_sizes, action_dim, num_outputs or 1,
            activation, dueling=dueling, noisy=noisy, layer_norm=layer_norm,
        )  # fmt: skip
        self._passes = WrittenOut()

    def forward(self, obs: Tensor, state: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """[B, ...] -> [B, A] or [B, A, K]."""
        x = self.features(obs)
        if self.memory is not None and state is not None and starts is not None:
            x = self.memory(x.unflatten(0, starts.shape), Recall(state, starts)).flatten(0, 1)
        return self._values(x)

    def _values(self, x: Tensor) -> Tensor:
        outputs = self._passes(x, [*self.trunk, self.head])[0]
        return outputs if len(self.output_shape) == 1 else outputs.view(-1, *self.output_shape)

    def remember(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the outputs for observations [N, ...], and the states [N, S] after them; starts are [N]."""
        outputs, states = self._follow(obs, state, starts.unsqueeze(0))
        return self._values(outputs[0]), states[0]

    def states(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The states [T, N, S] after each of these observations [T * N, ...]."""
        return self._follow(obs, state, starts)[1]

    def _follow(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        assert self.memory is not None
        return self.memory.follow(self.features(obs).unflatten(0, starts.shape), Recall(state, starts))

    def trace(self, obs: Tensor, *recall: Tensor) -> tuple[Tensor, Backward] | None:
        """`forward` without a graph, and a function from its slopes to the gradients; None where autograd is needed."""
        if self.encoder is not None or recall:
            return None
        found = self._passes.trace(self.observation_input(obs), [*self.trunk, self.head])
        if found is None:
            return None
        (outputs,), backward = found
        if len(self.output_shape) == 1:
            return outputs, backward
        return outputs.view(-1, *self.output_shape), lambda grad: backward(grad.flatten(1))

    @torch.no_grad()
    def combine_outputs(self, weights: Tensor, offsets: Tensor) -> None:
        """Change the last layer so that every action's outputs [K] become `weights` [K, K] @ outputs + `offsets`."""
        layers = self.head.output_layers() if isinstance(self.head, DuelingHead) else [self.head]
        for layer in layers:
            for parameter in layer.parameters():  # [A * K, ...], deviations of noisy layers too
                rows = parameter.unflatten(0, (-1, len(offsets)))
                parameter.copy_(torch.tensordot(rows, weights, dims=([1], [1])).movedim(-1, 1).flatten(0, 1))
        bias: Any = layers[0].bias
        bias.unflatten(0, (-1, len(offsets))).add_(offsets)

    def numpy_memory(self) -> NumpyMemory | None:
        """The memory's outputs, and the states after them, in numpy; None where torch is as fast."""
        prepare, remember = self.numpy_form(), None if self.memory is None else self.memory.numpy_memory()
        if prepare is None or remember is None:
            return None
        return lambda obs, states, starts: remember(prepare(obs, None), states, starts)

    def numpy_network(self) -> NumpyStep | None:
        """The forward pass in numpy, with noise where there is a generator; None where there is no numpy form.

        With a memory, the pass on what `numpy_memory` returns.
        """
        if self.memory is None:
            forward = self.numpy_form(self.trunk, self.head, most_weights=MOST_WEIGHTS)
        elif self.numpy_memory() is None:
            return None
        else:
            forward = numpy_chain([numpy_step(layer, MOST_WEIGHTS) for layer in (self.trunk, self.head)])
        if forward is None or len(self.output_shape) == 1:
            return forward
        return lambda obs, rng: forward(obs, rng).reshape(-1, *self.output_shape)
