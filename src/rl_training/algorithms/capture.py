"""A learner's steps as CUDA graphs, compiled or not, and the numbers that they read in place."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]
CAPTURING = ("cuda",)  # devices whose kernels can be captured
PLAIN_CALLS = 3  # before capturing: allocator, cuBLAS and autograd set themselves up in the first of them
MOST_GRAPHS = 16  # of one step; each keeps its own memory
# What a kernel takes by value, or Python branches on.
BY_VALUE = frozenset({"optimizer_eps", "kappa", "gradient_penalty", "model_weight_decay"})
OUTSIDE = frozenset({"epsilon", "exploration_noise", "target_kl", "penalty_coef"})  # no step reads them


class Numbers(dict[str, Any]):
    """A learner's table of numbers: floats, or None where one is not set.

    With a `device`, a number that is set becomes a 0-dim tensor there, and later values are written into it, so that a
    captured step reads them. That includes numbers that do not change yet: a resumed run would otherwise round
    differently.
    `constants` are what a step does not read in place: floats, and whether a number is set.
    """

    device: torch.device | None = None
    constants: tuple[Any, ...] = ()

    def __setitem__(self, name: str, value: float | None) -> None:
        held = self.get(name)
        if isinstance(held, Tensor) and value is not None:
            held.fill_(value)
            return
        if self.device is not None and value is not None and name not in BY_VALUE | OUTSIDE:
            value = torch.tensor(float(value), device=self.device)  # type: ignore[assignment]
        super().__setitem__(name, value)
        self.constants = tuple("set" if isinstance(x, Tensor) else x for key, x in self.items() if key not in OUTSIDE)

    def update(self, *others: Any, **values: float | None) -> None:
        """Like `dict.update`, one by one."""
        for name, value in dict(*others, **values).items():
            self[name] = value


def accelerate_step(step: Step, how: str, numbers: Numbers) -> Step:
    """The step, compiled if `how` is "compile", and captured if the numbers' device can capture."""
    function = torch.compile(step, dynamic=False) if how == "compile" else step
    captures = numbers.device is not None and numbers.device.type in CAPTURING
    return CapturedStep(function, numbers) if captures else function


class CapturedStep:
    """A step, run plainly for its first calls, then captured once per signature of its inputs and replayed.

    Its inputs and outputs are tensors in tuples, lists and dicts. It draws nothing, reads no tensor on the host and
    changes tensors only in place. Every call is one step, captured or not.
    """

    def __init__(self, function: Step, numbers: Numbers) -> None:
        self.function, self.numbers = function, numbers
        self._graphs: dict[Any, Recording] = {}
        self._calls: Counter[Any] = Counter()
        self._can_capture, self._is_full = True, False

    def __call__(self, *inputs: Any) -> Any:
        """The function's result, which the next call does not overwrite."""
        tensors: list[Tensor] = []
        key = self.numbers.constants, _sign(inputs, tensors)
        graph = self._graphs.get(key)
        if graph is not None:
            return graph.replay(tensors)
        if not self._can_capture or len(self._graphs) == MOST_GRAPHS:
            if self._can_capture and not self._is_full:
                self._is_full = True
                self._warn(f"has {MOST_GRAPHS} CUDA graphs, one per shape of its inputs; others run eagerly")
            return self.function(*inputs)
        if len(self._calls) > 4 * MOST_GRAPHS:  # signatures that never come back
            self._calls.clear()
        self._calls[key] += 1
        if self._calls[key] <= PLAIN_CALLS:
            return self._run_plainly(inputs)
        try:
            self._graphs[key] = graph = self._record(inputs)
        except RuntimeError as error:
            self._can_capture = False
            self._warn(f"cannot be captured as a CUDA graph and runs eagerly: {str(error).splitlines()[0]}")
            return self.function(*inputs)
        return graph.replay(tensors)

    def _warn(self, what: str) -> None:
        warnings.warn(f"{getattr(self.function, '__qualname__', 'step')} {what}", stacklevel=3)

    def _run_plainly(self, inputs: tuple[Any, ...]) -> Any:
        """Run on a side stream, as CUDA graphs require of warm-up calls."""
        with torch.cuda.device(_device_of(inputs)):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _record(self, inputs: tuple[Any, ...]) -> Recording:
        return Recording(self.function, inputs)


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures on a device, since each stream has its own cuBLAS workspace."""
    return torch.cuda.Stream(device)


def free_generator(generator: torch.Generator) -> None:
    """Let it draw again after a failed capture, which leaves it waiting for the capture to end."""
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh)


class Recording:
    """One captured call, with its own memory for inputs and outputs. Recording runs none of the kernels."""

    graph: Any

    def __init__(self, function: Step, inputs: tuple[Any, ...]) -> None:
        own = map_tensors(torch.clone, inputs)
        self.inputs: list[Tensor] = []
        _sign(own, self.inputs)
        kinds = [tensor.dtype for tensor in self.inputs]
        # by dtype, since only tensors of one dtype are copied by one kernel
        self.groups = [[i for i, kind in enumerate(kinds) if kind == one] for one in dict.fromkeys(kinds)]
        self.record(lambda: self.keep(function(*own)))

    def record(self, function: Callable[[], None]) -> None:
        """Capture the kernels of a function."""
        collects = gc.isenabled()
        gc.disable()  # freeing the graph of a finished run would end the capture
        try:
            with torch.cuda.device(_device_of(self.inputs)):  # another device's kernels would run, not be captured
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                stream = capture_stream(torch.cuda.current_device())
                try:
                    with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                        function()
                except RuntimeError:
                    free_generator(torch.cuda.default_generators[torch.cuda.current_device()])
                    raise
        finally:
            if collects:
                gc.enable()

    def keep(self, outputs: Any) -> None:
        """Join the outputs of each dtype into one tensor, which one kernel copies; part of what is captured."""
        tensors: list[Tensor] = []
        self.outputs = map_tensors(Tensor.detach, outputs)
        _sign(self.outputs, tensors)
        pieces = {kind: [t.reshape(-1) for t in tensors if t.dtype == kind] for kind in {t.dtype for t in tensors}}
        self.joined = {kind: torch.cat(parts) for kind, parts in pieces.items()}
        self.sizes = {kind: [len(part) for part in parts] for kind, parts in pieces.items()}

    def replay(self, tensors: list[Tensor]) -> Any:
        """Run it on other inputs of the same shapes."""
        for group in self.groups:
            torch._foreach_copy_([self.inputs[i] for i in group], [tensors[i] for i in group])
        self.graph.replay()
        pieces = {kind: iter(joined.clone().split(self.sizes[kind])) for kind, joined in self.joined.items()}
        return map_tensors(lambda own: next(pieces[own.dtype]).view(own.shape), self.outputs)


def _sign(tree: Any, tensors: list[Tensor]) -> Any:
    """What a graph of these inputs depends on; their tensors are added to the list in order."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return tuple([(name, _sign(value, tensors)) for name, value in tree.items()])
    if isinstance(tree, (tuple, list)):
        return tuple([_sign(value, tensors) for value in tree])
    return tree


def _device_of(tree: Any) -> torch.device | None:
    """The device of its first tensor."""
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
