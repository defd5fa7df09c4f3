"""Storage of one rollout: preallocated arrays [T, N, ...] that numpy writes and torch reads in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, as_tensors


class RolloutStorage:
    """T steps of N environments, plus the observation after the last step (row T of `obs`)."""

    def __init__(
        self, num_steps: int, num_envs: int, *, obs_shape: Sequence[int], obs_dtype: str, action_shape: Sequence[int],
        continuous: bool, mask_size: int = 0, may_hold_resets: bool = False,
    ) -> None:  # fmt: skip
        lead = (num_steps, num_envs)
        self.num_steps, self.num_envs = lead
        self.obs: Array = np.zeros((num_steps + 1, num_envs, *obs_shape), dtype=obs_dtype)
        self.actions: Array = np.zeros((*lead, *action_shape), dtype=np.float32 if continuous else np.int64)
        self.rewards: Array = np.zeros(lead, dtype=np.float32)
        self.terminated: Array = np.zeros(lead, dtype=bool)
        self.truncated: Array = np.zeros(lead, dtype=bool)
        self.truncation_values: Array = np.zeros(lead, dtype=np.float32)
        self.logprobs: Array = np.zeros(lead, dtype=np.float32)
        self.values: Array = np.zeros((num_steps + 1, num_envs), dtype=np.float32)
        self.action_masks: Array | None = np.ones((*lead, mask_size), dtype=bool) if mask_size else None
        self.valid: Array | None = np.ones(lead, dtype=bool) if may_hold_resets else None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    def batch(self, device: torch.device) -> dict[str, Tensor]:
        """The rollout [T, N, ...] as a batch; on the CPU the tensors share this storage's memory."""
        arrays = {
            "obs": self.obs[:-1], "actions": self.actions, "rewards": self.rewards, "terminated": self.terminated,
            "truncated": self.truncated, "truncation_values": self.truncation_values, "logprobs": self.logprobs,
            "values": self.values[:-1], "bootstrap_value": self.values[-1],
        }  # fmt: skip
        if self.action_masks is not None:
            arrays["action_masks"] = self.action_masks
        if self.valid is not None and not self.valid.all():
            arrays["valid"] = self.valid
        batch = as_tensors(arrays, device)
        batch["behavior_logprobs"] = batch["logprobs"]
        return batch
