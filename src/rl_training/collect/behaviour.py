"""`Behaviour`: the acting policy, which can be sent as one flat array."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Carry, NumpyPolicy
from rl_training.data.experience import Experience
from rl_training.envs.spaces import EnvSpaces
from rl_training.speed.capture import HostStep


class Behaviour:
    """Acting network, exploration numbers, generators and memory for N environments.

    In the learner's process it acts with the learner itself: nothing is copied, and a numpy policy reads the current
    weights. In other processes it acts with a second learner of the same spec, whose weights `unpack` loads.
    """

    def __init__(self, algorithm: Algorithm, spaces: EnvSpaces, num_envs: int, rng: np.random.Generator) -> None:
        self.algorithm, self.spaces, self.rng = algorithm, spaces, rng
        self.device = algorithm.device
        self.memory = algorithm.initial_carry(num_envs)
        self.held: Array | None = None  # the last random actions
        self._explore = HostStep(self.explore, algorithm.numbers, algorithm.generator, self.device)
        self._numpy_policy: NumpyPolicy | None = None
        self._asked_for_policy = False

    def act(self, obs: Array, masks: Array | None, is_first: Array) -> tuple[Array, dict[str, Array]]:
        """Actions [N, ...] for encoded observations, and the values to store with them."""
        policy = self._numpy_policy if self._asked_for_policy else self._ask_for_policy()
        if policy is not None:
            return policy(obs, masks, self.rng, False), {}
        given = {"obs": obs, "action_masks": masks, "is_first": None if self.memory is None else is_first}
        given = {name: array for name, array in given.items() if array is not None}
        found, self.memory = self._explore(given, self.memory)
        return found.pop("actions"), found

    @torch.no_grad()
    def explore(self, given: Mapping[str, Tensor], memory: Carry) -> tuple[dict[str, Tensor], Carry]:
        """Actions and extras on the device."""
        first, legal = given.get("is_first"), given.get("action_masks")
        out = self.algorithm.act(given["obs"], memory, is_first=first, action_masks=legal)
        return {**out.extras, "actions": out.actions}, out.carry

    def _ask_for_policy(self) -> NumpyPolicy | None:
        self._numpy_policy, self._asked_for_policy = self.algorithm.numpy_policy(), True
        return self._numpy_policy

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
        if experience.logprobs is None or self._numpy_policy is None:
            return
        if not self.algorithm.reads_logprobs:  # they stay 0
            return
        steps, masks = experience.steps, experience.masks
        obs, actions = (torch.from_numpy(array[:steps]).flatten(0, 1) for array in (experience.obs, experience.actions))
        legal = None if masks is None else torch.from_numpy(masks[:steps]).flatten(0, 1)
        policy: Any = self.algorithm.acting()
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
