"""Playing environments: one loop of steps for any policy, and random actions."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_training.errors import EnvironmentFailure, UserError

CLOSE_SECONDS = 30.0  # for all environments of a run or an evaluation
LEAST_CLOSE_SECONDS = 0.1  # for each of them, even if others have used up the time

Array = NDArray[Any]
# observations, infos and whether each is an episode's first, of N environments -> their actions
Act = Callable[[list[Any], list[Any], Array], Sequence[Any]]


class Played(NamedTuple):
    """One step of one environment; `obs` and `action` are copies, `next_obs` is the environment's own."""

    obs: Any
    action: Any
    reward: float
    next_obs: Any
    terminated: bool
    truncated: bool
    info: Any
    episode: int


def play(
    envs: Sequence[Any], act: Act, seed_of: Callable[[int], int | None], env_id: str, episodes: float = inf,
    longest: float = inf,
) -> Iterator[Played]:  # fmt: skip
    """Yield the steps of these environments in turn; each takes the next episode when one ends.

    Episode i is reset with `seed_of(i)` and cut after `longest` steps. Errors of an environment are reported as
    `env_id`.
    """
    current, begun = list(range(len(envs))), len(envs)  # the episode that each environment is in; beyond the last: none
    taken = [0] * len(envs)  # steps of that episode
    named = FailuresNamed(env_id)
    with named:
        rows, infos = (list(part) for part in zip(*(e.reset(seed=seed_of(i)) for i, e in enumerate(envs)), strict=True))
    is_first = np.ones(len(envs), dtype=bool)
    while any(episode < episodes for episode in current):
        actions = act(rows, infos, is_first)
        is_first = np.zeros(len(envs), dtype=bool)
        for i, env in enumerate(envs):
            if current[i] >= episodes:
                continue
            before = _copied(rows[i]), _copied(actions[i])
            with named:
                rows[i], reward, terminated, truncated, infos[i] = env.step(actions[i])
                step = Played(*before, float(reward), rows[i], terminated, truncated, infos[i], current[i])
            yield step
            taken[i] += 1
            if terminated or truncated or taken[i] >= longest:
                taken[i], current[i], begun, is_first[i] = 0, begun, begun + 1, True
                if current[i] < episodes:
                    with named:
                        rows[i], infos[i] = env.reset(seed=seed_of(current[i]))


def read_success(info: Any) -> bool | None:
    """Whether an episode that ended with this info succeeded; None if `info["is_success"]` does not say."""
    value = info.get("is_success") if isinstance(info, Mapping) else None
    return None if value is None else bool(value)


class FailuresNamed:
    """Turns an exception of an environment into an EnvironmentFailure with its name; a missing package stays as it is.

    Not a generator, because that would take nearly as long as a step of a small environment.
    """

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, UserError):
            from gymnasium.error import DependencyNotInstalled

            if not isinstance(error, DependencyNotInstalled):
                raise EnvironmentFailure.from_error(self.env_id, error) from error


def _copied(value: Any) -> Any:
    """A copy of an observation or action; the environment may overwrite the original."""
    return value.copy() if isinstance(value, np.ndarray) else value if isinstance(value, int) else deepcopy(value)


def close_all(envs: Iterable[Any], *, waits: bool = False) -> BaseException | None:
    """Close every environment, even if one raises or does not return; returns the first exception.

    All of them together have `CLOSE_SECONDS`, unless this `waits` for them.
    """
    failures: list[BaseException] = []
    end = inf if waits else time.monotonic() + CLOSE_SECONDS
    for env in envs:
        try:
            with _time_limit(max(end - time.monotonic(), LEAST_CLOSE_SECONDS)):
                env.close()
        except (Exception, SystemExit) as error:
            failures.append(error)
    return failures[0] if failures else None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over, even while it waits.

    The block runs in this thread, because a renderer can often be closed only where it was made. Only the main thread
    can be interrupted; elsewhere, and where there is no alarm (Windows), there is no limit. After a signal, a run has
    its own alarm, which stays.
    """
    can_limit = hasattr(signal, "setitimer") and current_thread() is main_thread()
    if seconds == inf or not can_limit or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError(f"its close did not return in time ({CLOSE_SECONDS:g} seconds)")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, in case the exception was lost in a finalizer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


@contextmanager
def closed_after(
    envs: Iterable[Any], env_id: str, warn: Callable[[str], None] | None = None, *, waits: bool = False
) -> Iterator[None]:
    """Close every environment at the end, as `close_all` does; pass an exception of `close` to `warn`, or raise it.

    After an error in the block, only that error is reported.
    """
    try:
        yield
    except BaseException:
        close_all(envs, waits=waits)
        raise
    if (error := close_all(envs, waits=waits)) is None:
        return
    failure = EnvironmentFailure.from_error(env_id, error)
    if warn is None:
        raise failure from error
    warn(f"warning: while closing, {failure}")


def random_actions(
    rng: np.random.Generator, count: int, sizes: Sequence[int], masks: Array | None = None, kind: str = "discrete"
) -> Array:
    """Uniform actions of a policy: choices [count] or [count, K], of those that masks allow, or floats in [-1, 1]."""
    if kind == "continuous":
        return rng.uniform(-1.0, 1.0, (count, len(sizes))).astype(np.float32)
    if kind == "discrete" and masks is None:
        return rng.integers(sizes[0], size=count)
    scores = rng.random((count, sum(sizes)))
    if masks is not None:
        scores = np.where(masks, scores, -1.0)
    if kind == "discrete":
        best: Array = scores.argmax(-1)
        return best
    return np.stack([part.argmax(-1) for part in np.split(scores, np.cumsum(sizes)[:-1], axis=-1)], axis=-1)
