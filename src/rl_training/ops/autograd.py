"""Call autograd's engine directly, without the checks of `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def differentiate(outputs: Sequence[Tensor], slopes: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Gradients of a loss at the inputs, from its slopes at the outputs; None for an input that has no effect.

    The checks of `torch.autograd.grad` take as long as the backward pass of a small loss. They also import sympy at the
    first call, which takes up to three seconds.
    """
    return _engine_run_backward(
        tuple(outputs), tuple(slopes), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
