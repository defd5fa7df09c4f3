"""Target networks: a slow copy of an online network, moved by one operation per flat piece of its parameters."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class TargetNetwork:
    """A copy of `online` without gradients; `network` is the module to register and to call.

    Make it after the optimizers, which move the parameters of `online` into flat tensors: parameters that are
    adjacent there are so in the copy, and `copy_` and `polyak_` are one operation for all of them. Buffers (a
    normalizer's statistics, a support) are shared, not copied, so that they are always equal. Not a module itself: the
    learner's `self.target_network = target.network` puts it into the state once, under the online network's names.
    """

    def __init__(self, online: nn.Module) -> None:
        shared = {id(buffer): buffer for buffer in online.buffers()}
        self.network: nn.Module = copy.deepcopy(online, shared).requires_grad_(False)
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (target, online), each flat
        self._places: list[tuple[nn.Parameter, int]] = []
        run: list[tuple[nn.Parameter, nn.Parameter]] = []
        for mine, theirs in zip(self.network.parameters(), online.parameters(), strict=True):
            if run and not _adjacent(run[-1][1], theirs):
                self._add(run)
                run = []
            run.append((mine, theirs))
        if run:
            self._add(run)

    def _add(self, run: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Give the target's side of one run of adjacent parameters a flat tensor like the online side's."""
        first, sizes = run[0][1], [theirs.numel() for _, theirs in run]
        alone = len(run) == 1
        online = first.detach() if alone else first.detach().as_strided((sum(sizes),), (1,))
        target = online.clone()
        pieces = [target] if alone else target.split(sizes)
        for (mine, _), piece in zip(run, pieces, strict=True):
            mine.data = piece.view_as(mine)
        self._pairs.append((target, online))
        self._places.append((first, first.data_ptr()))

    @torch.no_grad()
    def copy_(self) -> None:
        """Make the target equal to the online network."""
        self._check()
        for target, online in self._pairs:
            target.copy_(online)

    @torch.no_grad()
    def polyak_(self, tau: float) -> None:
        """Move the target the share `tau` of the way to the online network."""
        self._check()
        for target, online in self._pairs:
            target.lerp_(online, tau)

    def _check(self) -> None:
        for parameter, place in self._places:
            if parameter.data_ptr() != place:
                raise RuntimeError("the online parameters have moved; make TargetNetwork after the optimizers")


def _adjacent(before: nn.Parameter, after: nn.Parameter) -> bool:
    """Whether one parameter starts in memory where the other ends, as pieces of one flat tensor."""
    return (
        before.dtype == after.dtype
        and before.is_contiguous()
        and after.is_contiguous()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )
