"""PPO's learning rate that adapts to a desired KL, and the first deviation of continuous actions."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training.algorithms.ppo import PPO
from rl_training.errors import UserError
from rl_training.models.distributions import DiagonalGaussian
from rl_training.ops.losses import approx_kl
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import open_session
from rl_training.run.workflows import train
from rollout_cases import OtherRank, flat_rows, make_policy, make_rollout, weights_of

ADAPTS = {"desired_kl": 0.01, "learning_rate": 1e-3}


def learner_of(**settings: Any) -> PPO:
    torch.manual_seed(0)
    return PPO(policy=make_policy("continuous"), **{"update_epochs": 2, "minibatch_size": 7, **ADAPTS, **settings})


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        (1e-3, 0.0201, 1e-3 / 1.5), (1e-3, 0.0199, 1e-3), (1e-3, 0.0051, 1e-3), (1e-3, 0.0049, 1.5e-3),
        (1e-3, 0.0, 1.5e-3), (1.2e-5, 1.0, 1e-5), (9e-3, 0.001, 1e-2), (0.05, 0.01, 0.05), (1e-3, math.nan, 1e-3),
    ],
)  # fmt: skip
def test_the_rate_follows_the_kl(rate: float, kl: float, expected: float) -> None:
    learner = learner_of(learning_rate=rate)
    learner.adapt_rate(torch.tensor(kl))
    assert float(learner.learning_rate) == float(learner.optimizer.learning_rate) == pytest.approx(expected, rel=1e-6)


def test_a_step_is_taken_at_the_adapted_rate() -> None:
    rows = flat_rows(make_rollout(make_policy("continuous")))
    adapting, fixed = learner_of(), learner_of(desired_kl=None, learning_rate=1.5e-3)
    for learner in (adapting, fixed):  # the first minibatch has a KL of 0
        learner.minibatch_step(rows)
    torch.testing.assert_close(weights_of(adapting.policy), weights_of(fixed.policy))


def test_large_steps_lower_the_rate_and_it_is_reported() -> None:
    rollout = make_rollout(make_policy("continuous"))
    learner = learner_of(learning_rate=0.01, update_epochs=10)
    metrics = learner.update(flat_rows(rollout)).metrics
    assert metrics["learning_rate"] == float(learner.rate) < 0.01
    assert "learning_rate" not in learner_of(desired_kl=None).update(flat_rows(rollout)).metrics


def test_the_estimate_is_the_closed_form_of_rsl_rl() -> None:
    generator = torch.Generator().manual_seed(0)
    old = DiagonalGaussian(torch.randn(20_000, 3, generator=generator), torch.tensor([0.1, -0.4, 0.0]))
    new = DiagonalGaussian(old.mean + 0.05, torch.tensor([0.13, -0.45, 0.02]))
    actions = old.sample(generator)
    sigma, old_sigma = new.log_std.exp(), old.log_std.exp()
    squares = (old_sigma.square() + (old.mean - new.mean).square()) / (2.0 * sigma.square())
    theirs = ((sigma / old_sigma + 1e-5).log() + squares - 0.5).sum(-1).mean()
    ours = approx_kl(new.log_prob(actions) - old.log_prob(actions)).mean()
    assert float(ours) == pytest.approx(float(theirs), rel=0.05)


@pytest.mark.parametrize(("elsewhere", "expected"), [(0.0, 1.5), (0.016, 1.0), (0.05, 1.0 / 1.5)])
def test_the_rate_follows_the_mean_of_all_learners(elsewhere: float, expected: float) -> None:
    learner = learner_of()
    learner.ranks = OtherRank(elsewhere)
    learner.adapt_rate(torch.tensor(0.0))
    assert float(learner.rate) == pytest.approx(1e-3 * expected)


def test_a_copy_has_a_rate_of_its_own() -> None:
    learner = learner_of()
    copied = copy.deepcopy(learner)
    copied.adapt_rate(torch.tensor(1.0))
    assert float(learner.learning_rate) == pytest.approx(1e-3)
    assert float(copied.optimizer.learning_rate) == pytest.approx(1e-3 / 1.5)


@pytest.mark.parametrize("algo", ["ppo", "gail"])
def test_a_resume_continues_with_the_adapted_rate(tmp_path: Path, algo: str) -> None:
    fields = {"algo": algo, "output_dir": tmp_path, "env_id": "CartPole-v1", "num_envs": 2}
    config = tiny(**fields, kwargs={"desired_kl": 0.001, "learning_rate": 0.005, "clip_value_loss": True})
    straight = train(config, console=False)
    assert_same_run(straight, stop_and_resume(config, 64))
    stored = load_checkpoint(straight.checkpoint_path)["algorithm"]["rate" if algo == "ppo" else "ppo.rate"]
    assert 1e-5 < float(stored) != pytest.approx(0.005)


def test_a_schedule_of_the_rate_is_refused(tmp_path: Path) -> None:
    schedule = {"type": "linear", "start": 1e-3, "end": 0.0}
    with pytest.raises(UserError, match="ppo cannot change learning_rate during a run; desired_kl adapts it"):
        open_session(tiny("ppo", tmp_path, kwargs={"desired_kl": 0.01, "learning_rate_schedule": schedule}))


def test_a_single_minibatch_per_rollout_is_refused() -> None:
    rows = flat_rows(make_rollout(make_policy("continuous")))
    with pytest.raises(UserError, match="desired_kl compares minibatches, but a rollout has only one"):
        learner_of(update_epochs=1, minibatch_size=64).update(rows)
    learner_of(update_epochs=1).update(rows)



@pytest.mark.parametrize("algo", ["a2c", "ppo", "trpo", "impala", "appo"])
def test_the_first_deviation_is_what_is_asked_for(tmp_path: Path, algo: str) -> None:
    for kwargs, expected in (({}, 0.0), ({"initial_log_std": -1.5}, -1.5)):
        session = open_session(tiny(algo, tmp_path, env_id="Pendulum-v1", kwargs=kwargs))
        session.close()
        assert session.algorithm.policy.log_std.tolist() == [expected]  # type: ignore[union-attr, operator]


def test_discrete_actions_have_no_deviation(tmp_path: Path) -> None:
    session = open_session(tiny("ppo", tmp_path, kwargs={"initial_log_std": -1.0}))
    session.close()
    assert any("initial_log_std has no effect: only continuous" in note for note in session.notes)
