"""The rollout store: T steps of N environments become one batch [T, N] (A2C, PPO, TRPO, IMPALA, APPO)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch, UpdateResult
from rl_training.data.experience import Experience, Request, Timed
from rl_training.data.memory import as_tensors
from rl_training.data.store import StoreContext

COLUMNS = ("actions", "rewards", "terminated", "truncated", "logprobs")
MOST_IMAGES = 1024  # whose values are computed at a time


class RolloutStore:
    """Keeps one rollout and returns it as one batch, with values from the learner."""

    def __init__(self, context: StoreContext) -> None:
        self.params, self.spaces, self.rng = context.params, context.spaces, context.rng
        self.device = torch.device(context.device)
        self.layout = context.layout(self.params.num_steps, logprobs=True)
        self.metrics: dict[str, float] = {}
        self.experience: Any = None
        lead = (self.params.num_steps, context.num_envs)
        self.values = np.zeros((lead[0] + 1, lead[1]), dtype=np.float32)
        self.truncation_values = np.zeros(lead, dtype=np.float32)
        self._batches: dict[Experience, dict[str, Tensor]] = {}

    def describe(self) -> str:
        """The rollout's size, for the start of a run."""
        return f"rollouts of {self.layout.max_steps} x {self.layout.num_envs} steps"

    def request(self, step: int) -> Request:
        """Request `num_steps` steps of every environment."""
        return Request(steps=self.params.num_steps)

    def add(self, experience: Experience, step: int) -> int:
        """Keep a rollout until the next one."""
        self.experience = experience
        return experience.transitions

    @torch.no_grad()
    def _evaluate(self, algorithm: Algorithm) -> None:
        """Compute the values of all observations with the learner's critic, unless acting has computed them."""
        experience, device = self.experience, self.device
        policy: Any = algorithm.policy

        def evaluate(obs: Array) -> Array:
            return self._value(policy, torch.from_numpy(obs).to(device)).cpu().numpy()

        if experience.has_values:
            self.values[:-1] = experience.values
            self.values[-1] = evaluate(experience.obs[-1])
        else:
            self.values[:] = evaluate(experience.obs.reshape(-1, *experience.obs.shape[2:])).reshape(self.values.shape)
        if experience.final_obs is None:  # the row after an end holds the final observation
            self.truncation_values[:] = self.values[1:]
        else:
            rows = experience.truncated & ~experience.terminated
            if rows.any():
                self.truncation_values[rows] = evaluate(experience.final_obs[rows])

    def _value(self, policy: Any, rows: Tensor) -> Tensor:
        """Values [B] of observations [B, ...]; images are evaluated in chunks, whose features fit into memory."""
        if self.spaces.obs_kind == "vector":
            values: Tensor = policy.values(rows)
            return values
        return torch.cat([policy.values(part) for part in rows.split(MOST_IMAGES)])

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield the rollout once, or nothing if a short one has only reset rows."""
        experience, device = self.experience, self.device
        reads_values = algorithm.reads_values
        if isinstance(experience.obs, Tensor):
            yield "policy", self._hand_over(algorithm, reads_values)
            return
        if experience.has_resets and not experience.valid.any():
            return
        if reads_values:
            self._evaluate(algorithm)
        known = self._batches.get(experience)
        if known is None or device.type != "cpu":  # once on the CPU: its tensors share the experience's memory
            arrays = {name: getattr(experience, name) for name in COLUMNS} | {"obs": experience.obs[:-1]}
            if experience.masks is not None:
                arrays["action_masks"] = experience.masks[:-1]
            if reads_values:
                arrays |= {"values": self.values[:-1], "bootstrap_value": self.values[-1]}
                arrays["truncation_values"] = self.truncation_values
            else:
                arrays["bootstrap_obs"] = experience.obs[-1]
            known = as_tensors(arrays, device)
            known["behavior_logprobs"] = known["logprobs"]
            self._batches[experience] = known
        batch = dict(known)
        if experience.has_resets:
            batch["valid"] = torch.from_numpy(experience.valid).to(device)
        if not reads_values and experience.final_obs is not None and experience.truncated.any():
            batch["final_obs"] = torch.from_numpy(experience.final_obs).to(device)
        yield "policy", batch

    @torch.no_grad()
    def _hand_over(self, algorithm: Algorithm, reads_values: bool) -> dict[str, Tensor]:
        """The batch of experience in tensors; the host reads nothing, so it has final observations of all rows."""
        experience, count = self.experience, self.layout.num_envs
        policy: Any = algorithm.policy
        batch = {name: getattr(experience, name) for name in COLUMNS} | {"obs": experience.obs[:-1]}
        batch["behavior_logprobs"] = batch["logprobs"]
        if not reads_values:
            return batch | {"bootstrap_obs": experience.obs[-1], "final_obs": experience.final_obs}
        batch["truncation_values"] = self._value(policy, experience.final_obs.flatten(0, 1)).view(-1, count)
        values = self._value(policy, experience.obs.flatten(0, 1)).view(-1, count)
        return batch | {"values": values[:-1], "bootstrap_value": values[-1]}

    def watch(self, timed: Timed) -> None:
        """Let `timed` replace the evaluation of a rollout."""
        self._evaluate = timed(self._evaluate, "act")  # type: ignore[method-assign]

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Rollouts need no feedback."""

    def state_dict(self) -> dict[str, Any]:
        """The generator only, because a rollout lasts one turn."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        self.rng.bit_generator.state = state["rng"]
        return []

    def close(self) -> None:
        """Nothing to close."""
