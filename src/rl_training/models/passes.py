"""`SplitMLP`: forward and backward passes of small MLPs written out, for losses that give their gradient at the end.

On a CPU an update of a small network is bookkeeping: a module call and a node of the graph per layer and direction.
Here there is no graph, the gradients are pieces of one flat tensor, which the optimizer takes as it is, and tanh is
numpy's, seven times as fast as torch's. What has no written-out form (other activations, LayerNorm, noise, a GPU) goes
through autograd; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# gradient of a loss at outputs -> gradients of the parameters, in order
Backward = Callable[[Tensor], Sequence[Tensor]]


class LinearPass:
    """x [B, in] -> [B, out], with the parameters of an `nn.Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias  # the parameters themselves: an optimizer moves their memory

    def forward(self, x: Tensor) -> Tensor:
        """The layer."""
        return torch.addmm(self.bias, x, self.weight.t())

    def into_parameters(self, grad: Tensor, x: Tensor, on_weight: Tensor, on_bias: Tensor) -> None:
        """Write the parameters' gradients."""
        torch.mm(grad.t(), x, out=on_weight)
        torch.sum(grad, 0, out=on_bias)

    def into_input(self, grad: Tensor) -> Tensor:
        """The input's gradient."""
        return torch.mm(grad, self.weight)


class StackedPass:
    """x [E, B, in], or [B, in] for all, -> [E, B, out]: E layers with weights [E, in, out] and biases [E, 1, out]."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        return torch.baddbmm(self.bias, x if x.dim() == 3 else x.expand(len(self.weight), *x.shape), self.weight)

    def into_parameters(self, grad: Tensor, x: Tensor, on_weight: Tensor, on_bias: Tensor) -> None:
        """Write the parameters' gradients."""
        torch.bmm(x.mT if x.dim() == 3 else x.t().expand(len(grad), *x.t().shape), grad, out=on_weight)
        torch.sum(grad, 1, keepdim=True, out=on_bias)

    def into_input(self, grad: Tensor) -> Tensor:
        """The inputs' gradients [E, B, in]."""
        return torch.bmm(grad, self.weight.mT)


class StackedHead(StackedPass):
    """[E, B, in] -> [E, B]: E layers with one output each, for which a batched product is 5 times slower than this."""

    def forward(self, x: Tensor) -> Tensor:
        """The layers."""
        return torch.linalg.vecdot(x, self.weight.mT).add_(self.bias.squeeze(-1))

    def into_parameters(self, grad: Tensor, x: Tensor, on_weight: Tensor, on_bias: Tensor) -> None:
        """Write the parameters' gradients."""
        rows = x if x.dim() == 3 else x.expand(len(grad), *x.shape)
        torch.bmm(grad.unsqueeze(1), rows, out=on_weight.mT)
        torch.sum(grad, 1, keepdim=True, out=on_bias.squeeze(-1))

    def into_input(self, grad: Tensor) -> Tensor:
        """The inputs' gradients [E, B, in]."""
        return grad.unsqueeze(-1) * self.weight.mT


class SplitMLP:
    """Layers with ReLU or tanh between them, and with `active_end` after the last; cut at the outputs from autograd."""

    def __init__(self, layers: Sequence[Any], *, is_tanh: bool, active_end: bool = False) -> None:
        self.layers, self.is_tanh, self.active_end = list(layers), is_tanh, active_end
        self.parameters: list[Tensor] = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        self._slope = tanh_backward if is_tanh else relu_backward
        self._gradients: list[Tensor] = []

    @classmethod
    def of(cls, network: Iterable[nn.Module]) -> SplitMLP | None:
        """The passes of linear layers with tanh or ReLU, one of them throughout, after each or between them."""
        parts = list(network)
        kinds, ends = [type(part) for part in parts], len(parts) % 2
        if not parts or set(kinds[0::2]) != {nn.Linear} or set(kinds[1::2]) not in ({nn.Tanh}, {nn.ReLU}, set()):
            return None
        layers = [LinearPass(part.weight, part.bias) for part in parts if isinstance(part, nn.Linear)]
        return cls(layers, is_tanh=nn.Tanh in kinds, active_end=not ends)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs without a graph, and each layer's input."""
        inputs: list[Tensor] = []
        for layer in self.layers:
            if inputs:
                self._activate(x)
            inputs.append(x)
            x = layer.forward(x)
        if self.active_end:
            self._activate(x)
        return x, inputs

    def with_gradients(self, x: Tensor) -> tuple[Tensor, Backward]:
        """Outputs, and what takes their gradient to the parameters'; both are called without a graph (`no_grad`)."""
        outputs, inputs = self.forward(x)
        return outputs, lambda grad: self.backward(inputs, self._slope(grad, outputs) if self.active_end else grad)

    def _activate(self, x: Tensor) -> None:
        if self.is_tanh:
            np.tanh(x.numpy(), out=x.numpy())
        else:
            x.relu_()

    def backward(self, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        """The gradients of the parameters in order, from the gradient at the last layer: pieces of one flat tensor,
        which the next call overwrites."""
        if not self._gradients:
            flat = grad.new_empty(sum(p.numel() for p in self.parameters))
            sizes = [p.numel() for p in self.parameters]
            self._gradients = [g.view_as(p) for g, p in zip(flat.split(sizes), self.parameters, strict=True)]
        pieces = self._gradients
        for i in range(len(self.layers) - 1, 0, -1):
            self.layers[i].into_parameters(grad, inputs[i], pieces[2 * i], pieces[2 * i + 1])
            grad = self._slope(self.layers[i].into_input(grad), inputs[i])
        self.layers[0].into_parameters(grad, inputs[0], pieces[0], pieces[1])
        return pieces

    def backward_into_input(self, inputs: Sequence[Tensor], grad: Tensor) -> Tensor:
        """The gradient of the first layer's input; for E networks that read the same rows, [E, B, in]."""
        for i in range(len(self.layers) - 1, 0, -1):
            grad = self._slope(self.layers[i].into_input(grad), inputs[i])
        return self.layers[0].into_input(grad)


def relu_backward(grad: Tensor, outputs: Tensor) -> Tensor:
    """The gradient before a ReLU from the one after it."""
    return torch.ops.aten.threshold_backward(grad, outputs, 0)


def tanh_backward(grad: Tensor, outputs: Tensor) -> Tensor:
    """The gradient before a tanh from the one after it."""
    return torch.ops.aten.tanh_backward(grad, outputs)


def runs_written_out(x: Tensor) -> bool:
    """Whether the passes can take these inputs: rows in the CPU's memory, and nobody tracing the network."""
    return x.is_cpu and x.dim() == 2 and not torch.compiler.is_compiling()


class WrittenOut:
    """Modules one after the other, by their written-out passes where they have them; not a module itself."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = list(parts)
        self.split = SplitMLP.of(self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out]."""
        if self.split is not None and not torch.is_grad_enabled() and runs_written_out(x):
            return self.split.forward(x)[0]
        for part in self.parts:
            x = part(x)
        return x

    def with_gradients(self, x: Tensor) -> tuple[Tensor, Backward] | None:
        """Outputs without a graph and their backward pass; None where autograd has to do it."""
        return self.split.with_gradients(x) if self.split is not None and runs_written_out(x) else None
