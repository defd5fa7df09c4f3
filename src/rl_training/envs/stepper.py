"""`Stepper`: scales actions, distinguishes the ends of episodes, and counts episodes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from rl_training.envs.episodes import Differences, differences, join_names
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.errors import EnvironmentFailure

CAN_BE_LEFT = True  # a signal may interrupt this code (run/interruption.py)


class Step(NamedTuple):
    """One step of N environments, rows in order.

    `final_obs` holds the true last observation in the rows that ended (same-step autoreset) and arbitrary values in the
    others; it is None if no row ended. `final_masks` are the legal actions there. `valid` is None, or false in the rows
    in which an engine with next-step autoreset only reset.
    """

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    final_obs: Array | None = None
    masks: Array | None = None
    valid: Array | None = None
    final_masks: Array | None = None


class Engine:
    """Steps N environments with actions in the environment's own form."""

    resets_next_step = False  # if true, the row after an end holds the final observation, and its step only resets
    state_format = ""  # engines with the same format read each other's states; empty: it cannot be saved
    unsaved = ""  # why it cannot be saved, as the beginning of a sentence

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations and masks."""
        raise NotImplementedError

    def step(self, actions: Array) -> Step:
        """Step every environment."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue from here."""
        return {}

    def brief_state(self) -> dict[str, Any]:
        """The state without the parts that grow with an episode, for a caller that records the actions."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the environments; return their current observations and masks."""
        return self.reset()

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """What the environments have logged, as `Collector.metrics`."""
        return {}

    def notes(self) -> list[str]:
        """Sentences for the start of a run."""
        return []

    def close(self) -> None:
        """Close the environments."""


class Episode(NamedTuple):
    """A finished episode of the training environments."""

    episode_return: float
    length: int


NO_REWARDS: Array = np.zeros(0, dtype=np.float32)


class Stepper:
    """Steps an engine with actions of a policy and keeps the current observation and the episode statistics."""

    def __init__(self, engine: Engine, spaces: EnvSpaces, num_envs: int) -> None:
        self.engine, self.spaces, self.num_envs = engine, spaces, num_envs
        self.obs: Array = np.empty(0)
        self.masks: Array | None = None
        self.is_first = np.ones(num_envs, dtype=bool)
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.started = False
        self.interruption: BaseException | None = None  # raised instead of the next step
        self._map = spaces.map_actions
        self._sees_floats, self._is_mixed = spaces.obs_kind != "image", spaces.obs_kind == "mixed"

    @property
    def resets_next_step(self) -> bool:
        """Whether the row after an end holds the final observation (see `Engine`)."""
        return self.engine.resets_next_step

    def start(self) -> None:
        """Reset the environments once; a restored stepper is already started."""
        if not self.started:
            self.obs, self.masks = self.engine.reset()
            self._check_finite(self.obs, NO_REWARDS, None)
            self.started = True

    def step(self, actions: Array) -> tuple[Step, list[Episode]]:
        """Apply a policy's actions `[N, ...]`; return the step and the episodes that ended."""
        if self.interruption is not None:
            raise self.interruption
        step = self.engine.step(self._map(actions))
        self._check_finite(step.obs, step.rewards, step.final_obs)
        self.obs, self.masks = step.obs, step.masks
        self.returns += step.rewards
        self.lengths += 1
        if step.valid is not None:
            self.returns[~step.valid] = 0.0
            self.lengths[~step.valid] = 0
        self.is_first = done = step.terminated | step.truncated
        if self.engine.resets_next_step:
            self.is_first = np.zeros_like(done) if step.valid is None else ~step.valid
        if not np.count_nonzero(done):  # several times faster than any() on a few rows
            return step, []
        ended = np.flatnonzero(done)
        episodes = [Episode(float(self.returns[i]), int(self.lengths[i])) for i in ended]
        self.returns[ended] = 0.0
        self.lengths[ended] = 0
        return step, episodes

    def _check_finite(self, obs: Array, rewards: Array, final_obs: Array | None) -> None:
        """Raise an error that names the environment if it returned a NaN or infinity, before that reaches the loss."""
        if self._is_mixed:
            obs, final_obs = self.spaces.floats_of(obs), None if final_obs is None else self.spaces.floats_of(final_obs)
        squares: Any = np.vdot(rewards, rewards)  # half the time of isfinite; an overflow is checked again
        if self._sees_floats:
            squares = squares + np.vdot(obs, obs) + (0.0 if final_obs is None else np.vdot(final_obs, final_obs))
        if math.isfinite(squares):
            return
        for what, values in (("a reward", rewards), ("an observation", obs), ("an observation", final_obs)):
            if values is not None and not np.isfinite(values).all():
                raise EnvironmentFailure.not_finite(self.spaces.env_id, what)

    def state_dict(self, engine: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything needed to continue exactly from here, with the engine's state or the given one.

        It is empty before the start, and if the engine's state cannot be saved.
        """
        if not self.started or not self.engine.state_format:
            return {}
        engine = self.engine.state_dict() if engine is None else engine
        return {
            "format": self.engine.state_format, "engine": engine, "obs": self.obs,
            "is_first": self.is_first, "returns": self.returns.copy(), "lengths": self.lengths.copy(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the environments; return one sentence for each difference."""
        if not state:
            return []
        if state["format"] != self.engine.state_format or len(state["obs"]) != self.num_envs:
            return [f"{self.spaces.env_id} has another engine or number of environments now; new episodes start."]
        self.obs, self.masks = self.engine.load_state_dict(state["engine"])
        self.is_first = np.array(state["is_first"])
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.started = True
        found = self.find_differences(state)
        if not any(found):
            return []
        what = f"{self.spaces.env_id} did not replay to the stored {join_names([*found.seen, *found.hidden])}"
        if not found.seen and not found.hidden:
            what = f"{join_names(found.unseen)} of {self.spaces.env_id} cannot be compared with the stored state"
        return [f"{what}, so this resume {'is not' if found.seen else 'may not be'} exact."]

    def find_differences(self, stored: dict[str, Any]) -> Differences:
        """The differences from `stored`."""
        seen = [] if np.array_equal(self.obs, stored["obs"]) else ["observation"]
        total = Differences(seen, [], [])
        states = stored["engine"], self.engine.state_dict()
        if states[0].get("device") != states[1].get("device"):  # another kind of device draws other numbers
            seen.append("random generator")
        for pair in zip(*(state.get("episodes", []) for state in states), strict=True):
            for names, more in zip(total, differences(*pair), strict=True):
                names += more
        return total

    def abandon(self) -> None:
        """Discard the current episodes: the state is empty from now on, and new ones start."""
        self.started, self.is_first = False, np.ones(self.num_envs, dtype=bool)
        self.returns[:] = self.lengths[:] = 0

    def close(self) -> None:
        """Close the environments."""
        self.engine.close()
