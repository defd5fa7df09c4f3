"""TD3's mathematics: twin targets, clipped smoothing noise, delayed actor and targets."""

from functools import partial

import pytest
import torch
from torch import Tensor

from continuous_cases import (
    assert_numpy_acts_like_torch,
    assert_only_termination_stops_bootstrapping,
    assert_solves_bandit,
    make_batch,
    make_learner,
    same,
    tensors,
)
from rl_training.algorithms.ddpg import DDPG
from rl_training.algorithms.td3 import TD3, td3_loss
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.models.mlp_td3 import MLPTD3Model

make = partial(make_learner, TD3, MLPTD3Model)


def test_td3_loss_sums_the_errors_of_both_critics() -> None:
    quantities = {"target_q_values": torch.tensor([2.0, 4]), "actor_q_values": torch.tensor([1.0, 5])}
    losses = td3_loss({"q1_values": torch.tensor([1.0, 2]), "q2_values": torch.tensor([2.0, 5]), **quantities})
    assert {name: float(value) for name, value in losses.items()} == {
        "critic_loss": 3.0, "actor_loss": -3.0, "target_q_mean": 3.0,
    }  # fmt: skip
    stacked = td3_loss({"q_values": torch.tensor([[1.0, 2], [2, 5]]), **quantities})
    assert stacked == losses


def test_actor_and_targets_move_every_second_update_only() -> None:
    learner = make(policy_delay=2)
    for update in range(1, 5):
        actor, targets, critics = (
            tensors(m) for m in (learner.model.actor, learner.target_network, learner.model.critics)
        )
        learner.update(make_batch(seed=update))
        moved = update % 2 == 0
        assert all(same(actor, learner.model.actor)) != moved
        assert all(same(targets, learner.target_network)) != moved
        assert not any(same(critics, learner.model.critics))


def test_between_actor_steps_the_last_actor_loss_is_reported() -> None:
    learner = make()
    losses = [learner.update(make_batch(seed=i)).metrics["actor_loss"] for i in range(4)]
    assert losses[0] == 0.0
    assert losses[1] == losses[2] != losses[3]


def test_smoothing_noise_has_its_deviation_and_is_clipped() -> None:
    learner = make(policy_noise=0.2, noise_clip=0.5)
    noise = learner.draw_noise(torch.zeros(20_000, 2))
    assert noise.abs().max() == pytest.approx(0.5)
    assert noise.std() == pytest.approx(0.2, rel=0.05)
    assert torch.equal(make(policy_noise=0.0).draw_noise(torch.zeros(4, 2)), torch.zeros(4, 2))


def test_target_is_the_smaller_critic_at_the_smoothed_and_clipped_action() -> None:
    learner, next_obs = make(), make_batch()["next_obs"]
    noise = torch.full((8, 2), 5.0)
    values = learner.target_network.ensemble_values(next_obs, torch.ones(8, 2))  # mu + 5 is clipped to 1
    found = learner.target_values({"next_obs": next_obs}, noise)
    torch.testing.assert_close(found, torch.minimum(values[0], values[1]))
    assert not torch.equal(values[0], values[1])


def test_only_termination_stops_bootstrapping() -> None:
    def next_value(learner: TD3, obs: Tensor) -> Tensor:
        return learner.target_values({"next_obs": obs}, torch.zeros(8, 2))

    assert_only_termination_stops_bootstrapping(lambda: make(policy_noise=0.0), next_value)


def test_the_actor_climbs_the_first_critic() -> None:
    learner, batch = make(), make_batch()
    values = learner.model.ensemble_values(batch["obs"], batch["actions"])
    torch.testing.assert_close(learner.model.q_values(batch["obs"], batch["actions"]), values[0])


def test_numpy_acts_like_torch() -> None:
    assert_numpy_acts_like_torch(make())


def test_td3_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPTD3Model(obs_dim=3, action_dim=1, hidden_sizes=(32, 32))
    assert_solves_bandit(TD3(model=model, learning_rate=3e-3), 600)


def test_td3_is_ddpg_with_two_critics_noise_on_the_target_and_a_delay() -> None:
    axes = {"policy_noise": 0.2, "noise_clip": 0.5, "policy_delay": 2}
    learners = [make(), make_learner(DDPG, partial(MLPDDPGModel, num_critics=2), **axes)]
    for learner in learners:
        for seed in range(4):
            learner.update(make_batch(seed=seed))
    for one, other in zip(learners[0].parameters(), learners[1].parameters(), strict=True):
        assert torch.equal(one, other)
