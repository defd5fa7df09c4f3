"""PPO's update: its loss and the published numbers, epochs and minibatches, clipping, and Stable-Baselines3's step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rl_training.algorithms.actor_critic as actor_critic_module
import rl_training.algorithms.ppo as ppo_module
from rl_training.algorithms.actor_critic import normalize, select_rows
from rl_training.algorithms.ppo import PPO, ppo_loss
from rollout_cases import (
    KINDS,
    PLAIN_STEP,
    OtherRank,
    assert_one_step_reports,
    assert_same_weights,
    by_torch_distributions,
    flat_rows,
    gradient_of,
    make_policy,
    make_rollout,
    minibatches_of,
    n_step_advantages,
    sb3_learner,
    seen_by,
    step_of,
    weights_of,
)

METRICS = {"loss", "policy_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction"}


@pytest.mark.parametrize(("sign", "expected"), [(1.0, -0.17117467), (-1.0, 0.19333333)])
def test_policy_loss_matches_the_published_numbers(sign: float, expected: float) -> None:
    actions = torch.tensor([[0], [1], [2]])
    new = torch.tensor([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]]).log_softmax(-1).gather(1, actions).squeeze(1)
    old = torch.tensor([[1.0, 1, 1], [2, 0, 0], [-3, -2, -1]]).log_softmax(-1).gather(1, actions).squeeze(1)
    batch = {
        "new_logprobs": new, "logprobs": old, "advantages": sign * torch.tensor([0.3, 0.2, 0.1]),
        "values": torch.zeros(3), "returns": torch.zeros(3), "entropy": torch.zeros(3),
    }  # fmt: skip
    losses = ppo_loss(batch, clip_coef=0.2, ent_coef=0.0, vf_coef=0.5)
    assert float(losses["policy_loss"]) == pytest.approx(expected, abs=1e-4)
    assert float(losses["loss"]) == pytest.approx(expected, abs=1e-4)


def test_loss_and_statistics_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 0.5])
    batch = {
        "new_logprobs": ratios.log() - 1.0, "logprobs": -torch.ones(3), "advantages": torch.tensor([2.0, 1.0, 1.0]),
        "values": torch.tensor([0.0, 1.0, 2.0]), "returns": torch.tensor([1.0, 1.0, 4.0]),
        "entropy": torch.tensor([0.3, 0.6, 0.9]),
    }  # fmt: skip
    losses = {name: float(value) for name, value in ppo_loss(batch, 0.2, 0.1, 0.5).items()}
    policy_loss, value_loss = -(2.0 + 1.2 + 0.5) / 3, 0.5 * (1 + 0 + 4) / 3
    kl = (0.0 + (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 3
    assert losses == pytest.approx(
        {"policy_loss": policy_loss, "value_loss": value_loss, "entropy_loss": -0.6, "approx_kl": kl,
         "clip_fraction": 2 / 3, "loss": policy_loss + 0.5 * value_loss - 0.1 * 0.6}
    )  # fmt: skip


def test_update_takes_flat_rows_and_reports_its_losses() -> None:
    policy = make_policy()
    learner = PPO(policy=policy, learning_rate=1e-3, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5)
    # one epoch of the whole batch, unless told otherwise
    result = assert_one_step_reports(learner, flat_rows(make_rollout(policy)), METRICS)
    assert result.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_gradient_of_the_loss(kind: str) -> None:
    policy = make_policy(kind)
    rows = flat_rows(make_rollout(policy, lag=0.3))
    logprobs, entropy, values = by_torch_distributions(policy, rows["obs"], rows["actions"])
    ratio, advantages = (logprobs - rows["logprobs"]).exp(), rows["advantages"]
    surrogate = torch.where(advantages > 0, ratio.clamp(max=1.2) * advantages, ratio.clamp(min=0.8) * advantages)
    loss = -surrogate.mean() + 0.7 * 0.5 * (values - rows["returns"]).square().mean() - 0.1 * entropy.mean()
    expected = -gradient_of(loss, policy)
    learner = PPO(policy=policy, ent_coef=0.1, vf_coef=0.7, clip_coef=0.2, normalize_advantages=False, **PLAIN_STEP)
    with step_of(policy) as step:
        learner.update(rows)
    torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sign", "moves"), [(1.0, False), (-1.0, True)])
def test_a_ratio_beyond_the_clip_moves_only_back(sign: float, moves: bool) -> None:
    """Every ratio is e: a good action gets no more likely, a bad one gets less."""
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    rows |= {"logprobs": rows["logprobs"] - 1.0, "advantages": sign * rows["advantages"].abs()}
    learner = PPO(policy=policy, vf_coef=0.0, ent_coef=0.0, normalize_advantages=False, **PLAIN_STEP)
    before = weights_of(policy)
    result = learner.update(rows)
    assert torch.equal(weights_of(policy), before) is not moves
    assert result.metrics["clip_fraction"] == 1.0


# ---- epochs and minibatches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(None, [21]), (7, [7, 7, 7]), (8, [8, 8, 5]), (10, [10, 10]), (50, [21]), (1, [1] * 20)],
    ids=str,
)  # fmt: skip
def test_each_epoch_serves_every_row_once(size: int | None, sizes: list[int]) -> None:
    """But one row left over, which could not be normalized, waits for the next shuffle."""
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    learner = PPO(policy=policy, learning_rate=1e-4, update_epochs=3, minibatch_size=size)
    steps, seen = minibatches_of(learner, rows)
    assert steps == len(seen) == 3 * len(sizes)
    assert [len(minibatch["obs"]) for minibatch in seen] == 3 * sizes
    orders = []
    for epoch in range(3):
        pieces = seen[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        served = {name: torch.cat([piece[name] for piece in pieces]) for name in rows}
        found = [int((rows["returns"] == value).nonzero()) for value in served["returns"]]
        assert len(set(found)) == len(found) == sum(sizes)
        for name, tensor in served.items():  # rows stay together
            assert torch.equal(tensor, rows[name][found])
        orders.append(found)
    assert orders[0] != orders[1]


def test_the_divergence_is_that_of_the_last_epoch() -> None:
    """The other metrics are means over all steps."""
    policy = make_policy()
    rows, steps = flat_rows(make_rollout(policy)), []
    learner = PPO(policy=policy, learning_rate=0.01, update_epochs=4, minibatch_size=7)
    take = learner.minibatch_step
    learner.minibatch_step = lambda part: steps.append(take(part)) or steps[-1]  # type: ignore[func-returns-value]
    metrics, table = learner.update(rows).metrics, torch.stack(steps)
    assert metrics["approx_kl"] == pytest.approx(float(table[-3:, 4].mean()), rel=1e-5)
    assert metrics["approx_kl"] > 1.2 * float(table[:, 4].mean())
    assert metrics["clip_fraction"] == pytest.approx(float(table[:, 5].mean()), rel=1e-5)


def test_how_many_steps_are_taken_together_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for most, calls in ((32, 6), (1, 9)):  # two whole minibatches per epoch and a smaller one
        monkeypatch.setattr(actor_critic_module, "MOST_STEPS", most)
        policy = make_policy()
        learner = PPO(policy=policy, update_epochs=3, minibatch_size=8)
        learner.seed(7)
        together, seen = learner.shuffled_steps, []
        monkeypatch.setattr(learner, "shuffled_steps", lambda *given, f=together, s=seen: s.append(1) or f(*given))
        learner.update(flat_rows(make_rollout(policy)))
        assert len(seen) == calls
        weights.append(weights_of(policy))
    assert torch.equal(*weights)


@pytest.mark.parametrize("resets", [[3], [0, 4, 19]])
def test_rows_that_reset_are_left_out_and_whole_minibatches_keep_their_shapes(
    resets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, shapes = [], []
    for left_out in (False, True):
        policy = make_policy()
        learner = PPO(policy=policy, update_epochs=2, minibatch_size=8)
        learner.seed(7)
        rows = flat_rows(make_rollout(policy))
        valid = torch.ones(len(rows["advantages"]), dtype=torch.bool)
        valid[resets] = False
        batch = select_rows(rows, valid.nonzero().squeeze(-1)) if left_out else {**rows, "valid": valid}
        plain = learner.shuffled_steps
        monkeypatch.setattr(
            learner, "shuffled_steps",
            lambda rows, order, plain=plain: shapes.append((len(rows["obs"]), len(order))) or plain(rows, order),
        )  # fmt: skip
        learner.update(batch)
        weights.append(weights_of(policy))
    assert torch.equal(*weights)
    assert shapes[:2] == shapes[2:4] == [(21, 16), (21, 5 - len(resets))]


def test_advantages_are_normalized_in_each_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(batch: Any, *coefficients: float) -> dict[str, Tensor]:
        seen.append(batch["advantages"])
        return ppo_loss(batch, *coefficients)

    monkeypatch.setattr(ppo_module, "ppo_loss", spy)
    policy = make_policy()
    rows = flat_rows(make_rollout(policy))
    rows["advantages"] = 100 + 10 * rows["advantages"]
    PPO(policy=policy, update_epochs=2, minibatch_size=7).update(rows)
    assert len(seen) == 6
    for advantages in seen:
        assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-4)
        assert float(advantages.std()) == pytest.approx(1.0, abs=1e-4)
    seen.clear()
    PPO(policy=policy, minibatch_size=7, normalize_advantages=False).update(rows)
    assert torch.cat(seen).sort().values.equal(rows["advantages"].sort().values)


def test_target_kl_ends_the_epochs_once_the_policy_moved_too_far() -> None:
    def epochs(learning_rate: float, target_kl: float | None) -> int:
        policy = make_policy()
        learner = PPO(
            policy=policy, learning_rate=learning_rate, update_epochs=5, minibatch_size=7, target_kl=target_kl
        )
        return learner.update(flat_rows(make_rollout(policy))).num_gradient_steps // 3

    assert epochs(0.1, None) == 5
    assert epochs(0.1, 1e-3) == 1
    assert epochs(1e-6, 1e-3) == 5


def test_a_rollout_gets_its_advantages_once() -> None:
    """GAE from the values of the policy that acted, however often the epochs move the critic."""
    weights = []
    for given in (True, False):
        policy = make_policy()
        rollout = make_rollout(policy, truncates=True)
        if given:
            advantages = n_step_advantages(rollout, 0.9, 0.7)
            rollout |= {"advantages": advantages, "returns": advantages + rollout["values"]}
        torch.manual_seed(0)
        learner = PPO(policy=policy, learning_rate=1e-2, gamma=0.9, gae_lambda=0.7, update_epochs=3, minibatch_size=8)
        learner.update(rollout)
        weights.append(weights_of(policy))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


# ---- another implementation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_epochs_are_those_of_stable_baselines3(kind: str) -> None:
    """The same weights after three epochs of one minibatch; their value loss is not halved, so vf_coef is."""
    sb3 = pytest.importorskip("stable_baselines3")
    policy = make_policy(kind)
    rollout = make_rollout(policy, lag=0.2, truncates=True)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.03, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    kwargs = {"optimizer_kwargs": {"eps": 1e-5}}
    rows = rollout["rewards"].numel()
    theirs = sb3_learner(
        sb3.PPO, policy, rollout, n_epochs=3, batch_size=rows, clip_range=0.15, vf_coef=0.25, policy_kwargs=kwargs,
        **options,
    )  # fmt: skip
    ours = PPO(policy=policy, update_epochs=3, clip_coef=0.15, vf_coef=0.5, **options)
    theirs.train()
    result = ours.update(rollout)
    assert_same_weights(theirs, policy)
    logged = theirs.logger.name_to_value
    assert result.metrics["clip_fraction"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    assert result.metrics["policy_loss"] == pytest.approx(logged["train/policy_gradient_loss"], rel=1e-3, abs=1e-5)
    assert result.metrics["value_loss"] == pytest.approx(0.5 * logged["train/value_loss"], rel=1e-4)


def test_the_value_loss_can_be_clipped_around_the_old_values() -> None:
    terms = {name: torch.zeros(3) for name in ("new_logprobs", "logprobs", "advantages", "entropy")}
    terms |= {"values": torch.tensor([1.0, 0.1, 1.0]), "returns": torch.tensor([2.0, 2.0, 0.0])}
    plain = ppo_loss(terms, 0.2, 0.0, 1.0)
    assert float(plain["value_loss"]) == pytest.approx(0.5 * (1.0 + 1.9**2 + 1.0) / 3)
    clipped = ppo_loss({**terms, "old_values": torch.zeros(3)}, 0.2, 0.0, 1.0)
    assert float(clipped["value_loss"]) == pytest.approx(0.5 * (1.8**2 + 1.9**2 + 1.0) / 3)
    torch.testing.assert_close(clipped.slopes[1], torch.tensor([0.0, -1.9, 1.0]) / 3)  # the first is held back
    rollout, steps = make_rollout(make_policy()), []
    for clip in (False, True):
        policy = make_policy()
        learner = PPO(policy=policy, clip_value_loss=clip, clip_coef=1e-4, update_epochs=2, **PLAIN_STEP)
        with step_of(policy) as step:
            learner.update(rollout)
        steps.append(step)
    assert not torch.allclose(*steps)


def test_target_kl_looks_at_the_mean_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def epochs(kls: list[float]) -> int:
        learner = PPO(policy=make_policy(), target_kl=0.01, update_epochs=5, minibatch_size=7)
        steps = iter(range(100))

        def step(rows: Any) -> Tensor:
            return torch.tensor([0.0, 0, 0, 0, kls[next(steps) % len(kls)], 0, 0])

        monkeypatch.setattr(learner, "minibatch_step", step)
        return learner.update(make_rollout(make_policy(), steps=7, envs=3)).num_gradient_steps // 3

    assert epochs([0.0, 0.0, 0.02]) == 5  # the last minibatch alone is above 1.5 times the target
    assert epochs([0.03, 0.03, 0.0]) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [1, 4, 16, 17])
def test_rows_are_selected_alike_on_a_gpu(width: int) -> None:
    rows = {"obs": torch.randn(100, width), "actions": torch.arange(100), "pictures": torch.randn(100, 2, 3, 3)}
    order = torch.randperm(100)
    found = select_rows({name: value.cuda() for name, value in rows.items()}, order.cuda())
    for name, value in rows.items():
        assert torch.equal(found[name].cpu(), value[order])


# ---- running statistics, and the means of several learners -----------------------------------------------------------


def scaled_rewards(batch: dict[str, Tensor], gamma: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rewards as a learner that normalizes them learns from them, flat, and its running moments."""
    learner = PPO(policy=make_policy(), gamma=gamma, normalize_rewards=True)
    zeros = torch.zeros_like(batch["rewards"])
    rows = learner.rows({**batch, "values": zeros, "bootstrap_value": zeros[0]})
    return rows["advantages"], learner.state_dict()["reward_scale.moments"]


def test_rewards_are_divided_by_the_deviation_of_returns_without_reset_rows() -> None:
    """With gamma 0 an advantage is the scaled reward; returns before the division are the rewards themselves."""
    batch = make_rollout(make_policy(), steps=4, envs=2)
    batch["rewards"] = torch.tensor([[1.0, 2.0], [0.0, -3.0], [4.0, 0.0], [2.0, 6.0]])
    batch["dones"] = torch.tensor([[True, False], [False, True], [False, False], [False, False]])
    batch["valid"] = torch.tensor([[True, True], [False, True], [True, False], [True, True]])
    counted = np.array([1.0, 2.0, -3.0, 4.0, 2.0, 6.0])  # the two zeros are rewards of reset rows
    found, (count, mean, squares) = scaled_rewards(batch)
    assert float(count) == pytest.approx(6.0, abs=1e-3)
    assert float(mean) == pytest.approx(counted.mean(), abs=1e-3)
    assert float(squares / count) == pytest.approx(counted.var(), abs=1e-3)
    np.testing.assert_allclose(found.numpy(), counted / counted.std(), rtol=1e-3)


def test_the_return_that_scales_rewards_starts_again_at_every_end() -> None:
    batch = make_rollout(make_policy(), steps=5, envs=1, truncates=True)
    batch["rewards"] = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    batch |= {"terminated": torch.zeros(5, 1, dtype=torch.bool), "truncated": torch.zeros(5, 1, dtype=torch.bool)}
    batch["terminated"][1] = batch["truncated"][3] = True
    returns = np.array([1.0, 2.0 + 0.5 * 1.0, 4.0, 8.0 + 0.5 * 4.0, 16.0])  # with gamma 0.5
    _, (count, mean, squares) = scaled_rewards(batch, gamma=0.5)
    assert float(mean) == pytest.approx(returns.mean(), rel=1e-3)
    assert float(squares / count) == pytest.approx(returns.var(), rel=1e-3)


def test_a_scaled_reward_is_at_most_ten() -> None:
    batch = make_rollout(make_policy(), steps=400, envs=1)
    batch["rewards"] = torch.zeros(400, 1)
    batch["rewards"][7] = 1000.0  # 20 deviations of a column with one such entry
    batch["rewards"][8] = -1000.0
    found, _ = scaled_rewards(batch)
    assert (found.max(), found.min()) == (10.0, -10.0)
    batch["rewards"][7:9] = 0.0
    batch["rewards"][::4] = 1000.0
    assert scaled_rewards(batch)[0].max().item() == pytest.approx(1.0 / math.sqrt(0.25 * 0.75), rel=1e-3)


def test_normalized_advantages_have_the_deviation_of_the_rows_that_count() -> None:
    rows = torch.tensor([1.0, 2.0, 6.0])
    expected = (rows - 3.0) / math.sqrt((4.0 + 1.0 + 9.0) / 2.0)  # divided by the number of rows minus one
    torch.testing.assert_close(normalize(rows), expected)
    weighted = normalize(torch.tensor([1.0, 2.0, 99.0, 6.0]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(weighted[[0, 1, 3]], expected)


def test_statistics_of_observations_change_after_learning() -> None:
    """While it learns, the policy is the one that acted: every ratio of the first step is 1."""
    policy = make_policy(normalizes=True)
    policy.observation_input.update(torch.randn(50, 2) * 3 + 1)
    rollout = make_rollout(policy)
    mean, var, count = seen_by(policy)
    metrics = PPO(policy=policy).update(rollout).metrics
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    obs = rollout["obs"].flatten(0, 1)
    assert seen_by(policy)[2] == count + len(obs)
    torch.testing.assert_close(seen_by(policy)[0], (50 * mean + obs.sum(0)) / 71)
    squares = 50 * (var + mean.square()) + obs.square().sum(0)
    torch.testing.assert_close(seen_by(policy)[1], squares / 71 - seen_by(policy)[0].square())


@pytest.mark.parametrize(("elsewhere", "epochs"), [(0.0, 4), (0.28, 4), (0.32, 1)])
def test_target_kl_is_compared_with_the_mean_of_all_learners(elsewhere: float, epochs: int) -> None:
    """The policy stays here, so the mean of two learners is half of the other's KL; the limit is 1.5 times 0.1."""
    policy = make_policy()
    learner = PPO(policy=policy, learning_rate=0.0, update_epochs=4, target_kl=0.1, normalize_advantages=False)
    learner.ranks = OtherRank(elsewhere)
    assert learner.update(flat_rows(make_rollout(policy))).num_gradient_steps == epochs


def test_the_clip_fraction_counts_ratios_and_not_their_logarithms() -> None:
    terms = {name: torch.zeros(4) for name in ("logprobs", "advantages", "values", "returns", "entropy")}
    for ratios, share in (([1.21, 1.19, 1.0, 1.0], 0.25), ([0.81, 0.79, 1.0, 1.0], 0.25)):
        losses = ppo_loss({**terms, "new_logprobs": torch.tensor(ratios).log()}, 0.2, 0.0, 0.0)
        assert float(losses["clip_fraction"]) == share
