"""Every private name of torch that this package uses; `tests/speed/test_private_torch.py` checks each of them.

Torch may change these without notice. Each is here because its public counterpart costs more than a small network's
arithmetic. They are torch's own functions, with some arguments filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.autograd.graph import _engine_run_backward

Function = TypeVar("Function", bound=Callable[..., Any])

# differentiate(outputs, slopes, inputs=...), all tuples of tensors: gradients of a loss at the inputs, from its slopes
# at the outputs; None for an input that has no effect. The checks of `torch.autograd.grad` take as long as the backward
# pass of a small loss, and import sympy at the first call, which takes up to three seconds.
differentiate: Callable[..., tuple[Any, ...]] = partial(
    _engine_run_backward, keep_graph=False, create_graph=False, allow_unreachable=True, accumulate_grad=False
)
# record_graph(bool): whether autograd records what follows. `torch.no_grad` takes four times as long, and a small
# network's update needs it several times.
record_graph: Callable[[bool], None] = torch._C._set_grad_enabled
# Copy tensors into one [P]; `torch.cat` would need a reshaped view of each.
concatenate: Callable[..., Tensor] = _flatten_dense_tensors
# copy_all(targets, sources): copy each source into its target, all of one dtype: one kernel on a GPU.
copy_all: Callable[..., None] = torch._foreach_copy_
# adam_step(parameters, gradients, means, squares, state_steps=[...], lr=..., eps=...): Adam's step, in place.
# `torch.optim.Adam` would loop over groups and states in Python.
adam_step: Callable[..., None] = partial(
    torch._fused_adam_, max_exp_avg_sqs=[], beta1=0.9, beta2=0.999, weight_decay=0.0, amsgrad=False, maximize=False
)


def holder_counter(tensor: Tensor) -> Callable[[], int]:
    """A function that counts how many tensors share this one's memory, as long as the tensor exists."""
    return partial(torch._C._storage_Use_Count, tensor.untyped_storage()._cdata)


def constant_in_graphs(function: Function) -> Function:
    """Let `torch.compile` call the function once, while compiling; torch's own decorator imports sympy."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
