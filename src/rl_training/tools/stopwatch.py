"""`Stopwatch`: measures where time goes by wrapping calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Adds the time of wrapped calls to the part they belong to, minus the time of wrapped calls inside them."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # per open call, the time of the wrapped calls inside it
        self._synchronize = synchronize or (lambda: None)

    def wrap(self, call: Any, part: str) -> Any:
        """Wrap a call to measure its time, including the time that a generator takes for each value."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(part):
                result = call(*args, **kwargs)
            return self._timed_values(result, part) if isinstance(result, Iterator) else result

        return timed

    def _timed_values(self, values: Iterator[Any], part: str) -> Iterator[Any]:
        end = object()
        while True:
            with self.timing(part):
                value = next(values, end)
            if value is end:
                return
            yield value

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of the block for that part."""
        self._inside.append(0.0)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            spent = time.perf_counter() - begun
            self.seconds[part] = self.seconds.get(part, 0.0) + spent - self._inside.pop()
            self._inside[-1] += spent
