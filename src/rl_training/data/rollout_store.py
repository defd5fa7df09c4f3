"""The stores of rollouts: T steps of N environments become one batch [T, N], in GAIL with an expert's steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch, UpdateResult
from rl_training.data import TransitionDataset
from rl_training.data.memory import as_tensors
from rl_training.data.recorded_store import describe_origin, find_dataset, fit_dataset, refuse_missing, refuse_unread
from rl_training.data.store import Experience, Request, Store, StoreContext, Timed
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.probe import play_at_random
from rl_training.errors import UserError, counted

COLUMNS = ("actions", "rewards", "terminated", "truncated", "logprobs")
MOST_IMAGES = 1024  # whose values are computed at a time
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


class RolloutStore(Store):
    """Keeps one rollout and returns it as one batch, with values from the learner."""

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.layout = context.layout(self.params.num_steps, logprobs=True)
        self.experience: Any = None

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

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield the rollout once, or nothing if a short one has only reset rows."""
        experience, reads_values = self.experience, algorithm.reads_values
        if experience.has_resets and not experience.valid.any():
            return
        batch = {name: getattr(experience, name) for name in COLUMNS} | {"obs": experience.obs[:-1]}
        if experience.masks is not None:
            batch["action_masks"] = experience.masks[:-1]
        if experience.has_resets:
            batch["valid"] = experience.valid
        if experience.states is not None:
            batch |= {"states": experience.states, "starts": experience.starts}
        if not reads_values:
            batch["bootstrap_obs"] = experience.obs[-1]
        if not isinstance(experience.obs, Tensor):
            batch = as_tensors(batch, torch.device(self.device))
        batch["behavior_logprobs"] = batch["logprobs"]
        if reads_values:
            batch |= self._evaluate(algorithm)
        elif experience.final_obs is not None and (isinstance(experience.obs, Tensor) or experience.truncated.any()):
            batch["final_obs"] = torch.as_tensor(experience.final_obs).to(self.device)
        yield "policy", batch

    @torch.no_grad()
    def _evaluate(self, algorithm: Algorithm) -> dict[str, Tensor]:
        """The values of all observations by the learner, unless acting has computed them."""
        experience, shape, masks = self.experience, self.experience.rewards.shape, self.experience.masks
        memory = () if experience.states is None else (experience.states, experience.starts)
        learner: Any = algorithm

        def evaluate(*inputs: Any) -> Tensor:
            """Values of observations; after these come masks, and the states and starts of a memory."""
            rows = [None if x is None else torch.as_tensor(x).to(self.device) for x in inputs]
            if self.spaces.obs_kind == "vector":
                found: Tensor = learner.state_values(*rows)
                return found
            # features of many images may not fit into memory
            parts = [repeat(None) if x is None else x.split(MOST_IMAGES) for x in rows]
            return torch.cat([learner.state_values(*piece) for piece in zip(*parts, strict=False)])

        if experience.has_values:
            known = torch.as_tensor(experience.values).to(self.device)
            last = evaluate(experience.obs[-1], None if masks is None else masks[-1], *(x[-1] for x in memory))
            values = torch.cat([known, last.unsqueeze(0)])
        else:
            legal = None if masks is None else merge(masks)
            values = evaluate(merge(experience.obs), legal, *map(merge, memory)).view(-1, shape[1])
        if experience.final_obs is None:  # the row after an end holds the final observation
            finals = values[1:]
        elif isinstance(experience.obs, Tensor):  # the host reads nothing, so all rows are evaluated
            finals = evaluate(merge(experience.final_obs), None, *(merge(x[1:]) for x in memory[:1])).view(shape)
        else:
            finals, rows = torch.zeros_like(values[1:]), experience.truncated & ~experience.terminated
            if rows.any():
                legal = None if masks is None else experience.final_masks[rows]
                after = (states[1:][rows] for states in memory[:1])  # the memory after the observation before
                finals[torch.from_numpy(rows).to(self.device)] = evaluate(experience.final_obs[rows], legal, *after)
        return {"values": values[:-1], "bootstrap_value": values[-1], "truncation_values": finals}

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Rollouts need no feedback."""

    def watch(self, timed: Timed) -> None:
        """Let `timed` replace the evaluation of a rollout."""
        self._evaluate = timed(self._evaluate, "act")  # type: ignore[method-assign]


def merge(x: Any) -> Any:
    """[T, N, ...] -> [T * N, ...]."""
    return x.reshape(-1, *x.shape[2:])


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
        self.warning = ""
        arrays = {"expert_obs": self.expert.obs, "expert_actions": self.expert.actions}
        if params.absorbing_states:
            self.horizon = find_horizon(context.recipe, self.expert)
            lengths = closed(self.expert, self.expert.episode_lengths)
            arrays["expert_absorbing_steps"] = absorbing_steps(
                self.expert.terminated, self.expert.truncated, lengths, self.horizon
            )
        elif self.expert.terminated.any() or ends_early(context):
            self.warning = (
                f"\nwarning: survival bias: episodes can end early, and reward_form {params.reward_form} "
                f"{BIAS[params.reward_form]}; absorbing_states: true takes ends into account"
            )
        self.extras = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    def describe(self) -> str:
        """Sizes of the rollout and of the expert data, its origin, and a warning if episode ends are ignored."""
        data, policy = self.params.as_dataset(), f"the policy in {self.params.expert_checkpoint}"
        origin = describe_origin(data, self.expert, self.spaces.env_id, policy)
        steps = f"{len(self.expert):,} expert steps in {describe_episodes(self.expert)}"
        return f"{super().describe()}, {steps}, from {origin}{self.warning}"

    def add(self, experience: Experience, step: int) -> int:
        """Keep a rollout, and compute the time that ended episodes stay in the absorbing state."""
        if self.params.absorbing_states:
            lengths = np.array([episode.length for episode in experience.episodes], dtype=np.int64)
            steps = absorbing_steps(experience.terminated, experience.truncated, lengths, self.horizon)
            self.extras["absorbing_steps"] = torch.from_numpy(steps).to(self.device)
        return super().add(experience, step)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The rollout with all of the expert's steps; the learner draws from them."""
        for phase, batch in super().batches(algorithm, step):
            yield phase, {**batch, **self.extras}


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
    parts = [f"{counted(len(returns), 'episode')} of return {returns.mean():.1f}"] if len(returns) else []
    if dataset.last_episode_is_open:
        parts.append("one incomplete episode")
    return " and ".join(parts)


def ends_early(context: StoreContext) -> bool:
    """Whether an episode of random play terminates."""
    steps = play_at_random(context.recipe, context.spaces, context.seed, PROBED_STEPS)
    return any(step.terminated for step in steps)


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
