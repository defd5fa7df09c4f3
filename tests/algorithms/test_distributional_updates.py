"""C51, QR-DQN and IQN: targets and losses, and every head of the family on problems with a known answer."""

import numpy as np
import pytest
import torch
from torch import nn

from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.fqf import FQF
from rl_training.algorithms.iqn import IQN
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.errors import UserError
from rl_training.models.mlp_fqf_network import MLPFQFNetwork, MLPIQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork

HEADS = ["dqn", "c51", "qr", "iqn", "fqf"]


def make_learner(head, obs_dim=2, action_dim=2, dueling=False, noisy=False, quantiles=8, **options):
    network = {"obs_dim": obs_dim, "action_dim": action_dim, "hidden_sizes": (32,), "dueling": dueling, "noisy": noisy}
    options = {"learning_rate": 5e-3, "gamma": 0.9, "target_update_interval": 20, **options}
    if head == "dqn":
        return DQN(q_network=MLPQNetwork(**network), **options)
    if head == "c51":
        return C51DQN(q_network=MLPQNetwork(num_outputs=41, **network), v_min=-1.0, v_max=3.0, num_atoms=41, **options)
    if head == "qr":
        return QRDQN(q_network=MLPQNetwork(num_outputs=quantiles, **network), num_quantiles=quantiles, **options)
    if head == "iqn":
        return IQN(q_network=MLPIQNNetwork(embedding_dim=16, **network), num_quantiles=quantiles, **options)
    fqf = MLPFQFNetwork(num_quantiles=quantiles, embedding_dim=16, **network)
    return FQF(q_network=fqf, num_quantiles=quantiles, **options)


def two_states(repeats=8):
    """State 0: end with reward 1, or go on to state 1; state 1: end with reward 2, or with 0."""
    eye = torch.eye(2)
    batch = {
        "obs": eye[[0, 0, 1, 1]], "next_obs": eye[[0, 1, 0, 0]], "actions": torch.tensor([0, 1, 0, 1]),
        "rewards": torch.tensor([1.0, 0.0, 2.0, 0.0]), "terminated": torch.tensor([True, False, True, True]),
    }  # fmt: skip
    return {name: value.repeat_interleave(repeats, 0) for name, value in batch.items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("axes", "noisy"), [(False, False), (True, False), (True, True)])
def test_every_head_finds_the_values_of_a_small_problem(head, axes, noisy):
    torch.manual_seed(0)
    learner = make_learner(head, double_q=axes, dueling=axes, noisy=noisy)
    batch = two_states()
    for _ in range(400):
        result = learner.update(batch, sync=False)
    values = learner.action_values(torch.eye(2), deterministic=True)
    torch.testing.assert_close(values, torch.tensor([[1.0, 1.8], [2.0, 0.0]]), atol=0.3 if noisy else 0.12, rtol=0)
    assert learner.act(torch.eye(2), deterministic=True).actions.tolist() == [1, 0]
    assert result.priorities.shape == (32,)
    assert {"loss", "q_value_mean", "target_mean", "td_error_mean"} <= set(result.metrics)
    policy = learner.numpy_policy()
    assert policy(np.eye(2, dtype=np.float32), None, np.random.default_rng(0), True).tolist() == [1, 0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dueling", [False, True])
def test_numpy_action_values_are_torchs(head, dueling):
    learner = make_learner(head, obs_dim=3, dueling=dueling)
    obs = torch.randn(5, 3)
    values = learner.numpy_action_values()(obs.numpy(), None)
    expected = learner.action_values(obs, deterministic=True).detach().numpy()
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_weights_scale_the_loss_and_not_the_priorities(head):
    options = {"fraction_learning_rate": 0.0} if head == "fqf" else {}
    learner = make_learner(head, learning_rate=0.0, **options)
    batch = two_states()
    state = learner.generator.get_state()
    plain = learner.update(batch)
    learner.generator.set_state(state)  # IQN: the same fractions again
    weighted = learner.update({**batch, "weights": torch.full((32,), 3.0)})
    assert weighted.metrics["loss"] == pytest.approx(3 * plain.metrics["loss"], rel=1e-5)
    assert torch.equal(weighted.priorities, plain.priorities)
    assert learner.last_td_errors is weighted.priorities
    assert weighted.metrics["td_error_mean"] == pytest.approx(float(weighted.priorities.mean()), rel=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_learning_rate_zero_leaves_the_parameters(head):
    options = {"fraction_learning_rate": 0.0} if head == "fqf" else {}
    learner = make_learner(head, learning_rate=0.0, noisy=True, **options)
    before = [p.clone() for p in learner.parameters()]
    learner.update(two_states())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters(), strict=True))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("double_q", [False, True])
def test_illegal_next_actions_and_terminations_in_the_target(head, double_q):
    torch.manual_seed(0)
    learner = make_learner(head, learning_rate=0.0, gamma=1.0, double_q=double_q)
    with torch.no_grad():  # in every state action 1 is worth 1 more than action 0
        bias = learner.q_network.head.bias.view(2, -1)
        learner.q_network.head.weight.zero_()
        bias.zero_()
        if head == "c51":
            bias[0, 10], bias[1, 20] = 50.0, 50.0  # all mass at 0, at 1
        else:
            bias[1] = 1.0
    learner.target.copy_()
    eye = torch.eye(2)
    batch = {
        "obs": eye[[0] * 4], "next_obs": eye[[1] * 4], "actions": torch.zeros(4, dtype=torch.long),
        "rewards": torch.full((4,), 0.5), "terminated": torch.tensor([False, False, True, False]),
        "truncated": torch.tensor([False, False, False, True]),
        "next_action_masks": torch.tensor([[True, True], [True, False], [True, True], [True, True]]),
    }  # fmt: skip
    targets = learner.targets(learner.rows(batch, learner.draws(len(batch["actions"]))))
    means = targets[0] @ learner.support if head == "c51" else targets
    means = means if means.dim() == 1 else means.mean(-1)
    torch.testing.assert_close(means, torch.tensor([1.5, 0.5, 0.5, 1.5]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("double_q", [False, True])
def test_an_end_without_a_legal_action_leaves_every_number_finite(head, double_q):
    torch.manual_seed(0)
    learner, batch = make_learner(head, double_q=double_q), two_states()
    batch["next_action_masks"] = ~batch["terminated"][:, None].expand(-1, 2)
    result = learner.update(batch)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert result.priorities.isfinite().all()
    assert all(p.isfinite().all() for p in learner.parameters())


@pytest.mark.parametrize("head", ["iqn", "fqf", "c51"])
def test_state_is_complete(head):
    def make(seed):
        torch.manual_seed(seed)
        return make_learner(head, noisy=True, dueling=True, double_q=True, target_update_interval=3)

    first, second = make(0), make(1)
    for _ in range(4):
        first.update(two_states())
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        first.update(two_states())
        second.update(two_states())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_categorical_loss_is_the_golden_one():
    # O12: rlax categorical TD learning; one action, states 0-4 are the current ones, 5-9 the next ones
    current = [[0, 9, 0], [9, 0, 9], [0, 9, 0], [9, 9, 0], [9, 0, 9]]
    following = [[0, 0, 9], [1, 1, 1], [0, 0, 9], [1, 1, 1], [0, 9, 9]]
    network = nn.Sequential(nn.Linear(10, 3, bias=False), nn.Unflatten(1, (1, 3)))
    network[0].weight.data = torch.tensor(current + following).float().T.contiguous()
    learner = C51DQN(q_network=network, v_min=0.5, v_max=1.5, num_atoms=3, learning_rate=0.0)
    eye = torch.eye(10)
    batch = {
        "obs": eye[:5], "next_obs": eye[5:], "actions": torch.zeros(5, dtype=torch.long),
        "rewards": torch.tensor([0.5, 0.0, 0.5, 0.8, -0.1]), "discounts": torch.tensor([0.8, 1.0, 0.8, 0.0, 1.0]),
    }  # fmt: skip
    result = learner.update(batch)
    expected = torch.tensor([8.998915, 3.6932087, 8.998915, 0.69320893, 5.1929307])
    torch.testing.assert_close(learner.last_td_errors, expected, rtol=1e-5, atol=1e-5)
    assert result.metrics["loss"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert learner.numpy_policy() is None  # any module will do as a network; it then acts in torch
    with pytest.raises(UserError, match="v_max"):
        C51DQN(q_network=network, v_min=1.0, v_max=1.0)


@pytest.mark.parametrize("head", ["qr", "iqn", "fqf"])
def test_quantiles_of_a_random_reward_are_found(head):
    torch.manual_seed(0)
    learner = make_learner(head, obs_dim=1, action_dim=1, quantiles=4, kappa=0.02, learning_rate=1e-2)
    rewards = torch.arange(4.0).repeat(16)
    batch = {
        "obs": torch.ones(64, 1), "next_obs": torch.ones(64, 1), "actions": torch.zeros(64, dtype=torch.long),
        "rewards": rewards, "dones": torch.ones(64),
    }  # fmt: skip
    for i in range(600):
        learner.learning_rate = 1e-2 * (1 - i / 600)
        learner.update(batch, sync=False)
    taus = (torch.arange(4) + 0.5).unsqueeze(0) / 4
    network, obs = learner.q_network, torch.ones(1, 1)
    quantiles = network(obs)[0, 0] if head == "qr" else network(obs, taus)[0, 0]
    torch.testing.assert_close(quantiles, torch.arange(4.0), atol=0.25, rtol=0)
    assert learner.action_values(obs, deterministic=True).item() == pytest.approx(1.5, abs=0.15)


def test_iqn_draws_apart_for_online_and_target_and_anew_each_update():
    learner = make_learner("iqn", num_target_quantiles=5, num_acting_quantiles=7)
    first, second = learner.draws(6), learner.draws(6)
    assert first["taus"].shape == (6, 8)
    assert first["target_taus"].shape == (6, 5)
    assert first["acting_taus"].shape == (7,)
    drawn = torch.cat([value.flatten() for part in (first, second) for value in part.values()])
    assert len(set(drawn.tolist())) == 2 * (48 + 30 + 7)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    obs = torch.randn(3, 2)
    assert torch.equal(learner.action_values(obs, True), learner.action_values(obs, True))
    assert not torch.equal(learner.action_values(obs, False), learner.action_values(obs, False))
