"""Small MLPs without torch's overhead: hand-written passes for learning (`WrittenOut`), and acting in numpy.

On a CPU a small network's update is mostly bookkeeping: a module call and a graph node per layer and direction. If a
loss provides its slopes at the outputs, a whole network runs without an autograd graph (`WrittenOut.trace`): its
gradients are pieces of one flat tensor that the optimizer uses directly, and tanh is numpy's, seven times as fast as
torch's. Networks without hand-written passes (other activations, LayerNorm, noise, a GPU) and losses without slopes use
autograd; the tests compare the two. On a GPU, networks with two hidden layers run as one kernel per direction if there
are many rows (`speed/mlp_kernels.py`).

Acting with 8 rows, a numpy layer costs a third of a torch layer. The arrays are views of the weights, so they always
show in-place updates. A numpy form is None if there is none, or if it would not be faster: with an encoder, on a GPU,
for wide layers. A module of another kind provides its own as `numpy_step()`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.speed.private_torch import constant_in_graphs, holder_counter, record_graph

Backward = Callable[..., "Sequence[Tensor | None]"]  # gradients of outputs -> gradients of parameters, in order
Array = NDArray[Any]
NumpyStep = Callable[[Array, "np.random.Generator | None"], Array]  # x [N, D] and a generator, None for mean weights
# obs [N, ...], masks [N, A] or None, generator, deterministic -> actions [N, ...]: acting without torch
NumpyPolicy = Callable[[Array, "Array | None", np.random.Generator, bool], Array]
MOST_WEIGHTS = 2 * 256 * 256  # of a layer; above this a torch layer is as fast
NUMPY_ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Array]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x), nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
}  # fmt: skip
FUSED_ROWS, FUSED_OUTPUTS = 2**15, 2**16  # fewest rows in learning and evaluation that repay compiling the kernels
FUSED_UNITS = 64
CAN_FUSE = bool(torch.version.cuda and find_spec("triton") and any(map(shutil.which, ("cc", "gcc", "clang"))))


class Pieces(list[Tensor]):
    """Gradients of parameters in order: pieces of one tensor that an optimizer uses directly."""

    flat: Tensor


class Columns(nn.Module):
    """The first layer of a network that reads only some columns: [..., D] -> [..., K]."""

    def __init__(self, columns: Sequence[int]) -> None:
        super().__init__()
        self.index = nn.Buffer(torch.tensor(columns, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The columns."""
        return x.index_select(-1, self.index)

    def numpy_step(self) -> NumpyStep | None:
        """The same in numpy."""
        columns = self.index.numpy() if self.index.is_cpu else None
        return None if columns is None else lambda x, rng: x[:, columns]


class SplitMLP:
    """Linear layers with ReLU or tanh between them, perhaps on some columns only."""

    def __init__(self, layers: Sequence[nn.Linear], columns: Columns | None, *, is_tanh: bool) -> None:
        self.columns = columns
        # the parameters themselves, because an optimizer moves their memory
        self.layers = [(layer.weight, layer.bias) for layer in layers]
        self.is_tanh = is_tanh
        self.parameters: list[Tensor] = [p for layer in self.layers for p in layer]

    @classmethod
    def of(cls, network: Sequence[nn.Module]) -> SplitMLP | None:
        """The passes of a network of linear layers with one activation (tanh or ReLU); None for any other network."""
        columns = network[0] if network and isinstance(network[0], Columns) else None
        network = network[columns is not None :]
        kinds = [type(part) for part in network]
        known = len(kinds) % 2 and set(kinds[0::2]) == {nn.Linear} and set(kinds[1::2]) in ({nn.Tanh}, {nn.ReLU}, set())
        layers = [part for part in network if isinstance(part, nn.Linear)]
        return cls(layers, columns, is_tanh=nn.Tanh in kinds) if known else None

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs, and each layer's input, without an autograd graph."""
        inputs: list[Tensor] = []
        x = x if self.columns is None else self.columns(x)
        for weight, bias in self.layers:
            if inputs and self.is_tanh:
                np.tanh(x.numpy(), out=x.numpy())
            elif inputs:
                x.relu_()
            inputs.append(x)
            x = F.linear(x, weight, bias)
        return x, inputs

    def backward(self, inputs: Sequence[Tensor], grad: Tensor, pieces: Sequence[Tensor]) -> None:
        """Write the parameters' gradients into `pieces`, from the outputs' gradient."""
        for i in range(len(self.layers) - 1, -1, -1):
            x = inputs[i]
            torch.mm(grad.t(), x, out=pieces[2 * i])
            torch.sum(grad, 0, out=pieces[2 * i + 1])
            if i:
                grad = torch.mm(grad, self.layers[i][0])
                if self.is_tanh:  # in place: new memory costs more than the arithmetic
                    torch.ops.aten.tanh_backward.grad_input(grad, x, grad_input=grad)
                else:
                    torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)


def runs_written_out(x: Tensor) -> bool:
    """Whether the passes support these inputs: rows in CPU memory, outside `torch.compile`."""
    return x.is_cpu and x.dim() == 2 and not torch.compiler.is_compiling()


@constant_in_graphs
def has_room(device: torch.device) -> bool:
    """Whether two programs of the kernels fit on a multiprocessor, as on Hopper and data-center Blackwell GPUs."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def is_fused(x: Tensor, networks: Sequence[Iterable[nn.Module]], least: int) -> bool:
    """Whether these networks run as one kernel per direction on these rows: worthwhile from `least` rows on."""
    if not x.is_cuda or x.dim() != 2 or x.dtype != torch.float32 or not x.numel() or not CAN_FUSE:
        return False
    if len(x) < least and not torch.compiler.is_compiling():
        return False
    forms = [[type(part) for part in network] for network in networks]
    known = [[nn.Linear, kind, nn.Linear, kind, nn.Linear] for kind in (nn.Tanh, nn.ReLU)]
    if forms[0] not in known or any(form != forms[0] for form in forms):
        return False
    sizes = [[x.shape[1], *map(len, _parameters(network))] for network in networks]
    longest = max(size for own in sizes for size in (own[0], own[-1])) * len(x)
    fits = max(map(max, sizes)) <= FUSED_UNITS and longest < 2**31  # the kernels use 32-bit indices
    return fits and has_room(x.device)


def _parameters(network: Iterable[nn.Module]) -> list[Tensor]:
    return [p.contiguous() for part in network if isinstance(part, nn.Linear) for p in (part.weight, part.bias)]


def trace_fused(x: Tensor, networks: Sequence[Iterable[nn.Module]]) -> tuple[list[Tensor], Backward]:
    """`WrittenOut.trace` with the kernels."""
    from rl_training.speed.mlp_kernels import mlp_backward, mlp_forward

    parameters, is_tanh = [_parameters(network) for network in networks], nn.Tanh in map(type, networks[0])
    every = [p for own in parameters for p in own]

    @torch.no_grad()
    def backward(*grads: Tensor) -> list[Tensor]:
        pieces = mlp_backward(x, list(grads), every, is_tanh).split([p.numel() for p in every])
        return [piece.view_as(p) for piece, p in zip(pieces, every, strict=True)]

    with torch.no_grad():
        return [mlp_forward(x, own, is_tanh) for own in parameters], backward


def run_network(network: nn.Sequential, x: Tensor) -> Tensor:
    """[B, in] -> [B, out], with one kernel if that is faster and nothing is differentiated."""
    fused = not torch.is_grad_enabled() and is_fused(x, (network,), FUSED_OUTPUTS)
    return trace_fused(x, (network,))[0][0] if fused else network(x)


class no_graph:
    """`torch.no_grad` without its cost (see `private_torch.record_graph`)."""

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        record_graph(False)

    def __exit__(self, *_: object) -> None:
        record_graph(self.before)


class WrittenOut:
    """Networks that read the same rows, run with hand-written passes if all of them have one; not a module itself.

    The owner passes its networks' modules at every call, so that a replaced module is noticed.
    """

    def __init__(self) -> None:
        self._parts: list[list[nn.Module]] = []
        self._splits: list[SplitMLP] | None = None
        self._pieces: Pieces | None = None  # of memory for the gradients of all of them together
        self._count: Callable[[], int]  # of the tensors that use it
        self._holders = 0

    def __reduce__(self) -> Any:
        """A copy starts empty, because a copy's pieces need not be parts of one tensor."""
        return WrittenOut, ()

    def __call__(self, x: Tensor, *networks: Iterable[nn.Module]) -> Sequence[Tensor]:
        """[B, in] -> [B, out] for each network, given as a sequence of modules."""
        splits = None
        if not torch.is_grad_enabled():
            if is_fused(x, networks, FUSED_OUTPUTS):
                return trace_fused(x, networks)[0]
            splits = self._write_out(x, networks)
        return [run_chain(network, x) for network in networks] if splits is None else [s.forward(x)[0] for s in splits]

    def trace(self, x: Tensor, *networks: Iterable[nn.Module]) -> tuple[Sequence[Tensor], Backward] | None:
        """The same without a graph, and a function that maps gradients of the outputs to those of all parameters, in
        order; None if autograd is needed."""
        if is_fused(x, networks, FUSED_ROWS):
            return trace_fused(x, networks)
        splits = self._write_out(x, networks)
        if splits is None:
            return None
        with no_graph():
            passed = [split.forward(x) for split in splits]

        def backward(*grads: Tensor) -> Pieces:
            pieces, start = self._take_pieces(splits), 0
            with no_graph():
                for split, (_, inputs), grad in zip(splits, passed, grads, strict=True):
                    end = start + len(split.parameters)
                    split.backward(inputs, grad, pieces[start:end])
                    start = end
            return pieces

        return [outputs for outputs, _ in passed], backward

    def _write_out(self, x: Tensor, networks: Sequence[Iterable[nn.Module]]) -> list[SplitMLP] | None:
        parts = [list(network) for network in networks]
        if parts != self._parts:
            splits = [split for network in parts if (split := SplitMLP.of(network)) is not None]
            self._parts, self._splits, self._pieces = parts, splits if len(splits) == len(parts) else None, None
        return self._splits if runs_written_out(x) else None

    def _take_pieces(self, splits: Sequence[SplitMLP]) -> Pieces:
        """Memory for gradients: the same every time, unless a view of it is still in use."""
        if self._pieces is None or self._count() > self._holders:
            parameters = [p for split in splits for p in split.parameters]
            sizes = [p.numel() for p in parameters]
            flat = parameters[0].detach().new_empty(sum(sizes))
            self._pieces = Pieces(g.view_as(p) for g, p in zip(flat.split(sizes), parameters, strict=True))
            self._pieces.flat = flat
            self._count = holder_counter(flat)
            self._holders = self._count()
        return self._pieces


def run_chain(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Run modules one after the other."""
    for module in modules:
        x = module(x)
    return x


# acting in numpy ------------------------------------------------------------------------------------------------------


def numpy_step(layer: nn.Module, most_weights: int = MOST_WEIGHTS) -> NumpyStep | None:
    """A layer, or layers one after the other."""
    if isinstance(layer, nn.Sequential):
        return numpy_chain([numpy_step(part, most_weights) for part in layer])
    if type(layer) in NUMPY_ACTIVATIONS:
        activation = NUMPY_ACTIVATIONS[type(layer)]
        return lambda x, rng: activation(x)
    if isinstance(layer, nn.Linear):
        return linear_step(layer, most_weights)
    make = getattr(layer, "numpy_step", None)
    return None if make is None else make()


def linear_step(layer: Any, most_weights: int = MOST_WEIGHTS) -> NumpyStep | None:
    """x W' + b of a layer with `weight` and `bias`."""
    if layer.weight.device.type != "cpu" or layer.weight.numel() > most_weights:
        return None
    weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()

    def forward(x: Array, rng: np.random.Generator | None) -> Array:
        x = x @ weight
        x += bias
        return x

    return forward


def numpy_chain(steps: list[NumpyStep | None]) -> NumpyStep | None:
    """Steps one after the other; None when one of them is missing."""
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None

    def forward(x: Array, rng: np.random.Generator | None) -> Array:
        for step in known:
            x = step(x, rng)
        return x

    return forward


def mask_in_numpy(scores: Array, legal: Array | None) -> Array:
    """`ops.policy.mask_actions` in numpy."""
    if legal is None:
        return scores
    return np.where(legal | ~legal.any(-1, keepdims=True), scores, -np.inf)
