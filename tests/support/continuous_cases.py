"""What the update tests of the continuous learners share: tiny learners, batches, and a one-step bandit to solve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.ddpg import DDPG

Learner = TypeVar("Learner", bound=Algorithm)
SIZES: dict[str, Any] = {"obs_dim": 3, "action_dim": 2, "hidden_sizes": (16, 16)}


def make_learner(
    make: Callable[..., Learner], make_model: Callable[..., Any], seed: int = 0, **options: Any
) -> Learner:
    """A small learner with its weights and draws from `seed`; `make_model` takes SIZES."""
    torch.manual_seed(seed)
    plain = {"learning_rate": 1e-3, "gamma": 0.9, "tau": 0.1}
    learner = make(model=make_model(**SIZES), **{**plain, **options})
    learner.seed(seed)
    return learner


def make_batch(rows: int = 8, seed: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {
        "obs": torch.randn(rows, 3, generator=draws), "next_obs": torch.randn(rows, 3, generator=draws),
        "actions": torch.rand(rows, 2, generator=draws) * 2 - 1, "rewards": torch.randn(rows, generator=draws),
        "dones": torch.zeros(rows),
    }  # fmt: skip


def tensors(module: torch.nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def same(before: list[Tensor], module: torch.nn.Module) -> list[bool]:
    return [torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True)]


def assert_solves_bandit(learner: Algorithm, updates: int, tolerance: float = 0.1) -> None:
    """One step, reward -(a - 0.3)^2 whatever the observation: the greedy action must become 0.3."""
    draws = torch.Generator().manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only wait for each other's threads
    for _ in range(updates):
        obs = torch.randn(64, 3, generator=draws)
        actions = torch.rand(64, 1, generator=draws) * 2 - 1
        rewards = -(actions.squeeze(-1) - 0.3).square()
        learner.update({"obs": obs, "next_obs": obs, "actions": actions, "rewards": rewards, "dones": torch.ones(64)})
    torch.set_num_threads(threads)
    greedy = learner.act(torch.randn(100, 3, generator=draws), deterministic=True).actions
    assert (greedy - 0.3).abs().mean() < tolerance


def move_target(learner: Any) -> None:
    """Make the target network differ from the online one, so that a test tells them apart."""
    target = learner.target_critics if hasattr(learner, "target_critics") else learner.target_network
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))


def assert_only_termination_stops_bootstrapping(
    make: Callable[[], Algorithm], next_value: Callable[[Any, Tensor], Tensor], gamma: float = 0.9
) -> None:
    """`next_value(learner, next_obs)` is the value that the learner's target bootstraps from."""
    batch = make_batch()
    rewards = batch["rewards"].mean()
    ended = torch.ones(8)
    terminated = {**batch, "dones": ended}
    truncated = {**batch, "terminated": torch.zeros(8, dtype=torch.bool), "truncated": ended.bool(), "dones": ended}
    n_step = {**batch, "discounts": torch.full((8,), gamma**3), "dones": ended}
    for given, discount in ((terminated, 0.0), (truncated, gamma), (batch, gamma), (n_step, gamma**3)):
        learner = make()
        move_target(learner)
        expected = rewards + discount * next_value(copy.deepcopy(learner), batch["next_obs"]).mean().detach()
        found = learner.update(given).metrics["target_q_mean"]
        assert found == pytest.approx(float(expected), abs=2e-5)


def assert_numpy_acts_like_torch(learner: Algorithm) -> None:
    obs = make_batch()["obs"]
    policy = learner.numpy_policy()
    assert policy is not None
    rng = np.random.default_rng(0)
    greedy = policy(obs.numpy(), None, rng, True)
    np.testing.assert_allclose(greedy, learner.act(obs, deterministic=True).actions, atol=1e-6)
    drawn = policy(np.repeat(obs.numpy(), 500, 0), None, rng, False)
    assert drawn.dtype == np.float32
    assert np.abs(drawn).max() <= 1.0
    by_torch = learner.act(obs.repeat_interleave(500, 0)).actions.numpy()
    np.testing.assert_allclose(drawn.std(0), by_torch.std(0), rtol=0.1)


def assert_steps_touch_only_their_own_network(learner: DDPG) -> None:
    """The actor step leaves the critics alone, the critic step the actor."""
    batch = make_batch()
    actor, critics = tensors(learner.model.actor), tensors(learner.model.critics)
    learner.actor_step(batch["obs"], batch["actions"])
    assert all(same(critics, learner.model.critics))
    assert not any(same(actor, learner.model.actor))
    actor = tensors(learner.model.actor)
    learner.critic_step(batch, None)
    assert all(same(actor, learner.model.actor))
    assert not any(same(critics, learner.model.critics))
