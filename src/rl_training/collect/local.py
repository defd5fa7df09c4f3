"""Acting in this process: `Behaviour`, the policy that acts, and `Collector`, where it acts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Carry, defines_explore, overrides
from rl_training.data.store import Experience, ExperienceLayout, Request, Timed, untimed
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import Step, Stepper, StepTold
from rl_training.errors import UserError
from rl_training.speed.capture import HostStep
from rl_training.speed.passes import NumpyPolicy
from rl_training.speed.recurrent_passes import NumpyMemory

NOTHING = Experience(ExperienceLayout(0, 0, (), "float32"))


class Behaviour:
    """Acting network, exploration numbers, generators and memory for N environments.

    In the learner's process it acts with the learner itself: nothing is copied, and a numpy policy reads the current
    weights. In other processes it acts with a second learner of the same spec, whose weights `unpack` loads.
    """

    def __init__(self, algorithm: Algorithm, spaces: EnvSpaces, num_envs: int, rng: np.random.Generator) -> None:
        self.algorithm, self.spaces, self.rng = algorithm, spaces, rng
        self.device = algorithm.device
        self.memory = algorithm.exploring_carry(num_envs)
        self.held: Array | None = None  # the last random actions
        self._explore = HostStep(self.explore, algorithm.numbers, algorithm.generator, self.device)

    def act(self, obs: Array, masks: Array | None, is_first: Array) -> tuple[Array, dict[str, Array]]:
        """Actions [N, ...] for encoded observations, and the values to store with them."""
        if self.numpy_policy is not None:
            found = {}
            if self.numpy_memory is not None:
                obs, found["states"] = self.numpy_memory(obs, self.memory.numpy(), is_first)
                self.memory = torch.from_numpy(found["states"])
            return self.numpy_policy(obs, masks, self.rng, False), found
        given = {"obs": obs, "action_masks": masks, "is_first": None if self.memory is None else is_first}
        given = {name: array for name, array in given.items() if array is not None}
        found, self.memory = self._explore(given, self.memory)
        return found.pop("actions"), found

    @torch.no_grad()
    def explore(self, given: Mapping[str, Tensor], memory: Carry) -> tuple[dict[str, Tensor], Carry]:
        """Actions and extras on the device."""
        first, legal = given.get("is_first"), given.get("action_masks")
        out = self.algorithm.act_in_training(given["obs"], memory, is_first=first, action_masks=legal)
        return {**out.extras, "actions": out.actions}, out.carry

    @cached_property
    def numpy_policy(self) -> NumpyPolicy | None:
        """The learner's policy in numpy, if it has one that explores as the learner does."""
        own = overrides(type(self.algorithm), "act") or defines_explore(type(self.algorithm))
        return None if own else self.algorithm.numpy_policy()

    @cached_property
    def numpy_memory(self) -> NumpyMemory | None:
        """The memory that this policy reads in place of observations, if it has one."""
        return self.algorithm.numpy_memory()

    def act_randomly(self, count: int, masks: Array | None, hold: float) -> Array:
        """Uniform actions, each repeated for `hold` steps on average; with masks, a new legal one at every step."""
        actions = self.spaces.random_actions(self.rng, count, masks)
        if hold > 1 and masks is None:
            if self.held is not None:
                kept = self.rng.random(count) >= 1 / hold
                actions[kept] = self.held[kept]
            self.held = actions.copy()
        return actions

    def add_logprobs(self, experience: Experience) -> None:
        """After acting in numpy, compute log-probabilities of all actions in one pass, if the learner reads them."""
        if experience.logprobs is None or self.numpy_policy is None or not self.algorithm.reads_logprobs:
            return  # or they stay 0
        steps, masks = experience.steps, experience.masks
        obs, actions = (torch.from_numpy(array[:steps]).flatten(0, 1) for array in (experience.obs, experience.actions))
        legal = None if masks is None else torch.from_numpy(masks[:steps]).flatten(0, 1)
        policy: Any = self.algorithm.policy
        if experience.states is not None:  # the memory's outputs are in the states after them
            states = torch.from_numpy(experience.states[1 : steps + 1]).flatten(0, 1)
            policy, obs = policy.heads, policy.memory.outputs_in(states)
        with torch.no_grad():
            logprobs = policy.distribution(obs, legal).log_prob(actions)
        experience.logprobs[:steps] = logprobs.view(steps, -1).numpy()

    # transfer ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of updates that produced the weights."""
        return self.algorithm.num_updates

    def pack(self) -> Array:
        """Network, normalizers, exploration numbers and version as one array of bytes."""
        numbers = [math.nan if number is None else float(number) for number in self.algorithm.numbers.values()]
        arrays = [tensor.detach().cpu().numpy() for tensor in self.algorithm.acting_tensors()]
        arrays.append(np.array([*numbers, self.version]))
        return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])

    @torch.no_grad()
    def unpack(self, packed: Array) -> None:
        """Load the result of `pack` from another process or an earlier time."""
        begin = 0
        for tensor in self.algorithm.acting_tensors():
            end = begin + tensor.numel() * tensor.element_size()
            tensor.copy_(torch.from_numpy(packed[begin:end].copy()).view(tensor.dtype).view(tensor.shape))
            begin = end
        *values, version = packed[begin:].copy().view(np.float64).tolist()
        for name, value in zip(self.algorithm.numbers, values, strict=True):
            self.algorithm.numbers[name] = None if math.isnan(value) else value
        self.algorithm.num_updates = int(version)

    def state_dict(self) -> dict[str, Any]:
        """The policy's memory, if it has one, and the repeated random actions."""
        memory = {} if self.memory is None else {"carry": self.memory.clone()}
        return memory if self.held is None else memory | {"held": self.held.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if self.memory is not None:
            self.memory.copy_(state["carry"])
        self.held = state.get("held")


class Collector:
    """Where a behaviour acts: owns the environments and the policy's memory. This one, for recorded data, has none."""

    part = "store"  # of a turn, to which the time of `collect` belongs
    started = False  # whether episodes have started
    envs: Sequence[Any] = ()  # the environments, where they are in this process

    def collect(self, behaviour: Behaviour, request: Request) -> Experience:
        """The requested experience, valid until the next call; here nothing."""
        return NOTHING

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """Metrics since the previous call; a call with `last` does not reset them: a resumed run does not repeat it."""
        return {}

    def watch_steps(self, told: StepTold) -> None:
        """Call `told` after every step; only a collector that has `envs` can."""
        raise NotImplementedError

    def interrupt(self, error: BaseException) -> None:
        """Raise this instead of the next step; here the turn ends with its update."""

    def abandon(self) -> None:
        """Discard the current episodes and start new ones."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a saved state; return one sentence for each thing that could not be restored exactly."""
        return []

    def close(self) -> None:
        """Close the environments."""


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


class LocalCollector(Collector):
    """Steps environments in this process.

    `actor` acts: it is the learner's own behaviour or, with a `lag`, another one that is that many turns behind.
    """

    def __init__(self, actor: Behaviour, stepper: Stepper, experience: Experience, lag: int | None = None) -> None:
        self.actor, self.stepper, self.experience = actor, stepper, experience
        self.lag = None if lag is None else Lag(lag)
        self._timed: Timed = untimed

    @property
    def started(self) -> bool:  # type: ignore[override]  # a read-only view
        """Whether episodes have started."""
        return self.stepper.started

    @property
    def envs(self) -> Sequence[Any]:  # type: ignore[override]  # a read-only view
        """The environments, where they are in this process."""
        return self.stepper.engine.envs

    def watch_steps(self, told: StepTold) -> None:
        """Call `told` after every step."""
        self.stepper.engine.watch_steps(told)

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
        all_obs, all_actions, all_masks = experience.obs, experience.actions, experience.masks
        rewards, terminated, truncated = experience.rewards, experience.terminated, experience.truncated
        if experience.states is not None:
            experience.states[0] = actor.memory.cpu()
        count, t, taken = stepper.num_envs, 0, 0
        while t < request.steps or taken < request.transitions:
            all_obs[t] = stepper.obs
            if all_masks is not None:
                all_masks[t] = stepper.masks
            actions = self._choose(act, experience, t, request, is_random=taken < request.random)
            all_actions[t] = actions
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
        if experience.starts is not None:
            experience.starts[t] = stepper.is_first
        experience.steps, experience.transitions = t, taken
        self._timed(actor.add_logprobs, "act")(experience)

    def _choose(self, act: Any, experience: Experience, t: int, request: Request, *, is_random: bool) -> Array:
        """The actions of row t; writes what the policy found with them."""
        stepper, states, starts = self.stepper, experience.states, experience.starts
        if is_random and states is None:
            return self.actor.act_randomly(stepper.num_envs, stepper.masks, request.hold)
        extras: dict[str, Array]
        actions, extras = act(stepper.obs, stepper.masks, stepper.is_first)
        if states is not None and starts is not None:
            starts[t], states[t + 1] = stepper.is_first, extras.pop("states")
        if is_random:  # a memory reads every observation
            return self.actor.act_randomly(stepper.num_envs, stepper.masks, request.hold)
        if extras and experience.logprobs is not None and experience.values is not None:
            experience.logprobs[t], experience.values[t] = extras["logprobs"], extras["values"]
            experience.has_values = True
        chosen: Array = actions
        return chosen

    @staticmethod
    def _keep_finals(experience: Experience, t: int, result: Step) -> None:
        if result.final_obs is not None and experience.final_obs is not None:
            rows = result.terminated | result.truncated
            experience.final_obs[t, rows] = result.final_obs[rows]
            if result.final_masks is not None and experience.final_masks is not None:
                experience.final_masks[t, rows] = result.final_masks[rows]

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """What the environments have logged."""
        return self.stepper.engine.metrics(last=last)

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
