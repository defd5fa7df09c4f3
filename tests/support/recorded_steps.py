"""Captured steps without a GPU: `Recorded` and `RecordedOnHost` count plain calls and replays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_training.speed.capture import CapturedStep, HostRecording, HostStep, Recording


class Kernels(TorchDispatchMode):
    """Records the operations of a call, and undoes what they did; `run` does them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                self.generators.setdefault(leaf, leaf.get_state())
            if isinstance(leaf, Tensor) and func._schema.is_mutable:
                whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
                self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        out = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(out, float):
            return math.inf  # a GPU does not look whether a gradient is long: it is clipped
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for memory, before in self.before.values():
            memory.copy_(before)
        for generator, state in self.generators.items():
            generator.set_state(state)

    @torch.no_grad()
    def run(self) -> None:
        for func, args, kwargs, out in self.calls:
            for new, own in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(out), strict=True):
                if isinstance(own, Tensor) and new.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
                    own.copy_(new)


class Reads(TorchDispatchMode):
    """Counts the operations for which the host waits: reading a number, or finding how many rows there are."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return func(*args, **(kwargs or {}))


class Replayed(Recording):
    """A graph without a GPU: replaying does the recorded operations again, on the same memory, and no Python."""

    replays = 0

    def record(self, function: Callable[[], None]) -> None:
        self.graph, self.kernels = self, Kernels()
        with self.kernels:
            function()
        self.kernels.undo()

    def replay(self, tensors: list[Tensor] | None = None) -> Any:
        if tensors is not None:
            return super().replay(tensors)
        self.replays += 1
        return self.kernels.run()


class Recorded(CapturedStep):
    """A step whose plain calls and replays are counted."""

    plain = 0

    def _run_plainly(self, inputs: tuple[Any, ...]) -> Any:
        self.plain += 1
        return self.function(*inputs)

    def _record(self, inputs: tuple[Any, ...]) -> Recording:
        return Replayed(self.function, inputs, self.generator)

    @property
    def replays(self) -> list[int]:
        """Of every graph."""
        return [graph.replays for graph in self._graphs.values()]  # type: ignore[attr-defined]


class ReplayedOnHost(Replayed, HostRecording):
    pass


class RecordedOnHost(Recorded, HostStep):
    def _record(self, inputs: tuple[Any, ...]) -> Recording:
        return ReplayedOnHost(self.on_device, inputs, self.generator, self.device)
