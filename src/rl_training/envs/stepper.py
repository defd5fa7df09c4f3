"""`Stepper`: the one place where actions are scaled, ends are told apart, and episodes are counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rl_training.envs.engines import Engine, Step
from rl_training.envs.spaces import Array, EnvSpaces


class Episode(NamedTuple):
    """A finished episode of the training environments."""

    episode_return: float
    length: int


class Stepper:
    """Steps an engine with actions of a policy and keeps the current observation and the episode statistics."""

    def __init__(self, engine: Engine, spaces: EnvSpaces, num_envs: int) -> None:
        self.engine, self.spaces, self.num_envs = engine, spaces, num_envs
        self.obs: Array = np.empty(0)
        self.masks: Array | None = None
        self.is_first = np.ones(num_envs, dtype=bool)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._started = False

    @property
    def resets_next_step(self) -> bool:
        """Whether the row after an end holds the final observation (see `Engine`)."""
        return self.engine.resets_next_step

    def start(self) -> None:
        """Reset the environments, once; a restored stepper is started already."""
        if not self._started:
            self.obs, self.masks = self.engine.reset()
            self._started = True

    def step(self, actions: Array) -> tuple[Step, list[Episode]]:
        """Apply a policy's actions `[N, ...]`; returns what happened and the episodes that ended."""
        step = self.engine.step(self.spaces.map_actions(actions))
        self.obs, self.masks = step.obs, step.masks
        self._returns += step.rewards
        self._lengths += 1
        if step.valid is not None:
            self._returns[~step.valid] = 0.0
            self._lengths[~step.valid] = 0
        self.is_first = done = step.terminated | step.truncated
        if self.resets_next_step:
            self.is_first = np.zeros_like(done) if step.valid is None else ~step.valid
        if not done.any():
            return step, []
        ended = np.flatnonzero(done)
        episodes = [Episode(float(self._returns[i]), int(self._lengths[i])) for i in ended]
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return step, episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here."""
        return {
            "engine": self.engine.state_dict(), "obs": self.obs, "masks": self.masks, "is_first": self.is_first,
            "returns": self._returns, "lengths": self._lengths,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Bring the environments back; false when they did not come back to the same observation."""
        replayed = self.engine.load_state_dict(state["engine"])
        self.obs = np.array(state["obs"])
        self.masks = None if state["masks"] is None else np.array(state["masks"])
        self.is_first = np.array(state["is_first"])
        self._returns, self._lengths = np.array(state["returns"]), np.array(state["lengths"])
        self._started = True
        same = replayed is None or bool(np.array_equal(replayed, self.obs))
        if not same and replayed is not None:
            self.obs = replayed  # the policy must see where the environment really is
        return same

    def close(self) -> None:
        """Close the environments."""
        self.engine.close()
