"""The sequence store: steps go into a buffer, batches are windows; for learners that act with memory (Dreamer)."""

from __future__ import annotations

from collections.abc import Iterator

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data import RecurrentReplayBuffer
from rl_training.data.experience import Experience, Request
from rl_training.data.replay_store import BufferStore, goes_to_device
from rl_training.data.store import StoreContext


class SequenceStore(BufferStore):
    """Keeps steps, and samples windows [B, L].

    Every environment step since `learning_starts` makes `train_ratio` replayed steps due. An update replays
    `batch_size * sequence_length` steps, and runs when that many are due.
    """

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.credit = 0.0  # steps to replay that are due
        self.train_ratio: float = self.params.train_ratio
        self.layout = context.layout(1, masks=False)
        self.buffer = RecurrentReplayBuffer(
            self.params.buffer_capacity, context.num_envs, obs_shape=self.spaces.obs_shape,
            obs_dtype=self.spaces.obs_dtype, action_shape=self.spaces.action_shape,
            continuous=self.spaces.action_kind == "continuous", sequence_length=self.params.sequence_length,
            folder=self.params.replay_folder, device=context.device,
            on_device=goes_to_device(self.params, self.spaces, context.device),
        )  # fmt: skip

    def describe(self) -> str:
        """The buffer's size, for the start of a run."""
        return f"sequence replay of {self.buffer.capacity:,} steps: {self.buffer.describe_size()}"

    def request(self, step: int) -> Request:
        """Request one step of every environment, with random actions until `learning_starts`."""
        return Request(steps=1, random=self.random_steps(step))

    def add(self, experience: Experience, step: int) -> int:
        """Add to the buffer; every step from `learning_starts` on makes `train_ratio` replayed steps due."""
        self.credit += self.train_ratio * self.keep(experience, step)
        return experience.transitions

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield a batch for each update that is due."""
        replayed = self.params.batch_size * self.params.sequence_length
        filled = len(self.buffer) >= min(self.params.learning_starts, self.buffer.capacity)
        if not filled or not self.buffer.num_windows():
            self.credit = 0.0  # too early, or resumed without its buffer: fill it first
        while self.credit >= replayed:
            self.credit -= replayed
            yield "policy", self.buffer.sample(self.params.batch_size, self.rng)

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Sequences need no feedback."""
