"""CUDA graphs that take numpy arrays from the host and return numpy arrays, through pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rl_training.speed.capture import CapturedStep, Joined, Numbers, Recording, Step, can_capture


class HostStep(CapturedStep):
    """A step with inputs on the host and a state on a device: `function(tensors, state) -> (tensors, state)`.

    It takes and returns numpy arrays, through pinned memory: a call launches a graph, then copies its results and waits
    for them. It is captured if the device of the numbers can capture.
    """

    def __init__(self, function: Step, numbers: Numbers, generator: torch.Generator, device: torch.device) -> None:
        # in the memory layout that a graph reads: products of transposed tensors may round differently
        by_rows: dict[str, Any] = {} if device.type == "cpu" else {"memory_format": torch.contiguous_format}

        @wraps(function)
        def between(given: Mapping[str, Tensor], state: Any) -> tuple[dict[str, Tensor], Any]:
            found, state = function({name: tensor.to(device, **by_rows) for name, tensor in given.items()}, state)
            return {name: tensor.cpu() for name, tensor in found.items()}, state

        super().__init__(between, numbers, generator)
        self.on_device, self.device = function, device
        self._can_capture = can_capture(numbers)

    def __call__(self, arrays: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
        """Return the function's result, which the next call does not overwrite."""
        found, state = super().__call__({name: torch.from_numpy(array) for name, array in arrays.items()}, state)
        return {name: tensor.numpy() for name, tensor in found.items()}, state

    def _run_plainly(self, inputs: tuple[Any, ...]) -> Any:
        return self.function(*inputs)

    def _record(self, inputs: tuple[Any, ...]) -> Recording:
        return HostRecording(self.on_device, inputs, self.generator, self.device)


class HostRecording(Recording):
    """A captured call of a `HostStep`, with pinned memory for its inputs and outputs on the host."""

    def __init__(
        self, function: Step, inputs: tuple[Any, ...], generator: torch.Generator | None, device: torch.device
    ) -> None:
        self.given = {name: self.allocate(tensor, device) for name, tensor in inputs[0].items()}
        self.here: dict[torch.dtype, Tensor] = {}

        def transfer(state: Any) -> Any:
            return function({name: own.to(device, non_blocking=True) for name, own in self.given.items()}, state)

        super().__init__(transfer, inputs[1:], generator, device)

    @staticmethod
    def allocate(like: Tensor, device: torch.device) -> Tensor:
        """Allocate host memory that the device can read and write directly (pinned for CUDA)."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda")

    def keep(self, outputs: Any) -> None:
        """Keep results and state separately."""
        found, state = outputs
        self.found = Joined(found)
        super().keep(state)

    def replay(self, tensors: list[Tensor]) -> Any:
        """Run the graph on other inputs of the same shapes, and wait for the results."""
        for own, tensor in zip(self.given.values(), tensors, strict=False):  # the remaining tensors belong to the state
            own.copy_(tensor)
        state = super().replay(tensors[len(self.given) :])
        return self.found.copy(self._fetch), state

    def _fetch(self, joined: Tensor) -> Tensor:
        if joined.dtype not in self.here:
            self.here[joined.dtype] = self.allocate(joined, joined.device)
        return self.here[joined.dtype].copy_(joined).clone()
