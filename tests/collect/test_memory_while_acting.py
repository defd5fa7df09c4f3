"""A policy with memory while it acts: which states an experience holds, and that a new episode starts with none."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.ppo import PPO
from rl_training.collect.device import DeviceCollector
from rl_training.collect.local import Behaviour, LocalCollector
from rl_training.data.store import Experience, ExperienceLayout, Request
from rl_training.envs.engines import make_engine
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.stepper import Stepper
from rl_training.models.recurrent_actor_critic import RecurrentActorCritic

STEPS, COUNT = 7, 3
KINDS = pytest.mark.parametrize("vectorization", ["sync", "native", "device"])


def open_collector(vectorization: str, limit: int = 4) -> tuple[Any, Any]:
    """A collector of CartPoles that end after `limit` steps, and the behaviour of a PPO learner with memory."""
    recipe = read_recipe("CartPole-v1", {"max_episode_steps": limit}, None)
    spaces = probe_spaces(recipe)
    torch.manual_seed(0)
    policy = RecurrentActorCritic(memory="lstm", memory_size=5, memory_layers=2, obs_dim=4, action_dim=2)
    behaviour = Behaviour(PPO(policy=policy), spaces, COUNT, np.random.default_rng(0))
    stepper = Stepper(make_engine(recipe, spaces, COUNT, 0, vectorization), spaces, COUNT)
    layout = ExperienceLayout(
        STEPS, COUNT, (4,), "float32", logprobs=True, state_size=20, holds_resets=stepper.resets_next_step
    )
    if vectorization == "device":
        return DeviceCollector(behaviour, stepper, layout), behaviour
    return LocalCollector(behaviour, stepper, Experience(layout)), behaviour


def arrays_of(experience: Experience) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(array).clone() for name, array in experience.arrays.items()}


@KINDS
def test_each_state_is_what_the_memory_makes_of_the_one_before(vectorization: str) -> None:
    collector, behaviour = open_collector(vectorization)
    policy = behaviour.algorithm.policy
    with closing(collector):
        before = torch.zeros(COUNT, 20)
        for _ in range(3):
            rows = arrays_of(collector.collect(behaviour, Request(steps=STEPS)))
            assert torch.equal(rows["states"][0], before)
            for t in range(STEPS):
                with torch.no_grad():
                    outputs, after = policy.remember(rows["obs"][t], rows["states"][t], rows["starts"][t])
                    logprobs = policy.heads.distribution(outputs).log_prob(rows["actions"][t])
                torch.testing.assert_close(rows["states"][t + 1], after)
                torch.testing.assert_close(rows["logprobs"][t], logprobs)
            before = rows["states"][-1]
        assert before.abs().min() > 0


@KINDS
def test_starts_are_the_first_observations_of_episodes(vectorization: str) -> None:
    collector, behaviour = open_collector(vectorization)
    with closing(collector):
        rows = arrays_of(collector.collect(behaviour, Request(steps=STEPS)))
    assert rows["starts"][0].all()
    begins = rows["terminated"] | rows["truncated"]
    if "valid" in rows:  # the row after an end still belongs to the episode that ended: it has its last observation
        assert torch.equal(rows["starts"][1:], ~rows["valid"])
    else:
        assert torch.equal(rows["starts"][1:], begins)
    assert begins.any()


@KINDS
def test_a_collector_continues_with_its_memory(vectorization: str) -> None:
    (one, behaviour), (other, again) = open_collector(vectorization), open_collector(vectorization)
    with closing(one), closing(other):
        one.collect(behaviour, Request(steps=STEPS))
        assert other.load_state_dict(one.state_dict()) == []
        again.algorithm.load_state_dict(behaviour.algorithm.state_dict())
        again.rng.bit_generator.state = behaviour.rng.bit_generator.state
        rows, others = (arrays_of(c.collect(b, Request(steps=STEPS))) for c, b in ((one, behaviour), (other, again)))
    for name in rows.keys() - {"final_obs"}:  # which has old rows where no episode ended
        assert torch.equal(rows[name], others[name]), name


def test_a_memory_reads_observations_while_actions_are_random() -> None:
    collector, behaviour = open_collector("sync", limit=100)
    with closing(collector):
        rows = arrays_of(collector.collect(behaviour, Request(steps=STEPS, random=STEPS * COUNT)))
    assert all(rows["states"][t].abs().sum() > 0 for t in range(1, STEPS + 1))
