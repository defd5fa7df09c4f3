"""The demonstrations store: rollouts, each together with recorded steps of an expert (GAIL)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch
from rl_training.data import TransitionDataset
from rl_training.data.experience import Experience
from rl_training.data.recorded_store import describe_origin, find_dataset, fit_dataset, refuse_missing, refuse_unread
from rl_training.data.rollout_store import RolloutStore
from rl_training.data.store import StoreContext
from rl_training.envs.random_play import play_at_random
from rl_training.envs.recipe import EnvRecipe
from rl_training.errors import UserError

RECORDED_STEPS = 10_000  # default size, as for random play
PROBED_STEPS = 200  # of random play that may show that episodes end early
READERS = {  # kinds that read a field
    "expert_dataset_path": ("npz", "minari"), "expert_dataset_id": ("minari",), "expert_checkpoint": ("checkpoint",),
}  # fmt: skip
BIAS = {
    "softplus": "is never negative, so that staying alive pays whatever the expert does",
    "log_d": "is never positive, so that ending an episode pays whatever the expert does",
    "logit": "gives no reward after an episode has ended, whatever the expert's end is worth",
}


def find_expert(context: StoreContext) -> TransitionDataset:
    """The expert's steps as a policy sees them; an expert given as a checkpoint is played now."""
    params, recipe, spaces = context.params, context.recipe, context.spaces
    refuse_unread(params, READERS, "expert_dataset_kind")
    if params.expert_dataset_kind != "checkpoint":
        return find_dataset(params.as_dataset(), recipe, spaces, prefix="expert_")
    assert params.expert_checkpoint is not None  # the validator
    refuse_missing("expert_checkpoint", params.expert_checkpoint, "a checkpoint that a run wrote")
    steps = params.expert_dataset_size or RECORDED_STEPS
    dataset = context.recordings.record_policy(
        params.expert_checkpoint, steps, seed=params.expert_dataset_seed, env=recipe.user_env
    )
    return fit_dataset(dataset, spaces)


def find_horizon(recipe: EnvRecipe, expert: TransitionDataset) -> int:
    """Length of an episode that does not end early: the time limit, or else the expert's longest episode.

    For Atari, the limit is inside the preprocessing and counts frames, of which a step takes several.
    """
    spec = gym.registry.get(recipe.env_id) if recipe.maker is None else None
    limit = recipe.max_episode_steps or (None if spec is None else spec.max_episode_steps)
    if not limit:
        return int(expert.episode_lengths.max())
    return math.ceil(limit / (recipe.wrappers.atari.frame_skip if recipe.wrappers.atari else 1))


class DemonstrationStore(RolloutStore):
    """Rollouts with the expert's steps and the time that ended episodes stay in the absorbing state."""

    recorded = {"expert": "expert's data"}

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        params = self.params
        schedule = params.schedules.get("gamma")  # which no validator sees
        if params.absorbing_states and schedule is not None and 1 in (schedule.start, schedule.end):
            raise UserError(
                "algo_kwargs.gamma_schedule: gamma would be 1; with absorbing_states it must stay below 1, or an end "
                "has infinite value."
            )
        self.expert = find_expert(context)
        self.absorbing_steps: Array | None = None
        self._expert_batch: dict[str, Tensor] = {}
        self.warning = ""
        if params.absorbing_states:
            self.horizon = find_horizon(context.recipe, self.expert)
            self.absorbing_steps = np.zeros(self.truncation_values.shape, dtype=np.int64)
        elif self.expert.terminated.any() or ends_early(context):
            self.warning = (
                f"\nwarning: survival bias: episodes can end early, and reward_form {params.reward_form} "
                f"{BIAS[params.reward_form]}; absorbing_states: true takes ends into account"
            )

    def describe(self) -> str:
        """Sizes of the rollout and of the expert data, its origin, and a warning if episode ends are ignored."""
        data, policy = self.params.as_dataset(), f"the policy in {self.params.expert_checkpoint}"
        origin = describe_origin(data, self.expert, self.spaces.env_id, policy)
        steps = f"{len(self.expert):,} expert steps in {describe_episodes(self.expert)}"
        return f"{super().describe()}, {steps}, from {origin}{self.warning}"

    def add(self, experience: Experience, step: int) -> int:
        """Keep a rollout, and compute the time that ended episodes stay in the absorbing state."""
        if self.absorbing_steps is not None:
            lengths = [episode.length for episode in experience.episodes]
            self.absorbing_steps[:] = absorbing_steps(
                experience.terminated, experience.truncated, np.array(lengths, dtype=np.int64), self.horizon
            )
        return super().add(experience, step)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The rollout with all of the expert's steps; the learner draws from them."""
        for phase, batch in super().batches(algorithm, step):
            extras = self._expert(algorithm.device)
            if self.absorbing_steps is not None:
                extras = {**extras, "absorbing_steps": torch.from_numpy(self.absorbing_steps).to(algorithm.device)}
            yield phase, {**batch, **extras}

    def _expert(self, device: torch.device) -> dict[str, Tensor]:
        if not self._expert_batch:
            expert = self.expert
            arrays = {"expert_obs": expert.obs, "expert_actions": expert.actions}
            if self.absorbing_steps is not None:
                arrays["expert_absorbing_steps"] = absorbing_steps(
                    expert.terminated, expert.truncated, closed(expert, expert.episode_lengths), self.horizon
                )
            self._expert_batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        return self._expert_batch


def absorbing_steps(terminated: Array, truncated: Array, lengths: Array, horizon: int) -> Array:
    """Steps until the horizon after each row that terminated, else 0, in the flags' shape.

    `lengths` are those of the episodes in the order of the rows that end them.
    """
    left = np.zeros(terminated.shape, dtype=np.int64)
    left[terminated | truncated] = np.maximum(horizon - lengths, 0)
    return np.where(terminated, left, 0)


def closed(dataset: TransitionDataset, episodes: Array) -> Array:
    """Values per episode, without the last episode if its recording is incomplete."""
    return episodes[:-1] if dataset.last_episode_is_open else episodes


def describe_episodes(dataset: TransitionDataset) -> str:
    """The number of episodes and their mean return; an incomplete episode has no return."""
    returns = closed(dataset, dataset.episode_returns)
    parts = []
    if len(returns):
        parts.append(f"{len(returns)} episode{'s' if len(returns) != 1 else ''} of return {returns.mean():.1f}")
    if dataset.last_episode_is_open:
        parts.append("one incomplete episode")
    return " and ".join(parts)


def ends_early(context: StoreContext) -> bool:
    """Whether an episode of random play terminates."""
    steps = play_at_random(context.recipe, context.spaces, context.seed, PROBED_STEPS)
    return any(step.terminated for step in steps)
