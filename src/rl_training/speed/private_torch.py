"""Every private name of torch that this package uses; `tests/speed/test_private_torch.py` checks each of them.

Torch may change these without notice. Each is here because its public counterpart costs more than a small network's
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.autograd.graph import _engine_run_backward

Function = TypeVar("Function", bound=Callable[..., Any])
Tensors = tuple[Tensor, ...] | list[Tensor]


def differentiate(outputs: Sequence[Tensor], slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Gradients of a loss at the inputs, from its slopes at the outputs; None for an input that has no effect.

    The checks of `torch.autograd.grad` take as long as the backward pass of a small loss. They also import sympy at the
    first call, which takes up to three seconds.
    """
    return _engine_run_backward(
        tuple(outputs), tuple(slopes), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one [P]; `torch.cat` would need a reshaped view of each."""
    return _flatten_dense_tensors(tensors)


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target, all of one dtype: one kernel on a GPU."""
    torch._foreach_copy_(targets, sources)


def adam_step(
    parameters: Tensors, gradients: Tensors, means: Tensors, squares: Tensors, steps: Tensor, *, learning_rate: Any,
    eps: float,
) -> None:  # fmt: skip
    """Adam's step number `steps` [], in place; `learning_rate` is a float or a tensor [].

    `torch.optim.Adam` would loop over groups and states in Python.
    """
    torch._fused_adam_(
        parameters, gradients, means, squares, [], [steps] * len(parameters),
        lr=learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def count_holders(tensor: Tensor) -> int:
    """How many tensors share this one's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class no_graph:
    """`torch.no_grad` at a quarter of its cost: a small network's update enters it several times."""

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self.before)


def constant_in_graphs(function: Function) -> Function:
    """Let `torch.compile` call the function once, while compiling; torch's own decorator imports sympy."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
