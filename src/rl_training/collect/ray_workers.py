"""Collect in Ray actors: the workers of `collect/worker_process.py` on the nodes of a cluster."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError

from rl_training.algorithms.base import Array
from rl_training.collect.worker_process import MEMORIES, CollectingWorker, SharedMemory, WorkerPlan
from rl_training.data.store import Experience, Request
from rl_training.envs.worker_process import attempt
from rl_training.envs.workers import CLOSE_SECONDS, LOOK_EVERY, WorkerFailure, WorkerPool
from rl_training.errors import UserError, first_line

AUTHENTICATED = (2, 59)  # the first version whose local clusters ask for a token
KNOCK_SECONDS = 10.0  # how long to wait for an answer from the address of a cluster


class WorkerActor:
    """A Ray actor that holds one object, whose methods the learner calls by name."""

    def __init__(self) -> None:
        self.served: Any = None

    def make(self, maker: bytes) -> tuple[bool, Any]:
        """Make the object; modules are also searched for on the learner's path."""
        paths, pickled = pickle.loads(maker)
        sys.path.extend(path for path in paths if path not in sys.path)
        return attempt(lambda: setattr(self, "served", pickle.loads(pickled)()))

    def call(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Call a method; return its result, or a description of its exception."""
        return attempt(getattr(self.served, method), *arguments)

    def steps(self) -> int:
        """Steps taken so far; a second thread answers this while the object steps."""
        return 0 if self.served is None else self.served.steps()


class RayWorkers(WorkerPool):
    """Actors of the cluster that Ray is connected to, each with the resources that it needs."""

    def __init__(
        self, makers: Sequence[Callable[[], Any]], name: str, timeout: float, needs: Mapping[str, float]
    ) -> None:
        super().__init__(makers, name, timeout)
        check_room(self.count, needs)
        custom = {resource: amount for resource, amount in needs.items() if resource not in ("CPU", "GPU")}
        # Ray restarts nothing: only the learner knows a worker's state
        remote: Any = ray.remote  # its types lack concurrency groups
        self._make = remote(
            num_cpus=needs["CPU"], num_gpus=needs["GPU"], resources=custom, max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD", concurrency_groups={"watch": 1},
        )(WorkerActor)  # fmt: skip
        self._owed: dict[int, Any] = {}  # pending answers
        self._ends: dict[int, str] = {}  # how workers ended
        self._watched: dict[int, Any] = {}  # pending step counts
        self._steps, self._looked = np.zeros(self.count, np.int64), 0.0
        self._actors: list[Any] = []
        try:
            self._actors += [self._start(index) for index in range(self.count)]
            for index in range(self.count):
                self.get(index)
        except BaseException as error:
            self.close()
            if self._ends or not isinstance(error, WorkerFailure):
                raise
            raise UserError(
                f"num_workers is {self.count}, but Ray has not started them all in {timeout:g} seconds "
                f"(worker_timeout); each needs {describe_needs(needs)} that nothing else in the cluster uses."
            ) from None

    def _start(self, index: int) -> Any:
        actor = self._make.remote()
        self._owed[index] = actor.make.remote(self._makers[index])
        return actor

    def ask(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of one object; object references among the arguments arrive as their values."""
        self._owed[index] = self._actors[index].call.remote(method, *arguments)

    def ready(self, wanted: Iterable[int], seconds: float) -> list[int]:
        """The workers that have answered, or ended, within that time."""
        owed = {self._owed[index]: index for index in wanted}
        first, _ = ray.wait(list(owed), timeout=seconds)
        return [owed[one] for one in ray.wait(list(owed), num_returns=len(owed), timeout=0)[0]] if first else []

    def get(self, index: int, seconds: float | None = None) -> Any:
        """Return a worker's pending result; wait at most that long (None: `timeout`)."""
        limit = self.timeout if seconds is None else seconds
        if index not in self._owed:
            raise self._silent(index, limit)
        try:
            succeeded, result = ray.get(self._owed[index], timeout=limit)
        except GetTimeoutError:
            raise self._silent(index, limit) from None
        except RayError as error:
            self._ends[index] = describe_end(error)
            raise self._ended(index) from None
        del self._owed[index]
        if not succeeded:
            raise self._raised(index, result)
        return result

    def has_ended(self, index: int) -> bool:
        """Whether `get` has seen the worker end; the pending answer of a dead actor is ready at once."""
        return index in self._ends

    def _ended(self, index: int) -> WorkerFailure:
        return self._failure(index, f"failed: {self._ends[index]}")

    def restart(self, index: int) -> None:
        """Replace an actor with a new one, on any node that has room."""
        ray.kill(self._actors[index])
        for known in (self._ends, self._watched):
            known.pop(index, None)
        self._actors[index] = self._start(index)
        self.get(index)

    def steps(self) -> Array:
        """The steps that each object has taken, as of its last answer; objects that have answered are asked again."""
        if time.monotonic() < self._looked + LOOK_EVERY:
            return self._steps.copy()
        self._looked = time.monotonic()
        for index, actor in enumerate(self._actors):
            asked = self._watched.get(index)
            if asked is not None:
                if not ray.wait([asked], timeout=0)[0]:
                    continue
                with suppress(RayError):  # it has ended
                    self._steps[index] = ray.get(asked)
            self._watched[index] = actor.steps.options(concurrency_group="watch").remote()
        return self._steps.copy()

    def close(self) -> None:
        """End every actor, after closing its object if all are idle; a second call does nothing."""
        actors, self._actors = self._actors, []
        if actors and not self._owed:
            closing = [actor.call.remote("close") for actor in actors]
            with suppress(RayError):
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in actors:
            ray.kill(actor)
        for known in (self._owed, self._watched):
            known.clear()


def describe_end(error: RayError) -> str:
    """Ray's reason for the end of an actor, in a few words."""
    mark = "is dead because "
    _, found, reason = str(error).partition(mark)
    return reason.partition(".")[0].strip() if found else f"{type(error).__name__} in Ray"


def describe_needs(needs: Mapping[str, float]) -> str:
    """Resources in words."""
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount) or "nothing"


def check_room(count: int, needs: Mapping[str, float]) -> None:
    """Refuse more workers than the nodes can ever hold: Ray would wait for new nodes."""
    wanted = [(name, amount) for name, amount in needs.items() if amount]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted) for node in nodes if wanted)
    if wanted and room < count:
        raise UserError(
            f"num_workers is {count}, but the Ray cluster has room for {room} that need {describe_needs(needs)} each; "
            "lower num_workers or what ray reserves, or add nodes."
        )


class RayWorker(CollectingWorker):
    """A worker that gets the weights with the request and sends its experience with the answer.

    Its memory has the same layout as that of worker processes, so that the arithmetic is the same, bit for bit.
    """

    def __init__(self, plan: WorkerPlan, index: int) -> None:
        *_, self._counts, descriptor = plan.share()
        super().__init__(plan, index, descriptor)
        self._index = index

    def collect(self, number: int, request: Request, packed: Array | None = None) -> dict[str, Any]:
        """The answer as a message, and the arrays."""
        assert packed is not None
        self.packed[number % len(self.packed)] = packed
        answer = super().collect(number, request)
        return {"answer": pickle.dumps(answer), "arrays": pack_arrays(self.experiences[number % MEMORIES])}

    def steps(self) -> int:
        """Steps taken so far."""
        return int(self._counts[self._index])


def pack_arrays(experience: Experience) -> dict[str, Array]:
    """Contiguous copies of the rows that were filled; final observations and masks only of episodes that ended."""
    steps = experience.steps
    ends = experience.terminated[:steps] | experience.truncated[:steps]
    packed = {}
    for name, array in experience.arrays.items():
        if name.startswith("final_"):
            packed[name] = array[:steps][ends]
        elif name != "values":  # the learner computes them with its own weights
            packed[name] = np.ascontiguousarray(array[: steps + 1 if name in ("obs", "masks") else steps])
    return packed


def unpack_arrays(experience: Experience, packed: Mapping[str, Array]) -> None:
    """The inverse of `pack_arrays`."""
    ends = packed["terminated"] | packed["truncated"]
    for name, array in packed.items():
        if name.startswith("final_"):
            experience.arrays[name][: len(ends)][ends] = array
        else:
            experience.arrays[name][: len(array)] = array


class ObjectStore(SharedMemory):
    """Ray actors: weights go through Ray's object store, once per node, and answers carry the experience.

    At any time the store holds a few sets of weights and at most one answer per worker.
    """

    def __init__(self, plan: WorkerPlan, name: str, timeout: float, needs: Mapping[str, float]) -> None:
        self.experiences, _, _, descriptor = plan.share()
        os.close(descriptor)
        self._columns = plan.columns()
        self._weights: list[Any] = [None] * plan.behaviours
        self._owns_cluster = connect(plan.num_workers, needs)
        makers = [partial(RayWorker, plan, index) for index in range(plan.num_workers)]
        try:
            self.pool: RayWorkers = RayWorkers(makers, name, timeout, needs)
        except BaseException:
            self._disconnect()
            raise

    def send(self, number: int, packed: Array) -> None:
        """Put the weights into the store; Ray frees the weights that they replace once no worker reads them."""
        self._weights[number % len(self._weights)] = ray.put(packed)

    def ask(self, index: int, number: int, request: Request) -> None:
        """Ask a worker, with a reference that Ray turns into the weights where the worker is."""
        self.pool.ask(index, "collect", number, request, self._weights[number % len(self._weights)])

    def receive(self, index: int, number: int) -> dict[str, Any]:
        """A worker's answer; its experience is copied to its columns."""
        answer = self.pool.get(index)
        unpack_arrays(self.experiences[number % MEMORIES].columns(*self._columns[index]), answer["arrays"])
        return pickle.loads(answer["answer"])

    def steps(self) -> Array:
        """The workers' own counts, as they last gave them."""
        return self.pool.steps()

    def close(self) -> None:
        """End the actors, and the cluster if it was started for the run."""
        try:
            self.pool.close()
        finally:
            self._weights.clear()
            self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_cluster:
            with own_signals():
                ray.shutdown()


def connect(count: int, needs: Mapping[str, float]) -> bool:
    """Connect to the cluster in RAY_ADDRESS, or start one here for that many workers; False if already connected."""
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if not address and tuple(map(int, ray.__version__.split(".")[:2])) < AUTHENTICATED:
        needed = ".".join(map(str, AUTHENTICATED))
        raise UserError(f"Ray {ray.__version__} starts clusters that ask for no token; install ray>={needed}.")
    with own_signals():
        try:
            if address:
                knock(address)
                ray.init(**quiet)
            else:
                cpus = max(1, math.ceil(count * needs["CPU"]))
                with on_this_machine():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            where = f"RAY_ADDRESS is {address!r}, but there is no Ray cluster to use" if address else "Ray cannot start"
            raise UserError(f"{where} ({first_line(error)}).") from None
    return True


@contextmanager
def on_this_machine() -> Iterator[None]:
    """Let a cluster that starts here listen on 127.0.0.1 only, as it does on macOS; Ray has no public option for it."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def knock(address: str) -> None:
    """Raise OSError if nothing answers at the address: Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces with its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
