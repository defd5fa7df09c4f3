"""Worker processes: new interpreters with one object each, whose methods are called by name. None can hang or outlive
a run.

The object defines what a worker does: `envs/engines.py` steps one environment, `tools/doctor.py` plays one. What all of
them need is here too: shared memory, and the environments that are registered in this process.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from rl_training.envs.spaces import Array
from rl_training.envs.worker_process import receive, send
from rl_training.errors import EnvironmentFailure, UserError, kind_and_line, user_line

ENTRY = Path(__file__).with_name("worker_process.py")
LOOK_EVERY = 0.5  # seconds between checks of the processes; usually a closed socket shows the end at once
CLOSE_SECONDS = 10.0  # for `close` of the objects
ALIGNMENT = 64  # bytes, of arrays in shared memory
ENDS: dict[int | None, str] = {
    None: "stopped answering", -signal.SIGSEGV: "ended in a segmentation fault",
    -signal.SIGKILL: "was killed by signal 9, often because memory ran out",
}  # fmt: skip
TIMEOUT = "worker_timeout"  # the setting that most limits come from
LEAVE_SECONDS = 2.0  # for a process to end after `close`, or after a failure


class WorkerFailure(EnvironmentFailure):
    """A worker process ended or stopped answering."""


class Worker:
    """One process and the socket to it."""

    def __init__(self, timeout: float, descriptors: Sequence[int]) -> None:
        self.line, other = socket.socketpair()
        self.line.settimeout(timeout)
        self.poll = select.poll()
        self.poll.register(self.line, select.POLLIN)
        # Linux ends the process with the thread that starts it. That is right for the main thread, which lives as long
        # as the run; a process started from another thread ends when its socket closes.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [sys.executable, str(ENTRY), str(other.fileno()), str(parent)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            descriptors = (other.fileno(), *descriptors)
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            other.close()

    def describe_end(self) -> str:
        """How the process ended; waits a moment if only its socket has closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_SECONDS)
        code = self.process.returncode
        if code is None or code in ENDS:
            return ENDS[code]
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def end(self, deadline: float) -> None:
        """Wait for the process until the deadline, then kill it and the programs that it started."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not lead its group yet
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_SECONDS)


class WorkerPool(ABC):
    """Objects in other processes, created there by their makers and called by name, one request in flight each.

    Error messages call the environment `name`. WorkerFailure is raised if a worker ended or gave no answer for
    `timeout` seconds; an exception in an object is raised here with its text.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], name: str, timeout: float) -> None:
        self.name, self.timeout, self.count = name, timeout, len(makers)
        try:
            self._makers = [pickle.dumps((sys.path, cloudpickle.dumps(maker))) for maker in makers]
        except Exception as error:
            reason = kind_and_line(error)
            raise UserError(f"{name} cannot be sent to a worker process ({reason}); use vectorization sync.") from error

    @abstractmethod
    def ask(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of one object; `get` has its result."""

    @abstractmethod
    def ready(self, wanted: Iterable[int], seconds: float) -> list[int]:
        """The workers that have answered, or ended, within that time."""

    @abstractmethod
    def get(self, index: int, seconds: float | None = None) -> Any:
        """Return the pending result of a worker; wait at most that long (None: `timeout`)."""

    @abstractmethod
    def has_ended(self, index: int) -> bool:
        """Whether the worker is gone."""

    @abstractmethod
    def restart(self, index: int) -> None:
        """Replace a worker with a new one, whatever its state."""

    @abstractmethod
    def close(self) -> None:
        """End every worker: cleanly if all are idle, otherwise by force; may be called again."""

    @abstractmethod
    def _ended(self, index: int) -> WorkerFailure: ...

    def failure(self, index: int, seconds: float) -> WorkerFailure:
        """The failure of a worker that has ended, or has not answered for that long."""
        return self._ended(index) if self.has_ended(index) else self._silent(index, seconds)

    def _raised(self, index: int, error: dict[str, Any]) -> Exception:
        if error["module"] == UserError.__module__:  # already a sentence for users
            kind = UserError if error["kind"] == UserError.__name__ else EnvironmentFailure
            failure: Exception = kind(self._in_worker(index, error["message"]))
        else:
            line = user_line(error["trace"])
            sentence = str(EnvironmentFailure.raised(self.name, error["kind"], error["message"], line))
            failure = EnvironmentFailure(self._in_worker(index, sentence))
        failure.__cause__ = RuntimeError(error["trace"])
        return failure

    def _silent(self, index: int, seconds: float, limit: str = TIMEOUT) -> WorkerFailure:
        return self._failure(index, f"gave no answer for {seconds:g} seconds ({limit})")

    def _failure(self, index: int, what: str) -> WorkerFailure:
        return WorkerFailure(self._in_worker(index, str(EnvironmentFailure.of(self.name, what))))

    def _in_worker(self, index: int, sentence: str) -> str:
        """The sentence with the worker named at the end of its first part."""
        head, mark, tail = sentence.partition("; ")
        where = f" (worker {index + 1} of {self.count})" if self.count > 1 else ""
        return f"{head}{where}{mark}{tail}"


class Workers(WorkerPool):
    """Processes on this machine. If all are called at once, a failure in one ends all."""

    def __init__(
        self, makers: Sequence[Callable[[], Any]], name: str, timeout: float, descriptors: Sequence[int] = ()
    ) -> None:
        super().__init__(makers, name, timeout)
        self._descriptors = descriptors
        self._workers: list[Worker] = []
        self._busy: set[int] = set()  # workers with a pending answer
        try:
            for _ in makers:  # start all of them before waiting for the first
                self._workers.append(Worker(timeout, descriptors))
            self._exchange(self._makers, timeout)
        except OSError as error:
            self._end()
            what = f"{self.count} processes for {name} cannot start here ({kind_and_line(error)})"
            raise UserError(f"{what}; lower num_envs, or num_workers where there are workers.") from error
        except BaseException:
            self._end()
            raise

    # one at a time: the caller handles failures -----------------------------------------------------------------

    def ask(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method of one object; `get` has its result."""
        self._send(index, pickle.dumps((method, arguments)))

    def ready(self, wanted: Iterable[int], seconds: float) -> list[int]:
        """The workers that have answered, or ended, within that time."""
        lines = {self._workers[index].line.fileno(): index for index in wanted}
        poll = select.poll()
        for line in lines:
            poll.register(line, select.POLLIN)
        return [lines[line] for line, _ in poll.poll(1e3 * seconds)]

    def get(self, index: int, seconds: float | None = None) -> Any:
        """Return the pending result of a worker; wait at most that long (None: `timeout`)."""
        limit = self.timeout if seconds is None else seconds
        if index not in self._busy:
            raise self._silent(index, limit)
        return self._wait_for([index], limit)[0]

    def has_ended(self, index: int) -> bool:
        """Whether the process is gone."""
        return self._workers[index].process.poll() is not None

    def restart(self, index: int) -> None:
        """Replace a process with a new one, whatever its state."""
        old = self._workers[index]
        if old.line.fileno() >= 0:  # otherwise an earlier restart failed
            old.line.close()
            old.end(time.monotonic())
        try:
            self._workers[index] = Worker(self.timeout, self._descriptors)
        except OSError as error:
            raise self._failure(index, f"needs a new process, which cannot start ({error})") from None
        self._send(index, self._makers[index])
        self.get(index)

    # all at once: a failure in one ends all ---------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every object, all at once; return the results in order."""
        return self.call_each(method, [arguments] * self.count)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]], extra: float = 0.0) -> list[Any]:
        """`call` with other arguments for each object, and `extra` seconds of time."""
        if self._busy or not self._workers:
            raise EnvironmentFailure.of(self.name, "was interrupted" if self._busy else "has lost its worker processes")
        try:
            limit = f"{TIMEOUT} and {extra:g} more" if extra else TIMEOUT
            return self._exchange([pickle.dumps((method, given)) for given in arguments], self.timeout + extra, limit)
        except (EnvironmentFailure, UserError):
            with suppress(EnvironmentFailure, UserError):  # report the first failure
                self.close()
            raise

    def _exchange(self, requests: list[bytes], timeout: float, limit: str = TIMEOUT) -> list[Any]:
        """Send each worker its request, and wait for every answer or for the first failure."""
        for index, request in enumerate(requests):
            self._send(index, request)
        return self._wait_for(range(self.count), timeout, limit)

    def _send(self, index: int, request: bytes) -> None:
        self._busy.add(index)
        self._on_line(index, send, request)

    def _wait_for(self, wanted: Sequence[int], seconds: float, limit: str = TIMEOUT) -> list[Any]:
        """The answers of these workers, awaited in turn: it takes the fewest wake-ups. If one is late, look at all.

        A process may have ended while a program that it started keeps its socket open. `limit` names the setting that
        the time comes from.
        """
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        for index in wanted:
            while index not in results:
                left = deadline - time.monotonic()
                if self._workers[index].poll.poll(1e3 * min(LOOK_EVERY, max(0.0, left))):
                    results[index] = self._take_answer(index)
                    continue
                for other in self.ready(set(wanted) - results.keys(), 0.0):
                    results[other] = self._take_answer(other)
                for late in sorted(set(wanted) - results.keys()):
                    if self.has_ended(late):
                        raise self._ended(late)
                    if time.monotonic() > deadline:
                        raise self._silent(late, seconds, limit)
        return [results[index] for index in wanted]

    def _take_answer(self, index: int) -> Any:
        succeeded, result = pickle.loads(self._on_line(index, receive))
        self._busy.discard(index)
        if not succeeded:
            raise self._raised(index, result)
        return result

    def _on_line(self, index: int, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(self._workers[index].line, *arguments)
        except TimeoutError:
            raise self._silent(index, self.timeout) from None
        except (EOFError, OSError):
            raise self._ended(index) from None

    def _ended(self, index: int) -> WorkerFailure:
        return self._failure(index, f"failed: its process {self._workers[index].describe_end()}")

    def close(self) -> None:
        """End every process, cleanly if all are idle, otherwise by force; a second call does nothing."""
        try:
            if self._workers and not self._busy:
                self._exchange([pickle.dumps(("close", ()))] * self.count, CLOSE_SECONDS, "the limit for close")
        finally:
            self._end()

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        self._busy.clear()
        for worker in workers:
            worker.line.close()
        deadline = time.monotonic() + LEAVE_SECONDS
        for worker in workers:
            worker.end(deadline)


def share_arrays(
    layout: Sequence[tuple[tuple[int, ...], Any]], descriptor: int | None = None
) -> tuple[list[Array], int]:
    """Arrays of these shapes and types in unnamed shared memory, and its descriptor; or open a given descriptor."""
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    descriptor = _open_memory(starts[-1]) if descriptor is None else descriptor
    memory = mmap.mmap(descriptor, starts[-1])
    arrays = [np.ndarray(shape, dtype, memory, at) for (shape, dtype), at in zip(layout, starts[:-1], strict=True)]
    return arrays, descriptor


def _open_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rl_training")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def pickle_registrations() -> dict[str, bytes]:
    """The environments that other code registered with Gymnasium, which a new interpreter does not know."""
    found = {}
    for name, spec in gym.registry.items():
        if str(spec.entry_point).startswith("gymnasium.envs."):
            continue
        with suppress(Exception):  # an environment that cannot be pickled is an error only if it is used
            found[name] = cloudpickle.dumps(spec)
    return found


def register_missing(registrations: Mapping[str, bytes]) -> None:
    """Register with Gymnasium what `pickle_registrations` found and this process does not have yet."""
    # a module that registers its environments when it is imported finds them there
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry")
    for name, pickled in registrations.items():
        if name not in gym.registry:
            with suppress(Exception):
                gym.registry[name] = cloudpickle.loads(pickled)
