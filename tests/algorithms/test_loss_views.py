"""`<algo>_loss` is what the learner computes: on random batches, it gives the metrics of the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_training.algorithms import critic_heads, d4pg, ddpg, dqn, mbpo, mopo, rlpd, sac, td3, trpo
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.mlp_td3 import MLPTD3Model

ROWS = 17
SIZES: dict[str, Any] = {"obs_dim": 4, "action_dim": 2, "hidden_sizes": (16, 8)}
Record = Callable[[Any, str], list[tuple[Any, ...]]]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """`record(owner, name)` lists the arguments of every later call of that function."""

    def start(owner: Any, name: str) -> list[tuple[Any, ...]]:
        function, calls = getattr(owner, name), []

        def recorded(*arguments: Any) -> Any:
            calls.append(arguments)
            return function(*arguments)

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return start


@pytest.fixture(params=[(0, False), (1, True)], ids=["plain", "weighted"])
def batch(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    seed, weighted = request.param
    torch.manual_seed(seed)
    rows = {
        "obs": torch.randn(ROWS, 4), "next_obs": torch.randn(ROWS, 4), "rewards": torch.randn(ROWS),
        "actions": torch.rand(ROWS, 2) * 2 - 1, "dones": (torch.rand(ROWS) < 0.2).float(),
    }  # fmt: skip
    return {**rows, "weights": torch.rand(ROWS)} if weighted else rows


def assert_same(losses: dict[str, Any], metrics: dict[str, Any], *names: str) -> None:
    found = {name: float(losses[name].detach()) for name in names}
    assert found == pytest.approx({name: metrics[name] for name in names}, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("num_critics", [2, 5])
def test_sac_loss_and_rlpd_loss(num_critics: int, batch: dict[str, torch.Tensor], record: Record) -> None:
    model = MLPSACModel(**SIZES, num_critics=num_critics)
    learner = sac.SAC(model=model) if num_critics == 2 else rlpd.RLPD(model=model, critic_subset_size=3)
    of_critics, of_actor = record(critic_heads, "critic_losses"), record(sac, "actor_loss")
    climbed = record(learner, "climbed")
    metrics = learner.update(batch).metrics
    (q_values, targets, _), (_, logprobs, alpha) = of_critics[0], of_actor[0]
    terms = {
        **batch, "q_values": q_values, "target_q_values": targets, "sampled_q_values": climbed[0][0],
        "sampled_logprobs": logprobs, "alpha": alpha,
    }  # fmt: skip
    losses = sac.sac_loss(terms) if num_critics == 2 else rlpd.rlpd_loss(terms, 3)
    assert_same(losses, metrics, "critic_loss", "actor_loss", "target_q_mean", "entropy_term")


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_ddpg_loss_and_td3_loss(name: str, batch: dict[str, torch.Tensor], record: Record) -> None:
    learner: ddpg.DDPG
    if name == "ddpg":
        learner = ddpg.DDPG(model=MLPDDPGModel(**SIZES))
    else:
        learner = td3.TD3(model=MLPTD3Model(**SIZES), policy_delay=1)
    of_critics, of_actor = record(ddpg, "regression_losses"), record(ddpg, "actor_loss")
    metrics = learner.update(batch).metrics
    (q_values, targets, _), (of_policy,) = of_critics[0], of_actor[0]
    terms = {**batch, "target_q_values": targets, "actor_q_values": of_policy}
    if name == "ddpg":
        losses = ddpg.ddpg_loss({**terms, "q_values": q_values})
    else:
        losses = td3.td3_loss({**terms, "q1_values": q_values[0], "q2_values": q_values[1]})
    assert_same(losses, metrics, "critic_loss", "actor_loss", "target_q_mean")


def test_d4pg_loss(batch: dict[str, torch.Tensor], record: Record) -> None:
    learner = d4pg.D4PG(model=MLPD4PGModel(**SIZES, v_min=-3.0, v_max=3.0))
    of_critic, of_actor = record(d4pg, "critic_loss"), record(ddpg, "actor_loss")
    metrics = learner.update(batch).metrics
    (logits, targets, _), (of_policy,) = of_critic[0], of_actor[0]
    terms = {
        **batch, "logits": logits, "target_distributions": targets, "actor_q_values": of_policy,
        "target_q_values": targets @ learner.model.support,
    }  # fmt: skip
    assert_same(d4pg.d4pg_loss(terms), metrics, "critic_loss", "actor_loss", "target_q_mean")


def test_dqn_loss(batch: dict[str, torch.Tensor], record: Record) -> None:
    learner, of_values = dqn.DQN(q_network=MLPQNetwork(**SIZES)), record(dqn, "dqn_terms")
    metrics = learner.update({**batch, "actions": torch.randint(2, (ROWS,))}).metrics
    terms = dict(zip(("q_values", "actions", "target_q_values"), of_values[0], strict=False))
    losses = dqn.dqn_loss({**batch, **terms})
    assert_same(losses, metrics, "loss", "q_value_mean", "target_mean", "td_error_mean")


def test_trpo_loss(batch: dict[str, torch.Tensor], record: Record) -> None:
    policy = MLPActorCritic(**SIZES, action_kind="continuous")
    learner = trpo.TRPO(policy=policy, value_updates=1, value_minibatch_size=None)
    with torch.no_grad():
        logprobs = policy.distribution(batch["obs"]).log_prob(batch["actions"])
    rows = {"obs": batch["obs"], "actions": batch["actions"], "logprobs": logprobs, "returns": batch["rewards"]}
    of_policy, of_critic = record(trpo, "surrogate"), record(trpo, "squared_error")
    metrics = learner.update({**rows, "advantages": torch.randn(ROWS)}).metrics
    assert metrics["accepted_step"] == 1.0
    terms = dict(zip(("new_logprobs", "logprobs", "advantages"), of_policy[-1], strict=True))
    terms |= dict(zip(("values", "returns"), of_critic[0], strict=True))
    losses = trpo.trpo_loss({**terms, "entropy": policy.distribution(batch["obs"]).entropy()})
    assert_same(losses, metrics, "policy_loss", "value_loss", "entropy")


def test_mopo_model_loss(batch: dict[str, torch.Tensor], record: Record) -> None:
    learner = mopo.MOPO(policy_model=MLPSACModel(**SIZES), dynamics_model=MLPMOPOEnsembleModel(**SIZES))
    given = record(mbpo, "mbpo_model_loss")
    metrics = learner.update_model(batch).metrics
    losses = mopo.mopo_model_loss(given[0][0])
    assert_same(losses, {name: float(value) for name, value in metrics.items()}, *losses)
