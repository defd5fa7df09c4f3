"""The rollout lane: T steps of N environments, then one batch [T, N] (A2C, PPO, TRPO, IMPALA, APPO)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data.rollout import RolloutStorage
from rl_training.envs.stepper import Episode
from rl_training.runtime.networks import build_on_policy
from rl_training.runtime.params import Params
from rl_training.runtime.spec import AlgorithmSpec, Collected, SourceContext

ACTION_KINDS = ("discrete", "continuous", "multi_discrete", "multi_binary")
NORMALIZED = {"wrappers": {"normalize_observation": "auto", "normalize_reward": True}}  # env_kwargs, by default


class RolloutParams(Params):
    """Hyper-parameters of the rollout lane."""

    num_steps: int = Field(128, ge=1, le=1_000_000, description="Steps per environment and rollout.")
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    policy_lag: int = Field(0, ge=0, le=1000, description="Act with the policy of this many updates ago.")


def rollout_spec(learner: type[Algorithm], **entry: Any) -> AlgorithmSpec:
    """The registry entry of a learner from rollouts, which takes every kind of action and observation."""
    return AlgorithmSpec(
        lane="rollout", learner=learner, build=partial(build_on_policy, learner), source=RolloutSource,
        action_kinds=ACTION_KINDS, normalizes_rewards=True, **entry,
    )  # fmt: skip


class LaggedPolicy:
    """The policy of `lag` updates ago: a copy of the network and the weights between then and now."""

    def __init__(self, policy: nn.Module, lag: int) -> None:
        self.policy = copy.deepcopy(policy)
        self.weights: deque[list[Tensor]] = deque(maxlen=lag + 1)

    def follow(self, policy: nn.Module) -> None:
        """Remember the newest weights and put on the oldest remembered."""
        self.weights.append([tensor.detach().clone() for tensor in policy.state_dict().values()])
        for mine, tensor in zip(self.policy.state_dict().values(), self.weights[0], strict=True):
            mine.copy_(tensor)


class RolloutSource:
    """Collects one rollout at a time and hands it over as one batch."""

    def __init__(self, context: SourceContext) -> None:
        params, spaces = context.params, context.spaces
        self.stepper = context.stepper
        self.spaces = spaces
        self.lag: int = params.policy_lag
        self.rng = np.random.default_rng(np.random.SeedSequence([context.seed, 1]))
        self._lagged: LaggedPolicy | None = None
        self._restored_weights: list[list[Tensor]] | None = None
        self._numpy_policy: Any = None
        self._policy: Any = None
        self._batch: dict[str, Tensor] | None = None
        self._final_obs: Any = None  # [T, N, ...], read where an episode was truncated
        self._has_finals = False
        self._device = torch.device("cpu")
        self.storage = RolloutStorage(
            params.num_steps, context.stepper.num_envs,
            obs_shape=spaces.obs_shape, obs_dtype=spaces.obs_dtype, action_shape=spaces.action_shape,
            continuous=spaces.action_kind == "continuous", mask_size=spaces.action_dim if spaces.has_action_mask else 0,
            may_hold_resets=context.stepper.resets_next_step,
        )  # fmt: skip

    def describe(self) -> str:
        """The rollout's size, for the start of a run."""
        return f"rollouts of {self.storage.num_steps} x {self.storage.num_envs} steps"

    def collect(self, algorithm: Algorithm, step: int) -> Collected:
        """Fill the storage with the behaviour policy's experience."""
        self._take_policy(algorithm)
        self.stepper.start()
        storage, stepper = self.storage, self.stepper
        episodes: list[Episode] = []
        finals: list[tuple[int, Any, Any]] = []  # (t, rows, final observations) of truncated episodes
        if storage.valid is not None:
            storage.valid.fill(True)
        for t in range(storage.num_steps):
            storage.obs[t] = stepper.obs
            if storage.action_masks is not None:
                storage.action_masks[t] = stepper.masks
            storage.actions[t] = actions = self._act(algorithm, t)
            result, ended = stepper.step(actions)
            storage.rewards[t] = result.rewards
            storage.terminated[t] = result.terminated
            storage.truncated[t] = result.truncated
            if result.valid is not None and storage.valid is not None:
                storage.valid[t] = result.valid
            if ended:
                episodes += ended
                if result.final_obs is not None and result.truncated.any():
                    rows = np.flatnonzero(result.truncated & ~result.terminated)
                    finals.append((t, rows, result.final_obs[rows]))
        storage.obs[-1] = stepper.obs
        self._evaluate(algorithm, finals)
        steps = storage.rewards.size if storage.valid is None else int(np.count_nonzero(storage.valid))
        return Collected(steps, episodes)

    def _take_policy(self, algorithm: Algorithm) -> None:
        """The behaviour policy: the learner's own, or one that lags behind it."""
        if self._policy is None:
            self._policy, self._device = algorithm.acting(), algorithm.device
            if self.lag:
                self._lagged = LaggedPolicy(self._policy, self.lag)
                self._lagged.weights.extend(self._restored_weights or [])
                self._policy = self._lagged.policy
            self._numpy_policy = self._policy.numpy_policy()
        if self._lagged is not None:
            self._lagged.follow(algorithm.acting())

    def _act(self, algorithm: Algorithm, t: int) -> Any:
        stepper = self.stepper
        if self._numpy_policy is not None:
            return self._numpy_policy(stepper.obs, stepper.masks, self.rng, False)
        device = self._device
        masks = None if stepper.masks is None else torch.from_numpy(stepper.masks).to(device)
        with torch.no_grad():
            out = self._policy.act(
                torch.from_numpy(stepper.obs).to(device), generator=algorithm.generator, action_masks=masks
            )
        self.storage.logprobs[t] = out.logprobs.cpu().numpy()
        self.storage.values[t] = out.values.cpu().numpy()
        return out.actions.cpu().numpy()

    @torch.no_grad()
    def _evaluate(self, algorithm: Algorithm, finals: list[tuple[int, Any, Any]]) -> None:
        """Values and log-probabilities: after numpy acting in one pass over the rollout; else only of what is left."""
        storage, policy, device = self.storage, self._policy, self._device
        reads_values = getattr(algorithm, "reads_values", True)
        if self._numpy_policy is not None:
            obs = torch.from_numpy(storage.obs).flatten(0, 1)
            rows = storage.rewards.size
            if getattr(algorithm, "reads_logprobs", True):  # else they stay 0
                masks = None if storage.action_masks is None else torch.from_numpy(storage.action_masks).flatten(0, 1)
                actions = torch.from_numpy(storage.actions).flatten(0, 1)
                logprobs = policy.distribution(obs[:rows], masks).log_prob(actions)
                storage.logprobs[:] = logprobs.view(storage.logprobs.shape).numpy()
            if reads_values:
                storage.values[:] = policy.values(obs).view(storage.values.shape).numpy()
        elif reads_values:
            storage.values[-1] = policy.values(torch.from_numpy(storage.obs[-1]).to(device)).cpu().numpy()
        self._has_finals = bool(finals) and not reads_values
        if self._has_finals:
            if self._final_obs is None:
                self._final_obs = np.zeros_like(storage.obs[:-1])
            for t, rows, observations in finals:
                self._final_obs[t, rows] = observations
        elif self.stepper.resets_next_step:  # the row after an end holds the final observation
            storage.truncation_values[:] = storage.values[1:]
        elif finals:
            observations = torch.from_numpy(np.concatenate([obs for _, _, obs in finals])).to(device)
            values = policy.values(observations).cpu().numpy()
            times = np.concatenate([np.full(len(rows), t) for t, rows, _ in finals])
            storage.truncation_values[times, np.concatenate([rows for _, rows, _ in finals])] = values

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The rollout, once; not when a short one holds nothing but reset rows."""
        valid = self.storage.valid
        if valid is not None and not valid.any():
            return
        if self._batch is None or self._device.type != "cpu":  # on the CPU once: its tensors are the storage's memory
            self._batch = self.storage.batch(self._device)
            self._batch.pop("valid", None)
            if not getattr(algorithm, "reads_values", True):
                for name in ("values", "bootstrap_value", "truncation_values"):
                    del self._batch[name]
                self._batch["bootstrap_obs"] = torch.from_numpy(self.storage.obs[-1]).to(self._device)
        batch = dict(self._batch)
        if valid is not None and not valid.all():
            batch["valid"] = torch.from_numpy(valid).to(self._device)
        if self._has_finals:
            batch["final_obs"] = torch.from_numpy(self._final_obs).to(self._device)
        yield "policy", batch

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Nothing flows back."""

    def state_dict(self) -> dict[str, Any]:
        """Environments, generator, and the weights that a lagging policy still needs."""
        weights = (self._restored_weights or []) if self._lagged is None else list(self._lagged.weights)
        return {"stepper": self.stepper.state_dict(), "rng": self.rng.bit_generator.state, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        self.rng.bit_generator.state = state["rng"]
        self._restored_weights = state["weights"]
        return self.stepper.load_state_dict(state["stepper"])

    def close(self) -> None:
        """Close the environments."""
        self.stepper.close()
