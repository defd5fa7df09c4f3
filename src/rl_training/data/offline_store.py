"""The store of learners from recorded data: the data alone, or first alone and then together with new experience."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, Array, Batch
from rl_training.data import ReplayBuffer, TransitionDataset
from rl_training.data.episode_replay import EpisodeReplayBuffer, Returns
from rl_training.data.memory import as_tensors
from rl_training.data.recorded_store import PriorReplayStore, describe_origin
from rl_training.data.replay_store import make_buffer
from rl_training.data.store import Experience, Store, StoreContext
from rl_training.errors import UserError

RETURN_RANGE = 1_000.0  # the range of the returns of recorded episodes after reward_scale 'return_range'


def scale_returns(dataset: TransitionDataset) -> float:
    """The number that `reward_scale` 'return_range' stands for."""
    returns = dataset.episode_returns
    if returns.max() <= returns.min():
        raise UserError(
            f"reward_scale is 'return_range', but all episodes of the data have the return {returns.max():g}; "
            "it must be a number."
        )
    return float(RETURN_RANGE / (returns.max() - returns.min()))


def with_next_actions(dataset: TransitionDataset) -> tuple[TransitionDataset, Array]:
    """The rows after which another action was recorded or the episode terminated, and the next actions of those rows.

    Where an episode was cut off, nobody acted at the next observation, so that row is left out. Where it terminated,
    the next action has no effect.
    """
    cut = dataset.truncated & ~dataset.terminated
    cut[-1] = not dataset.terminated[-1]
    following = np.roll(dataset.actions, -1, axis=0)
    kept = np.flatnonzero(~cut)
    if not len(kept):
        raise UserError("every episode of the recorded data is cut off after one step; critic_bc_coef must be 0 there.")
    return dataset.take(kept), following[kept]


def find_returns(dataset: TransitionDataset, returns: Returns) -> Array:
    """The return from every row to the end of its episode [M]."""
    ends = dataset.episode_ends + 1
    return np.concatenate([returns.of(part) for part in np.split(dataset.rewards, ends[:-1])])


class OfflineStore(PriorReplayStore):
    """Recorded data alone for `offline_updates` updates, then replay with a share of recorded data in every batch.

    If `offline_updates` is None, no environment is stepped, and every update counts as one timestep. Otherwise the
    updates before the first step count as none. Rewards are scaled and shifted in both kinds of rows. The learner's
    normalizer gets the statistics of the recorded observations once, before the first update.
    """

    counters = (*PriorReplayStore.counters, "normalizer_is_set")
    recorded = {"dataset": "recorded data"}

    def __init__(self, context: StoreContext) -> None:
        self.steps_environments = context.params.facts.steps_environments
        self.column = context.params.recorded_column  # that a batch has in addition; empty: none
        self.is_scaled_by_data = isinstance(context.params.reward_scale, str)
        scale = 1.0 if self.is_scaled_by_data else context.params.reward_scale
        self.returns = Returns(context.params.gamma, scale, context.params.reward_shift)
        self.normalizer_is_set = False
        super().__init__(context)
        if self.dataset is not None:
            self._prepare(self.dataset)

    def _prepare(self, dataset: TransitionDataset) -> None:
        """The recorded rows as the learner gets them, and their additional column."""
        returns = self.returns
        if self.is_scaled_by_data:
            returns.scale = scale_returns(dataset)
        if self.column == "returns_to_go" and self.params.sparse_rewards:
            returns.failure = returns.scale * float(dataset.rewards.min()) + returns.shift
        self.more: dict[str, Array] = {}
        if self.column == "next_actions":
            dataset, self.more[self.column] = with_next_actions(dataset)
        elif self.column == "returns_to_go":
            self.more[self.column] = find_returns(dataset, returns)
        rewards = np.float32(returns.scale) * dataset.rewards + np.float32(returns.shift)
        self.rows = replace(dataset, rewards=rewards)

    @property
    def needs_data(self) -> bool:
        """Whether any batch holds recorded data, or something else is read from it."""
        reads = self.params.normalize_states or self.is_scaled_by_data or self.column == "returns_to_go"
        return super().needs_data or reads or not self.steps_environments

    def make_buffer(self, context: StoreContext) -> Any:
        """The buffer of new experience; of complete episodes, if their returns are needed."""
        params = self.params
        if not self.steps_environments:  # nothing is put into it
            params = params.model_copy(update={"buffer_capacity": context.num_envs, "replay_folder": None})
        kind = partial(EpisodeReplayBuffer, returns=self.returns) if self.column == "returns_to_go" else ReplayBuffer
        return make_buffer(
            params, self.spaces, context.num_envs, context.device, context.recipe.image_frame_stack, plain=kind
        )

    def describe(self) -> str:
        """The recorded data, and the replay buffer if there is one."""
        if self.steps_environments or self.dataset is None:
            return super().describe()
        origin = describe_origin(self.params, self.dataset, self.spaces.env_id)
        return f"{len(self.dataset):,} transitions of {self.recorded['dataset']} from {origin}"

    @property
    def _pretrains(self) -> bool:
        return not self.steps_environments or super()._pretrains

    @property
    def updates_per_turn(self) -> int:
        """One, so that evaluations, checkpoints and schedules are exact where an update is a timestep."""
        return 1

    def add(self, experience: Experience, step: int) -> int:
        """Keep the experience; without an environment, count a timestep."""
        return super().add(experience, step) if self.steps_environments else 1

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """As `PriorReplayStore`, after the learner's normalizer got its statistics."""
        if not self.normalizer_is_set and self.dataset is not None:
            observation_input: Any = algorithm.acting().observation_input
            observation_input.fit(torch.from_numpy(self.dataset.obs).to(algorithm.device))
        self.normalizer_is_set = True
        yield from super().batches(algorithm, step)

    def _offline(self, size: int) -> dict[str, Any]:
        batch = self.rows.minibatch(self.rng, size, gamma=self.gamma, device=self.device)
        rows = batch["indices"].numpy()
        more = {name: column.take(rows, axis=0) for name, column in self.more.items()}
        return batch | as_tensors(more, torch.device(self.device))

    def _online(self, size: int) -> dict[str, Any]:
        batch = self.buffer.sample(size, self.rng)
        return {**batch, "rewards": self.returns.scale * batch["rewards"] + self.returns.shift}

    def sample(self) -> dict[str, Any]:
        """A mixed batch; of recorded data alone as long as no new episode is complete, where that is needed."""
        if isinstance(self.buffer, EpisodeReplayBuffer) and not self.buffer.complete.any():
            return self._offline(self.params.batch_size)
        return super().sample()

    def state_dict(self) -> dict[str, Any]:
        """That of `PriorReplayStore`; without environment steps, there is no replay."""
        state = super().state_dict()
        return {name: value for name, value in state.items() if name != "replay" or self.steps_environments}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        return super().load_state_dict(state) if self.steps_environments else Store.load_state_dict(self, state)
