"""Run a learner's steps as CUDA graphs (compiled or not), with inputs on the device (`CapturedStep`) or on the host.

`numbers` is a learner's table (`algorithms/base.py`): it says on which `device` the steps run, and its `constants` are
the values that a graph cannot read in place.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from rl_training.speed.private_torch import copy_all

Step = Callable[..., Any]
CAPTURING = ("cuda",)  # devices whose kernels can be captured
PLAIN_CALLS = 3  # before capturing: allocator, cuBLAS and autograd initialize themselves in the first of them
MOST_GRAPHS = 16  # per step; each graph keeps its own memory
MOST_CAPTURES = 64  # per step: inputs with more shapes than that seldom repeat one
THREAD_LOCAL = "thread_local"  # a capture forbids its own thread, and no other, what could break it
CAPTURING_STREAM = threading.RLock()  # held while a thread uses `capture_stream`


def can_capture(numbers: Any) -> bool:
    """Whether steps on the numbers' device can be captured."""
    return numbers.device is not None and numbers.device.type in CAPTURING


def capture_step(step: Step, numbers: Any, generator: torch.Generator) -> Step:
    """Wrap a step, which may draw from the generator, in a `CapturedStep` if the numbers' device can capture."""
    return CapturedStep(step, numbers, generator) if can_capture(numbers) else step


class CapturedStep:
    """A step that runs as plain code at first, is then captured once per input signature, and replayed after that.

    Its inputs and outputs are tensors in tuples, lists and dicts. It draws only from the given generator, reads no
    tensor on the host and changes tensors only in place. Every call computes one step, captured or not. `mode` is
    "relaxed" for a function that lets another library launch kernels, which may then allocate memory.
    """

    def __init__(
        self, function: Step, numbers: Any, generator: torch.Generator | None = None, mode: str = THREAD_LOCAL
    ) -> None:
        self.function, self.numbers, self.generator, self.mode = function, numbers, generator, mode
        self._graphs: dict[Any, Recording] = {}
        self._calls: Counter[Any] = Counter()
        self._captures = 0
        self._can_capture = True

    def __call__(self, *inputs: Any) -> Any:
        """Return the function's result, which the next call does not overwrite."""
        if not self._can_capture and not self._graphs:
            return self.function(*inputs)
        tensors: list[Tensor] = []
        key = self.numbers.constants, _sign(inputs, tensors)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs[key] = self._graphs.pop(key)  # most recently used last
            return graph.replay(tensors)
        if not self._can_capture:
            return self.function(*inputs)
        if len(self._calls) > 4 * MOST_GRAPHS:  # signatures that are not repeated
            self._calls.clear()
        self._calls[key] += 1
        if self._calls[key] <= PLAIN_CALLS:
            return self._run_plainly(inputs)
        if self._captures == MOST_CAPTURES:
            self._stop(f"was captured {MOST_CAPTURES} times as a CUDA graph; inputs of other shapes run eagerly")
            return self.function(*inputs)
        if len(self._graphs) == MOST_GRAPHS:
            unused_longest = next(iter(self._graphs))
            del self._graphs[unused_longest], self._calls[unused_longest]
        try:
            with CAPTURING_STREAM:
                self._graphs[key] = graph = self._record(inputs)
        except RuntimeError as error:
            if self.generator is not None:
                self._graphs.clear()
                self.numbers.drop_graphs()
            self._stop(f"cannot be captured as a CUDA graph and runs eagerly: {str(error).splitlines()[0]}")
            return self.function(*inputs)
        self._captures += 1
        return graph.replay(tensors)

    def _stop(self, reason: str) -> None:
        """Stop capturing, with a warning."""
        self._can_capture = False
        warnings.warn(f"{getattr(self.function, '__qualname__', 'step')} {reason}", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs: a copy of a learner captures its own."""
        return {**self.__dict__, "_graphs": {}, "_calls": Counter(), "_captures": 0}

    def _run_plainly(self, inputs: tuple[Any, ...]) -> Any:
        """Run on a side stream, as CUDA graphs require for warm-up calls.

        This uses the stream of captures. Torch hands out 32 streams in turn, so a new one could be the stream on which
        another thread is capturing.
        """
        with CAPTURING_STREAM, torch.cuda.device(_device_of(inputs)):
            stream, before = capture_stream(torch.cuda.current_device()), torch.cuda.current_stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                outputs = self.function(*inputs)
            before.wait_stream(stream)
        return outputs

    def _record(self, inputs: tuple[Any, ...]) -> Recording:
        return Recording(self.function, inputs, self.generator, mode=self.mode)


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures and warm-up calls on a device: each stream has its own cuBLAS workspace."""
    return torch.cuda.Stream(device)


def free_generator(generator: torch.Generator) -> None:
    """Make a generator usable after a failed capture, which leaves it waiting for the capture to end."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh)


class Recording:
    """One captured call, with its own memory for inputs and outputs. Capturing does not run the kernels."""

    graph: Any

    def __init__(
        self, function: Step, inputs: tuple[Any, ...], generator: torch.Generator | None = None,
        device: torch.device | None = None, mode: str = THREAD_LOCAL,
    ) -> None:  # fmt: skip
        self.generator, self.device, self.mode = generator, device or _device_of(inputs), mode
        own = map_tensors(torch.clone, inputs)
        self.inputs: list[Tensor] = []
        _sign(own, self.inputs)
        kinds = [tensor.dtype for tensor in self.inputs]
        # by dtype, because one kernel copies only tensors of one dtype
        self.groups = [[i for i, kind in enumerate(kinds) if kind == one] for one in dict.fromkeys(kinds)]
        self.record(lambda: self.keep(function(*own)))

    def record(self, function: Callable[[], None]) -> None:
        """Capture the kernels of a function."""
        collects = gc.isenabled()
        gc.disable()  # freeing the graph of a finished run would abort the capture
        try:
            with torch.cuda.device(self.device):  # kernels on another device would run instead of being captured
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                if self.generator is not None:  # a replay draws from the generator's current state and advances it
                    self.graph.register_generator_state(self.generator)
                stream, before = capture_stream(torch.cuda.current_device()), torch.cuda.current_stream()
                try:
                    with torch.cuda.graph(self.graph, stream=stream, capture_error_mode=self.mode):
                        function()
                except RuntimeError:
                    torch.cuda.set_stream(before)  # a failed capture leaves its own stream set
                    for generator in (torch.cuda.default_generators[torch.cuda.current_device()], self.generator):
                        if generator is not None:
                            free_generator(generator)
                    raise
        finally:
            if collects:
                gc.enable()

    def keep(self, outputs: Any) -> None:
        """Keep the outputs; this runs inside the capture."""
        self.outputs = Joined(outputs)

    def replay(self, tensors: list[Tensor]) -> Any:
        """Run the graph on other inputs of the same shapes."""
        for group in self.groups:
            copy_all([self.inputs[i] for i in group], [tensors[i] for i in group])
        self.graph.replay()
        return self.outputs.copy(torch.clone)


class Joined:
    """A tree of tensors, joined into one tensor per dtype, so that one kernel copies all of a dtype."""

    def __init__(self, tree: Any) -> None:
        tensors: list[Tensor] = []
        self.tree = map_tensors(Tensor.detach, tree)
        _sign(self.tree, tensors)
        tensors.sort(key=lambda tensor: tensor.dim() > 0)  # 0-dim tensors first: one call separates them
        kinds = {tensor.dtype: [own for own in tensors if own.dtype == tensor.dtype] for tensor in tensors}
        self.joined = {kind: torch.cat([own.reshape(-1) for own in owns]) for kind, owns in kinds.items()}
        self.numbers = {kind: sum(own.dim() == 0 for own in owns) for kind, owns in kinds.items()}
        self.sizes = {kind: [own.numel() for own in owns if own.dim()] for kind, owns in kinds.items()}

    def copy(self, function: Callable[[Tensor], Tensor]) -> Any:
        """Apply the function to the joined tensor of each dtype, and return the results as a tree."""
        numbers, others = {}, {}
        for kind, joined in self.joined.items():
            found, count, sizes = function(joined), self.numbers[kind], self.sizes[kind]
            numbers[kind] = iter(found[:count].unbind() if count else ())
            rest = found[count:] if count else found
            others[kind] = iter(rest.split(sizes) if len(sizes) > 1 else [rest])

        def piece(own: Tensor) -> Tensor:
            if own.dim() < 2:
                return next((others if own.dim() else numbers)[own.dtype])
            return next(others[own.dtype]).view(own.shape)

        return map_tensors(piece, self.tree)


class HostStep(CapturedStep):
    """A step with inputs on the host and a state on a device: `function(tensors, state) -> (tensors, state)`.

    It takes and returns numpy arrays, through pinned memory: a call launches a graph, then copies its results and waits
    for them. It is captured if the device of the numbers can capture.
    """

    def __init__(self, function: Step, numbers: Any, generator: torch.Generator, device: torch.device) -> None:
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


def _sign(tree: Any, tensors: list[Tensor]) -> Any:
    """The signature of inputs, for which a graph is valid; adds their tensors to the list in order."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return tuple([(name, _sign(value, tensors)) for name, value in tree.items()])
    if isinstance(tree, (tuple, list)):
        return tuple([_sign(value, tensors) for value in tree])
    return tree


def _device_of(tree: Any) -> torch.device | None:
    """The device of the first tensor in a tree."""
    tensors: list[Tensor] = []
    _sign(tree, tensors)
    return tensors[0].device if tensors else None


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(function, value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [map_tensors(function, value) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
