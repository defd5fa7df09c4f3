"""Collect experience in this process, and define the interface of all collectors."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np

from rl_training.algorithms.base import Array
from rl_training.collect.behaviour import Behaviour
from rl_training.data.experience import Experience, ExperienceLayout, Request, Timed, untimed
from rl_training.envs.stepper import Step, Stepper
from rl_training.errors import UserError


class Collector(Protocol):
    """Where a behaviour acts. It owns the environments and the policy's memory."""

    part: str  # of a turn, to which the time of `collect` belongs

    @property
    def started(self) -> bool:
        """Whether episodes have started."""

    def collect(self, behaviour: Behaviour, request: Request) -> Experience:
        """The requested experience, valid until the next call."""

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """Metrics since the previous call; a call with `last` does not reset them: a resumed run does not repeat it."""

    def interrupt(self, error: BaseException) -> None:
        """Raise this instead of the next step."""

    def abandon(self) -> None:
        """Discard the current episodes and start new ones."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a saved state; return one sentence for each thing that could not be restored exactly."""

    def close(self) -> None: ...


class Lag:
    """Packed behaviours of the last turns; the oldest one acts."""

    def __init__(self, turns: int) -> None:
        self.packed: deque[Array] = deque(maxlen=turns + 1)

    def follow(self, behaviour: Behaviour) -> Array:
        """Add a behaviour; return the one from `turns` turns ago, or the first one."""
        self.packed.append(behaviour.pack())
        return self.packed[0]

    def restore(self, packed: list[Any], size: int) -> None:
        """Restore stored behaviours, each of which must have `size` bytes."""
        if not all(isinstance(array, np.ndarray) and array.shape == (size,) for array in packed):
            raise UserError("it has weights of an acting policy in the layout of an earlier version.")
        self.packed.extend(packed)


class LocalCollector:
    """Steps environments in this process.

    `actor` acts: it is the learner's own behaviour or, with a `lag`, another one that is that many turns behind.
    """

    part = "store"
    def __init__(self, actor: Behaviour, stepper: Stepper, experience: Experience, lag: int | None = None) -> None:
        self.actor, self.stepper, self.experience = actor, stepper, experience
        self.lag = None if lag is None else Lag(lag)
        self._timed: Timed = untimed

    @property
    def started(self) -> bool:
        """Whether episodes have started."""
        return self.stepper.started

    def collect(self, behaviour: Behaviour, request: Request) -> Experience:
        """Step every environment until there is enough."""
        actor = self.actor
        if actor is not behaviour:
            assert self.lag is not None
            actor.unpack(self.lag.follow(behaviour))
            actor.algorithm.generator = behaviour.algorithm.generator
        self.fill(self.experience, request)
        self.experience.has_values &= actor is behaviour
        return self.experience

    def fill(self, experience: Experience, request: Request) -> None:
        """Write the steps into the experience."""
        actor, stepper = self.actor, self.stepper
        experience.clear()
        experience.version = actor.version
        if request.is_empty:
            return
        act, step = self._timed(actor.act, "act"), self._timed(stepper.step, "environment")
        self._timed(stepper.start, "environment")()
        if experience.valid is not None:
            experience.valid.fill(True)
        all_obs, all_actions, all_masks, logprobs = (
            experience.obs, experience.actions, experience.masks, experience.logprobs
        )  # fmt: skip
        rewards, terminated, truncated = experience.rewards, experience.terminated, experience.truncated
        count, t, taken = stepper.num_envs, 0, 0
        extras: dict[str, Array]
        while t < request.steps or taken < request.transitions:
            obs, masks = stepper.obs, stepper.masks
            all_obs[t] = obs
            if all_masks is not None:
                all_masks[t] = masks
            if taken < request.random:
                actions, extras = actor.act_randomly(count, masks, request.hold), {}
            else:
                actions, extras = act(obs, masks, stepper.is_first)
            all_actions[t] = actions
            if extras and logprobs is not None:
                logprobs[t] = extras["logprobs"]
                experience.values[t] = extras["values"]  # type: ignore[index]  # they come together
                experience.has_values = True
            result, ended = step(actions)
            rewards[t] = result.rewards
            terminated[t] = result.terminated
            truncated[t] = result.truncated
            if ended:
                experience.episodes += ended
                self._keep_finals(experience, t, result)
            if result.valid is None:
                taken += count
            else:
                experience.valid[t] = result.valid  # type: ignore[index]  # the layout holds resets
                experience.has_resets = True
                taken += int(np.count_nonzero(result.valid))
            t += 1
        experience.obs[t] = stepper.obs
        if experience.masks is not None:
            experience.masks[t] = stepper.masks
        experience.steps, experience.transitions = t, taken
        self._timed(actor.add_logprobs, "act")(experience)

    @staticmethod
    def _keep_finals(experience: Experience, t: int, result: Step) -> None:
        if result.final_obs is not None and experience.final_obs is not None:
            rows = result.terminated | result.truncated
            experience.final_obs[t, rows] = result.final_obs[rows]
            if result.final_masks is not None and experience.final_masks is not None:
                experience.final_masks[t, rows] = result.final_masks[rows]

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """No metrics: nothing waits."""
        return {}

    def watch(self, timed: Timed) -> None:
        """Let `timed` replace the calls of the policy and the environments."""
        self._timed = timed

    def interrupt(self, error: BaseException) -> None:
        """Raise this instead of the next step."""
        self.stepper.interruption = error

    def abandon(self) -> None:
        """Discard the current episodes and start new ones."""
        self.stepper.abandon()

    def state_dict(self) -> dict[str, Any]:
        """Environments, the policy's memory, and the weights that a lagging policy still needs."""
        state = {"stepper": self.stepper.state_dict(), **self.actor.state_dict()}
        return state if self.lag is None else state | {"weights": list(self.lag.packed)}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        if self.lag is not None:
            self.lag.restore(state["weights"], len(self.actor.pack()))
        self.actor.load_state_dict(state)
        return self.stepper.load_state_dict(state["stepper"])

    def close(self) -> None:
        """Close the environments."""
        self.stepper.close()


class NoCollector:
    """For recorded data: no environment is built, and nothing is collected."""

    started, part = False, "store"

    def collect(self, behaviour: Behaviour, request: Request) -> Experience:
        """Nothing."""
        return NOTHING

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """No metrics."""
        return {}

    def interrupt(self, error: BaseException) -> None:
        """Do nothing: the turn ends with its update."""

    def abandon(self) -> None:
        """There are no episodes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing to close."""


NOTHING = Experience(ExperienceLayout(0, 0, (), "float32"))
