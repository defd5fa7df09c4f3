"""An update as one CUDA graph, for learners of thousands of small kernels, and the numbers that it reads in place."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
PLAIN_CALLS = 3  # before capturing: allocator, cuBLAS and autograd set themselves up in the first of them


class DeviceNumbers(UserDict[str, Any]):
    """A learner's table of numbers as 0-dim tensors: setting one fills it, so that a captured step sees the new value.

    What is not set stays None, and the names in `plain` stay floats (what a kernel takes by value).
    """

    def __init__(self, device: torch.device, numbers: Mapping[str, Any], plain: Collection[str] = ()) -> None:
        self.device, self.plain = device, plain
        super().__init__(numbers)

    def __setitem__(self, name: str, value: float | None) -> None:
        held = self.get(name)
        if isinstance(held, Tensor) and value is not None:
            held.fill_(value)
        elif value is None or name in self.plain:
            super().__setitem__(name, value)
        else:
            super().__setitem__(name, torch.tensor(float(value), device=self.device))


def constants(numbers: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a captured step does not read in place: floats, and whether a number is set."""
    return tuple(isinstance(value, Tensor) or value for value in numbers.values())


class CapturedStep:
    """`function(inputs) -> Tensor`, run plainly for its first calls, then captured once and replayed.

    The function draws nothing, reads no tensor on the host and keeps what it changes where it is. Every call is one
    update, captured or not. `constants` are the numbers that it does not read in place: while one of them moves, or
    when the inputs have another shape, it runs plainly, without the graph's speed.
    """

    def __init__(self, function: Callable[[Inputs], Tensor]) -> None:
        self.function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._output: Tensor | None = None
        self._key: Any = None
        self._calls = 0  # in a row with this key

    def __call__(self, inputs: Inputs, constants: tuple[Any, ...]) -> Tensor:
        """The function's result, which the next call does not overwrite."""
        key = (constants, tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self._graph is None:
            self._calls = self._calls + 1 if key == self._key else 1
            self._key = key
            if self._calls <= PLAIN_CALLS:
                return self._run_plainly(inputs)
            self._capture(inputs)
        if key != self._key or self._graph is None or self._output is None:
            return self.function(inputs)
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._output.clone()

    def _run_plainly(self, inputs: Inputs) -> Tensor:
        """On a side stream, as capturing asks of the calls before it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = self.function(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    def _capture(self, inputs: Inputs) -> None:
        """Record the function's kernels over inputs of its own; recording runs none of them."""
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self.function(self._inputs)
        self._graph = graph
