"""Run a learner's steps as CUDA graphs (compiled or not), and keep the numbers that graphs read in place."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_training.speed.private_torch import copy_all

Step = Callable[..., Any]
CAPTURING = ("cuda",)  # devices whose kernels can be captured
PLAIN_CALLS = 3  # before capturing: allocator, cuBLAS and autograd initialize themselves in the first of them
MOST_GRAPHS = 16  # per step; each graph keeps its own memory
MOST_CAPTURES = 64  # per step: inputs with more shapes than that seldom repeat one
CAPTURING_STREAM = threading.RLock()  # held while a thread uses `capture_stream`


class Numbers(dict[str, Any]):
    """A learner's table of numbers: floats, or None for a number that is not set.

    With a `device`, a number that is set becomes a 0-dim tensor there, and later values are written into it, so that a
    captured step reads them. This includes numbers that have not changed yet: a resumed run would otherwise round
    differently.
    `constants` are the values that a graph cannot read in place: floats, and the addresses of the tensors. A graph is
    valid only for the constants that it was captured with. Numbers in `floats` stay floats (those in `acting` only on a
    CPU), and those in `unread` are in no graph.
    """

    device: torch.device | None = None
    floats: frozenset[str] = frozenset()
    acting: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    constants: tuple[Any, ...] = ()
    _failures = 0

    def __setitem__(self, name: str, value: float | None) -> None:
        held = self.get(name)
        if isinstance(held, Tensor) and value is not None:
            held.fill_(value)
            return
        if self.device is not None and value is not None and not self._stays_float(name, self.device):
            value = torch.tensor(float(value), device=self.device)  # type: ignore[assignment]
        super().__setitem__(name, value)
        self._find_constants()

    def _find_constants(self) -> None:
        read = [value for name, value in self.items() if name not in self.unread]
        places = [("at", value.data_ptr()) if isinstance(value, Tensor) else value for value in read]
        self.constants = (self._failures, *places)

    def drop_graphs(self) -> None:
        """Invalidate all graphs captured so far: they would draw from an old state of the generator."""
        self._failures += 1
        self._find_constants()

    def __reduce__(self) -> Any:
        """Copy floats as floats; the copy has its own tensors."""
        kept = ("device", "floats", "acting", "unread")
        return Numbers, (dict(self),), {name: getattr(self, name) for name in kept}

    def _stays_float(self, name: str, device: torch.device) -> bool:
        return name in self.floats or name in self.unread or (name in self.acting and device.type == "cpu")

    def update(self, *others: Any, **values: float | None) -> None:
        """Like `dict.update`, but through `__setitem__`."""
        for name, value in dict(*others, **values).items():
            self[name] = value


def can_capture(numbers: Numbers) -> bool:
    """Whether steps on the numbers' device can be captured."""
    return numbers.device is not None and numbers.device.type in CAPTURING


def capture_step(step: Step, numbers: Numbers, generator: torch.Generator) -> Step:
    """Wrap a step, which may draw from the generator, in a `CapturedStep` if the numbers' device can capture."""
    return CapturedStep(step, numbers, generator) if can_capture(numbers) else step


class CapturedStep:
    """A step that runs as plain code at first, is then captured once per input signature, and replayed after that.

    Its inputs and outputs are tensors in tuples, lists and dicts. It draws only from the given generator, reads no
    tensor on the host and changes tensors only in place. Every call computes one step, captured or not.
    """

    def __init__(self, function: Step, numbers: Numbers, generator: torch.Generator | None = None) -> None:
        self.function, self.numbers, self.generator = function, numbers, generator
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
        return Recording(self.function, inputs, self.generator)


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
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.generator, self.device = generator, device or _device_of(inputs)
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
                    with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
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
