"""Changes of networks in place: target networks, which follow an online one, and moves of a categorical support."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rl_training.ops.distributional import carry_over
from rl_training.speed.optimizer import join_parameters


class TargetNetwork:
    """A copy of `online` without gradients; `network` is the module to register and to call.

    Make it after the optimizers, which move the parameters of `online` into flat tensors: parameters that are
    adjacent there are adjacent in the copy too, and `copy_` and `polyak_` are one operation for all of them. Buffers (a
    normalizer's statistics, a support) are shared, not copied, so that they are always equal. This class is not a
    module: the learner's `self.target_network = target.network` puts the network into `state_dict` once.
    """

    def __init__(self, online: nn.Module) -> None:
        shared = {id(buffer): buffer for buffer in online.buffers()}
        self.online, self.network = online, copy.deepcopy(online, shared).requires_grad_(False)
        self._join()

    def _join(self) -> None:
        """Find adjacent parameters of the online network, and make them adjacent in the target."""
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (target, online), each flat
        self._first: list[nn.Parameter] = []  # of the online side of each pair
        run: list[tuple[nn.Parameter, nn.Parameter]] = []
        for mine, theirs in zip(self.network.parameters(), self.online.parameters(), strict=True):
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
        target = run[0][0].detach() if alone else join_parameters([mine for mine, _ in run])
        self._pairs.append((target, online))
        self._first.append(first)

    @torch.no_grad()
    def copy_(self) -> None:
        """Make the target equal to the online network."""
        self._follow()
        for target, online in self._pairs:
            target.copy_(online)

    @torch.no_grad()
    def polyak_(self, tau: float) -> None:
        """Move the target the share `tau` of the way to the online network."""
        self._follow()
        for target, online in self._pairs:
            target.lerp_(online, tau)

    def _follow(self) -> None:
        pairs = zip(self._first, self._pairs, strict=True)
        if any(first.data_ptr() != online.data_ptr() for first, (_, online) in pairs):
            self._join()  # the learner was copied, or an optimizer was made later


def _adjacent(before: nn.Parameter, after: nn.Parameter) -> bool:
    """Whether one parameter starts in memory where the other ends, as pieces of one flat tensor."""
    return (
        before.dtype == after.dtype
        and before.is_contiguous()
        and after.is_contiguous()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


@torch.no_grad()
def move_support(support: Tensor, v_min: float, v_max: float, *heads: Any) -> None:
    """Spread `support` [K] from `v_min` to `v_max`, and change the last layers of the `heads` that predict on it.

    All of it happens in place, so captured steps and numpy policies see it. Predicted means stay the same within about
    half the distance of two new atoms.
    """
    wider = torch.linspace(v_min, v_max, len(support), device="cpu").to(support)
    if torch.equal(wider, support):
        return
    weights, offsets = carry_over(support, wider)
    for head in heads:
        head.combine_outputs(weights, offsets)
    support.copy_(wider)
