"""CrossQ: batch renormalization, one pass over both states, and no target networks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner, move_target, same, tensors
from registry_contract import TrainerSmoke
from rl_training.algorithms.sac import SAC
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.errors import UserError
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.normalization import BatchRenorm

RENORM: dict[str, Any] = {"architecture": "batch_renorm"}
CROSSQ: dict[str, Any] = {"target_networks": False, "joint_forward": "critics"}


class TestCrossQ(TrainerSmoke):
    algo = "crossq"


def make(**options: Any) -> Any:
    return make_learner(SAC, partial(MLPSACModel, **RENORM), **{**CROSSQ, **options})


def by_hand(batches: int) -> tuple[BatchRenorm, Tensor]:
    norm = BatchRenorm(1, 1).double()
    norm.mean.fill_(0.5)
    norm.var.fill_(4.0)
    norm.batches.fill_(batches)
    return norm, torch.tensor([1.0, 2, 3, 6], dtype=torch.float64).view(1, 4, 1)


def statistics(module: torch.nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.buffers()]


# ---- batch renormalization ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (0, [-1.068892, -0.534446, 0.0, 1.603338]), (99_999, [-1.068892, -0.534446, 0.0, 1.603338]),
        (100_000, [0.249795, 0.749741, 1.249688, 2.749527]),
    ],
)  # fmt: skip
def test_batch_renormalization_on_numbers_made_by_hand(batches: int, expected: list[float]) -> None:
    norm, x = by_hand(batches)
    assert norm(x, by_batch=True).flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert (norm.mean.item(), norm.var.item()) == pytest.approx((0.525, 3.995))
    assert norm.batches.item() == batches + 1


def test_corrections_are_clipped() -> None:
    norm, _ = by_hand(100_000)
    for mean, var, expected in ((300.0, 300.0, (3.0, 5.0)), (-300.0, 0.0, (1 / 3, -5.0))):
        r, d = norm.corrections(torch.tensor(mean), torch.tensor(var))
        assert (r.item(), d.item()) == pytest.approx(expected)


def test_corrections_have_no_gradient() -> None:
    norm, x = by_hand(100_000)
    x.requires_grad_()
    (norm(x, by_batch=True) * torch.arange(4).view(1, 4, 1)).sum().backward()
    r, d = 0.935431, 1.249844  # constants
    again = x.detach().clone().requires_grad_()
    mean, var = again.mean(), again.var(correction=0)
    out = (again - (mean - d * var.sqrt() / r)) * (var / r**2 + 1e-3).rsqrt()
    (out * torch.arange(4).view(1, 4, 1)).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-5, atol=1e-6)


def test_acting_reads_running_statistics_and_moves_nothing() -> None:
    norm, x = by_hand(5)
    before = statistics(norm)
    assert norm(x).flatten().tolist() == pytest.approx([(value - 0.5) / 4.001**0.5 for value in (1, 2, 3, 6)])
    with torch.no_grad():
        norm(x, by_batch=True)  # nor does a pass that cannot learn, as that of a target
    assert all(map(torch.equal, before, norm.buffers()))


def test_a_constant_feature_has_finite_gradients() -> None:
    for batches in (0, 100_000):
        norm, _ = by_hand(batches)
        x = torch.full((1, 4, 1), 3.0, dtype=torch.float64, requires_grad=True)
        norm(x, by_batch=True).sum().backward()
        assert x.grad is not None
        assert bool(torch.isfinite(x.grad).all())


def test_several_learners_have_the_running_statistics_of_all_rows() -> None:
    class Ranks:
        def moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
            return mean + 1.0, var + 2.0  # as if the other rank had other rows

    alone, _ = by_hand(0)
    joined, x = by_hand(0)
    joined.ranks = Ranks()
    alone(x, by_batch=True)
    joined(x, by_batch=True)
    assert joined.mean.item() - alone.mean.item() == pytest.approx(0.01)
    assert joined.var.item() - alone.var.item() == pytest.approx(0.02)


def test_members_have_statistics_of_their_own() -> None:
    norm, x = BatchRenorm(2, 3), torch.randn(2, 50, 3) * torch.tensor([1.0, 4.0]).view(2, 1, 1)
    out = norm(x, by_batch=True)
    torch.testing.assert_close(out.var(1, correction=0), torch.ones(2, 3), rtol=0.05, atol=0)
    torch.testing.assert_close(norm.var, 0.99 + 0.01 * x.var(1, correction=0, keepdim=True))


# ---- the update ---------------------------------------------------------------------------------------------------


def test_one_pass_over_both_states_makes_target_and_loss() -> None:
    learner, batch, noise = make(alpha=0.3), make_batch(rows=16), torch.randn(16, 2)
    reference = copy.deepcopy(learner)
    actions, logprobs = reference.model.actor.sample(batch["next_obs"], noise)  # from running statistics
    states, chosen = torch.cat([batch["obs"], batch["next_obs"]]), torch.cat([batch["actions"], actions.detach()])
    values = reference.model.critics(states, chosen, by_batch=True)
    y = batch["rewards"] + 0.9 * (values[:, 16:].detach().amin(0) - 0.3 * logprobs.detach())
    loss = (values[:, :16] - y).square().mean()
    found, _ = learner.critic_step(batch, noise)
    assert float(found["target_q_mean"]) == pytest.approx(float(y.mean()), rel=1e-5)
    assert float(found["critic_loss"].detach()) == pytest.approx(float(loss), rel=1e-5)
    moved = learner.model.critics.body.norms
    assert all(int(norm.batches) == 1 for norm in moved)  # once, by this pass
    for mine, theirs in zip(statistics(moved), statistics(reference.model.critics.body.norms), strict=True):
        torch.testing.assert_close(mine, theirs)
    # the gradient passes through the statistics of both halves
    reference.critic_optimizer.step(loss)
    torch.testing.assert_close(learner.critic_optimizer.flat, reference.critic_optimizer.flat)


def test_two_passes_give_other_values_of_the_next_state() -> None:
    batch, actions = make_batch(rows=16), torch.zeros(16, 2)
    batch["next_obs"] += 2.0  # states move, which the statistics of two passes hide
    learners = [make(joint_forward=how) for how in ("critics", "none")]
    joint, apart = (learner.critic_outputs(batch, actions, None, (None, None))[1] for learner in learners)
    assert float((joint - apart).detach().abs().mean()) > 0.1


def test_the_actors_step_moves_its_own_statistics_and_reads_the_critics() -> None:
    learner, batch = make(), make_batch(rows=16)
    actor, critics = statistics(learner.model.actor), statistics(learner.model.critics)
    values = copy.deepcopy(learner.model.critics)
    sampled = copy.deepcopy(learner.model.actor).sample(batch["obs"], torch.zeros(16, 2), by_batch=True)
    loss = learner.actor_step(batch["obs"], torch.zeros(16, 2))
    expected = (1.0 * sampled.logprobs).mean() - values(batch["obs"], sampled.actions).amin(0).mean()
    assert float(loss["actor_loss"].detach()) == pytest.approx(float(expected), rel=1e-5)
    assert not any(map(torch.equal, actor, learner.model.actor.buffers()))
    assert all(map(torch.equal, critics, learner.model.critics.buffers()))


def test_acting_and_the_critics_step_leave_the_actors_statistics() -> None:
    learner, batch = make(), make_batch()
    before = statistics(learner.model.actor)
    learner.train()
    learner.act(batch["obs"])
    learner.act(batch["obs"], deterministic=True)
    learner.critic_step(batch, torch.randn(8, 2))
    assert all(map(torch.equal, before, learner.model.actor.buffers()))


def test_without_target_networks_there_is_one_set_of_critics() -> None:
    learner = make(actor_update_interval=3)
    assert not any(name.startswith("target") for name in learner.state_dict())
    moved = []
    for seed in range(6):
        actor = tensors(learner.model.actor)
        learner.update(make_batch(seed=seed))
        moved.append(not all(same(actor, learner.model.actor)))
    assert moved == [False, False, True] * 2


def test_a_joint_forward_evaluates_target_networks_on_both_states_too() -> None:
    learner, batch, noise = make(target_networks=True, alpha=0.3), make_batch(rows=16), torch.randn(16, 2)
    move_target(learner)
    actions, logprobs = learner.model.actor.sample(batch["next_obs"], noise)
    states, chosen = torch.cat([batch["obs"], batch["next_obs"]]), torch.cat([batch["actions"], actions.detach()])
    with torch.no_grad():
        values = learner.target_critics(states, chosen, by_batch=True)[:, 16:]
    y = batch["rewards"] + 0.9 * (values.amin(0) - 0.3 * logprobs.detach())
    assert float(learner.critic_step(batch, noise)[0]["target_q_mean"]) == pytest.approx(float(y.mean()), rel=1e-5)


@pytest.mark.parametrize("of_model", [{"num_quantiles": 5}, {"num_critics": 4}], ids=["quantiles", "subset"])
def test_it_combines_with_quantiles_and_subsets(of_model: dict[str, Any]) -> None:
    settings = CROSSQ | ({"critic_subset_size": 2} if "num_critics" in of_model else {})
    learner: Any = make_learner(SAC, partial(MLPSACModel, **RENORM, **of_model), **settings)
    result = learner.update(make_batch())
    assert result.priorities.shape == (8,)
    assert all(torch.isfinite(torch.tensor(value)) for value in result.metrics.values())


def test_crossq_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32), **RENORM)
    assert_solves_bandit(SAC(model=model, learning_rate=3e-3, alpha=0.01, adam_beta1=0.5, **CROSSQ), 400)


# ---- the name -----------------------------------------------------------------------------------------------------


def test_the_name_has_its_published_settings() -> None:
    params: Any = get_algorithm_spec("crossq").params()
    published = {
        "learning_rate": 1e-3, "adam_beta1": 0.5, "batch_size": 256, "hidden_sizes": (256, 256), "gamma": 0.99,
        "critic_hidden_sizes": (2048, 2048), "num_critics": 2, "actor_update_interval": 3, "learning_starts": 5_000,
        "gradient_updates_per_step": 1, "alpha": "auto", "optimizer": "adam",
    }  # fmt: skip
    assert {name: getattr(params, name) for name in published} == published


def test_beta_of_the_temperature_is_adams_own() -> None:
    learner = make(adam_beta1=0.5)
    betas = {name: optimizer.beta1 for name, optimizer in learner._optimizers.items()}
    assert betas == {"critic_optimizer": 0.5, "actor_optimizer": 0.5, "alpha_optimizer": 0.9}


def test_axes_that_do_not_combine_are_named() -> None:
    unused = read_params(get_algorithm_spec("crossq").params, {}).find_unused()
    assert unused["critic_dropout"] == "architecture is batch_renorm, and only an mlp has it"
    assert unused["tau"] == "target_networks is false"
    of_mlp = read_params(get_algorithm_spec("crossq").params, {"architecture": "mlp"}).find_unused()
    assert of_mlp["joint_forward"] == "architecture is mlp, which treats every row alone"
    with pytest.raises(UserError, match="joint_forward is 'actor'"):
        make(joint_forward="actor")
