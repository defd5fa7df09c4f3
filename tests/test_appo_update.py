"""APPO's update: the clipped surrogate on V-trace, its minibatches, and the reading with a target policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_training.algorithms.appo as appo_module
from rl_training.algorithms.appo import APPO, appo_loss
from rl_training.algorithms.impala import IMPALA
from rl_training.algorithms.ppo import ppo_loss
from rl_training.ops.losses import clipped_surrogate
from rollout_cases import (
    KINDS,
    PLAIN_STEP,
    VTRACE_COLUMNS,
    OtherRank,
    assert_one_step_reports,
    make_policy,
    make_rollout,
    minibatches_of,
    only,
    seen_by,
    step_of,
    weights_of,
)

METRICS = {
    "loss", "policy_loss", "value_loss", "entropy_loss", "rho_mean", "vtrace_target_mean", "pg_advantage_mean",
    "approx_kl", "clip_fraction",
}  # fmt: skip


def step_with(rollout: dict[str, Tensor], make: Any = APPO, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    """The plain gradient step of a fresh learner on a rollout, and its metrics."""
    policy = make_policy()
    learner = make(policy=policy, **{**PLAIN_STEP, **options})
    with step_of(policy) as step:
        metrics = learner.update(rollout).metrics
    return step, metrics


def test_loss_by_hand() -> None:
    ratios = torch.tensor([[1.0], [1.5], [0.5]])
    batch = {
        "target_logprobs": ratios.log() - 1.0, "behavior_logprobs": -torch.ones(3, 1),
        "vtrace_targets": torch.tensor([[1.0], [1.0], [4.0]]), "values": torch.tensor([[0.0], [1.0], [2.0]]),
        "pg_advantages": torch.tensor([[2.0], [1.0], [-1.0]]), "entropy": torch.tensor([[0.3], [0.6], [0.9]]),
    }  # fmt: skip
    losses = {name: float(value) for name, value in appo_loss(batch, 0.2, 0.1, 0.5).items()}
    policy_loss, value_loss = -(2.0 + 1.2 - 0.8) / 3, 0.5 * (1 + 0 + 4) / 3
    assert losses == pytest.approx(
        {"policy_loss": policy_loss, "value_loss": value_loss, "entropy_loss": -0.6, "rho_mean": 1.0,
         "vtrace_target_mean": 2.0, "pg_advantage_mean": 2 / 3, "clip_fraction": 2 / 3,
         "approx_kl": ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 3,
         "loss": policy_loss + 0.5 * value_loss - 0.1 * 0.6}
    )  # fmt: skip
    same = {
        "new_logprobs": batch["target_logprobs"], "logprobs": batch["behavior_logprobs"],
        "advantages": batch["pg_advantages"], "returns": batch["vtrace_targets"], **batch,
    }  # fmt: skip
    assert float(ppo_loss(same, 0.2, 0.1, 0.5)["loss"]) == pytest.approx(losses["loss"])


@pytest.mark.parametrize("target_policy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_update_takes_the_columns_of_the_contract_and_reports_its_losses(kind: str, target_policy: bool) -> None:
    policy = make_policy(kind)
    learner = APPO(
        policy=policy, learning_rate=1e-3, ent_coef=0.01, vf_coef=0.5, gamma=0.99, rho_clip=1.0, c_clip=1.0,
        pg_rho_clip=1.0, clip_coef=0.2, target_policy=target_policy,
    )  # fmt: skip
    assert_one_step_reports(learner, only(make_rollout(policy, lag=0.3), *VTRACE_COLUMNS), METRICS)


# ---- the surrogate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_policy", [False, True])
def test_where_all_policies_are_one_the_step_is_the_policy_gradient(target_policy: bool) -> None:
    """pi = pi_T = mu: every ratio is 1, nothing is clipped, the KL has no gradient; so it is IMPALA's step."""
    rollout = make_rollout(make_policy(), truncates=True)
    options = {"gamma": 0.9, "gae_lambda": 0.9, "ent_coef": 0.05}
    step, metrics = step_with(rollout, target_policy=target_policy, **options)
    torch.testing.assert_close(step, step_with(rollout, IMPALA, **options)[0], rtol=1e-4, atol=1e-5)
    assert metrics["rho_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["target_kl"] == 0.0


def test_the_ratio_is_to_the_policy_that_acted() -> None:
    """Every ratio is e, beyond the clip: good actions get no more likely."""
    rollout = make_rollout(make_policy())
    off_policy = rollout | {"behavior_logprobs": rollout["behavior_logprobs"] - 1.0}
    good = off_policy | {"rewards": rollout["rewards"].abs() + 10.0}
    step, metrics = step_with(good, ent_coef=0.0, vf_coef=0.0)
    assert metrics["rho_mean"] == pytest.approx(math.e, rel=1e-4)
    assert metrics["clip_fraction"] == 1.0
    assert step.abs().max() == 0.0
    bad = off_policy | {"rewards": -rollout["rewards"].abs() - 10.0}
    assert step_with(bad, ent_coef=0.0, vf_coef=0.0)[0].abs().max() > 0.1


def test_the_surrogate_weighs_by_the_ratio_once() -> None:
    """V-trace leaves the advantage unweighted: with every ratio inside its clip the step is IMPALA's."""
    rollout = make_rollout(make_policy(), lag=0.05)
    clips = {"rho_clip": 100.0, "c_clip": 100.0, "pg_rho_clip": 100.0, "ent_coef": 0.01}
    step, metrics = step_with(rollout, clip_coef=0.9, **clips)
    assert metrics["clip_fraction"] == 0.0
    torch.testing.assert_close(step, step_with(rollout, IMPALA, **clips)[0], rtol=1e-3, atol=1e-5)


# ---- minibatches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "sizes"), [(None, [5]), (14, [2, 2, 1]), (20, [2, 2, 1]), (1, [1] * 5), (500, [5])], ids=str
)
def test_minibatches_are_whole_trajectories(rows: int | None, sizes: list[int]) -> None:
    policy = make_policy()
    rollout = make_rollout(policy, steps=7, envs=5, truncates=True)
    learner = APPO(policy=policy, learning_rate=1e-4, update_epochs=2, minibatch_size=rows)
    steps, seen = minibatches_of(learner, rollout)
    assert steps == len(seen) == 2 * len(sizes)
    assert [minibatch["rewards"].shape for minibatch in seen] == [(7, size) for size in 2 * sizes]
    for epoch in (seen[: len(sizes)], seen[len(sizes) :]):
        ends = torch.cat([minibatch["bootstrap_value"] for minibatch in epoch])
        found = [int((rollout["bootstrap_value"] == end).nonzero()) for end in ends]
        assert sorted(found) == list(range(5))
        for name in ("obs", "actions", "rewards", "behavior_logprobs", "truncated", "truncation_values"):
            assert torch.equal(torch.cat([minibatch[name] for minibatch in epoch], 1), rollout[name][:, found])


def test_advantages_are_normalized_over_one_trajectory_too() -> None:
    """The step does not depend on the scale of the rewards, however many trajectories a minibatch has."""

    def step(scale: float, envs: int) -> Tensor:
        policy = make_policy()
        with torch.no_grad():
            for parameter in policy.critic.parameters():
                parameter.zero_()
        rollout = make_rollout(policy, envs=envs)
        rollout |= {"rewards": scale * rollout["rewards"], "bootstrap_value": torch.zeros(envs)}
        learner = APPO(policy=policy, vf_coef=0.0, normalize_advantages=True, **PLAIN_STEP)
        with step_of(policy) as moved:
            learner.update(rollout)
        return moved

    for envs in (1, 3):
        torch.testing.assert_close(step(1.0, envs), step(10.0, envs), rtol=1e-4, atol=1e-6)


# ---- reset rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_policy", [False, True])
@pytest.mark.parametrize("minibatch_size", [None, 7])
@pytest.mark.parametrize("name", ["obs", "behavior_logprobs", "rewards", "actions"])
def test_rows_that_are_not_valid_change_nothing(name: str, minibatch_size: int | None, target_policy: bool) -> None:
    """Normalised advantages included."""
    rollout = make_rollout(make_policy(), lag=0.3)
    rollout["dones"][:] = False
    rollout["dones"][2, 1] = True
    rollout["valid"] = torch.ones(7, 3, dtype=torch.bool)
    rollout["valid"][3, 1] = False
    garbage = rollout | {name: rollout[name].clone()}
    garbage[name][3, 1] = 1 - garbage[name][3, 1]
    steps = []
    for batch in (rollout, garbage):
        torch.manual_seed(0)  # the learner's generator shuffles
        policy = make_policy()
        learner = APPO(
            policy=policy, learning_rate=1e-2, normalize_advantages=True, update_epochs=2,
            minibatch_size=minibatch_size, target_policy=target_policy,
        )  # fmt: skip
        with step_of(policy) as step:
            learner.update(batch)
        steps.append(step)
    assert torch.equal(*steps)


def test_a_minibatch_of_reset_rows_alone_breaks_nothing() -> None:
    policy = make_policy()
    rollout = make_rollout(policy, steps=1, envs=4)
    rollout["valid"] = torch.tensor([[True, False, True, True]])
    learner = APPO(policy=policy, minibatch_size=1, normalize_advantages=True)
    result = learner.update(rollout)
    assert result.num_gradient_steps == 4
    assert learner.first_bad_tensor() is None
    assert all(math.isfinite(value) for value in result.metrics.values())


# ---- the target policy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu_over_target", "expected"), [(0.1, 1.0), (1.9, 1.0), (4.0, 0.5), (1e-30, 1.0)])
def test_the_ratio_is_to_the_target_policy_until_mu_is_twice_as_likely(
    mu_over_target: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clip(mu / pi_T, 0, 2) * pi / mu with pi = pi_T."""
    seen = []

    def look(logratio: Tensor, *others: Any) -> Any:
        seen.append(logratio.exp())
        return clipped_surrogate(logratio, *others)

    monkeypatch.setattr(appo_module, "clipped_surrogate", look)
    rollout = make_rollout(make_policy())
    rollout["behavior_logprobs"] = rollout["behavior_logprobs"] + math.log(mu_over_target)
    _, metrics = step_with(rollout, target_policy=True)
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], expected), rtol=1e-3, atol=0.0)
    assert metrics["rho_mean"] == pytest.approx(1 / mu_over_target, rel=1e-3)
    assert math.isfinite(metrics["approx_kl"])


@pytest.mark.parametrize("target_policy", [False, True])
def test_metrics_are_of_the_policy_that_acted_and_of_plain_advantages(target_policy: bool) -> None:
    """pi, pi_T and mu are three policies; the surrogate's own ratio shows in `clip_fraction` alone."""
    policy = make_policy()
    rollout = make_rollout(policy, lag=0.3)
    learner = APPO(policy=policy, learning_rate=0.0, normalize_advantages=True, target_policy=target_policy)
    if target_policy:
        with torch.no_grad():
            for weight in learner.target.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    flat = rollout["obs"].flatten(0, 1), rollout["actions"].flatten(0, 1)
    with torch.no_grad():
        logprobs = policy.distribution(flat[0]).log_prob(flat[1]).view_as(rollout["rewards"])
        values = policy.values(flat[0]).view_as(logprobs)
        reference = learner.compare_with_target(rollout)[0] if target_policy else logprobs
        trajectories = learner.value_finals(learner.trajectories(rollout))
        _, advantages = learner.vtrace(trajectories, reference, values, learner.pg_rho_clip if target_policy else None)
    metrics = learner.update(rollout).metrics
    logratio = logprobs - rollout["behavior_logprobs"]
    assert metrics["rho_mean"] == pytest.approx(float(logratio.exp().mean()), rel=1e-4)
    assert metrics["approx_kl"] == pytest.approx(float((logratio.exp() - 1 - logratio).mean()), rel=1e-3)
    assert abs(metrics["pg_advantage_mean"]) > 0.01
    assert metrics["pg_advantage_mean"] == pytest.approx(float(advantages.mean()), rel=1e-4)


def test_the_target_policy_is_copied_every_so_many_updates() -> None:
    policy = make_policy()
    rollout = make_rollout(policy)
    learner = APPO(policy=policy, learning_rate=1e-2, target_policy=True, target_update_interval=3)
    first = weights_of(policy)
    for update in range(1, 7):
        before = weights_of(learner.target)
        learner.update(rollout)
        if update % 3:
            assert torch.equal(weights_of(learner.target), before)
            assert not torch.equal(weights_of(learner.target), weights_of(policy))
        else:
            assert torch.equal(weights_of(learner.target), weights_of(policy))
    assert not torch.equal(weights_of(learner.target), first)
    assert not any(p.requires_grad for p in learner.target.parameters())


def adapted(kl_target: float, updates: int = 1) -> tuple[float, float]:
    """KL coefficient (1 at first) and KL after updates that each copy the target."""
    policy = make_policy()
    learner = APPO(
        policy=policy, learning_rate=0.05, update_epochs=4, target_policy=True, target_update_interval=1,
        kl_coef=1.0, kl_target=kl_target,
    )  # fmt: skip
    for _ in range(updates):
        kl = learner.update(make_rollout(policy)).metrics["target_kl"]
    return float(learner.kl_coef), kl


def test_the_kl_coefficient_adapts_when_the_target_is_copied() -> None:
    _, kl = adapted(1.0)
    assert kl > 1e-3
    assert adapted(kl)[0] == 1.0
    assert adapted(kl / 1.9)[0] == adapted(kl / 0.6)[0] == 1.0
    assert adapted(kl / 2.1)[0] == 1.5
    assert adapted(kl / 0.4)[0] == 0.5
    assert adapted(100.0, updates=3)[0] == 0.125


def test_the_penalty_holds_the_policy_near_its_target() -> None:
    def distance(kl_coef: float) -> float:
        policy = make_policy()
        learner = APPO(
            policy=policy, learning_rate=0.02, clip_coef=10.0, update_epochs=20, target_policy=True, kl_coef=kl_coef
        )
        return float(learner.update(make_rollout(policy)).metrics["target_kl"])

    assert distance(30.0) < 0.5 * distance(0.0)


def test_target_and_coefficient_are_in_the_state() -> None:
    policy = make_policy()
    options: dict[str, Any] = {"target_policy": True, "target_update_interval": 2, "learning_rate": 1e-2}
    learner = APPO(policy=policy, **options)
    for _ in range(3):
        learner.update(make_rollout(policy))
    copy = APPO(policy=make_policy(seed=5), **options)
    copy.load_state_dict(learner.state_dict())
    assert torch.equal(weights_of(copy.target), weights_of(learner.target))
    assert float(copy.kl_coef) == float(learner.kl_coef) == 0.5
    for each in (learner, copy):
        each.update(make_rollout(make_policy()))
    assert torch.equal(weights_of(copy), weights_of(learner))


def test_the_penalty_is_the_kl_of_the_target_to_the_policy_in_that_direction() -> None:
    learner = APPO(policy=make_policy(), target_policy=True)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    rollout = learner.trajectories(make_rollout(make_policy()))
    obs = rollout["obs"].flatten(0, 1)
    target, policy = learner.target.distribution(obs), learner.policy.distribution(obs)
    forward, backward = target.kl(policy).mean().item(), policy.kl(target).mean().item()
    assert abs(forward - backward) > 0.01 * forward
    assert learner.compare_with_target(rollout)[1].mean().item() == pytest.approx(forward, rel=1e-5)


@pytest.mark.parametrize("make", [IMPALA, APPO])
def test_the_critic_that_learns_values_the_ends_in_every_epoch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = make_rollout(make_policy(), truncates=True)
    steps, envs = rollout["rewards"].shape
    ends = {"bootstrap_obs": torch.randn(envs, 2), "final_obs": torch.randn(steps, envs, 2)}
    options = {"learning_rate": 0.1, "optimizer": "sgd"} | ({"update_epochs": 2} if make is APPO else {})
    learner = make(policy=make_policy(), **options)
    seen: list[tuple[Tensor, Tensor]] = []
    values_of = learner.successor_values

    def watched(values: Tensor, batch: dict[str, Tensor]) -> Tensor:
        found = values_of(values, batch)
        with torch.no_grad():
            last = learner.policy.values(batch["bootstrap_obs"])
            finals = learner.policy.values(ends["final_obs"].flatten(0, 1)).view(values.shape)
        following = torch.cat([values[1:], last.unsqueeze(0)])
        seen.append((found, torch.where(batch["truncated"], finals, following)))
        return found

    monkeypatch.setattr(learner, "successor_values", watched)
    learner.update({**rollout, **ends})  # which win over the given values
    assert len(seen) == options.get("update_epochs", 1)
    for found, wanted in seen:
        torch.testing.assert_close(found, wanted)
    if make is APPO:
        assert not torch.allclose(seen[0][0][-1], seen[1][0][-1])  # the weights moved in between


# ---- running statistics, and the means of several learners -----------------------------------------------------------


def test_the_target_policy_takes_over_the_statistics_of_observations() -> None:
    """As they were while the policy learned: they change after the copy."""
    policy = make_policy(normalizes=True)
    learner = APPO(policy=policy, learning_rate=1e-2, target_policy=True, target_update_interval=1)
    learner.update(make_rollout(policy))
    seen = seen_by(policy)
    learner.update(make_rollout(policy, seed=5))
    assert seen_by(learner.target)[2] == seen[2] == 21
    assert all(torch.equal(one, other) for one, other in zip(seen_by(learner.target)[:2], seen[:2], strict=True))
    assert seen_by(policy)[2] == 42


def test_rewards_of_a_rollout_count_once_however_many_epochs_learn_from_them() -> None:
    learner = APPO(policy=make_policy(), update_epochs=3, minibatch_size=7, normalize_rewards=True)
    for turn in (1, 2):
        learner.update(make_rollout(make_policy()))
        assert float(learner.state_dict()["reward_scale.moments"][0]) == pytest.approx(21 * turn, abs=1e-3)


def test_the_penalty_is_a_part_of_the_loss() -> None:
    learner = APPO(
        policy=make_policy(), target_policy=True, kl_coef=3.0, vf_coef=0.7, ent_coef=0.1, target_update_interval=99
    )
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    found = learner.update(make_rollout(make_policy())).metrics
    assert found["target_kl"] > 0.01
    parts = found["policy_loss"] + 0.7 * found["value_loss"] + 0.1 * found["entropy_loss"] + 3.0 * found["target_kl"]
    assert found["loss"] == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize(("elsewhere", "coefficient"), [(0.0, 0.5), (0.02, 1.0), (0.06, 1.5)])
def test_the_kl_coefficient_adapts_to_the_mean_of_all_learners(elsewhere: float, coefficient: float) -> None:
    """Here the policy stays, so its own KL is 0; the target is 0.01."""
    policy = make_policy()
    learner = APPO(
        policy=policy, learning_rate=0.0, target_policy=True, target_update_interval=1, kl_coef=1.0, kl_target=0.01
    )
    learner.ranks = OtherRank(elsewhere)
    learner.update(make_rollout(policy))
    assert float(learner.kl_coef) == coefficient


@pytest.mark.parametrize("make", [IMPALA, APPO])
def test_reset_rows_are_not_in_the_statistics_of_observations(make: Any) -> None:
    policy = make_policy(normalizes=True)
    rollout = make_rollout(policy)
    rollout["valid"] = torch.rand(7, 3, generator=torch.Generator().manual_seed(0)) < 0.7
    obs = rollout["obs"][rollout["valid"]]
    assert 0 < len(obs) < 21
    make(policy=policy).update(rollout)
    mean, var, count = seen_by(policy)
    assert count == len(obs)
    torch.testing.assert_close(mean, obs.mean(0))
    torch.testing.assert_close(var, obs.var(0, correction=0))


def test_a_minibatch_has_the_observations_after_its_own_trajectories() -> None:
    rollout = make_rollout(make_policy(), steps=7, envs=5)
    del rollout["bootstrap_value"]
    rollout["bootstrap_obs"] = rollout["obs"][-1] + 100.0  # so that it says whose it is
    learner = APPO(policy=make_policy(), minibatch_size=14)
    _, seen = minibatches_of(learner, rollout)
    assert [minibatch["rewards"].shape for minibatch in seen] == [(7, 2), (7, 2), (7, 1)]
    for minibatch in seen:
        assert torch.equal(minibatch["bootstrap_obs"], minibatch["obs"][-1] + 100.0)
