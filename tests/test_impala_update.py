"""IMPALA's update: its loss, V-trace's part in it, episode ends, and what happens on-policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training.algorithms.a2c import A2C
from rl_training.algorithms.impala import IMPALA, impala_loss
from rollout_cases import (
    KINDS,
    PLAIN_STEP,
    VTRACE_COLUMNS,
    assert_one_step_reports,
    by_torch_distributions,
    gradient_of,
    make_policy,
    make_rollout,
    only,
    step_of,
)

METRICS = {
    "loss", "policy_loss", "value_loss", "entropy_loss", "rho_mean", "vtrace_target_mean", "pg_advantage_mean",
}  # fmt: skip


def step_with(rollout: dict[str, Tensor], **options: Any) -> Tensor:
    """The plain gradient step of a fresh IMPALA on a rollout."""
    policy = make_policy()
    learner = IMPALA(policy=policy, **{**PLAIN_STEP, **options})
    with step_of(policy) as step:
        learner.update(rollout)
    return step


def targets_of(rollout: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """V-trace targets and advantages [T, B] that a learner computes from a rollout."""
    learner = IMPALA(policy=make_policy(), **options)
    trajectories = learner.trajectories(rollout)
    policy, _ = learner.trace_rollout(trajectories)
    return learner.vtrace(trajectories, policy["target_logprobs"], policy["values"], learner.pg_rho_clip)


def test_loss_by_hand() -> None:
    batch = {
        "target_logprobs": torch.tensor([[-1.0], [-2.0]]), "behavior_logprobs": torch.tensor([[-1.0], [-1.0]]),
        "vtrace_targets": torch.tensor([[3.0], [1.0]]), "values": torch.tensor([[1.0], [0.0]]),
        "pg_advantages": torch.tensor([[0.5], [2.0]]), "entropy": torch.tensor([[0.2], [0.6]]),
    }  # fmt: skip
    losses = {name: float(value) for name, value in impala_loss(batch, ent_coef=0.1, vf_coef=0.5).items()}
    expected = {
        "policy_loss": (0.5 + 4.0) / 2, "value_loss": 0.5 * (4 + 1) / 2, "entropy_loss": -0.4,
        "rho_mean": (1 + 1 / torch.e) / 2, "vtrace_target_mean": 2.0, "pg_advantage_mean": 1.25,
        "loss": 2.25 + 0.5 * 1.25 - 0.1 * 0.4,
    }  # fmt: skip
    assert losses == pytest.approx(expected)
    weighted = impala_loss({**batch, "weights": torch.tensor([[0.0], [1.0]])}, 0.1, 0.5)
    assert float(weighted["policy_loss"]) == pytest.approx(4.0)
    assert float(weighted["value_loss"]) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_update_takes_the_columns_of_the_contract_and_reports_its_losses(kind: str) -> None:
    policy = make_policy(kind)
    learner = IMPALA(
        policy=policy, learning_rate=1e-3, ent_coef=0.01, vf_coef=0.5, gamma=0.99, rho_clip=1.0, c_clip=1.0,
        pg_rho_clip=1.0,
    )  # fmt: skip
    assert_one_step_reports(learner, only(make_rollout(policy, lag=0.3), *VTRACE_COLUMNS), METRICS)


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_gradient_with_targets_and_advantages_as_constants(kind: str) -> None:
    """V-trace written as its backward recursion, row by row, with clipped ratios."""
    policy = make_policy(kind)
    rollout = make_rollout(policy, lag=0.5)
    flat = {name: rollout[name].flatten(0, 1) for name in ("obs", "actions")}
    logprobs, entropy, values = (x.view(7, 3) for x in by_torch_distributions(policy, flat["obs"], flat["actions"]))
    rho = (logprobs - rollout["behavior_logprobs"]).exp().detach()
    v, following, next_target = values.detach(), rollout["bootstrap_value"], rollout["bootstrap_value"]
    targets, advantages = torch.zeros(7, 3), torch.zeros(7, 3)
    for t in reversed(range(7)):
        discount = 0.9 * (~rollout["dones"][t]).float()
        advantages[t] = rho[t].clamp(max=1.1) * (rollout["rewards"][t] + discount * next_target - v[t])
        delta = rho[t].clamp(max=1.3) * (rollout["rewards"][t] + discount * following - v[t])
        targets[t] = v[t] + delta + discount * rho[t].clamp(max=0.9) * (next_target - following)
        following, next_target = v[t], targets[t]
    loss = -(logprobs * advantages).mean() + 0.7 * 0.5 * (values - targets).square().mean() - 0.1 * entropy.mean()
    expected = -gradient_of(loss, policy)
    learner = IMPALA(
        policy=policy, gamma=0.9, ent_coef=0.1, vf_coef=0.7, rho_clip=1.3, c_clip=0.9, pg_rho_clip=1.1, **PLAIN_STEP
    )
    with step_of(policy) as step:
        metrics = learner.update(only(rollout, *VTRACE_COLUMNS)).metrics
    torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)
    assert metrics["rho_mean"] == pytest.approx(float(rho.mean()), rel=1e-4)
    assert metrics["vtrace_target_mean"] == pytest.approx(float(targets.mean()), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.8])
@pytest.mark.parametrize("truncates", [False, True])
def test_on_policy_it_is_advantage_actor_critic(truncates: bool, gae_lambda: float) -> None:
    """All ratios are 1: n-step returns (or lambda-returns), the same gradient as A2C's on the same rollout."""
    steps = []
    for make in (A2C, IMPALA):
        policy = make_policy()
        options = {"gamma": 0.9, "gae_lambda": gae_lambda, "ent_coef": 0.05, "vf_coef": 0.7, **PLAIN_STEP}
        with step_of(policy) as step:
            make(policy=policy, **options).update(make_rollout(policy, truncates=truncates))
        steps.append(step)
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-5)


def test_ratios_above_the_clips_count_as_one() -> None:
    """Every ratio is e and every clip 1: the update of an on-policy rollout."""
    rollout = make_rollout(make_policy())
    off_policy = rollout | {"behavior_logprobs": rollout["behavior_logprobs"] - 1.0}
    torch.testing.assert_close(step_with(off_policy), step_with(rollout), rtol=1e-4, atol=1e-6)
    clips = {"rho_clip": 5.0, "c_clip": 5.0, "pg_rho_clip": 5.0}
    assert not torch.allclose(step_with(off_policy, **clips), step_with(rollout), rtol=1e-2)


def test_without_importance_correction_the_behaviour_policy_does_not_matter() -> None:
    rollout = make_rollout(make_policy())
    off_policy = rollout | {"behavior_logprobs": rollout["behavior_logprobs"] + torch.randn(7, 3)}
    on_policy, forced = step_with(rollout), step_with(off_policy, importance_correction=False)
    assert torch.equal(forced, step_with(rollout, importance_correction=False))
    torch.testing.assert_close(forced, on_policy, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(step_with(off_policy), on_policy, rtol=1e-2)


def test_a_truncated_row_bootstraps_from_its_final_observation_and_looks_no_further() -> None:
    rollout = make_rollout(make_policy(), steps=4, envs=2, truncates=True)
    rollout |= {"terminated": torch.zeros(4, 2, dtype=torch.bool), "truncated": torch.zeros(4, 2, dtype=torch.bool)}
    rollout["truncated"][1, 0] = True
    targets, advantages = targets_of(rollout, gamma=0.9)
    expected = rollout["rewards"][1, 0] + 0.9 * rollout["truncation_values"][1, 0]
    assert float(targets[1, 0]) == pytest.approx(float(expected), rel=1e-5)
    assert float(advantages[1, 0]) == pytest.approx(float(expected - rollout["values"][1, 0]), rel=1e-4)
    later = {**rollout, "rewards": rollout["rewards"].clone(), "bootstrap_value": rollout["bootstrap_value"] + 3}
    later["rewards"][2:] += 10.0
    changed, _ = targets_of(later, gamma=0.9)
    assert torch.equal(changed[:2, 0], targets[:2, 0])  # the next episode does not leak back
    assert (changed[:2, 1] > targets[:2, 1]).all()
    terminated = rollout | {"terminated": rollout["truncated"], "truncated": torch.zeros(4, 2, dtype=torch.bool)}
    assert float(targets_of(terminated, gamma=0.9)[0][1, 0]) == pytest.approx(float(rollout["rewards"][1, 0]), rel=1e-5)


def test_dones_mean_terminated_where_they_are_not_truncated() -> None:
    rollout = make_rollout(make_policy(), truncates=True)
    rollout["truncated"] &= ~rollout["terminated"]
    given = targets_of(rollout)
    either = {name: x for name, x in rollout.items() if name != "terminated"}
    either["dones"] = rollout["terminated"] | rollout["truncated"]
    for one, other in zip(given, targets_of(either), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["obs", "behavior_logprobs", "rewards", "actions"])
def test_rows_that_are_not_valid_change_nothing(name: str) -> None:
    """A reset row stands behind the end of an episode, where nothing looks at it."""
    rollout = make_rollout(make_policy(), lag=0.3)
    rollout["dones"][:] = False
    rollout["dones"][2, 1] = True
    rollout["valid"] = torch.ones(7, 3, dtype=torch.bool)
    rollout["valid"][3, 1] = False
    garbage = rollout | {name: rollout[name].clone()}
    garbage[name][3, 1] = 1 - garbage[name][3, 1]
    assert not torch.equal(garbage[name], rollout[name])
    assert torch.equal(step_with(garbage), step_with(rollout))
    assert not torch.equal(step_with({**garbage, "valid": torch.ones_like(garbage["valid"])}), step_with(garbage))
