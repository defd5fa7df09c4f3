"""Action values, or their distributions, of discrete actions: plain or dueling, with or without noisy layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.models.blocks import ObservationInput, activation_layer, encode, encoded_dim, numpy_input
from rl_training.models.noisy import NoisyNetwork, make_layer
from rl_training.speed.passes import Array, Backward, NumpyStep, WrittenOut, numpy_chain, numpy_step

# obs [N, D] and a generator for noise (None: mean weights) -> what `forward` returns, without torch
NumpyNetwork = Callable[[Array, "np.random.Generator | None"], Array]


def hidden_layers(inputs: int, sizes: Sequence[int], activation: str, *, noisy: bool) -> tuple[nn.Sequential, int]:
    """Layers of these widths and the width they end with; with `noisy` the last of them has noise.

    Only the last: layers that read the observation have no noise, like the convolutions of the paper's network.
    """
    layers: list[nn.Module] = []
    for i, size in enumerate(sizes):
        layers += [make_layer(inputs, size, noisy=noisy and i == len(sizes) - 1), activation_layer(activation)]
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
    inputs: int, sizes: Sequence[int], action_dim: int, outputs: int, activation: str, *, dueling: bool, noisy: bool
) -> tuple[nn.Sequential, nn.Module]:
    """Hidden layers of these widths, and the head after them: [..., inputs] -> [..., A * K].

    `dueling` gives value and advantage their own last hidden layers, inside the head; `noisy` makes the last hidden
    layer and the output layer noisy.
    """
    if dueling:
        width = sizes[-1] if sizes else inputs
        hidden, inputs = hidden_layers(inputs, sizes[:-1], activation, noisy=False)
        return hidden, DuelingHead(inputs, width, action_dim, outputs, activation, noisy=noisy)
    hidden, inputs = hidden_layers(inputs, sizes, activation, noisy=noisy)
    return hidden, make_layer(inputs, action_dim * outputs, noisy=noisy, gain=1.0)


class MLPQNetwork(NoisyNetwork):
    """Observations [B, ...] -> action values [B, A], or [B, A, K] with `num_outputs` K (logits, quantiles).

    `dueling` and `noisy` are those of `value_layers`. With an `encoder`, its features replace the observation.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (256, 256), activation: str = "relu",
        num_outputs: int | None = None, dueling: bool = False, noisy: bool = False,
        encoder: nn.Module | None = None, observation_input: ObservationInput | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.observation_input = observation_input or ObservationInput()
        self.encoder = encoder
        self.action_dim = action_dim
        self.output_shape = (action_dim,) if num_outputs is None else (action_dim, num_outputs)
        self.trunk, self.head = value_layers(
            encoded_dim(obs_dim, encoder), hidden_sizes, action_dim, num_outputs or 1, activation,
            dueling=dueling, noisy=noisy,
        )  # fmt: skip
        self._passes = WrittenOut()

    def forward(self, obs: Tensor) -> Tensor:
        """[B, ...] -> [B, A] or [B, A, K]."""
        x = encode(self.encoder, self.observation_input(obs))
        outputs = self._passes(x, [*self.trunk, self.head])[0]
        return outputs if len(self.output_shape) == 1 else outputs.view(-1, *self.output_shape)

    def trace(self, obs: Tensor) -> tuple[Tensor, Backward] | None:
        """`forward` without a graph, and a function from its slopes to the gradients; None where autograd is needed."""
        found = None
        if self.encoder is None:
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

    def numpy_network(self) -> NumpyNetwork | None:
        """The forward pass in numpy on the same weights; None with an encoder, on a GPU or for wide layers."""
        prepare = numpy_input(self.observation_input)
        forward = numpy_chain([numpy_step(self.trunk), numpy_step(self.head)])
        if self.encoder is not None or prepare is None or forward is None:
            return None
        shape = self.output_shape
        if len(shape) == 1:
            return lambda obs, rng: forward(prepare(obs), rng)
        return lambda obs, rng: forward(prepare(obs), rng).reshape(-1, *shape)
