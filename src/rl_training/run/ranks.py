"""Several learners: the processes that `torchrun` starts for one run, and the data that they exchange.

Every rank collects, learns and counts as it would alone. Gradients and statistics are those of all ranks together, so
all ranks have the same weights, bit for bit; only rank 0 writes. Every rank must make the same calls here in the same
order, because a call waits for the others.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.data.store import Experience, Request
from rl_training.errors import EnvironmentFailure
from rl_training.record.checkpoints import pack_tree, unpack_tree

T = TypeVar("T")
LONGEST_WAIT = timedelta(days=7)  # for an evaluation by rank 0, or for another rank's environment
FAILED = 2.0**52  # sent instead of a number of episodes


class RankFailure(EnvironmentFailure):
    """Another rank failed, or is gone; one line, and the command line exits with 1."""


class Ranks:
    """The ranks of a run of one process: nothing is exchanged."""

    rank, count, local_rank = 0, 1, 0

    def seed(self, seed: int) -> int:
        """The seed of this rank's own environments and draws; rank 0's is the run's."""
        return seed if self.rank == 0 else int(np.random.SeedSequence([seed, 2, self.rank]).generate_state(1)[0])

    def join(self, algorithm: Algorithm) -> None:
        """Make a learner learn together with those of the other ranks."""

    def average(self, numbers: Sequence[float]) -> list[float]:
        """Each number's mean over the ranks."""
        return list(numbers)

    def largest(self, number: float) -> float:
        """The largest of all ranks."""
        return number

    def first(self, function: Callable[[], T]) -> T:
        """Call the function in rank 0 only; every rank returns its result, or raises its error."""
        return function()

    def union(self, items: Iterable[T]) -> list[T]:
        """The items of all ranks, rank by rank; raises an error that another rank passes to `tell`."""
        return list(items)

    def settled(self, collect: Callable[[Request], Experience]) -> Callable[[Request], Experience]:
        """`collect` with the episodes of all ranks; all raise a failure of one, before anything is stored."""
        return collect

    def knows(self, error: BaseException) -> bool:
        """Whether every rank has this error, so that they can continue together."""
        return True

    def gather(self, algorithm: Mapping[str, Any], source: Mapping[str, Any]) -> list[dict[str, Any]]:
        """In rank 0, the state of the other ranks: experience, and what learners do not share."""
        return []


class TorchRanks(Ranks):
    """The ranks of torch's process group: gloo for tensors on the CPU, NCCL for those on GPUs."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self._known: BaseException | None = None

    def join(self, algorithm: Algorithm) -> None:
        """Set these ranks in every module whose class has `ranks`."""
        for module in algorithm.modules():
            if hasattr(type(module), "ranks"):
                module.ranks = self  # type: ignore[assignment]

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:  # from gloo or NCCL
            reason = f"rank {self.rank} lost another learner of this run ({str(error).splitlines()[0]})"
            raise RankFailure(f"{reason}; its last message says why.") from error

    # called by learners ------------------------------------------------------------------------------------------

    def mean_(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks, in place."""
        self._call(dist.all_reduce, tensor)
        return tensor.div_(self.count)

    def largest_(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, element by element, in place."""
        self._call(dist.all_reduce, tensor, dist.ReduceOp.MAX)
        return tensor

    def moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (divided by the number of rows) of all ranks' rows; each rank has the same number."""
        own = torch.stack([mean, var]).double()
        every = [torch.empty_like(own) for _ in range(self.count)]
        self._call(dist.all_gather, every, own)
        means, variances = torch.stack(every).unbind(1)
        mean_of_all = means.mean(0)
        return mean_of_all.to(mean.dtype), (variances + (means - mean_of_all).square()).mean(0).to(var.dtype)

    def std_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`torch.std_mean` of all ranks' numbers."""
        mean, var = self.moments(x.mean(), x.var(correction=0))
        rows = x.numel() * self.count
        return (var * (rows / (rows - 1))).sqrt(), mean

    # called by a run ---------------------------------------------------------------------------------------------

    def average(self, numbers: Sequence[float]) -> list[float]:
        """Each number's mean over the ranks."""
        return self.mean_(torch.tensor(numbers, dtype=torch.float64)).tolist() if numbers else []

    def largest(self, number: float) -> float:
        """The largest of all ranks."""
        value = torch.tensor(float(number), dtype=torch.float64)
        self._call(dist.all_reduce, value, dist.ReduceOp.MAX)
        return value.item()

    def first(self, function: Callable[[], T]) -> T:
        """Rank 0 calls the function and sends the outcome; only a second signal ends it without telling the others."""
        done: list[Any] = [None, None]
        if self.rank == 0:
            try:
                done[0] = function()
            except BaseException as error:
                if type(error) is not KeyboardInterrupt:
                    self._call(dist.broadcast_object_list, [None, self._portable(error)])
                    self._known = error
                raise
        self._call(dist.broadcast_object_list, done)
        self._raise_first(done[1:])
        return done[0]

    def _raise_first(self, told: Iterable[Any]) -> None:
        """Raise the first error among what ranks have sent."""
        for error in told:
            if isinstance(error, BaseException):
                self._known = error
                raise error

    def _portable(self, error: BaseException) -> BaseException:
        """The error, or a RankFailure with its text if it cannot be pickled."""
        try:
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return error
        except Exception:  # raised by the error's own class
            pass
        return RankFailure(f"rank {self.rank} failed with {type(error).__name__}: {error}")

    def union(self, items: Iterable[T]) -> list[T]:
        """Exchanges only one small number if no rank has an item."""
        own = list(items)
        most = self.largest(len(own))
        if not most:
            return own
        every = self._exchange(own)
        self._raise_first(every)
        return [item for part in every for item in part]

    def tell(self, error: BaseException) -> None:
        """Raise an error in the other ranks, which wait in `union`; call this instead of it."""
        self.largest(FAILED)
        self._exchange(self._portable(error))
        self._known = error

    def settled(self, collect: Callable[[Request], Experience]) -> Callable[[Request], Experience]:
        """Exchange episodes or failures of all ranks; only a second signal ends a rank without telling the others."""

        def collect_together(request: Request) -> Experience:
            try:
                experience = collect(request)
            except BaseException as error:
                if type(error) is not KeyboardInterrupt:
                    self.tell(error)
                raise
            experience.episodes = self.union(experience.episodes)
            if experience.totals is not None:
                self.mean_(experience.totals)
            return experience

        return collect_together

    def _exchange(self, own: Any) -> list[Any]:
        every: list[Any] = [None] * self.count
        self._call(dist.all_gather_object, every, own)
        return every

    def knows(self, error: BaseException) -> bool:
        """Whether the error came from `first`, `union` or `tell`."""
        return self._known is not None and self._known in (error, error.__cause__)

    def gather(self, algorithm: Mapping[str, Any], source: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of a learner's state, only the entries that differ from rank 0's, such as generators and running returns."""
        digests = {name: hashlib.sha256(pack_tree({"value": value})).digest() for name, value in algorithm.items()}
        known = self.first(lambda: digests)
        own = {name: value for name, value in algorithm.items() if digests[name] != known[name]}
        packed = b"" if self.rank == 0 else pack_tree({"algorithm": own, "source": dict(source)})
        every: list[Any] | None = [None] * self.count if self.rank == 0 else None
        self._call(dist.gather_object, packed, every)
        return [] if every is None else [unpack_tree(data) for data in every[1:]]


def resume_command(count: int) -> str:
    """The command to continue with that many ranks."""
    return "rl-training resume" if count == 1 else f"torchrun --nproc-per-node {count} -m rl_training resume"


def join_ranks() -> Ranks:
    """The ranks of this process: several if `torchrun` started it as one of several; set up once per process."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Ranks()
    if not dist.is_initialized():
        gpus = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=LONGEST_WAIT)
        if not gpus:  # NCCL would wait for ranks that may be gone
            atexit.register(leave_ranks)
    return TorchRanks()


def leave_ranks() -> None:
    """End the connections to the other ranks: gloo's threads may otherwise abort a process that has done its work."""
    if dist.is_initialized():
        dist.destroy_process_group()
