"""Acting outside training: one object that evaluation, prediction and `actor()` share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, Array
from rl_training.envs.spaces import EnvSpaces, read_masks
from rl_training.play import Act

_LOCKS: WeakKeyDictionary[Algorithm, Any] = WeakKeyDictionary()


def acting_lock(algorithm: Algorithm) -> Any:
    """The lock of everybody who acts with a learner outside training: for a moment each puts its own generator in."""
    return _LOCKS.setdefault(algorithm, threading.RLock())


class ActingSession:
    """Acts for N environments with its own generators and memory; never moves the training stream.

    Several sessions of one learner may act in several threads, one after the other.
    """

    def __init__(self, algorithm: Algorithm, num_envs: int, seed: int, *, deterministic: bool = True) -> None:
        self.algorithm, self.num_envs, self.deterministic = algorithm, num_envs, deterministic
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator(algorithm.device).manual_seed(seed)
        self._numpy_policy = algorithm.numpy_policy()
        self._lock = acting_lock(algorithm)
        self.forget()

    def forget(self) -> None:
        """Empty the memory; the generators go on, so that sampled episodes differ."""
        self.carry = self.algorithm.initial_carry(self.num_envs)

    def act(self, obs: Array, masks: Array | None = None, is_first: Array | None = None) -> Array:
        """Actions of the policy for encoded observations [N, ...]."""
        with self._lock:
            if self._numpy_policy is not None:
                return self._numpy_policy(obs, masks, self.rng, self.deterministic)
            return self._act_in_torch(obs, masks, is_first)

    def in_environments(self, spaces: EnvSpaces, check: Callable[[], None] | None = None) -> Act:
        """What `play` asks for actions in environments of these spaces; `check` is called before and may raise."""

        def act(rows: list[Any], infos: list[Any], is_first: Array) -> Sequence[Any]:
            if check is not None:
                check()
            return spaces.as_given(self.act(spaces.encode_rows(rows), read_masks(infos, spaces), is_first))

        return act

    def _act_in_torch(self, obs: Array, masks: Array | None, is_first: Array | None) -> Array:
        device = self.algorithm.device

        def tensor(array: Array | None) -> Any:
            return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

        with evaluation_mode(self.algorithm, self.generator), torch.no_grad():
            out = self.algorithm.act(
                tensor(obs), self.carry, is_first=tensor(is_first), deterministic=self.deterministic,
                action_masks=tensor(masks),
            )  # fmt: skip
        self.carry = out.carry
        return out.actions.cpu().numpy()


@contextmanager
def evaluation_mode(algorithm: Algorithm, generator: torch.Generator) -> Iterator[None]:
    """The algorithm in eval mode with another generator, and back."""
    was_training, own = algorithm.training, algorithm.generator
    algorithm.eval()
    algorithm.generator = generator
    try:
        yield
    finally:
        algorithm.generator = own
        algorithm.train(was_training)
