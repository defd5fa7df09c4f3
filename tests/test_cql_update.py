"""CQL's and Cal-QL's mathematics: the penalty, on numbers from the papers' code, its parts, and SAC without it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_cases import (
    assert_only_termination_stops_bootstrapping,
    make_batch,
    make_learner,
    move_target,
    same,
    tensors,
)
from rl_training.algorithms.cql import CQL, soft_maximum
from rl_training.algorithms.sac import SAC
from rl_training.errors import UserError
from rl_training.models.mlp_sac import MLPSACModel

make = partial(make_learner, CQL, MLPSACModel)
LOG_UNIFORM = -2 * math.log(2.0)  # of two dimensions
VALUES = torch.tensor([1.0, 2, 3, 0.5, 2.5, 1])  # of two uniform actions, two of pi(.|s') and two of pi(.|s)
DENSITIES = torch.tensor([LOG_UNIFORM, LOG_UNIFORM, -1, 0.5, -0.5, -2])


def lse(values: Tensor, densities: Tensor | None = None) -> float:
    return float(soft_maximum(values.unsqueeze(-1), None if densities is None else densities.unsqueeze(-1)))


def test_the_soft_maximum_of_the_papers_code() -> None:
    assert lse(VALUES, DENSITIES) == pytest.approx(4.914114, abs=1e-5)
    assert lse(VALUES) == pytest.approx(3.844651, abs=1e-5)
    raised = torch.cat([VALUES[:2], VALUES[2:].clamp(min=2.2)])  # Cal-QL: not the uniform ones
    assert lse(raised, DENSITIES) == pytest.approx(5.232569, abs=1e-5)


class Example:
    """A learner of one row and n = 2, whose critics and policy say what the example says."""

    def __init__(self, **options: Any) -> None:
        self.learner = make(num_proposals=2, **options)
        self.batch = {
            "obs": torch.zeros(1, 3), "next_obs": torch.ones(1, 3), "returns_to_go": torch.tensor([2.2]),
            "uniform": torch.tensor([[0.0, 0], [1, 1]]), "noise": torch.zeros(2, 2), "next_noise": torch.ones(2, 2),
        }  # fmt: skip
        self.learner.propose = self.propose  # type: ignore[method-assign]
        self.learner.values_at = self.values_at  # type: ignore[method-assign]
        self.seen: list[Tensor] = []

    def propose(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        is_next = bool(obs[0, 0] == 1.0)
        logprobs = [[-1.0], [0.5]] if is_next else [[-0.5], [-2.0]]
        return torch.full((2, 2), 8.0 if is_next else 7.0), torch.tensor(logprobs)

    def values_at(self, critics: Any, obs: Tensor, actions: Tensor) -> Tensor:
        self.seen.append(obs)
        values = [1.0, 2.0] if len(actions) == 2 else [2.5, 1.0, 3.0, 0.5]
        assert actions[:, 0].tolist() == ([0.0, 1.0] if len(actions) == 2 else [7.0, 7.0, 8.0, 8.0])
        return torch.tensor(values).view(1, -1, 1).repeat(2, 1, 1)

    def difference(self) -> float:
        found = self.learner.differences(torch.full((2, 1), 2.0), self.batch)
        assert found.shape == (2, 1)
        assert all(bool((obs == 0.0).all()) for obs in self.seen), "actions at s' are valued at s"
        return float(found.mean())


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 2.914114), ({"calibrated": True}, 5.232569 - 2.0),
     ({"importance_sampling": False}, math.log(math.exp(3.844651) + math.exp(2.0)) - 2.0)],
)  # fmt: skip
def test_the_learner_puts_the_parts_together(options: dict[str, Any], expected: float) -> None:
    assert Example(**options).difference() == pytest.approx(expected, abs=1e-5)


def test_proposals_are_of_the_policy_with_the_density_of_squashed_actions() -> None:
    learner, batch = make(num_proposals=3), make_batch()
    noise = torch.randn(24, 2)
    actions, logprobs = learner.propose(batch["obs"], noise)
    for k in range(3):
        one = learner.model.actor.sample(batch["obs"], noise[8 * k : 8 * k + 8])
        torch.testing.assert_close(actions[8 * k : 8 * k + 8], one.actions)
        torch.testing.assert_close(logprobs[k], one.logprobs)
    assert not actions.requires_grad
    assert not logprobs.requires_grad


def test_values_at_are_those_of_the_same_rows_one_by_one() -> None:
    learner, batch = make(), make_batch()
    actions = torch.rand(24, 2) * 2 - 1
    values = learner.values_at(learner.model.critics, batch["obs"], actions)
    assert values.shape == (2, 3, 8)
    for k in range(3):
        part = actions[8 * k : 8 * k + 8]
        torch.testing.assert_close(values[:, k], learner.model.ensemble_values(batch["obs"], part))


def test_the_penalty_lowers_unseen_actions_and_raises_recorded_ones_and_leaves_the_actor_alone() -> None:
    batch = {**make_batch(64), "rewards": torch.zeros(64), "dones": torch.ones(64), "actions": torch.full((64, 2), 0.9)}
    learner = make(penalty_coef=5.0, learning_rate=0.01, actor_learning_rate=0.0)
    actor = tensors(learner.model.actor)

    def excess() -> float:
        seen = learner.model.ensemble_values(batch["obs"], batch["actions"]).mean()
        return float((learner.model.ensemble_values(batch["obs"], -batch["actions"]).mean() - seen).detach())

    before = excess()
    for _ in range(50):
        learner.update(batch)
    assert excess() < before - 0.5
    assert all(same(actor, learner.model.actor))


def test_with_a_penalty_of_0_it_is_sac() -> None:
    batch, noise = make_batch(), torch.randn(8, 2)
    learner = make(penalty_coef=0.0, backup_entropy=True)
    plain = make_learner(SAC, MLPSACModel)
    learner.critic_step({**batch, **learner.draw_proposals(batch)}, noise)
    plain.critic_step(batch, noise)
    for one, other in zip(learner.model.critics.parameters(), plain.model.critics.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_targets_leave_the_entropy_out() -> None:
    def next_value(learner: CQL, obs: Tensor) -> Tensor:
        learner.draw_noise(obs)  # the update draws the proposals first
        actions, _ = learner.model.actor.sample(obs, learner.draw_noise(obs))
        return learner.target_critics(learner.model.features(obs), actions).amin(0)

    def fixed(**options: Any) -> CQL:
        learner = make(**options)
        learner.draw_proposals = lambda batch: {  # type: ignore[method-assign]
            name: learner.draw_noise(batch["obs"]) if name == "noise" else torch.zeros(8, 2)
            for name in ("noise", "next_noise", "backup_noise", "uniform")
        }
        return learner

    assert_only_termination_stops_bootstrapping(lambda: fixed(num_proposals=1, penalty_coef=0.0), next_value)


def test_the_best_proposal_is_the_one_that_the_smallest_target_critic_values_most() -> None:
    learner, batch = make(num_proposals=4, best_proposal_backup=True), make_batch()
    move_target(learner)
    drawn = learner.draw_proposals(batch)
    chosen, logprobs = learner.next_actions({**batch, **drawn}, torch.zeros(8, 2))
    actions, densities = learner.propose(batch["next_obs"], drawn["backup_noise"])
    values = learner.values_at(learner.target_critics, batch["next_obs"], actions).amin(0)
    for row in range(8):
        best = int(values[:, row].argmax())
        torch.testing.assert_close(chosen[row], actions[best * 8 + row])
        assert float(logprobs[row]) == float(densities[best, row])


@pytest.mark.parametrize(("gap", "grows"), [(0.0, True), (1e6, False)])
def test_the_multiplier_grows_while_the_difference_is_above_the_target(gap: float, grows: bool) -> None:
    learner = make(target_gap=gap, penalty_coef=1.0, learning_rate=0.01)
    assert learner.log_multiplier is not None
    metrics = learner.update(make_batch()).metrics
    assert float(learner.log_multiplier) == pytest.approx(1.01 if grows else 0.99, abs=1e-3)
    expected = metrics["bellman_loss"] + math.e * (metrics["q_gap"] - gap)
    assert metrics["critic_loss"] == pytest.approx(expected, rel=1e-5)


def test_rows_below_the_least_difference_are_clipped_before_the_mean() -> None:
    batch = make_batch()
    free = make(penalty_coef=1.0).update(batch).metrics
    clipped = make(penalty_coef=1.0, least_difference=100.0).update(batch).metrics
    assert free["q_gap"] < 100.0
    assert clipped["q_gap"] == 100.0


def test_calibrated_values_are_not_pushed_below_the_recorded_return() -> None:
    """With returns above every value, only uniform actions are pushed down: their share of the gradient vanishes."""
    batch = {**make_batch(), "returns_to_go": torch.full((8,), 1e4)}
    gap = {name: make(calibrated=name, penalty_coef=1.0).update(batch).metrics["q_gap"] for name in (False, True)}
    assert gap[True] > gap[False] + 9e3


def test_dropout_is_refused() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=2, hidden_sizes=(16,), critic_dropout=0.1)
    with pytest.raises(UserError, match=r"critic_dropout is 0\.1; with the penalty of CQL it must be 0"):
        CQL(model=model)
