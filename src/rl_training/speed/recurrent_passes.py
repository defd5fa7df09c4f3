"""GRU and LSTM cells in numpy, for acting with a few rows, and a GRU's passes through time for learning on a CPU.

A step of torch's cells costs more in calls than in arithmetic, and autograd adds a node per operation and step. torch
has fast passes for the LSTM (oneDNN), so only the GRU has its own here; the tests compare both with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.speed.passes import MOST_WEIGHTS, Array

Cell = Callable[[Array, Sequence[Array]], "tuple[Array, ...]"]  # inputs [N, D] and state, each part [N, H] -> state
# inputs [N, D], states [N, S] and where they are zeroed [N] -> outputs [N, H] and the states after them
NumpyMemory = Callable[[Array, Array, Array], "tuple[Array, Array]"]


def numpy_cell(weights: Sequence[Tensor], *, is_lstm: bool) -> Cell | None:
    """One step of a cell on the same weights, in torch's order; None if torch is as fast, or on a GPU."""
    if not weights[0].is_cpu or max(weight.numel() for weight in weights) > MOST_WEIGHTS:
        return None
    on_input, on_state, input_bias, state_bias = (weight.detach().numpy() for weight in weights)
    size = on_state.shape[1]

    def lstm(x: Array, state: Sequence[Array]) -> tuple[Array, ...]:
        gates = x @ on_input.T
        gates += state[0] @ on_state.T
        gates += input_bias
        gates += state_bias
        gates[:, : 2 * size] *= 0.5  # sigmoid(x) = (1 + tanh(x / 2)) / 2
        gates[:, 3 * size :] *= 0.5
        np.tanh(gates, out=gates)
        written, kept, new, shown = np.split(gates, 4, axis=-1)
        for gate in (written, kept, shown):
            gate += 1.0
            gate *= 0.5
        carried = kept * state[1]
        carried += written * new
        return shown * np.tanh(carried), carried

    def gru(x: Array, state: Sequence[Array]) -> tuple[Array, ...]:
        (hidden,) = state
        given, before = x @ on_input.T, hidden @ on_state.T
        given += input_bias
        before += state_bias
        gates = sigmoid(given[:, : 2 * size] + before[:, : 2 * size])
        new = np.tanh(given[:, 2 * size :] + gates[:, :size] * before[:, 2 * size :])
        return (new + gates[:, size:] * (hidden - new),)

    return lstm if is_lstm else gru


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by one tanh; changes x."""
    x *= 0.5
    np.tanh(x, out=x)
    x += 1.0
    x *= 0.5
    return x


def read_gru(x: Tensor, state: Tensor, keep: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Outputs [T, N, H] of a GRU's layer for inputs [T, N, D]; `keep` [T, N] is 0 where the state is zeroed before.

    No gradient flows into the first `state` [N, H].
    """
    on_input, on_state, input_bias, state_bias = weights
    outputs: Tensor = GRUPasses.apply(F.linear(x, on_input, input_bias), on_state, state_bias, state, keep)
    return outputs


class GRUPasses(torch.autograd.Function):
    """The recurrent part of a GRU's layer: what depends on the state before."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, on_state: Tensor, bias: Tensor, state: Tensor, keep: Tensor) -> Tensor:
        """Outputs [T, N, H] from the inputs' part of the gates [T, N, 3 H]."""
        steps, count, width = given.shape
        size = width // 3
        inputs, weight, offset = given.detach().numpy(), on_state.detach().numpy().T, bias.detach().numpy()
        kept, hidden = keep.numpy()[..., None], state.detach().numpy()
        gates, news = np.empty((steps, count, 2 * size), inputs.dtype), np.empty((steps, count, size), inputs.dtype)
        befores, nexts, outputs = news.copy(), news.copy(), news.copy()
        for t in range(steps):
            before = np.multiply(hidden, kept[t], out=befores[t])
            parts = before @ weight
            parts += offset
            nexts[t] = parts[:, 2 * size :]
            gate = gates[t]
            np.add(inputs[t, :, : 2 * size], parts[:, : 2 * size], out=gate)
            sigmoid(gate)
            new = np.multiply(gate[:, :size], nexts[t], out=news[t])
            new += inputs[t, :, 2 * size :]
            np.tanh(new, out=new)
            hidden = np.subtract(before, new, out=outputs[t])
            hidden *= gate[:, size:]
            hidden += new
        ctx.saved = gates, news, befores, nexts, kept, on_state
        return torch.from_numpy(outputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs' part of the gates, of the state's weights and of their bias."""
        gates, news, befores, nexts, kept, on_state = ctx.saved
        on_outputs, weight = slopes[0].numpy(), on_state.detach().numpy()
        steps, count, size = news.shape
        on_given = np.empty((steps, count, 3 * size), news.dtype)
        on_parts = np.empty_like(on_given)
        on_hidden = np.zeros((count, size), news.dtype)
        # what depends on no later step, for all steps at once
        resets, updates = gates[..., :size], gates[..., size:]
        to_new, to_update = (1.0 - updates) * (1.0 - news * news), (befores - news) * updates * (1.0 - updates)
        to_reset = nexts * resets * (1.0 - resets)
        for t in range(steps - 1, -1, -1):
            on_hidden += on_outputs[t]
            on_new = np.multiply(on_hidden, to_new[t], out=on_given[t, :, 2 * size :])
            np.multiply(on_new, to_reset[t], out=on_given[t, :, :size])
            np.multiply(on_hidden, to_update[t], out=on_given[t, :, size : 2 * size])
            on_parts[t, :, : 2 * size] = on_given[t, :, : 2 * size]
            np.multiply(on_new, resets[t], out=on_parts[t, :, 2 * size :])
            on_hidden *= updates[t]
            on_hidden += on_parts[t] @ weight
            on_hidden *= kept[t]
        rows = on_parts.reshape(-1, 3 * size)
        on_weight = rows.T @ befores.reshape(-1, size)
        return *map(torch.from_numpy, (on_given, on_weight, rows.sum(0))), None, None
