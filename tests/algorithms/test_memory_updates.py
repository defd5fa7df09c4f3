"""Rollout learners with memory: what they learn from is what the behaviour remembered, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from resume_cases import take_steps
from rl_training.algorithms.actor_critic import sequences
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.errors import UserError
from rl_training.ops.returns import vtrace
from rl_training.run.build import Session, open_session

STEPS, COUNT = 12, 3
SMALL = {"num_steps": STEPS, "hidden_sizes": [8], "memory_size": 6}
LANES = {  # where rows end in both ways: same-step resets, an engine's reset rows, masks, images, tensors on a device
    "sync": {"env_id": "env_zoo:Walk", "env_kwargs": {"length": 4}, "vectorization": "sync"},
    "native": {"env_id": "CartPole-v1", "env_kwargs": {"max_episode_steps": 5}, "vectorization": "native"},
    "device": {"env_id": "CartPole-v1", "env_kwargs": {"max_episode_steps": 5}, "vectorization": "device"},
    "masks": {"env_id": "env_zoo:LastMoves", "vectorization": "sync"},
    "images": {"env_id": "env_zoo:Image", "env_kwargs": {"length": 4}, "vectorization": "sync"},
    "workers": {"env_id": "env_zoo:Walk", "execution_backend": "local_async", "num_workers": 2},
}  # fmt: skip
EVERYWHERE = pytest.mark.parametrize("lane", [lane for lane in LANES if lane != "workers"])
KINDS = pytest.mark.parametrize("memory", ["gru", "lstm"])


@contextmanager
def opened(algo: str = "ppo", lane: str = "sync", **kwargs: Any) -> Iterator[Session]:
    kwargs = {**SMALL, "memory": "lstm", **kwargs}
    plain: dict[str, Any] = {"device": "cpu", "eval_episodes": 0, "num_envs": COUNT, "threads": 1, "seed": 5}
    config = TrainConfig(algo=algo, total_timesteps=500, algo_kwargs=kwargs, **plain, **LANES[lane])
    session = open_session(config)
    try:
        yield session
    finally:
        session.close()


def collect(session: Session, rollouts: int = 2) -> tuple[Any, dict[str, Tensor]]:
    """The learner and the last of some rollouts; the first one begins with an empty memory."""
    learner: Any = session.algorithm
    for _ in range(rollouts):
        take_steps(session, 0)
        ((_, batch),) = session.store.batches(learner, 0)
    return learner, {name: tensor.clone() for name, tensor in batch.items()}


def follow(policy: Any, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What the heads read at each step, and the states after it: one step after the other, the plainest way."""
    outputs, states = [], []
    for row, first in zip(obs, starts, strict=True):
        output, state = policy.remember(row, state * ~first.unsqueeze(-1), torch.zeros_like(first))
        outputs.append(output)
        states.append(state)
    return outputs, states


def real(batch: dict[str, Tensor]) -> Tensor:
    return batch.get("valid", torch.ones_like(batch["rewards"]) > 0).bool()


@pytest.mark.parametrize(
    ("lane", "length"),
    [(lane, length) for lane in LANES for length in (None, 4) if (lane, length) != ("workers", None)],
)
def test_before_the_first_step_the_ratio_is_1_in_every_row(lane: str, length: int | None) -> None:
    with opened("ppo", lane, sequence_length=length) as session:
        learner, batch = collect(session)
        rows, _ = learner.rows_and_indices(batch)
        assert rows["starts"].shape == (COUNT * STEPS // (length or STEPS), length or STEPS)
        policy, _ = learner.trace(rows)
        ratios = (policy.logprobs - rows["logprobs"]).exp()
        keep = rows["weights"] > 0 if "weights" in rows else torch.ones_like(ratios) > 0
        assert keep.sum() == real(batch).sum()
        torch.testing.assert_close(ratios[keep], torch.ones_like(ratios[keep]), atol=1e-5, rtol=0.0)
        torch.testing.assert_close(policy.values[keep], rows["values"][keep], atol=1e-5, rtol=1e-5)


@EVERYWHERE
@KINDS
def test_truncations_and_the_end_are_valued_with_the_state_that_the_policy_had_there(lane: str, memory: str) -> None:
    with opened("ppo", lane, memory=memory) as session:
        learner, batch = collect(session)
        experience: Any = session.store.experience  # type: ignore[attr-defined]
        policy = learner.policy
        with torch.no_grad():
            obs = torch.as_tensor(experience.obs)
            outputs, states = follow(policy, obs, batch["states"][0], batch["starts"])
            values = torch.stack([policy.heads.values(output) for output in outputs])
            torch.testing.assert_close(batch["values"], values[:-1])
            torch.testing.assert_close(batch["bootstrap_value"], values[-1])
            where = (batch["truncated"] & ~batch["terminated"]).nonzero().tolist()
            assert len(where) > 3
            for t, env in where:
                final = obs[t + 1] if experience.final_obs is None else torch.as_tensor(experience.final_obs)[t]
                none = torch.zeros(1, dtype=torch.bool)
                output, _ = policy.remember(final[env : env + 1], states[t][env : env + 1], none)
                wanted = policy.heads.values(output)[0]
                torch.testing.assert_close(batch["truncation_values"][t, env], wanted, atol=1e-6, rtol=1e-5)


def test_the_learner_values_what_a_lagging_behaviour_saw_with_the_states_that_it_had() -> None:
    with opened("ppo", policy_lag=1) as session:
        learner, _ = collect(session)
        with torch.no_grad():
            for parameter in learner.policy.parameters():
                parameter.mul_(1.1)
        _, batch = collect(session, 1)
        rows, _ = learner.rows_and_indices(batch)
        policy, _ = learner.trace(rows)
        assert (policy.logprobs - rows["logprobs"]).abs().max() > 1e-4
        given = [batch[name][:STEPS].flatten(0, 1) for name in ("obs", "states", "starts")]
        with torch.no_grad():
            values = learner.state_values(given[0], None, *given[1:])
        torch.testing.assert_close(batch["values"].flatten(), values)


def test_a_minibatch_is_whole_sequences_in_the_order_of_time() -> None:
    steps, count, length = 6, 2, 3
    numbers = torch.arange(steps * count, dtype=torch.float32).view(steps, count)
    batch = {
        "advantages": numbers, "obs": numbers.unsqueeze(-1), "valid": numbers != 5.0,
        "starts": torch.zeros(steps + 1, count, dtype=torch.bool),
        "states": torch.arange((steps + 1) * count, dtype=torch.float32).view(steps + 1, count, 1),
    }  # fmt: skip
    rows = sequences(batch, length)
    assert rows["advantages"].tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert rows["obs"].shape == (4, 3, 1)
    assert rows["state"].tolist() == [[0], [1], [6], [7]]
    assert rows["weights"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]


def loop(policy: Any, obs: Tensor, state: Tensor, starts: Tensor) -> list[Tensor]:
    """What the heads read at each step of one layer of cells, with gradients through the steps."""
    weights, size = policy.memory.cells.all_weights[0], policy.memory.size
    parts, outputs = state.split(size, -1), []
    for row, first in zip(obs, starts, strict=True):
        x, parts = policy.features(row), [part * ~first.unsqueeze(-1) for part in parts]
        parts = torch.lstm_cell(x, parts, *weights) if len(parts) > 1 else (torch.gru_cell(x, parts[0], *weights),)
        outputs.append(parts[0])
    return outputs


@KINDS
@pytest.mark.parametrize("length", [None, 4])
def test_a2cs_gradient_is_that_of_a_loop_through_each_sequence(memory: str, length: int | None) -> None:
    kwargs = {"memory": memory, "sequence_length": length, "vf_coef": 0.7, "ent_coef": 0.1, "max_grad_norm": None}
    with opened("a2c", "native", **kwargs) as session:
        learner, batch = collect(session)
        policy, kept = learner.policy, real(batch)
        advantages, returns = learner.advantages(batch)
        loss = torch.zeros(())
        for start in range(0, STEPS, length or STEPS):
            part = slice(start, start + (length or STEPS))
            outputs = loop(policy, batch["obs"][part], batch["states"][start], batch["starts"][:-1][part])
            for t, output in enumerate(outputs, start):
                rows = policy.heads.evaluate_actions(output, batch["actions"][t])
                errors = 0.5 * (rows.values - returns[t]).square()
                terms = -rows.logprobs * advantages[t] + 0.7 * errors - 0.1 * rows.entropy
                loss = loss + terms[kept[t]].sum() / kept.sum()
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
        found: list[Tensor] = []
        learner.optimizer.apply_gradients = lambda gradients: found.extend(gradients) or torch.zeros(())
        learner.gradient_step(learner.rows(batch))
        torch.testing.assert_close(torch.cat([g.flatten() for g in found]), wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lane", ["sync", "native", "device", "images"])
def test_impala_reads_the_rollout_again_and_the_observation_after_it(lane: str) -> None:
    with opened("impala", lane, gae_lambda=0.9) as session:
        learner, batch = collect(session)
        with torch.no_grad():
            for parameter in learner.policy.parameters():  # it has learned since
                parameter.mul_(1.1)
            last = batch["bootstrap_obs"].unsqueeze(0)
            obs = torch.cat([batch["obs"], last])
            outputs, _ = follow(learner.policy, obs, batch["states"][0], batch["starts"])
            *before, after = outputs
            pairs = zip(before, batch["actions"], strict=True)
            heads = [learner.policy.heads.evaluate_actions(*pair) for pair in pairs]
            values = torch.stack([*(head.values for head in heads), learner.policy.heads.values(after)])
            logprobs = torch.stack([head.logprobs for head in heads])
            next_values = values[1:].clone()
            if "final_obs" in batch:
                where = batch["truncated"]
                given = batch["final_obs"][where], batch["states"][1:][where]  # the state that the policy had there
                none = torch.zeros(int(where.sum()), dtype=torch.bool)
                next_values[where] = learner.policy.heads.values(learner.policy.remember(*given, none)[0])
            rollout = learner.value_finals(learner.trajectories(batch))
            inputs = {name: rollout[name] for name in ("rewards", "discounts", "cuts")}
            inputs |= {"log_rhos": logprobs - batch["logprobs"], "values": values[:-1], "next_values": next_values}
            wanted = vtrace(**inputs, lambda_=0.9)
        policy, _ = learner.trace_rollout(rollout)
        torch.testing.assert_close(policy["target_logprobs"], logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(policy["bootstrap_value"], values[-1], atol=1e-5, rtol=1e-5)
        found = learner.vtrace({**rollout, **policy}, policy["target_logprobs"], policy["values"], 1.0)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[real(batch)], other[real(batch)], atol=1e-5, rtol=1e-5)


def test_a_minibatch_of_appo_is_whole_trajectories_with_their_states() -> None:
    with opened("appo", minibatch_size=STEPS) as session:
        learner, batch = collect(session)
        seen = []
        for rollout in learner.minibatches(learner.trajectories(batch)):
            policy, _ = learner.trace_rollout(learner.value_finals(rollout))
            torch.testing.assert_close(policy["target_logprobs"], rollout["behavior_logprobs"], atol=1e-5, rtol=1e-5)
            seen.append(rollout["states"].shape)
        assert seen == [(STEPS + 1, 1, 12)] * COUNT


def test_refreshed_states_are_those_of_the_current_weights() -> None:
    with opened("ppo", sequence_length=4, refresh_memory=True, update_epochs=3, learning_rate=0.1) as session:
        learner, batch = collect(session)
        seen: list[Tensor] = []
        step = learner.shuffled_steps

        def watched(rows: dict[str, Tensor], order: Tensor) -> Tensor:
            _, states = follow(learner.policy, batch["obs"], batch["states"][0], batch["starts"][:-1])
            current = torch.cat([batch["states"][0], states[3], states[7]])
            if not seen or not torch.equal(seen[-1], rows["state"]):
                seen.append(rows["state"])
                torch.testing.assert_close(rows["state"], current)
            metrics: Tensor = step(rows, order)
            return metrics

        learner.shuffled_steps = watched
        learner.learn(batch)
        assert len(seen) == 3
        assert all(torch.equal(state[:COUNT], batch["states"][0]) for state in seen)


def test_states_are_kept_for_all_epochs_unless_they_are_refreshed() -> None:
    with opened("ppo", sequence_length=4, update_epochs=3, learning_rate=0.1) as session:
        learner, batch = collect(session)
        rows, indices = learner.rows_and_indices(batch)
        for _ in learner.epochs(rows, indices, batch):
            assert torch.equal(rows["state"], batch["states"][:STEPS:4].flatten(0, 1))


@pytest.mark.parametrize(
    ("algo", "kwargs", "sentence"),
    [
        ("ppo", {"sequence_length": 5}, "sequence_length is 5; it must divide num_steps (12)"),
        ("impala", {"sequence_length": 4}, "sequence_length is 4; V-trace needs whole rollouts"),
        ("appo", {"target_policy": True}, "target_policy is true; with a memory it must be false"),
        ("a2c", {"critic_obs": ["hidden"]}, "critic_obs is ['hidden']; with a memory it must be left out"),
        ("gail", {"num_steps": 8}, "memory is 'lstm'; gail"),
        ("trpo", {}, "memory is 'lstm'; trpo supports none"),
    ],
)
def test_what_a_memory_cannot_do_is_refused(algo: str, kwargs: dict[str, Any], sentence: str) -> None:
    small = {"num_steps": STEPS} if algo != "gail" else {}
    with pytest.raises(UserError) as caught:
        read_params(get_algorithm_spec(algo).params, {"memory": "lstm", **small, **kwargs})
    assert sentence in str(caught.value)
