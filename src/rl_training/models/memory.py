"""Memory of a network over time: a GRU or an LSTM whose state is one flat tensor per environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.speed.passes import Array
from rl_training.speed.recurrent_passes import NumpyMemory, numpy_cell, read_gru

CELLS: dict[str, tuple[Any, Callable[..., Any], int]] = {  # torch's loop, one step, and the parts of a state
    "gru": (nn.GRU, torch.gru_cell, 1), "lstm": (nn.LSTM, torch.lstm_cell, 2),
}  # fmt: skip


class Recall(NamedTuple):
    """What a network with memory needs besides observations, whose rows [T * N, ...] are ordered by time.

    `state` [N, S] is the memory before the first of the T steps. `starts` [T, N] is true where an observation is the
    first of its episode: the state, be it the given one, is zeroed before such an observation is read.
    """

    state: Tensor
    starts: Tensor


def state_size(kind: str, size: int, layers: int = 1) -> int:
    """Numbers of the state of one environment; 0 for "none"."""
    return 0 if kind == "none" else CELLS[kind][2] * layers * size


class Memory(nn.Module):
    """Layers of GRU ("gru") or LSTM ("lstm") cells, one on the other, with orthogonal weights and biases of zero.

    The state [N, S] holds h of every layer, then c of every layer of an LSTM. No gradient flows into the given state.
    With a positive `keep_bias`, a new memory keeps more of its state from step to step (the bias of an LSTM's forget
    gate and of a GRU's update gate).
    """

    stays_eager = True  # unrolled over the steps, `torch.compile` would take minutes

    def __init__(self, kind: str, inputs: int, size: int, layers: int = 1, keep_bias: float = 0.0) -> None:
        super().__init__()
        module, self._cell, self.parts = CELLS[kind]
        self.size, self.layers, self.state_size = size, layers, state_size(kind, size, layers)
        self.cells = module(inputs, size, layers)
        for parameter in self.cells.parameters():
            (nn.init.orthogonal_ if parameter.dim() == 2 else nn.init.zeros_)(parameter)
        for _, _, bias, _ in self.cells.all_weights:
            nn.init.constant_(bias[size : 2 * size], keep_bias)

    def initial_state(self, count: int) -> Tensor:
        """Zeros [count, S]."""
        return next(self.parameters()).new_zeros(count, self.state_size)

    def forward(self, x: Tensor, recall: Recall) -> Tensor:
        """Outputs [T, N, size] for inputs [T, N, D]: those of `follow`, faster on a CPU."""
        if not x.is_cpu:
            return self.follow(x, recall)[0]
        if self.parts > 1:
            return self._read_segments(x, recall)
        keep = (~recall.starts).to(x.dtype)
        for state, weights in zip(recall.state.split(self.size, -1), self.cells.all_weights, strict=True):
            x = read_gru(x, state, keep, weights)
        return x

    def outputs_in(self, states: Tensor) -> Tensor:
        """The outputs [..., size] with which these states [..., S] came."""
        return states[..., (self.layers - 1) * self.size : self.layers * self.size]

    def numpy_memory(self) -> NumpyMemory | None:
        """One step in numpy on the same weights; None where torch is as fast."""
        found = [numpy_cell(weights, is_lstm=self.parts > 1) for weights in self.cells.all_weights]
        cells = [cell for cell in found if cell is not None]
        if len(cells) < self.layers:
            return None

        def remember(x: Array, states: Array, starts: Array) -> tuple[Array, Array]:
            before = (states * ~starts[:, None]).reshape(-1, self.parts, self.layers, self.size)
            after = np.empty_like(before)
            for layer, cell in enumerate(cells):
                carried = cell(x, before[:, :, layer].swapaxes(0, 1))
                for part, value in enumerate(carried):
                    after[:, part, layer] = value
                x = carried[0]
            return x, after.reshape(states.shape)

        return remember

    def follow(self, x: Tensor, recall: Recall) -> tuple[Tensor, Tensor]:
        """Outputs [T, N, size] for inputs [T, N, D], and the states [T, N, S] after each of them, without a gradient.

        One step after the other, and nothing is read on the host.
        """
        state = recall.state.detach().unflatten(-1, (self.parts, self.layers, self.size))
        keep = (~recall.starts).to(x.dtype).unsqueeze(-1)
        after = []
        for layer, weights in enumerate(self.cells.all_weights):
            carried = state[:, :, layer].unbind(1)  # h, and c of an LSTM
            outputs, carries = [], []
            for row, kept in zip(x.unbind(), keep.unbind(), strict=True):
                before = [part * kept for part in carried]
                found = self._cell(row, before if self.parts > 1 else before[0], *weights)
                carried = found if isinstance(found, tuple) else (found,)
                outputs.append(carried[0])
                carries.append(torch.stack([part.detach() for part in carried], 1))
            x = torch.stack(outputs)
            after.append(torch.stack(carries))
        return x, torch.stack(after, 3).flatten(2)

    def _read_segments(self, x: Tensor, recall: Recall) -> Tensor:
        """Cut the rows where episodes start, and let torch's LSTM read segments of similar lengths side by side.

        With gradients this takes a third to a twentieth of the time of `follow`.
        Segments are padded to less than twice their length, with rows whose outputs are dropped.
        """
        steps, count = recall.starts.shape
        rows, starts = x.transpose(0, 1).flatten(0, 1), recall.starts.t().flatten()  # one environment after the other
        begins = starts.clone()
        begins[::steps] = True
        first = begins.nonzero().squeeze(-1)
        lengths = first.diff(append=first.new_tensor([len(rows)]))
        state = recall.state.detach()[first // steps] * ~starts[first].unsqueeze(-1)
        sizes = lengths.log2().ceil()
        outputs, places = [], []
        for size in sizes.unique():
            group = (sizes == size).nonzero().squeeze(-1)
            offsets = torch.arange(int(lengths[group].max())).unsqueeze(-1)
            index, is_real = first[group] + offsets, offsets < lengths[group]
            before = state[group].unflatten(-1, (self.parts, self.layers, self.size)).permute(1, 2, 0, 3).contiguous()
            read = self.cells(rows[index.clamp(max=len(rows) - 1)], tuple(before))[0]
            outputs.append(read[is_real])
            places.append(index[is_real])
        order = torch.cat(places).argsort()
        return torch.cat(outputs).index_select(0, order).view(count, steps, self.size).transpose(0, 1)
