"""Simulators of other packages: what their shims read, with fakes of their shapes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces as gs
from torch import Tensor

from fake_packages import Cached, Direct, Managed, ManagedByHand, Remembering, VecEnv, Vector
from fake_simulator import GroupedPoints, Points, as_groups
from resume_cases import tiny
from rl_training.envs.simulator import SimulatorEngine
from rl_training.envs.simulator_shims import ManagerSimulator, RslRlSimulator, VectorSimulator
from rl_training.errors import UserError
from rl_training.run.build import Session
from rl_training.run.workflows import train
from simulator_cases import open_simulator, take_rollout

LIMITED = {"env_kwargs": {"simulator": {"action_limit": 1.0, "random_ages": True}}}
SPREAD = {"env_kwargs": {"simulator": {"random_ages": True}}}
BOTH = ["policy", "critic"]
SHIMS: list[tuple[Any, dict[str, Any], bool, str]] = [
    (lambda: ManagerSimulator(Managed()), LIMITED, True, "sim/Episode/ended"),
    (lambda: ManagerSimulator(ManagedByHand()), LIMITED, True, "sim/Episode/ended"),
    (lambda: ManagerSimulator(Direct()), LIMITED, False, "sim/Episode/ended"),
    (lambda: ManagerSimulator(Cached()), LIMITED, False, "sim/Episode/ended"),
    (lambda: ManagerSimulator(Remembering()), LIMITED, False, "sim/Episode/ended"),
    (lambda: VectorSimulator(Vector()), SPREAD, True, "sim/success_once"),
    (lambda: RslRlSimulator(VecEnv()), LIMITED, False, "sim/distance"),
    (lambda: RslRlSimulator(VecEnv(grouped=False)), LIMITED, False, "sim/distance"),
]
GROUPED: list[tuple[Any, dict[str, Any], bool, str]] = [
    (lambda: ManagerSimulator(Managed(), BOTH), LIMITED, True, "sim/Episode/ended"),
    (lambda: ManagerSimulator(ManagedByHand(), BOTH), LIMITED, True, "sim/Episode/ended"),
    (lambda: ManagerSimulator(Cached(), BOTH), LIMITED, False, "sim/Episode/ended"),
    (lambda: VectorSimulator(Vector(kind=GroupedPoints)), SPREAD, True, "sim/success_once"),
    (lambda: RslRlSimulator(VecEnv(), BOTH), LIMITED, False, "sim/distance"),
    (lambda: RslRlSimulator(VecEnv(grouped=False), BOTH), LIMITED, False, "sim/distance"),
]


@pytest.mark.parametrize(("make", "fields", "has_final_obs", "name"), SHIMS)
def test_a_shim_gives_true_final_observations_or_says_that_there_are_none(
    make: Any, fields: dict[str, Any], has_final_obs: bool, name: str
) -> None:
    session = open_simulator(make, **fields)
    engine: Any = session.engine
    assert isinstance(engine, SimulatorEngine)
    notes = " ".join(session.notes)
    assert ("gives no final observation" in notes) == (not has_final_obs)
    rows = take_rollout(session)
    done = rows["terminated"] | rows["truncated"]
    assert rows["truncated"].any()
    assert rows["terminated"].sum() + rows["truncated"].sum() == done.sum()
    # a place follows from the one before, and an age too, except where an episode begins
    place, age = rows["obs"][:-1, :, 0] + 0.5 * rows["actions"][..., 0].clamp(-1, 1), rows["obs"][:-1, :, 1]
    true_finals = torch.stack([place, age + 0.1], -1)
    true_finals[0, :, 1] = rows["final_obs"][0, :, 1]  # ages were set after the first observation
    wanted = true_finals if has_final_obs else rows["obs"][:-1]
    torch.testing.assert_close(rows["final_obs"][done], wanted[done])
    torch.testing.assert_close(rows["obs"][1:][~done][..., 0], place[~done])
    assert (rows["obs"][1:][done][:, 1] == 0).all(), "a new episode"
    torch.testing.assert_close(rows["rewards"], 1.0 - place.abs())
    assert name in session.collector.metrics()
    session.close()


class Nested(Points):
    """Groups inside a group."""

    observation_space = gs.Dict(agent=gs.Dict(place=gs.Box(-1, 1, (1,))))  # type: ignore[assignment]


def split_groups(obs: Tensor, session: Session) -> dict[str, Tensor]:
    """Observations [..., 5] as groups."""
    space: Any = session.spaces.observation_space
    parts = obs.split([int(part.shape[0]) for part in space.spaces.values()], -1)
    return {"actor" if name == "policy" else name: part for name, part in zip(space, parts, strict=True)}


@pytest.mark.parametrize(("make", "fields", "has_final_obs", "name"), GROUPED)
def test_the_groups_of_a_shim_belong_together_where_episodes_end_too(
    make: Any, fields: dict[str, Any], has_final_obs: bool, name: str
) -> None:
    session = open_simulator(make, kwargs={"critic_obs": ["critic"]}, **fields)
    assert ("gives no final observation" in " ".join(session.notes)) == (not has_final_obs)
    rows = take_rollout(session)
    done = rows["terminated"] | rows["truncated"]
    assert rows["truncated"].any()
    obs, finals = split_groups(rows["obs"], session), split_groups(rows["final_obs"][done], session)
    for groups in (obs, finals):
        torch.testing.assert_close(groups["critic"], as_groups(groups["actor"])["critic"])
    place = obs["actor"][:-1, :, 0] + 0.5 * rows["actions"][..., 0].clamp(-1, 1)
    wanted = place if has_final_obs else obs["actor"][:-1, :, 0]
    torch.testing.assert_close(finals["actor"][:, 0], wanted[done])
    assert (obs["actor"][1:][done][:, 1] == 0).all(), "a new episode"
    actor: Any = session.algorithm.policy.actor  # type: ignore[attr-defined]
    assert next(layer.in_features for layer in actor if isinstance(layer, torch.nn.Linear)) == 2
    session.close()


def test_looking_for_a_cache_leaves_the_observations_as_they_were() -> None:
    env = Cached()
    before = {name: part.clone() for name, part in env.compute().items()}
    plain = env._reset_idx
    assert not ManagerSimulator(env).has_final_obs
    assert env._reset_idx == plain, "the environment resets as it did"
    for name, part in env.compute().items():
        assert torch.equal(part, before[name])
    assert ManagerSimulator(Remembering(), "critic").has_final_obs, "a group without a history"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ManagerSimulator(Managed(), "camera"),
         "group is 'camera'; the simulator's groups of observations are critic, policy"),
        (lambda: ManagerSimulator(Managed(), ["policy", "camera"]), "group is ['policy', 'camera']; the simulator's"),
        (lambda: RslRlSimulator(VecEnv(grouped=False), "camera"), "observations are critic, policy"),
        (lambda: RslRlSimulator(VecEnv(), []), "group is []; the simulator's groups of observations are policy"),
        (lambda: VectorSimulator(Vector(kind=Nested)), "; it must be a Box or a Dict of Boxes"),
        (lambda: RslRlSimulator(SimpleNamespace()), "the VecEnv has no reset()"),
        (lambda: VectorSimulator(SimpleNamespace(metadata={"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP})),
         "it must be SAME_STEP"),
    ],
)  # fmt: skip
def test_what_a_shim_cannot_use_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make()


def test_with_a_finite_horizon_a_time_out_ends_the_task() -> None:
    env = Managed()
    env.cfg.is_finite_horizon = True
    rows = take_rollout(open_simulator(lambda: ManagerSimulator(env), **LIMITED))
    assert not rows["truncated"].any()
    assert rows["terminated"].any()


@pytest.mark.parametrize("make", [make for make, *_ in SHIMS + GROUPED])
def test_a_run_with_a_shim_evaluates(make: Any, tmp_path: Path) -> None:
    simulator = make()
    limited = {} if isinstance(simulator, VectorSimulator) else LIMITED
    kwargs = {"critic_obs": ["critic"]} if isinstance(simulator.observation_space, gs.Dict) else {}
    config = tiny("ppo", tmp_path, env_id="shim", num_envs=4, vectorization="device", kwargs=kwargs, **limited)
    assert train(config, env=make).metrics["eval_episodes"] == 2
