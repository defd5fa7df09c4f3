"""DDPG's mathematics: the deterministic policy gradient, targets, exploration, and exact restoring."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_cases import (
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    assert_solves_bandit,
    assert_steps_touch_only_their_own_network,
    make_batch,
    make_learner,
    tensors,
)
from rl_training.algorithms.d4pg import D4PG
from rl_training.algorithms.ddpg import DDPG, ddpg_loss
from rl_training.algorithms.naf import NAF
from rl_training.algorithms.sac import SAC
from rl_training.models.blocks import ObservationInput
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.models.mlp_naf import MLPNAFModel
from rl_training.models.mlp_sac import MLPSACModel

make = partial(make_learner, DDPG, MLPDDPGModel)


@pytest.mark.parametrize(("make_one", "model"), [(DDPG, MLPDDPGModel), (D4PG, MLPD4PGModel)])
def test_each_sample_s_action_gradient_is_clipped_before_it_reaches_the_actor(make_one: Any, model: Any) -> None:
    clip, batch = 0.05, make_batch()
    learner = make_learner(make_one, model, action_gradient_clip=clip, optimizer="sgd", learning_rate=1.0)
    parameters = list(learner.model.actor.parameters())
    actions = learner.model.actor(batch["obs"])
    leaf = actions.detach().requires_grad_()
    (rows,) = torch.autograd.grad(learner.model.q_values(batch["obs"], leaf).sum(), leaf)
    lengths = rows.norm(dim=-1, keepdim=True)
    assert (lengths > clip).any()
    shortened = rows * (clip / lengths).clamp(max=1.0)
    wanted = torch.autograd.grad(actions, parameters, shortened / len(rows))  # up the value, so plus
    expected = [p.detach() + g for p, g in zip(parameters, wanted, strict=True)]
    learner.actor_step(batch["obs"], batch["actions"])
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one.detach(), other)


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
    assert_steps_touch_only_their_own_network(make())


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


@pytest.mark.parametrize("rates", [{"actor_learning_rate": 0.0}, {"critic_learning_rate": 0.0}])
def test_actor_and_critics_may_have_rates_of_their_own(rates: dict[str, float]) -> None:
    learner = make(learning_rate=0.01, **rates)
    before = tensors(learner.model)
    learner.update(make_batch())
    moved = {
        name: not torch.equal(old, new)
        for old, (name, new) in zip(before, learner.model.named_parameters(), strict=True)
    }
    still = "actor" if "actor_learning_rate" in rates else "critics"
    assert {name for name, has_moved in moved.items() if not has_moved} == {n for n in moved if n.startswith(still)}


def test_numpy_exploration_stays_inside_the_bounds() -> None:
    policy, obs = make(exploration_noise=5.0).numpy_policy(), np.zeros((100, 3), np.float32)
    assert policy is not None
    drawn = policy(obs, None, np.random.default_rng(0), False)
    assert (drawn.max(), drawn.min()) == (1.0, -1.0)


@pytest.mark.parametrize(
    ("learner", "model"), [(DDPG, MLPDDPGModel), (NAF, MLPNAFModel), (SAC, MLPSACModel)], ids=["ddpg", "naf", "sac"]
)
def test_statistics_of_observations_change_after_learning(learner: Any, model: Any) -> None:
    """The first update is that of a learner which does not normalize; then the batch is in the statistics."""
    inputs, batch = ObservationInput(normalize_size=3), make_batch()
    normalizes = make_learner(learner, partial(model, observation_input=inputs))
    plain = make_learner(learner, model)
    assert normalizes.update(batch).metrics == pytest.approx(plain.update(batch).metrics, rel=1e-4, abs=1e-5)
    assert inputs.norm is not None
    assert inputs.norm.count == 8
    torch.testing.assert_close(inputs.norm.mean, batch["obs"].mean(0))
    torch.testing.assert_close(inputs.norm.var, batch["obs"].var(0, correction=0))
