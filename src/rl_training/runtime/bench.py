"""Where the time of a short run goes. The methods of the live objects are wrapped, so other runs pay nothing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.experiment.config import TrainConfig
from rl_training.runtime.loop import run_loop
from rl_training.runtime.run import Run
from rl_training.runtime.session import Session, open_session

# What each part of a run is made of: methods of the source, of its stepper, of the algorithm and of the run.
PARTS = {
    "environment": ("source.stepper.step", "source.stepper.start"),
    "act": ("source._act", "source._evaluate", "source._take_policy"),
    "store": ("source.collect", "source.batches", "source.feedback"),
    "learn": ("algorithm.update",),
    "evaluate": ("run.evaluate",),
    "checkpoint": ("run.save_checkpoint",),
}
REST = "rest"


@dataclass
class Breakdown:
    """Seconds of a run by part; a part's seconds leave out the parts called inside it."""

    config: TrainConfig
    steps: int = 0
    updates: int = 0
    total_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second of training: evaluations and checkpoints left out, as in a run's own count."""
        aside = self.seconds.get("evaluate", 0.0) + self.seconds.get("checkpoint", 0.0)
        return self.steps / max(self.total_seconds - aside, 1e-9)


class Stopwatch:
    """Adds the time of wrapped calls to the part they belong to, less the time of wrapped calls inside them."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # per open call, the time of the wrapped calls inside it
        self._synchronize = synchronize or (lambda: None)  # a GPU works on after a call has returned

    def wrap(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The method, timed; what a generator does between its values counts too."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(part):
                result = method(*args, **kwargs)
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
        """Time of the block, as that part's."""
        self._inside.append(0.0)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            spent = time.perf_counter() - begun
            self.seconds[part] = self.seconds.get(part, 0.0) + spent - self._inside.pop()
            self._inside[-1] += spent


def benchmark(config: TrainConfig) -> Breakdown:
    """Run the config in a temporary folder and say where the time of its loop went; nothing is left behind."""
    session = open_session(config)
    try:
        warm_up(session)
    except BaseException:
        session.source.close()
        raise
    with tempfile.TemporaryDirectory(prefix="rl-training-bench-") as folder:
        return _run_timed(session, Path(folder))


def warm_up(session: Session) -> int:
    """One turn of the loop outside of any run, so that first calls are paid for; returns the steps it took."""
    collected = session.source.collect(session.algorithm, 0)
    for phase, batch in session.source.batches(session.algorithm, 0):
        session.source.feedback(batch, session.algorithm.update(batch, phase=phase, sync=False))
    return collected.steps


def _run_timed(session: Session, folder: Path) -> Breakdown:
    device = session.config.device
    watch = Stopwatch(torch.cuda.synchronize if device.startswith("cuda") else None)
    run = Run(session, folder)
    try:
        _wrap_parts(watch, {"source": session.source, "algorithm": session.algorithm, "run": run})
        with run.signals():
            begun = time.perf_counter()
            run_loop(session.algorithm, session.source, run)
            total = time.perf_counter() - begun
    finally:
        run.close()
    seconds = {part: watch.seconds.get(part, 0.0) for part in PARTS}
    seconds[REST] = max(0.0, total - sum(seconds.values()))
    return Breakdown(session.config, run.step, run.updates, total, seconds)


def _wrap_parts(watch: Stopwatch, roots: dict[str, Any]) -> None:
    for part, names in PARTS.items():
        for name in names:
            root, *between, method = name.split(".")
            target = roots[root]
            for attribute in between:
                target = getattr(target, attribute, None)
            if callable(getattr(target, method, None)):  # lanes differ in what they have
                setattr(target, method, watch.wrap(getattr(target, method), part))


def measure_rate(session: Session, seconds: float) -> float:
    """Environment steps per second of collecting and learning; a lane without an environment counts updates."""
    begun = time.perf_counter()
    steps = warm_up(session) or 1
    spent = time.perf_counter() - begun
    if spent < 3 * seconds:  # a turn that takes long is not worth a second one: first calls hardly show in it
        begun, steps = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            steps += warm_up(session) or 1
        spent = time.perf_counter() - begun
    return steps / spent


def storage_bytes(session: Session) -> int:
    """Bytes of the arrays that the session's source keeps experience in."""
    return sum(_bytes(value) for name, value in vars(session.source).items() if name in ("storage", "replay", "buffer"))


def _bytes(value: Any, depth: int = 4) -> int:
    if isinstance(value, np.ndarray | torch.Tensor):
        return int(value.nbytes)
    parts = list(value.values()) if isinstance(value, dict) else list(getattr(value, "__dict__", {}).values())
    return sum(_bytes(part, depth - 1) for part in parts) if depth else 0


def format_bytes(count: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
