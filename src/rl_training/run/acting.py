"""Acting outside training, for evaluation, prediction and `actor()`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Carry
from rl_training.envs.action_masks import read_masks
from rl_training.envs.spaces import EnvSpaces
from rl_training.play import Act
from rl_training.speed.capture import HostStep

CAN_BE_LEFT = False  # a signal may not interrupt this code (run/interruption.py)

_LOCKS: WeakKeyDictionary[Algorithm, Any] = WeakKeyDictionary()


def acting_lock(algorithm: Algorithm) -> Any:
    """The lock for acting with a learner outside training, while another generator is set."""
    return _LOCKS.setdefault(algorithm, threading.RLock())


class ActingSession:
    """Acts in N environments with its own generators and memory; never changes the generators of training.

    Several sessions may use one learner from different threads; they take turns.
    """

    def __init__(self, algorithm: Algorithm, num_envs: int, seed: int, *, deterministic: bool = True) -> None:
        self.algorithm, self.num_envs, self.deterministic = algorithm, num_envs, deterministic
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(algorithm.device).manual_seed(seed)

        def decide(given: Mapping[str, Tensor], carry: Carry) -> tuple[dict[str, Tensor], Carry]:
            first, legal = given.get("is_first"), given.get("action_masks")
            out = algorithm.act(given["obs"], carry, is_first=first, deterministic=deterministic, action_masks=legal)
            return {"actions": out.actions}, out.carry

        # not a method: a reference cycle would keep the session's graphs until garbage collection
        self._step = HostStep(decide, algorithm.numbers, self.generator, algorithm.device)
        self._numpy_policy = algorithm.numpy_policy()
        self._lock = acting_lock(algorithm)
        self.forget()

    def forget(self, num_envs: int | None = None) -> None:
        """Clear the memory, for another number of environments if given; the generators continue, so samples differ."""
        self.num_envs = self.num_envs if num_envs is None else num_envs
        self.carry = self.algorithm.initial_carry(self.num_envs)

    def act(self, obs: Array, masks: Array | None = None, is_first: Array | None = None) -> Array:
        """Actions of the policy for encoded observations [N, ...]."""
        with self._lock:
            if self._numpy_policy is not None:
                return self._numpy_policy(obs, masks, self.rng, self.deterministic)
            return self._act_in_torch(obs, masks, is_first)

    def in_environments(self, spaces: EnvSpaces, check: Callable[[], None] | None = None) -> Act:
        """A function that returns actions for environments with these spaces, for `play`; it calls `check` first."""

        def act(rows: list[Any], infos: list[Any], is_first: Array) -> Sequence[Any]:
            if check is not None:
                check()
            return spaces.as_given(self.act(spaces.encode_rows(rows), read_masks(infos, spaces), is_first))

        return act

    def _act_in_torch(self, obs: Array, masks: Array | None, is_first: Array | None) -> Array:
        given = {"obs": obs, "action_masks": masks, "is_first": is_first}
        arrays = {name: np.ascontiguousarray(array) for name, array in given.items() if array is not None}
        with evaluation_mode(self.algorithm, self.generator), torch.no_grad():
            found, self.carry = self._step(arrays, self.carry)
        actions: Array = found["actions"]
        return actions


@contextmanager
def evaluation_mode(algorithm: Algorithm, generator: torch.Generator) -> Iterator[None]:
    """Put the algorithm into eval mode with another generator, and restore both afterwards."""
    was_training, own = algorithm.training, algorithm.generator
    algorithm.eval()
    algorithm.generator = generator
    try:
        yield
    finally:
        algorithm.generator = own
        algorithm.train(was_training)
