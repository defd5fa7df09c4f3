"""DQN's mathematics: targets, double Q-learning, target copies, weights, masks, noise draws, acting, state."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from resume_cases import take_steps, tiny
from rl_training.algorithms.base import TargetNetwork
from rl_training.algorithms.dqn import DQN, dqn_loss
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.blocks import ObservationInput
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.run.build import open_session
from rl_training.speed.optimizer import Optimizer


def table(rows):
    """A network that reads its values [S, A] out of one-hot observations."""
    network = nn.Linear(len(rows), len(rows[0]), bias=False)
    network.weight.data = torch.tensor(rows).float().T.contiguous()
    return network


def make_batch(size=32, obs_dim=3, actions=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "obs": torch.randn(size, obs_dim, generator=g), "next_obs": torch.randn(size, obs_dim, generator=g),
        "actions": torch.randint(actions, (size,), generator=g), "rewards": torch.randn(size, generator=g),
        "dones": (torch.rand(size, generator=g) < 0.2).float(),
    }  # fmt: skip


def make_network(**options):
    return MLPQNetwork(obs_dim=3, action_dim=2, hidden_sizes=(16, 16), **options)


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("double_q", [False, True])
def test_td_errors_are_the_golden_ones(double_q):
    # O10: rlax value_learning_test.py; states 0, 1 are the current ones, 2, 3 the next ones
    eye = torch.eye(4)
    batch = {
        "obs": eye[:2], "next_obs": eye[2:], "actions": torch.tensor([0, 1]), "rewards": torch.ones(2),
        "discounts": torch.tensor([0.0, 1.0]),
    }  # fmt: skip
    current = [[1, 1, 0], [1, 2, 0]]
    selector = [[2, 10, 1], [11, 20, 1]] if double_q else [[0, 1, 0], [1, 2, 0]]
    value = [[99, 1, 98], [91, 2, 66]] if double_q else selector
    algorithm = DQN(q_network=table(current + selector), learning_rate=0.0, double_q=double_q)
    algorithm.target_network.load_state_dict(table(current + value).state_dict())
    result = algorithm.update(batch)
    assert algorithm.last_td_errors.tolist() == [0.0, 1.0]
    assert result.priorities is algorithm.last_td_errors
    assert result.metrics["td_error_mean"] == 0.5
    assert result.metrics["q_value_mean"] == 1.5
    assert result.metrics["target_mean"] == 2.0
    assert result.metrics["loss"] == 0.25  # mean of the Huber losses 0 and 1/2


def test_loss_helper_has_the_contract_names_and_weights():
    batch = {
        "q_values": torch.tensor([[1.0, 5.0], [2.0, 0.0]]), "actions": torch.tensor([0, 1]),
        "target_q_values": torch.tensor([1.5, 3.0]),
    }  # fmt: skip
    losses = dqn_loss(batch)
    assert set(losses) == {"loss", "q_value_mean", "target_mean", "td_error_mean"}
    assert losses["loss"] == pytest.approx((0.125 + 2.5) / 2)
    assert losses["td_error_mean"] == pytest.approx(1.75)
    weighted = dqn_loss({**batch, "weights": torch.tensor([2.0, 0.0])})
    assert weighted["loss"] == pytest.approx(0.125)
    assert weighted["td_error_mean"] == losses["td_error_mean"]


def test_plain_update_is_the_textbook_one_bit_for_bit():
    torch.manual_seed(0)
    network = make_network()
    twin = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    for mine, theirs in zip(twin.parameters(), network.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    algorithm = DQN(q_network=network, learning_rate=1e-2, gamma=0.9, target_update_interval=3)
    optimizer = Optimizer(twin.parameters(), learning_rate=1e-2, eps=1e-8, max_grad_norm=10.0)
    target = TargetNetwork(twin)
    for i in range(7):
        batch = make_batch(seed=i)
        with torch.no_grad():
            best = target.network(batch["next_obs"]).max(1).values
            wanted = torch.addcmul(batch["rewards"], 0.9 * (1 - batch["dones"]), best)  # rounded once, as in ops
        chosen = twin(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
        optimizer.step(F.smooth_l1_loss(chosen, wanted, reduction="none").mean())
        if (i + 1) % 3 == 0:
            target.copy_()
        # what a store with every switch off adds: one-step discounts and weights of one
        batch |= {"discounts": 0.9 * (1 - batch["dones"]), "weights": torch.ones(32)}
        algorithm.update(batch)
        assert torch.equal(flat(algorithm.q_network), flat(twin))
        assert torch.equal(flat(algorithm.target_network), flat(target.network))


@pytest.mark.parametrize("name", ["double_dqn", "dueling_dqn", "noisy_dqn", "prioritized_dqn", "n_step_dqn"])
def test_named_variant_with_its_switches_off_is_dqn_bit_for_bit(name):
    trainer = pytest.importorskip("rl_training.runtime.dqn_trainer")
    specs = {spec.name: spec for spec in trainer.SPECS}
    spaces = EnvSpaces.from_gym("test", gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2))
    off = {"double_q": False, "dueling": False, "noisy": False, "prioritized": False, "n_step": 1, "hidden_sizes": (8,)}

    def learner(spec):
        torch.manual_seed(0)
        return spec.build(spec.params(**off), spaces)

    plain, variant = learner(specs["dqn"]), learner(specs[name])
    assert type(variant) is DQN
    for i in range(3):
        plain.update(make_batch(seed=i))
        variant.update(make_batch(seed=i))
    assert torch.equal(flat(plain.q_network), flat(variant.q_network))


def test_target_network_follows_at_its_interval_and_with_tau_part_of_the_way():
    algorithm = DQN(q_network=make_network(), learning_rate=1e-2, target_update_interval=3)
    start = flat(algorithm.target_network)
    for i in range(1, 7):
        algorithm.update(make_batch(seed=i))
        equal = torch.equal(flat(algorithm.target_network), flat(algorithm.q_network))
        assert equal == (i % 3 == 0)
        if i < 3:
            assert torch.equal(flat(algorithm.target_network), start)
    slow = DQN(q_network=make_network(), learning_rate=1e-2, target_update_interval=1, tau=0.25)
    before = flat(slow.target_network)
    slow.update(make_batch())
    torch.testing.assert_close(flat(slow.target_network), before + 0.25 * (flat(slow.q_network) - before))
    assert not any(p.requires_grad for p in slow.target_network.parameters())
    with pytest.raises(ValueError, match="target_update_interval must be >= 1, got 0"):
        DQN(q_network=make_network(), target_update_interval=0)


def test_target_network_is_one_flat_tensor_and_follows_parameters_that_moved():
    network = make_network(observation_input=ObservationInput(normalize_size=3))
    target = TargetNetwork(network)
    assert len(target._pairs) == len(list(network.parameters()))  # not flat yet: one piece each
    optimizer = Optimizer(network.parameters(), learning_rate=0.1)
    optimizer.step(network(torch.randn(4, 3)).square().mean())
    before = flat(target.network)
    assert not torch.equal(before, flat(network))
    target.polyak_(0.25)
    assert len(target._pairs) == 1
    torch.testing.assert_close(flat(target.network), before + 0.25 * (flat(network) - before))
    target.copy_()
    assert torch.equal(flat(target.network), flat(network))
    network.observation_input.update(torch.randn(50, 3) * 5)
    assert torch.equal(target.network.observation_input.norm.mean, network.observation_input.norm.mean)
    x = torch.randn(4, 3)
    assert torch.equal(target.network(x), network(x))


def test_terminated_states_do_not_bootstrap_and_truncated_ones_do():
    algorithm = DQN(q_network=table([[0.0, 0.0], [3.0, 7.0]]), learning_rate=0.0, gamma=0.5)
    eye = torch.eye(2)
    batch = {
        "obs": eye[[0, 0, 0]], "next_obs": eye[[1, 1, 1]], "actions": torch.zeros(3, dtype=torch.long),
        "rewards": torch.ones(3), "terminated": torch.tensor([True, False, False]),
        "truncated": torch.tensor([False, True, False]),
    }  # fmt: skip
    algorithm.update(batch)
    assert algorithm.last_td_errors.tolist() == [1.0, 4.5, 4.5]
    dones = {**batch, "dones": torch.tensor([1.0, 0.0, 0.0])}
    del dones["terminated"]
    algorithm.update(dones)
    assert algorithm.last_td_errors.tolist() == [1.0, 4.5, 4.5]
    algorithm.update({**batch, "discounts": torch.tensor([1.0, 0.0, 0.25])})  # wins over terminated
    assert algorithm.last_td_errors.tolist() == [8.0, 1.0, 2.75]


def test_weights_scale_the_loss_and_not_the_priorities():
    algorithm = DQN(q_network=make_network(), learning_rate=0.0)
    batch = make_batch()
    plain = algorithm.update(batch)
    doubled = algorithm.update({**batch, "weights": torch.full((32,), 2.0)})
    assert doubled.metrics["loss"] == pytest.approx(2 * plain.metrics["loss"])
    assert doubled.metrics["grad_norm"] == pytest.approx(2 * plain.metrics["grad_norm"], rel=1e-5)
    assert torch.equal(doubled.priorities, plain.priorities)


@pytest.mark.parametrize("double_q", [False, True])
def test_illegal_next_actions_are_never_chosen_in_the_target(double_q):
    algorithm = DQN(q_network=table([[0.0, 0.0], [3.0, 7.0]]), learning_rate=0.0, gamma=1.0, double_q=double_q)
    eye = torch.eye(2)
    batch = {
        "obs": eye[[0, 0]], "next_obs": eye[[1, 1]], "actions": torch.zeros(2, dtype=torch.long),
        "rewards": torch.zeros(2), "dones": torch.zeros(2),
        "next_action_masks": torch.tensor([[True, False], [True, True]]),
    }  # fmt: skip
    algorithm.update(batch)
    assert algorithm.last_td_errors.tolist() == [3.0, 7.0]


def test_masks_of_final_observations_reach_the_replay_buffer(tmp_path):
    config = tiny("dqn", tmp_path, env_id="env_zoo:LastMoves", num_envs=2, kwargs={"learning_starts": 400})
    session = open_session(config)
    buffer = session.store.buffer
    for step in range(0, 400, 4):
        take_steps(session, step)
    batch = buffer.gather(np.arange(len(buffer)))
    session.close()
    position, time = batch["next_obs"].T
    legal = (torch.arange(5) == ((time + (position * 10).trunc()) % 5)[:, None]) & ~batch["terminated"][:, None]
    assert batch["terminated"].any()
    assert (batch["truncated"] & ~batch["terminated"]).any()
    assert torch.equal(batch["next_action_masks"], legal)


def test_learning_rate_zero_leaves_the_parameters():
    algorithm = DQN(q_network=make_network(), learning_rate=0.0)
    before = flat(algorithm.q_network)
    for i in range(3):
        algorithm.update(make_batch(seed=i))
    assert torch.equal(flat(algorithm.q_network), before)


def test_noise_is_drawn_apart_for_online_selecting_and_target_network_and_anew_each_update():
    algorithm = DQN(q_network=make_network(noisy=True), learning_rate=1e-3, double_q=True)
    seen = []
    for network in (algorithm.q_network, algorithm.target_network):

        def record(noise, set_noise=network.set_noise):
            if noise is not None:
                seen.append(noise.clone())
            set_noise(noise)

        network.set_noise = record
    for i in range(2):
        algorithm.update(make_batch(seed=i))
    assert len(seen) == 6
    assert len({tuple(noise.tolist()) for noise in seen}) == 6
    correlations = torch.corrcoef(torch.stack(seen))
    assert (correlations - torch.eye(6)).abs().max() < 0.6
    assert all(layer.noise is None for layer in algorithm.q_network.noisy_layers())  # mean weights between updates


def test_noisy_network_acts_with_fresh_noise_in_training_and_mean_weights_when_deterministic():
    torch.manual_seed(1)
    algorithm = DQN(q_network=make_network(noisy=True), learning_rate=0.0)
    obs = torch.randn(1, 3)
    numpy_act, rng = algorithm.numpy_policy(), np.random.default_rng(0)
    assert len({int(algorithm.act(obs, deterministic=True).actions) for _ in range(20)}) == 1
    assert len({int(numpy_act(obs.numpy(), None, rng, True)[0]) for _ in range(20)}) == 1
    obs = torch.randn(64, 3)
    means = algorithm.act(obs, deterministic=True).actions
    assert any(not torch.equal(algorithm.act(obs).actions, means) for _ in range(20))
    assert any((numpy_act(obs.numpy(), None, rng, False) != means.numpy()).any() for _ in range(20))


@pytest.mark.parametrize("masked", [False, True])
def test_epsilon_greedy_explores_at_its_rate_and_stays_legal(masked):
    algorithm = DQN(q_network=MLPQNetwork(obs_dim=3, action_dim=4, hidden_sizes=(8,)), learning_rate=0.0)
    obs = torch.randn(4000, 3)
    masks = (torch.rand(4000, 4) < 0.5) | (torch.arange(4) == 2) if masked else None
    greedy = algorithm.act(obs, deterministic=True, action_masks=masks).actions
    assert torch.equal(algorithm.act(obs, action_masks=masks).actions, greedy)  # epsilon is 0 by default
    numpy_masks = None if masks is None else masks.numpy()
    policy, rng = algorithm.numpy_policy(), np.random.default_rng(0)
    np.testing.assert_array_equal(policy(obs.numpy(), numpy_masks, rng, True), greedy.numpy())
    for epsilon in (0.4, 1.0):
        algorithm.epsilon = epsilon
        torch_actions = algorithm.act(obs, action_masks=masks).actions
        numpy_actions = torch.from_numpy(policy(obs.numpy(), numpy_masks, rng, False))
        for actions in (torch_actions, numpy_actions):
            if masks is None:
                assert float((actions != greedy).float().mean()) == pytest.approx(0.75 * epsilon, abs=0.03)
            else:
                assert masks.gather(1, actions[:, None]).all()
                assert set(actions.tolist()) == {0, 1, 2, 3}


def test_state_holds_networks_target_optimizer_and_generator():
    def make(seed):
        torch.manual_seed(seed)
        return DQN(q_network=make_network(noisy=True), learning_rate=1e-2, target_update_interval=3, double_q=True)

    first, second = make(0), make(1)
    for i in range(4):
        first.update(make_batch(seed=i))
    second.load_state_dict(first.state_dict())
    for i in range(4, 8):
        first.update(make_batch(seed=i))
        second.update(make_batch(seed=i))
    assert torch.equal(flat(first.q_network), flat(second.q_network))
    assert torch.equal(flat(first.target_network), flat(second.target_network))
    assert torch.equal(first.generator.get_state(), second.generator.get_state())


def test_observation_statistics_move_with_the_batches_and_are_the_target_networks_too():
    network = make_network(observation_input=ObservationInput(normalize_size=3))
    algorithm = DQN(q_network=network, learning_rate=1e-3)
    batch = make_batch()
    algorithm.update({**batch, "obs": batch["obs"] * 3 + 5})
    assert network.observation_input.norm.mean.mean() > 3
    obs = torch.randn(6, 3)
    algorithm.target.copy_()
    assert torch.equal(algorithm.target_network(obs), network(obs))
    policy = algorithm.numpy_policy()
    expected = algorithm.act(obs, deterministic=True).actions
    np.testing.assert_array_equal(policy(obs.numpy(), None, np.random.default_rng(0), True), expected)


def test_steps_that_no_training_turn_has_used_count_for_the_next(tmp_path):
    """Three environments step together, and a turn is due per four steps: two rows, six steps, one or two turns."""
    kwargs = {"learning_starts": 0, "train_frequency": 4, "gradient_updates_per_step": 2, "batch_size": 4}
    session = open_session(tiny("dqn", tmp_path, num_envs=3, vectorization="sync", kwargs=kwargs))
    step, found = 0, []
    for _ in range(6):
        step += take_steps(session, step)
        found.append(len(list(session.store.batches(session.algorithm, step))))
    session.close()
    assert step == 36
    assert found == [2, 4, 2, 4, 2, 4]
