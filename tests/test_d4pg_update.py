"""D4PG's mathematics: a projected categorical target, cross-entropy, and an actor that climbs the expectation."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from continuous_cases import (
    SIZES,
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    assert_solves_bandit,
    assert_steps_touch_only_their_own_network,
    make_batch,
    make_learner,
)
from rl_training.algorithms.d4pg import D4PG, d4pg_loss
from rl_training.errors import UserError
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.ops.distributional import project_categorical

SUPPORT: dict[str, Any] = {"v_min": -20.0, "v_max": 20.0, "num_atoms": 41}
make = partial(make_learner, D4PG, partial(MLPD4PGModel, **SUPPORT), **SUPPORT)


def test_losses_reproduce_rlax_categorical_td_learning() -> None:
    support = torch.tensor([0.5, 1.0, 1.5])
    rewards, discounts = torch.tensor([0.5, 0, 0.5, 0.8, -0.1]), torch.tensor([0.8, 1, 0.8, 0, 1])
    logits = torch.tensor([[0.0, 9, 0], [9, 0, 9], [0, 9, 0], [9, 9, 0], [9, 0, 9]])
    following = torch.tensor([[0.0, 0, 9], [1, 1, 1], [0, 0, 9], [1, 1, 1], [0, 9, 9]]).softmax(-1)
    atoms = rewards[:, None] + discounts[:, None] * support
    targets = project_categorical(atoms=atoms, probs=following, support=support)
    values = {"actor_q_values": torch.tensor([1.0]), "target_q_values": targets @ support}
    for i, expected in enumerate([8.998915, 3.6932087, 8.998915, 0.69320893, 5.1929307]):
        losses = d4pg_loss({"logits": logits[i : i + 1], "target_distributions": targets[i : i + 1], **values})
        assert float(losses["critic_loss"]) == pytest.approx(expected, rel=1e-4)
    assert {"critic_loss", "actor_loss", "target_q_mean", "q_value_mean"} == set(losses)
    assert float(losses["actor_loss"]) == -1.0


def test_expected_q_is_the_mean_of_the_distribution() -> None:
    model, batch = make().model, make_batch()
    logits = model.distribution_logits(batch["obs"], batch["actions"])
    assert logits.shape == (8, 41)
    torch.testing.assert_close(model.support, torch.linspace(-20, 20, 41))
    expected = (logits.softmax(-1) * model.support).sum(-1)
    torch.testing.assert_close(model.q_values(batch["obs"], batch["actions"]), expected)


def test_only_termination_stops_bootstrapping() -> None:
    # Inside the support the projection keeps the mean, so that the target's mean is the Bellman target of the mean.
    assert_only_termination_stops_bootstrapping(
        lambda: make(gamma=0.8),
        lambda learner, obs: learner.target_network.q_values(obs, learner.target_network.actor(obs)),
        gamma=0.8,
    )


def test_a_terminal_target_is_a_point_mass_and_priorities_are_cross_entropies() -> None:
    learner, batch = make(), make_batch()
    batch |= {"rewards": torch.full((8,), 3.0), "dones": torch.ones(8)}
    log_probs = learner.model.distribution_logits(batch["obs"], batch["actions"]).log_softmax(-1).detach()
    result = learner.update(batch)
    torch.testing.assert_close(result.priorities, -log_probs[:, 23])  # the atom at 3.0
    assert result.metrics["target_q_mean"] == pytest.approx(3.0, rel=1e-5)
    assert result.metrics["critic_loss"] == pytest.approx(float(-log_probs[:, 23].mean()), rel=1e-5)


def test_weights_scale_the_loss_but_not_the_priorities() -> None:
    batch = make_batch()
    plain, weighted = make().update(batch), make().update({**batch, "weights": torch.full((8,), 0.5)})
    assert weighted.metrics["critic_loss"] == pytest.approx(0.5 * plain.metrics["critic_loss"], rel=1e-5)
    torch.testing.assert_close(plain.priorities, weighted.priorities)


def test_actor_and_critic_steps_touch_only_their_own_network() -> None:
    assert_steps_touch_only_their_own_network(make())


def test_sampled_actions_come_with_their_density() -> None:
    model, obs = make().model, make_batch()["obs"]
    actions, logprobs = model.sample_actions(obs, 0.5, torch.Generator().manual_seed(0))
    assert actions.abs().max() <= 1.0
    assert logprobs.shape == (8,)
    inside = (actions.abs() < 1.0).all(-1)
    normal = torch.distributions.Normal(model.actor(obs), 0.5).log_prob(actions).sum(-1)
    torch.testing.assert_close(logprobs[inside], normal[inside], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.sample_actions(obs, 0.0).actions, model.actor(obs))
    assert math.isfinite(float(model.sample_actions(obs, 0.0).logprobs.sum()))


def test_noise_may_be_a_tensor_of_one_deviation_or_what_the_caller_drew() -> None:
    model, obs = make().model, make_batch()["obs"]
    one = model.sample_actions(obs, 0.5, torch.Generator().manual_seed(0))
    same = model.sample_actions(obs, torch.tensor(0.5), torch.Generator().manual_seed(0))
    torch.testing.assert_close(tuple(same), tuple(one), rtol=0, atol=0)
    noise = torch.randn(8, SIZES["action_dim"], generator=torch.Generator().manual_seed(1))
    actions, logprobs = model.sample_actions(obs, noise)
    torch.testing.assert_close(actions, (model.actor(obs) + noise).clamp(-1.0, 1.0))
    torch.testing.assert_close(logprobs, torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(-1))


def test_a_support_that_is_not_the_models_is_refused() -> None:
    model = MLPD4PGModel(**SIZES, **SUPPORT)
    for wrong in ({"v_min": -10.0}, {"v_max": 10.0}, {"num_atoms": 51}):
        with pytest.raises(UserError, match="the model was made with"):
            D4PG(model=model, **wrong)
    D4PG(model=model)
    with pytest.raises(UserError, match="not possible"):
        MLPD4PGModel(**SIZES, v_min=1.0, v_max=1.0)


def test_numpy_acts_like_torch() -> None:
    assert_numpy_acts_like_torch(make(exploration_noise=0.2))


def test_d4pg_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPD4PGModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32), v_min=-2.0, v_max=0.5, num_atoms=51)
    assert_solves_bandit(D4PG(model=model, learning_rate=3e-3), 600)


def test_hard_copies_of_the_targets_come_once_per_interval() -> None:
    learner = make(tau=1.0, target_update_interval=3)
    for update in range(1, 7):
        before = [p.detach().clone() for p in learner.target_network.parameters()]
        learner.update(make_batch(seed=update))
        pairs = zip(learner.target_network.parameters(), learner.model.parameters(), strict=True)
        copied = all(torch.equal(target, online) for target, online in pairs)
        after = list(learner.target_network.parameters())
        assert copied == (update % 3 == 0)
        assert copied or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
