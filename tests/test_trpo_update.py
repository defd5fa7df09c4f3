"""TRPO: the natural-gradient step, the trust region, the critic's own steps, and sb3-contrib's update; its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import rl_training.algorithms.trpo as trpo_module
from registry_contract import ReferenceScript, TrainerSmoke
from resume_cases import StopAt, edit_checkpoint, tiny
from rl_training.algorithms.trpo import TRPO, trpo_loss
from rl_training.models.blocks import ImageEncoder
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.workflows import resume_training, train
from rollout_cases import (
    KINDS,
    assert_same_weights,
    flat_rows,
    gradient_of,
    make_policy,
    make_rollout,
    sb3_learner,
    weights_of,
)

METRICS = {
    "surrogate_gain", "surrogate_improvement", "policy_loss", "value_loss", "final_value_loss", "entropy", "approx_kl",
    "accepted_step", "step_norm", "backtrack_steps", "line_search_fraction", "cg_iterations", "value_updates",
}  # fmt: skip


class TestTrainer(TrainerSmoke):
    algo = "trpo"


class TestReferenceScript(ReferenceScript):
    script, preset = "trpo_cartpole_reference", "trpo/cartpole"


def actor_weights(policy: MLPActorCritic) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in policy.actor_parameters()])


def surrogate_of(policy: MLPActorCritic, rows: dict[str, Tensor]) -> Tensor:
    """Mean ratio times normalized advantage."""
    advantages = rows["advantages"]
    advantages = (advantages - advantages.mean()) / advantages.std()
    logprobs = policy.evaluate_actions(rows["obs"], rows["actions"]).logprobs
    return ((logprobs - rows["logprobs"]).exp() * advantages).mean()


def fisher_matrix(policy: MLPActorCritic, obs: Tensor) -> Tensor:
    """The Hessian of KL(old || new) at the old parameters, entry by entry; a policy of discrete actions."""
    actor = policy.actor
    shapes = {name: p.shape for name, p in actor.named_parameters()}
    old = actor(obs).log_softmax(-1).detach()

    def kl(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        new = functional_call(actor, parameters, (obs,)).log_softmax(-1)
        return (old.exp() * (old - new)).sum(-1).mean()

    return torch.autograd.functional.hessian(kl, weights_of(actor))  # type: ignore[no-any-return]


def test_loss_by_hand() -> None:
    batch = {
        "new_logprobs": torch.tensor([0.0, -1.0]), "logprobs": torch.tensor([-1.0, -1.0]),
        "advantages": torch.tensor([1.0, 3.0]), "values": torch.tensor([1.0, 2.0]), "returns": torch.tensor([3.0, 2.0]),
        "entropy": torch.tensor([0.2, 0.4]),
    }  # fmt: skip
    losses = {name: float(value) for name, value in trpo_loss(batch).items()}
    gain = (torch.e + 3.0) / 2
    expected = {"surrogate_gain": gain, "policy_loss": -gain, "value_loss": 1.0, "entropy": 0.3}
    assert losses == pytest.approx(expected)
    step = {"approx_kl": 0.1, "accepted_step": 1.0, "step_norm": 0.5, "backtrack_steps": 2.0, "cg_iterations": 10.0}
    passed = trpo_loss({**batch, **{name: torch.tensor(value) for name, value in step.items()}})
    assert {name: float(value) for name, value in passed.items()} == pytest.approx({**expected, **step})


def test_update_takes_flat_rows_and_reports_every_part_of_the_step() -> None:
    policy = make_policy()
    learner = TRPO(
        policy=policy, value_learning_rate=1e-3, max_kl=0.01, cg_iterations=5, cg_damping=0.1, line_search_steps=4,
        line_search_shrink=0.5, value_updates=3,
    )  # fmt: skip
    result = learner.update(flat_rows(make_rollout(policy)), global_step=21)
    assert set(result.metrics) >= METRICS
    assert all(isinstance(value, float) for value in result.metrics.values())
    assert result.num_gradient_steps == 1 + 3
    assert (result.metrics["cg_iterations"], result.metrics["value_updates"]) == (5, 3)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("max_kl", 0.0, "> 0"), ("max_kl", -0.1, "> 0"), ("cg_damping", 0.0, "> 0"), ("cg_iterations", 0, ">= 1"),
        ("line_search_steps", 0, ">= 1"), ("line_search_shrink", 0.0, r"in \(0, 1\)"),
        ("line_search_shrink", 1.0, r"in \(0, 1\)"), ("value_updates", 0, ">= 1"),
        ("value_learning_rate", 0.0, "> 0"), ("value_minibatch_size", 0, ">= 1"), ("gamma", 1.1, r"in \[0, 1\]"),
        ("gae_lambda", -0.1, r"in \[0, 1\]"), ("max_grad_norm", 0.0, "> 0"), ("optimizer_eps", 0.0, "> 0"),
    ],
)  # fmt: skip
def test_a_bound_is_named_when_it_is_broken(name: str, value: float, bound: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be {bound}, got {value}$"):
        TRPO(**{"policy": make_policy(), name: value})  # type: ignore[arg-type]


# ---- the step --------------------------------------------------------------------------------------------------------


def test_fisher_product_is_the_hessian_of_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column by column, with the damping on the diagonal."""
    products = []

    def look(matvec: Any, b: Tensor, iterations: int) -> Tensor:
        products.append(torch.stack([matvec(column) for column in torch.eye(len(b))], 1).detach())
        return b

    monkeypatch.setattr(trpo_module, "conjugate_gradient", look)
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    expected = fisher_matrix(policy, rows["obs"]) + 0.05 * torch.eye(len(weights_of(policy.actor)))
    TRPO(policy=policy, cg_damping=0.05).update(rows)
    torch.testing.assert_close(products[0], expected, rtol=1e-3, atol=1e-5)


def test_step_is_the_natural_gradient_with_the_length_of_the_trust_region() -> None:
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    gradient = gradient_of(surrogate_of(policy, rows), policy.actor)
    fisher = fisher_matrix(policy, rows["obs"]) + 0.1 * torch.eye(len(gradient))
    direction = torch.linalg.solve(fisher, gradient)
    expected = direction * (2 * 1e-3 / (direction @ fisher @ direction)).sqrt()
    before = weights_of(policy.actor)
    learner = TRPO(policy=policy, max_kl=1e-3, cg_iterations=50, cg_damping=0.1, value_updates=1)
    metrics = learner.update(rows).metrics
    step = weights_of(policy.actor) - before
    assert metrics["accepted_step"] == 1.0
    torch.testing.assert_close(step, metrics["line_search_fraction"] * expected, rtol=1e-2, atol=1e-4)
    assert float(torch.cosine_similarity(step, gradient, dim=0)) < 0.99  # and not the plain gradient
    assert metrics["step_norm"] == pytest.approx(float(step.norm()), rel=1e-3)
    assert metrics["surrogate_gain"] == pytest.approx(float(gradient @ step), rel=1e-2)


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_accepted_step_stays_in_the_trust_region_and_improves_the_surrogate(kind: str, max_kl: float) -> None:
    policy = make_policy(kind)
    rows = flat_rows(make_rollout(policy))
    with torch.no_grad():
        old, before = policy.distribution(rows["obs"]), surrogate_of(policy, rows)
    metrics = TRPO(policy=policy, max_kl=max_kl, cg_damping=0.01, value_updates=1).update(rows).metrics
    with torch.no_grad():
        kl, after = old.kl(policy.distribution(rows["obs"])).mean(), surrogate_of(policy, rows)
    assert metrics["accepted_step"] == 1.0
    assert 0.0 < float(kl) <= max_kl * (1 + 1e-5)
    assert metrics["approx_kl"] == pytest.approx(float(kl), rel=1e-3)
    assert after > before
    assert metrics["surrogate_improvement"] == pytest.approx(float(after - before), rel=1e-2, abs=1e-5)
    assert metrics["line_search_fraction"] == pytest.approx(0.8 ** metrics["backtrack_steps"])


@pytest.mark.parametrize("reason", ["no better step", "no gradient", "a NaN"])
def test_a_step_that_is_not_accepted_leaves_the_policy_bit_for_bit(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no better step":  # uphill is downhill
        monkeypatch.setattr(trpo_module, "conjugate_gradient", lambda matvec, b, iterations: -b)
    if reason == "a NaN":
        monkeypatch.setattr(trpo_module, "conjugate_gradient", lambda matvec, b, iterations: b * torch.nan)
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    if reason == "no gradient":
        rows["advantages"] = torch.zeros_like(rows["advantages"])
    before, entropy = actor_weights(policy), policy.distribution(rows["obs"]).entropy().mean()
    metrics = TRPO(policy=policy, line_search_steps=4, value_updates=1).update(rows).metrics
    assert torch.equal(actor_weights(policy), before)
    for name in ("accepted_step", "approx_kl", "surrogate_improvement", "line_search_fraction"):
        assert metrics[name] == 0.0
    assert metrics["backtrack_steps"] == 4
    assert metrics["entropy"] == pytest.approx(float(entropy.detach()))  # of the policy that stayed


# ---- the critic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [False, True], ids=["vector", "image"])
def test_the_critic_leaves_the_policy_alone(image: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even behind an encoder that both read."""
    monkeypatch.setattr(trpo_module, "conjugate_gradient", lambda matvec, b, iterations: torch.zeros_like(b))
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    if image:
        policy = MLPActorCritic(obs_dim=0, action_dim=2, hidden_sizes=(), encoder=ImageEncoder((1, 4, 4), 8))
        rows["obs"] = torch.randn(21, 1, 4, 4)
    actor, critic = actor_weights(policy), weights_of(policy.critic)
    metrics = TRPO(policy=policy, value_learning_rate=0.05, value_updates=60).update(rows).metrics
    assert torch.equal(actor_weights(policy), actor)
    assert not torch.equal(weights_of(policy.critic), critic)
    assert metrics["final_value_loss"] < metrics["value_loss"]


@pytest.mark.parametrize(("size", "expected"), [(None, 21), (8, 8), (50, 21)])
def test_value_updates_counts_minibatches(size: int | None, expected: int) -> None:
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    learner = TRPO(policy=policy, value_updates=5, value_minibatch_size=size)
    sizes: list[int] = []
    step = learner.value_step
    learner.value_step = lambda *rows: sizes.append(len(rows[1])) or step(*rows)  # type: ignore[method-assign]
    result = learner.update(rows)
    assert result.num_gradient_steps == 6
    assert sizes == [expected] * 5


@pytest.mark.parametrize("name", ["learning_rate", "value_learning_rate"])
@pytest.mark.parametrize("rate", [3e-4, 0.02])
def test_a_forced_resume_changes_the_critics_rate_by_either_name(tmp_path: Path, name: str, rate: float) -> None:
    """Also in a checkpoint of an earlier version, whose unused `learning_rate` was 3e-4."""
    halfway = train(tiny("trpo", tmp_path, eval_episodes=0), callbacks=[StopAt(64)], console=False).checkpoint_path

    def differ(tree: dict[str, Any]) -> None:
        assert tree["config"]["algo_kwargs"]["learning_rate"] == 1e-3
        tree["config"]["algo_kwargs"]["learning_rate"] = 3e-4

    earlier = edit_checkpoint(halfway, tmp_path / "earlier.ckpt", differ)
    for path in (halfway, earlier):
        kept: Any = resume_training(path, output_dir=tmp_path, console=False)
        assert kept.policy.algorithm.value_optimizer.learning_rate == 1e-3
        changes = {"algo_kwargs": {name: rate}}
        result: Any = resume_training(path, output_dir=tmp_path, changes=changes, force=True, console=False)
        assert result.policy.algorithm.value_optimizer.learning_rate == rate
        stored = load_checkpoint(result.checkpoint_path)["config"]["algo_kwargs"]
        assert stored["learning_rate"] == stored["value_learning_rate"] == rate


# ---- another implementation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_update_is_that_of_sb3_contrib(kind: str) -> None:
    """Plain gradient steps for the critic; their value loss is not halved, so their step size is."""
    contrib = pytest.importorskip("sb3_contrib")
    policy = make_policy(kind)
    rollout = make_rollout(policy, steps=16, truncates=True)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "cg_damping": 0.1}
    theirs = sb3_learner(
        contrib.TRPO, policy, rollout, target_kl=0.02, cg_max_steps=10, n_critic_updates=3, learning_rate=0.01,
        batch_size=rollout["rewards"].numel(), policy_kwargs={"optimizer_class": torch.optim.SGD}, **options,
    )  # fmt: skip
    ours = TRPO(
        policy=policy, max_kl=0.02, cg_iterations=10, value_updates=3, value_minibatch_size=None, optimizer="sgd",
        value_learning_rate=0.02, **options,
    )  # fmt: skip
    before = weights_of(policy.actor)
    theirs.train()
    result = ours.update(rollout)
    assert result.metrics["accepted_step"] == 1.0
    assert (weights_of(policy.actor) - before).norm() > 0.01
    assert_same_weights(theirs, policy, rtol=1e-2, atol=2e-4)


def test_the_critics_rows_are_shuffled_for_every_pass() -> None:
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    learner = TRPO(policy=policy, value_updates=9, value_minibatch_size=7)
    seen: list[list[float]] = []
    step = learner.value_step
    learner.value_step = lambda *given: seen.append(given[1].tolist()) or step(*given)  # type: ignore[method-assign]
    learner.update(rows)
    passes = [[*seen[start], *seen[start + 1], *seen[start + 2]] for start in (0, 3, 6)]
    for served in passes:
        assert sorted(served) == sorted(rows["returns"].tolist())  # every row once
    assert len({tuple(served) for served in passes} | {tuple(rows["returns"].tolist())}) == 4  # never in one order
