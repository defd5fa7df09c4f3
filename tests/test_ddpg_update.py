"""DDPG's mathematics, and what the continuous learners share: batches, targets, and a one-step bandit to solve."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.ddpg import DDPG, ddpg_loss, dpg_loss
from rl_training.models.mlp_ddpg import MLPDDPGModel

SIZES: dict[str, Any] = {"obs_dim": 3, "action_dim": 2, "hidden_sizes": (16, 16)}


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


def make(seed: int = 0, **options: Any) -> DDPG:
    torch.manual_seed(seed)
    learner = DDPG(model=MLPDDPGModel(**SIZES), **{"learning_rate": 1e-3, "gamma": 0.9, "tau": 0.1, **options})
    learner.seed(seed)
    return learner


def test_dpg_loss_reproduces_rlax() -> None:
    obs = torch.tensor([[0.0, 1, 0], [1, 1, 2]])
    actions = (obs @ torch.ones(3, 2)).requires_grad_()
    (gradients,) = torch.autograd.grad((actions @ torch.ones(2, 1)).sum(), actions)
    losses = dpg_loss(actions, gradients, clip=1.0)
    torch.testing.assert_close(losses, torch.tensor([0.5, 0.5]))
    (moved,) = torch.autograd.grad(dpg_loss(actions, gradients).sum(), actions)
    torch.testing.assert_close(moved, -gradients)


def test_a_clip_that_never_binds_leaves_the_actor_step_unchanged() -> None:
    plain, clipped = make(), make(action_gradient_clip=1e6)
    for learner in (plain, clipped):
        learner.update(make_batch())
    for one, other in zip(plain.model.actor.parameters(), clipped.model.actor.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_ddpg_loss_is_the_mean_squared_error_and_minus_the_value_of_the_actor() -> None:
    losses = ddpg_loss({
        "q_values": torch.tensor([1.0, 2]), "target_q_values": torch.tensor([2.0, 4]),
        "actor_q_values": torch.tensor([1.0, 5]), "weights": torch.tensor([1.0, 0.5]),
    })  # fmt: skip
    assert {name: float(value) for name, value in losses.items()} == {
        "critic_loss": 1.5, "actor_loss": -3.0, "target_q_mean": 3.0,
    }  # fmt: skip


def test_update_reports_metrics_and_priorities() -> None:
    result = make().update(make_batch())
    assert {"critic_loss", "actor_loss", "target_q_mean"} <= set(result.metrics)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert result.priorities is not None
    assert result.priorities.shape == (8,)
    assert not result.priorities.requires_grad


def test_priorities_are_absolute_td_errors_and_weights_scale_the_loss() -> None:
    batch, learner = make_batch(), make()
    errors = (batch["rewards"] - learner.model.q_values(batch["obs"], batch["actions"])).abs().detach()
    weights = torch.linspace(0.1, 1.0, 8)
    result = learner.update({**batch, "dones": torch.ones(8), "weights": weights})
    torch.testing.assert_close(result.priorities, errors)
    assert result.metrics["critic_loss"] == pytest.approx(float((weights * errors.square()).mean()), rel=1e-5)


def test_only_termination_stops_bootstrapping() -> None:
    assert_only_termination_stops_bootstrapping(
        make, lambda learner, obs: learner.target_network.q_values(obs, learner.target_network.actor(obs))
    )


def test_actor_and_critic_steps_touch_only_their_own_network() -> None:
    learner, batch = make(), make_batch()
    actor, critics = tensors(learner.model.actor), tensors(learner.model.critics)
    learner.actor_step(batch["obs"])
    assert all(same(critics, learner.model.critics))
    assert not any(same(actor, learner.model.actor))
    actor = tensors(learner.model.actor)
    learner.critic_step(batch, torch.full((8,), 0.9), None)
    assert all(same(actor, learner.model.actor))
    assert not any(same(critics, learner.model.critics))


def test_targets_move_by_tau_and_only_after_the_update() -> None:
    learner = make()
    before = tensors(learner.target_network)
    learner.update(make_batch())
    online = list(learner.model.parameters())
    for old, new, source in zip(before, learner.target_network.parameters(), online, strict=True):
        torch.testing.assert_close(new, old + 0.1 * (source - old), rtol=0, atol=1e-7)


def test_exploration_noise_is_clipped_and_can_be_moved_during_a_run() -> None:
    learner = make(exploration_noise=5.0)
    obs = torch.zeros(100, 3)
    noisy = learner.act(obs).actions
    assert noisy.abs().max() == 1.0
    assert learner.scheduled("exploration_noise")
    policy = learner.numpy_policy()
    learner.exploration_noise = 0.0
    torch.testing.assert_close(learner.act(obs).actions, learner.act(obs, deterministic=True).actions)
    assert policy is not None
    drawn = policy(obs.numpy(), None, np.random.default_rng(0), False)
    np.testing.assert_allclose(drawn, learner.act(obs, deterministic=True).actions, atol=1e-6)


def test_numpy_acts_like_torch() -> None:
    assert_numpy_acts_like_torch(make(exploration_noise=0.2))


def test_state_restores_the_next_update_exactly() -> None:
    one, other = make(0), make(1)
    one.update(make_batch())
    other.load_state_dict(one.state_dict())
    for learner in (one, other):
        learner.update(make_batch(seed=1))
    for name, value in one.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other.state_dict()[name]), name


def test_ddpg_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPDDPGModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32))
    assert_solves_bandit(DDPG(model=model, learning_rate=3e-3), 600)
