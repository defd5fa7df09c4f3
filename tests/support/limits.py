"""Limits on memory and time inside a test: a small file must not cost more than a little of both."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TooSlow(BaseException):
    """Not an Exception, so that no code under test takes it for a damaged file."""


@contextlib.contextmanager
def limited(*, seconds: float, megabytes: int = 600) -> Iterator[None]:
    """Fail what takes longer, and let what takes more memory than that above today's run into a MemoryError."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds} seconds")

    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, stop)
    if sys.platform == "linux":  # which says what is in use, and obeys
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, before)
