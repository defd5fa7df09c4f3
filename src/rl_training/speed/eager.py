"""Modules that `torch.compile` leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def leave_eager(modules: Iterable[nn.Module]) -> None:
    """Keep the `forward` of every module whose class says `stays_eager` out of what is compiled from now on.

    Only a program that compiles calls this: `torch.compiler.disable` imports torch's compiler with sympy, which takes
    a second or more, so as a decorator it would delay the start of every program.
    """
    kinds: set[Any] = {type(module) for module in modules}
    for kind in kinds:
        if getattr(kind, "stays_eager", False):
            kind.forward = torch.compiler.disable(kind.forward)
            kind.stays_eager = False  # it is done
