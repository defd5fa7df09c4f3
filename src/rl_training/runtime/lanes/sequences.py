"""The sequences lane: steps into a sequence buffer, windows out of it, for learners that act with memory (Dreamer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator

from rl_training.algorithms.base import Algorithm, Array, Batch, UpdateResult
from rl_training.data import RecurrentReplayBuffer
from rl_training.envs.stepper import Episode
from rl_training.runtime.lanes.replay import BufferedSource
from rl_training.runtime.params import Params
from rl_training.runtime.spec import Collected, SourceContext


class SequenceParams(Params):
    """Hyper-parameters of the sequences lane."""

    buffer_capacity: int = Field(100_000, ge=1, le=10**9, description="Rows kept, summed over environments.")
    batch_size: int = Field(16, ge=1, le=10**5, description="Windows per update.")
    sequence_length: int = Field(64, ge=1, le=10**5, description="Consecutive steps of a window.")
    train_ratio: float = Field(32.0, gt=0, le=10**6, description="Replayed steps per environment step.")
    learning_starts: int = Field(1_000, ge=0, description="Environment steps with random actions before learning.")
    replay_folder: str | None = Field(None, description="Keep the buffer in files under this folder instead of memory.")

    @model_validator(mode="after")
    def _window_fits(self) -> SequenceParams:
        if self.sequence_length > self.buffer_capacity:
            raise ValueError(
                f"sequence_length is {self.sequence_length}; it must be at most buffer_capacity "
                f"({self.buffer_capacity})"
            )
        return self


class SequenceSource(BufferedSource):
    """Steps the environments with the policy's memory carried along, and samples windows [B, L].

    An update replays `batch_size * sequence_length` steps; one is due whenever `train_ratio` times the steps taken
    since `learning_starts` comes to as many.
    """

    def __init__(self, context: SourceContext, *, carry_dim: int) -> None:
        super().__init__(context)
        self.credit = 0.0  # steps to replay that are due
        self.train_ratio: float = self.params.train_ratio
        self.carry = torch.zeros(self.stepper.num_envs, carry_dim, device=context.device)
        self.buffer = RecurrentReplayBuffer(
            self.params.buffer_capacity, self.stepper.num_envs, obs_shape=self.spaces.obs_shape,
            obs_dtype=self.spaces.obs_dtype, action_shape=self.spaces.action_shape,
            continuous=self.spaces.action_kind == "continuous", sequence_length=self.params.sequence_length,
            folder=self.params.replay_folder, device=context.device,
        )  # fmt: skip

    def describe(self) -> str:
        """The buffer's size, for the start of a run."""
        return f"sequence replay of {self.buffer.capacity:,} steps: {self.buffer.describe_size()}"

    def collect(self, algorithm: Algorithm, step: int) -> Collected:
        """One step of every environment, at random until `learning_starts`."""
        stepper = self.stepper
        stepper.start()
        episodes: list[Episode] = []
        obs = stepper.obs
        warm = step >= self.params.learning_starts
        actions = self._act(algorithm) if warm else self.spaces.random_actions(self.rng, len(obs))
        result, ended = stepper.step(actions)
        self.buffer.add(
            obs, actions, result.rewards, result.terminated, result.truncated, result.obs,
            final_obs=result.final_obs, valid=result.valid,
        )  # fmt: skip
        episodes += ended
        taken = len(obs) if result.valid is None else int(np.count_nonzero(result.valid))
        if step + taken > self.params.learning_starts:
            self.credit += self.train_ratio * min(taken, step + taken - self.params.learning_starts)
        return Collected(taken, episodes)

    def _act(self, algorithm: Algorithm) -> Array:
        device = self.carry.device
        obs, is_first = (torch.from_numpy(array).to(device) for array in (self.stepper.obs, self.stepper.is_first))
        out = algorithm.act(obs, self.carry, is_first=is_first)
        self.carry = out.carry
        return out.actions.cpu().numpy()

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The updates due."""
        replayed = self.params.batch_size * self.params.sequence_length
        filled = len(self.buffer) >= min(self.params.learning_starts, self.buffer.capacity)
        if not filled or not self.buffer.num_windows():
            self.credit = 0.0  # too early, or resumed without its buffer: fill it first
        while self.credit >= replayed:
            self.credit -= replayed
            yield "policy", self.buffer.sample(self.params.batch_size, self.rng)

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Nothing flows back."""

    def state_dict(self) -> dict[str, Any]:
        """The lane's state, and the policy's memory."""
        return {**super().state_dict(), "carry": self.carry.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        self.carry.copy_(state["carry"])
        return super().load_state_dict(state)
