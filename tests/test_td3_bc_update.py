"""TD3+BC's and ReBRAC's mathematics: imitation in the actor's loss and in targets, on numbers from the papers' code."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from continuous_cases import (
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    make_batch,
    make_learner,
    same,
    tensors,
)
from rl_training.algorithms.td3_bc import TD3BC, bc_actor_loss, squared_distance
from rl_training.errors import UserError
from rl_training.models.mlp_td3 import MLPTD3Model

make = partial(make_learner, TD3BC, MLPTD3Model)
Q = torch.tensor([10.0, -20, 30])
PI = torch.tensor([[0.5, 0.0], [0.1, 0.2], [0.0, 0.0]])
RECORDED = torch.tensor([[0.0, 0.0], [0.1, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("q_weight", "bc_coef", "expected"), [(2.5, 1 / 2, -0.618333), (1.0, 0.01, -0.329033), (0.0, 1 / 2, 0.215)]
)
def test_the_actor_loss_of_td3_bc_and_of_rebrac(q_weight: float, bc_coef: float, expected: float) -> None:
    losses = bc_actor_loss(Q, squared_distance(PI, RECORDED), Q.abs().mean(), q_weight, bc_coef)
    assert float(losses["actor_loss"]) == pytest.approx(expected, abs=1e-6)


def test_no_gradient_passes_through_the_scale_of_the_values() -> None:
    values = Q.clone().requires_grad_()
    bc_actor_loss(values, torch.zeros(3), values.abs().mean(), 2.5, 1.0)["actor_loss"].backward()
    torch.testing.assert_close(values.grad, torch.full((3,), -0.125 / 3))  # lambda = 2.5 / 20


def target(values: float, coef: float) -> float:
    """The mean target of a batch whose rows are all the example, with a fixed value of the next state."""
    learner = make(critic_bc_coef=coef, gamma=0.99)
    penalized = learner.correct_values(
        torch.full((8,), values), torch.tensor([[0.5, -0.5]]).repeat(8, 1),
        {"next_actions": torch.tensor([[0.4, -0.1]]).repeat(8, 1)},
    )  # fmt: skip
    return float(1.0 + 0.99 * penalized.mean())


def test_the_target_of_rebrac_is_lower_where_the_policy_leaves_the_recorded_next_action() -> None:
    assert float(squared_distance(torch.tensor([0.5, -0.5]), torch.tensor([0.4, -0.1]))) == pytest.approx(0.17)
    assert target(50.0, 0.01) == pytest.approx(50.498317, abs=1e-5)
    assert target(50.0, 0.5) == pytest.approx(50.41585, abs=1e-5)


def test_the_penalty_of_the_targets_is_in_the_update_and_only_with_next_actions() -> None:
    batch = make_batch()
    far = {**batch, "next_actions": torch.full((8, 2), 100.0)}
    found = {
        name: make(critic_bc_coef=coef, policy_noise=None).update(given).metrics["target_q_mean"]
        for name, coef, given in (("none", 0.0, far), ("new", 1.0, batch), ("recorded", 1.0, far))
    }
    assert found["none"] == found["new"]
    assert found["recorded"] == pytest.approx(found["none"] - 0.9 * 2 * 100.0**2, rel=0.05)


def test_the_default_imitates_by_the_mean_over_dimensions() -> None:
    learner = make(q_weight=0.0)
    batch = make_batch()
    actions = learner.model.actor(batch["obs"])
    expected = (actions - batch["actions"]).square().mean()
    assert float(learner.actor_step(batch["obs"], batch["actions"])["actor_loss"]) == pytest.approx(float(expected))


@pytest.mark.parametrize("actor_q", ["first", "min"])
def test_the_actor_climbs_the_critic_that_is_named(actor_q: str) -> None:
    learner = make(actor_q=actor_q, actor_bc_coef=0.0, q_weight=2.0)
    batch = make_batch()
    values = learner.model.ensemble_values(batch["obs"], learner.model.actor(batch["obs"])).detach()
    climbed = values[0] if actor_q == "first" else values.amin(0)
    expected = -2.0 * climbed.mean() / climbed.abs().mean()
    found = learner.actor_step(batch["obs"], batch["actions"])["actor_loss"]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_another_name_for_the_climbed_critic_is_refused() -> None:
    with pytest.raises(UserError, match="actor_q is 'max'; it must be 'first', 'min' or 'mean'"):
        make(actor_q="max")


def test_the_actor_moves_every_second_update_and_imitates_alone_with_no_weight_on_values() -> None:
    learner = make(q_weight=0.0, learning_rate=0.01)
    batch = make_batch()
    before = tensors(learner.model.actor)
    learner.update(batch)
    assert all(same(before, learner.model.actor))
    far = float(squared_distance(learner.model.actor(batch["obs"]), batch["actions"]).mean())
    for _ in range(200):
        learner.update(batch)
    assert float(squared_distance(learner.model.actor(batch["obs"]), batch["actions"]).mean()) < 0.2 * far


def test_only_termination_stops_bootstrapping() -> None:
    def next_value(learner: TD3BC, obs: torch.Tensor) -> torch.Tensor:
        return learner.target_values({"next_obs": obs}, None)

    assert_only_termination_stops_bootstrapping(lambda: make(policy_noise=None), next_value)


def test_a_copy_learns_the_same_and_acting_in_numpy_is_the_same() -> None:
    learner = make()
    twin = copy.deepcopy(learner)
    for one in (learner, twin):
        one.update(make_batch())
        one.update(make_batch(seed=1))
    assert all(same(tensors(learner), twin))
    assert_numpy_acts_like_torch(learner)
