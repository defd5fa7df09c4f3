"""Discrete SAC's mathematics: exact expectations, temperature, masks, several choices, targets, a bandit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_cases import assert_only_termination_stops_bootstrapping, make_learner, same, tensors
from continuous_cases import make_batch as continuous_batch
from registry_contract import TrainerSmoke
from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.algorithms.discrete_sac import DiscreteSAC, least_expected
from rl_training.models.mlp_discrete_sac import MLPDiscreteSACModel
from rl_training.ops.policy import categorical_entropy
from rl_training.run.workflows import train

ONE = torch.ones(3, 1, dtype=torch.float64)


class TestTrainer(TrainerSmoke):
    algo = "discrete_sac"


def make(sizes: tuple[int, ...] = (3,), **options: Any) -> DiscreteSAC:
    def make_model(**_: Any) -> MLPDiscreteSACModel:
        kind = "discrete" if len(sizes) == 1 else "multi_discrete"
        return MLPDiscreteSACModel(
            obs_dim=3, action_dim=sum(sizes), action_kind=kind, action_sizes=sizes, hidden_sizes=(16, 16)
        )

    return make_learner(DiscreteSAC, make_model, **options)


def make_batch(sizes: tuple[int, ...] = (3,), **more: Tensor) -> dict[str, Tensor]:
    columns = [torch.arange(8) % size for size in sizes]
    return {**continuous_batch(), "actions": columns[0] if len(sizes) == 1 else torch.stack(columns, -1), **more}


def expected_q(learner: DiscreteSAC, obs: Tensor, critics: Any) -> Tensor:
    """sum_a pi(a) min_i Q_i(a) for one choice, written out."""
    probs = learner.model.actor.distribution(obs).log_probs.exp()
    return (probs * torch.minimum(*learner.model.values(critics, obs))).sum(-1)


def test_value_and_losses_are_the_golden_ones() -> None:
    probs, alpha = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64), 0.2
    q_values = torch.tensor([[[1.0, 2, 3]], [[1.5, 1, 4]]], dtype=torch.float64)
    entropy = categorical_entropy(probs.log())
    value = least_expected(q_values, probs, ONE) + alpha * entropy
    assert entropy.item() == pytest.approx(0.801819, abs=1e-6)
    assert value.item() == pytest.approx(1.360364, abs=1e-6)
    assert 1.0 + 0.99 * value.item() == pytest.approx(2.346760, abs=1e-6)


@pytest.mark.parametrize(("size", "ratio", "target"), [(2, 0.98, 0.679284), (6, 0.98, 1.755924), (18, 0.89, 2.572431)])
def test_target_entropy_is_a_share_of_the_largest(size: int, ratio: float, target: float) -> None:
    learner = make((size,), target_entropy_ratio=ratio)
    assert learner.target_entropy(None).item() == pytest.approx(target, abs=1e-6)


def test_target_entropy_counts_legal_actions_of_every_choice() -> None:
    learner = make((3, 2), target_entropy_ratio=0.5)
    assert learner.target_entropy(None).item() == pytest.approx(0.5 * math.log(6))
    masks = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 0, 1, 0]]).bool()
    assert learner.target_entropy(masks).item() == pytest.approx(0.5 * (math.log(4) + math.log(1)) / 2)
    assert learner.target_entropy(torch.zeros(2, 5)).item() == 0.0  # nothing to choose from, as at an end


def test_a_minimum_over_critics_does_not_depend_on_how_a_critic_divides_its_value_among_choices() -> None:
    learner = make((3, 2))
    draws = torch.Generator().manual_seed(0)
    q_values = torch.randn(2, 8, 5, generator=draws)
    probs = learner.model.actor.distribution(torch.randn(8, 3, generator=draws)).log_probs.detach().exp()
    moved = q_values + torch.tensor([[5.0] * 3 + [-5.0] * 2, [-5.0] * 3 + [5.0] * 2]).unsqueeze(1)
    found = least_expected(q_values, probs, learner.choices)
    torch.testing.assert_close(found, least_expected(moved, probs, learner.choices), rtol=0, atol=1e-5)
    alone = least_expected(q_values[:1], probs, learner.choices)  # one critic: the plain expectation of the sum
    torch.testing.assert_close(alone, (probs * q_values[0]).sum(-1))
    assert (found <= alone + 1e-5).all()


def test_target_is_soft_and_only_termination_stops_bootstrapping() -> None:
    def next_value(learner: DiscreteSAC, obs: Tensor) -> Tensor:
        entropy = categorical_entropy(learner.model.actor.distribution(obs).log_probs)
        return expected_q(learner, obs, learner.target_critics) + 0.3 * entropy

    class Bandit(DiscreteSAC):
        def update(self, batch: Any, **options: Any) -> Any:  # the shared cases have continuous actions
            return super().update({**batch, "actions": torch.arange(8) % 3}, **options)

    def learner() -> DiscreteSAC:
        plain = make(alpha=0.3)
        plain.__class__ = Bandit
        return plain

    assert_only_termination_stops_bootstrapping(learner, next_value)


def test_the_critics_regress_on_the_value_of_the_action_taken_summed_over_choices() -> None:
    learner, batch = make((3, 2), optimizer="sgd"), make_batch((3, 2), dones=torch.ones(8))
    values = learner.model.values(learner.model.critics, batch["obs"])
    rows, (first, second) = torch.arange(8), batch["actions"].unbind(-1)
    q_values = values[:, rows, first] + values[:, rows, 3 + second]
    loss = (q_values - batch["rewards"]).square().mean()
    parameters = list(learner.model.critics.parameters())
    expected = [p - 1e-3 * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]
    metrics, priorities = learner.critic_step(batch)
    assert metrics["critic_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(priorities, (q_values - batch["rewards"]).detach().abs().mean(0))
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_actor_step_follows_the_gradient_of_its_loss_summed_over_actions() -> None:
    learner, obs = make(alpha=0.2, optimizer="sgd", learning_rate=0.1), make_batch()["obs"]
    log_probs = learner.model.actor.distribution(obs).log_probs
    q_values = torch.minimum(*learner.model.values(learner.model.critics, obs)).detach()
    loss = (log_probs.exp() * (0.2 * log_probs - q_values)).sum(-1).mean()
    parameters = list(learner.model.actor.parameters())
    expected = [p - 0.1 * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]
    critics = tensors(learner.model.critics)
    losses = learner.actor_step(obs, None)
    assert losses["actor_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(same(critics, learner.model.critics))


@pytest.mark.parametrize(("ratio", "grows"), [(0.2, False), (1.0, True)])
def test_temperature_grows_when_the_entropy_is_below_its_target(ratio: float, grows: bool) -> None:
    learner, obs = make(target_entropy_ratio=ratio), make_batch()["obs"]
    with torch.no_grad():
        learner.model.actor.network[-1].bias.copy_(torch.tensor([0.0, 1.0, 2.0]))  # an entropy of about 0.83
    learner.actor_step(obs, None)
    assert (float(learner.alpha) > 1.0) == grows


def test_where_one_action_is_legal_the_temperature_and_the_actor_stay() -> None:
    learner, masks = make(target_entropy_ratio=1.0, optimizer="sgd"), torch.eye(3)[torch.arange(8) % 3].bool()
    actor = tensors(learner.model.actor)
    losses = learner.actor_step(make_batch()["obs"], masks)
    assert losses["entropy"].item() == 0.0
    assert float(learner.alpha) == 1.0
    assert all(same(actor, learner.model.actor))


def test_an_illegal_next_action_does_not_count() -> None:
    batch, legal = make_batch(rewards=torch.zeros(8)), torch.tensor([True, False, True]).expand(8, 3)
    targets = []
    for value in (0.0, 1e6):
        learner = make(alpha=0.3)
        with torch.no_grad():
            learner.target_critics._layers[-1].bias[..., 1] = value
        targets.append(learner.critic_step({**batch, "next_action_masks": legal})[0]["target_q_mean"].item())
    assert targets[0] == targets[1]


@pytest.mark.parametrize(("tau", "interval"), [(0.1, 1), (1.0, 3)])
def test_targets_move_by_tau_when_they_are_due(tau: float, interval: int) -> None:
    learner = make(tau=tau, target_update_interval=interval)
    before = tensors(learner.target_critics)
    for _ in range(interval - 1):
        learner.update(make_batch())
        assert all(same(before, learner.target_critics))
    learner.update(make_batch())
    online = learner.model.critics.parameters()
    moved = [old + tau * (new.detach() - old) for old, new in zip(before, online, strict=True)]
    for found, expected in zip(learner.target_critics.parameters(), moved, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("sizes", [(3,), (3, 2)])
def test_numpy_acts_as_torch_does(sizes: tuple[int, ...]) -> None:
    learner, obs = make(sizes), make_batch()["obs"]
    for parameter in learner.model.actor.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    masks = torch.ones(8, sum(sizes)).bool()
    masks[:4, 0] = False
    policy, rng = learner.numpy_policy(), np.random.default_rng(0)
    assert policy is not None
    greedy = policy(obs.numpy(), masks.numpy(), rng, True)
    np.testing.assert_array_equal(greedy, learner.act(obs, deterministic=True, action_masks=masks).actions)
    many = (obs.repeat_interleave(2000, 0), masks.repeat_interleave(2000, 0))
    by_torch = learner.act(many[0], action_masks=many[1]).actions.view(8, 2000, -1)
    by_numpy = policy(many[0].numpy(), many[1].numpy(), rng, False).reshape(8, 2000, -1)
    assert (by_numpy[:4, :, 0] > 0).all()
    probs = learner.model.actor.distribution(obs, masks).log_probs.exp()
    for drawn in (torch.from_numpy(by_numpy), by_torch):
        shares = torch.nn.functional.one_hot(drawn[..., 0], sizes[0]).float().mean(1)
        torch.testing.assert_close(shares, probs[:, : sizes[0]], rtol=0, atol=0.05)


def test_it_solves_a_bandit_of_two_choices() -> None:
    learner, draws = make((3, 2), alpha=0.01, learning_rate=3e-3), torch.Generator().manual_seed(1)
    for _ in range(150):
        obs = torch.randn(32, 3, generator=draws)
        actions = torch.stack([torch.randint(3, (32,), generator=draws), torch.randint(2, (32,), generator=draws)], -1)
        best = torch.stack([(obs[:, 0] > 0) * 2, obs[:, 1] > 0], -1)
        rewards = (actions == best).float().sum(-1)
        learner.update({"obs": obs, "next_obs": obs, "actions": actions, "rewards": rewards, "dones": torch.ones(32)})
    obs = torch.randn(200, 3, generator=draws)
    greedy = learner.act(obs, deterministic=True).actions
    best = torch.stack([(obs[:, 0] > 0) * 2, (obs[:, 1] > 0).long()], -1)
    assert (greedy == best).float().mean() > 0.9


@pytest.mark.parametrize("env_id", ["env_zoo:LastMoves", "env_zoo:MaskedFactors"])
def test_masked_runs_take_legal_actions_only_and_resume_to_the_bit(env_id: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env_id": env_id, "kwargs": {"n_step": 2, "prioritized": True}}
    whole = train(tiny("discrete_sac", tmp_path / "one", **settings), console=False)
    resumed = stop_and_resume(tiny("discrete_sac", tmp_path / "two", **settings), 60)
    assert_same_run(whole, resumed)
