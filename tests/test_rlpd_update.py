"""RLPD's mathematics: a random subset in the target, LayerNorm critics, a slower actor, and SAC as a special case."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner, same, tensors
from rl_training.algorithms.rlpd import RLPD, rlpd_loss
from rl_training.algorithms.sac import SAC, sac_loss
from rl_training.errors import UserError
from rl_training.models.blocks import CriticEnsemble
from rl_training.models.mlp_sac import MLPSACModel


def make(num_critics: int = 5, critic_layer_norm: bool = True, learner: type[SAC] = RLPD, **options: Any) -> Any:
    model = partial(MLPSACModel, num_critics=num_critics, critic_layer_norm=critic_layer_norm)
    return make_learner(learner, model, **options)


def test_subset_is_without_replacement_and_drawn_anew_for_every_update() -> None:
    learner = make(critic_subset_size=2)
    drawn: list[Tensor] = []
    draw = learner.draw_subset
    learner.draw_subset = lambda: drawn.append(draw()) or drawn[-1]
    for _ in range(40):
        learner.update(make_batch())
    assert len(drawn) == 40
    assert all(len(set(subset.tolist())) == 2 for subset in drawn)
    pairs = {tuple(sorted(subset.tolist())) for subset in drawn}
    assert len(pairs) == 10  # every pair of five critics


def test_target_is_the_minimum_over_the_subset_alone() -> None:
    learner, batch = make(alpha=0.0), make_batch()
    noise, subset = torch.randn(8, 2), torch.tensor([3, 1])
    actions = learner.model.actor.sample(batch["next_obs"], noise).actions
    values = learner.target_critics(batch["next_obs"], actions)
    expected = batch["rewards"] + 0.9 * torch.minimum(values[3], values[1])
    metrics, _ = learner.critic_step({**batch, "discounts": torch.full((8,), 0.9)}, noise, subset)
    assert float(metrics["target_q_mean"]) == pytest.approx(expected.mean().item(), rel=1e-5)


def test_every_critic_learns_and_the_loss_is_the_mean_over_them() -> None:
    learner, batch = make(), make_batch()
    before = tensors(learner.model.critics)
    q_values = learner.model.q_values(batch["obs"], batch["actions"])
    loss = (batch["rewards"] - q_values).square().mean()
    result = learner.update({**batch, "dones": torch.ones(8)})
    assert result.metrics["critic_loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(result.priorities, (batch["rewards"] - q_values).abs().mean(0).detach())
    for old, new in zip(before, learner.model.critics.parameters(), strict=True):
        assert ((old != new).flatten(1).any(1)).all()


def test_the_actor_climbs_the_mean_over_all_critics() -> None:
    learner, batch, noise = make(alpha=0.2), make_batch(), torch.randn(8, 2)
    actions, logprobs = learner.model.actor.sample(batch["obs"], noise)
    expected = (0.2 * logprobs).mean() - learner.model.q_values(batch["obs"], actions).mean()
    losses = learner.actor_step(batch["obs"], noise)
    assert losses["actor_loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_actor_and_temperature_move_once_per_interval_and_targets_every_time() -> None:
    learner = make(actor_update_interval=3)
    for update in range(1, 7):
        actor, targets, alpha = tensors(learner.model.actor), tensors(learner.target_critics), float(learner.alpha)
        learner.update(make_batch(seed=update))
        moved = update % 3 == 0
        assert all(same(actor, learner.model.actor)) != moved
        assert (float(learner.alpha) == alpha) != moved
        assert not all(same(targets, learner.target_critics))


@pytest.mark.parametrize("alpha", [0.2, "auto"])
def test_with_two_critics_and_no_layer_norm_it_is_sac_to_the_bit(alpha: float | str) -> None:
    sac = make(2, False, SAC, alpha=alpha)
    rlpd = make(2, False, alpha=alpha, critic_subset_size=2, actor_update_interval=1)
    for i in range(5):
        metrics = [learner.update(make_batch(seed=i)).metrics for learner in (sac, rlpd)]
        assert metrics[0] == metrics[1]
    for name, value in sac.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, rlpd.state_dict()[name]), name
    assert torch.equal(sac.generator.get_state(), rlpd.generator.get_state())


def test_target_entropy_is_half_of_sacs() -> None:
    assert make().target_entropy == -1.0
    assert make(2, critic_subset_size=2).target_entropy == -2.0
    assert make(target_entropy=-0.3).target_entropy == -0.3


def test_layer_norm_bounds_the_values_of_far_actions() -> None:
    torch.manual_seed(0)
    obs, near = torch.randn(64, 3), torch.rand(64, 2) * 2 - 1
    growth = {}
    for layer_norm in (False, True):
        critics = CriticEnsemble(num_critics=10, inputs=5, hidden_sizes=(64, 64), layer_norm=layer_norm)
        # |Q| <= |w| |h| of the last hidden layer h, and LayerNorm holds |h| at sqrt(H) whatever the input
        growth[layer_norm] = (critics(obs, 1e4 * near).abs().max() / critics(obs, near).abs().max()).item()
    assert growth[True] < 5.0
    assert growth[False] > 1000.0


def test_rlpd_loss_climbs_the_mean_of_many_and_the_minimum_of_two() -> None:
    batch = {
        "q_values": torch.zeros(3, 2), "target_q_values": torch.ones(2), "sampled_logprobs": torch.zeros(2),
        "sampled_q_values": torch.tensor([[1.0, 2], [3, 4], [5, 9]]), "alpha": torch.tensor(0.1),
    }  # fmt: skip
    assert float(rlpd_loss(batch)["actor_loss"]) == -4.0
    assert float(rlpd_loss(batch)["critic_loss"]) == 1.0
    twins = {**batch, "q_values": torch.zeros(2, 2), "sampled_q_values": torch.tensor([[1.0, 2], [3, 4]])}
    assert rlpd_loss(twins) == sac_loss(twins)
    assert float(rlpd_loss(twins)["actor_loss"]) == -1.5


def test_a_subset_larger_than_the_ensemble_is_refused() -> None:
    with pytest.raises(UserError, match="critic_subset_size is 6"):
        make(critic_subset_size=6)


def test_rlpd_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32), num_critics=4, critic_layer_norm=True)
    assert_solves_bandit(RLPD(model=model, learning_rate=3e-3, alpha=0.01, actor_update_interval=2), 500)


def test_layer_norm_stands_between_a_layer_and_its_activation() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(num_critics=1, inputs=3, hidden_sizes=(6,), layer_norm=True)
    x = torch.randn(5, 3)
    hidden = torch.nn.functional.layer_norm(x @ critics.weight0[0] + critics.bias0[0], (6,)).relu()
    expected = (hidden @ critics.weight1[0] + critics.bias1[0]).squeeze(-1)
    torch.testing.assert_close(critics.run(x)[0], expected)


def test_the_entropy_can_stay_out_of_the_targets() -> None:
    batch, noise = make_batch(), torch.randn(8, 2)
    learner = make(alpha=0.5, backup_entropy=False, critic_subset_size=5)
    actions = learner.model.actor.sample(batch["next_obs"], noise).actions
    next_q = learner.target_critics(batch["next_obs"], actions).amin(0)
    metrics, _ = learner.critic_step(batch, noise, None)
    assert float(metrics["target_q_mean"]) == pytest.approx((batch["rewards"] + 0.9 * next_q).mean().item(), rel=1e-5)


def test_a_tuned_temperature_starts_where_it_is_told() -> None:
    assert float(make(initial_alpha=0.1).alpha) == pytest.approx(0.1)
    assert float(make().alpha) == 1.0
    with pytest.raises(ValueError, match=r"^initial_alpha must be > 0, got 0$"):
        make(initial_alpha=0)
