"""A2C's update: its loss, its gradient, its advantages, and the same step as Stable-Baselines3's."""

from __future__ import annotations

import pytest
import torch

from rl_training.algorithms.a2c import A2C, a2c_loss
from rollout_cases import (
    KINDS,
    PLAIN_STEP,
    assert_one_step_reports,
    assert_same_weights,
    by_torch_distributions,
    flat_rows,
    gradient_of,
    make_policy,
    make_rollout,
    n_step_advantages,
    only,
    sb3_learner,
    step_of,
)

METRICS = {"loss", "policy_loss", "value_loss", "entropy_loss"}


def test_loss_is_policy_gradient_plus_half_the_squared_error_minus_entropy() -> None:
    batch = {
        "logprobs": torch.tensor([-1.0, -2.0]), "advantages": torch.tensor([3.0, -1.0]),
        "values": torch.tensor([1.0, 5.0]), "returns": torch.tensor([2.0, 2.0]), "entropy": torch.tensor([0.6, 0.4]),
    }  # fmt: skip
    losses = {name: float(value) for name, value in a2c_loss(batch, ent_coef=0.1, vf_coef=0.5).items()}
    # policy: -(-1*3 + -2*-1) / 2; value: (1 + 9) / 2 / 2
    expected = {"policy_loss": 0.5, "value_loss": 2.5, "entropy_loss": -0.5, "loss": 0.5 + 0.5 * 2.5 - 0.1 * 0.5}
    assert losses == pytest.approx(expected)


def test_update_takes_flat_rows_and_reports_its_losses() -> None:
    policy = make_policy()
    learner = A2C(policy=policy, learning_rate=1e-2, ent_coef=0.01, vf_coef=0.5)
    rows = only(flat_rows(make_rollout(policy)), "obs", "actions", "advantages", "returns")
    assert_one_step_reports(learner, rows, METRICS)


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_gradient_of_the_loss(kind: str) -> None:
    """With advantages and returns as constants: the critic learns from the value loss alone."""
    policy = make_policy(kind)
    rows = flat_rows(make_rollout(policy))
    logprobs, entropy, values = by_torch_distributions(policy, rows["obs"], rows["actions"])
    loss = -(logprobs * rows["advantages"]).mean() + 0.7 * 0.5 * (values - rows["returns"]).square().mean()
    expected = -gradient_of(loss - 0.1 * entropy.mean(), policy)
    learner = A2C(policy=policy, ent_coef=0.1, vf_coef=0.7, **PLAIN_STEP)
    with step_of(policy) as step:
        learner.update(rows)
    torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.7])
def test_a_rollout_without_advantages_gets_them(gae_lambda: float, truncates: bool) -> None:
    steps = []
    for given in (True, False):
        policy = make_policy()
        rollout = make_rollout(policy, truncates=truncates)
        if given:
            advantages = n_step_advantages(rollout, 0.9, gae_lambda)
            rollout |= {"advantages": advantages, "returns": advantages + rollout["values"]}
        learner = A2C(policy=policy, gamma=0.9, gae_lambda=gae_lambda, **PLAIN_STEP)
        with step_of(policy) as step:
            learner.update(rollout)
        steps.append(step)
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-6)


def test_a_rollout_without_values_is_valued_by_the_critic() -> None:
    steps = []
    for names in (("values",), ()):
        policy = make_policy()
        rollout = only(make_rollout(policy), "obs", "actions", "rewards", "dones", "bootstrap_value", *names)
        with step_of(policy) as step:
            A2C(policy=policy, **PLAIN_STEP).update(rollout)
        steps.append(step)
    torch.testing.assert_close(*steps)


def test_rows_that_are_not_valid_are_left_out() -> None:
    steps = []
    valid = torch.ones(7, 3, dtype=torch.bool)
    valid[2, 1] = valid[5, 0] = False
    for dropped in (True, False):
        policy = make_policy()
        rollout = make_rollout(policy)
        advantages, returns = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(3))
        batch = only(rollout, "obs", "actions") | {"advantages": advantages, "returns": returns}
        batch = {name: x[valid] for name, x in batch.items()} if dropped else batch | {"valid": valid}
        with step_of(policy) as step:
            A2C(policy=policy, **PLAIN_STEP).update(batch)
        steps.append(step)
    torch.testing.assert_close(*steps)


def test_advantages_are_normalized_only_on_request() -> None:
    def step(normalize: bool, scale: float) -> torch.Tensor:
        policy = make_policy()
        rows = flat_rows(make_rollout(policy))
        rows["advantages"] = rows["advantages"] * scale + (scale - 1.0)
        learner = A2C(policy=policy, vf_coef=0.0, normalize_advantages=normalize, **PLAIN_STEP)
        with step_of(policy) as moved:
            learner.update(rows)
        return moved

    torch.testing.assert_close(step(True, 1.0), step(True, 5.0), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(step(False, 1.0), step(False, 5.0), rtol=1e-2)


def test_acting_gives_what_a_rollout_stores() -> None:
    learner = A2C(policy=make_policy())
    out = learner.act(torch.randn(4, 2), deterministic=False)
    assert out.actions.shape == (4,)
    assert {name: tuple(x.shape) for name, x in out.extras.items()} == {"logprobs": (4,), "values": (4,)}
    obs = torch.randn(4, 2)
    assert torch.equal(learner.act(obs, deterministic=True).actions, learner.act(obs, deterministic=True).actions)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_three_updates_are_those_of_stable_baselines3(kind: str, normalize: bool) -> None:
    """Their value loss is not halved, so their vf_coef is half of ours."""
    sb3 = pytest.importorskip("stable_baselines3")
    policy = make_policy(kind)
    rollout = make_rollout(policy, truncates=True)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.03, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    theirs = sb3_learner(
        sb3.A2C, policy, rollout, vf_coef=0.25, rms_prop_eps=1e-3, normalize_advantage=normalize, **options
    )
    ours = A2C(
        policy=policy, vf_coef=0.5, optimizer="rmsprop", optimizer_eps=1e-3, normalize_advantages=normalize, **options
    )
    for _ in range(3):
        theirs.train()
        ours.update(rollout)
    assert_same_weights(theirs, policy)
