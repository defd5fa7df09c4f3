"""Groups of observations on the device: what is stored, who sees what, evaluation, export, resume, and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from gymnasium.utils.env_checker import check_env
from torch import Tensor

from fake_simulator import BlindGroupedPoints, GroupedPoints, Points, as_groups
from resume_cases import StopAt, assert_same_run, tiny
from rl_training.collect.device import DeviceCollector
from rl_training.data.replay_store import DeviceReplayStore
from rl_training.envs.device import DeviceEnvironment, OneEnvironment
from rl_training.envs.factory import make_env, read_recipe
from rl_training.errors import UserError
from rl_training.models.blocks import ObservationNorm
from rl_training.run.build import open_session
from rl_training.run.learner import load_policy
from rl_training.run.workflows import resume_training, train
from rl_training.tools.export import export_policy
from simulator_cases import open_simulator, take_rollout

ROLLOUTS = ["a2c", "ppo", "trpo", "impala", "appo"]
REPLAY = ["sac", "td3", "ddpg", "d4pg"]
GROUPED: dict[str, Any] = {"critic_obs": ["critic"]}
SUPPORT = {"d4pg": {"v_min": -10.0, "v_max": 10.0}}  # which random play of a simulator cannot measure


def joined(groups: Any) -> Tensor:
    """The groups in the order of their space."""
    return torch.cat([groups["critic"], groups["actor"]], -1)


def grouped_config(algo: str, folder: Path, **fields: Any) -> Any:
    own = {"num_envs": 10, "vectorization": "device", "env_kwargs": {"simulator": {"eval_rows": 2}}}
    kwargs = GROUPED | SUPPORT.get(algo, {})
    return tiny(algo, folder, env_id="fake_simulator:TenGrouped", kwargs=kwargs, **{**own, **fields})


# ---- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [GroupedPoints, BlindGroupedPoints])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_a_rollout_holds_both_groups_and_their_final_observations(algo: str, make: Any) -> None:
    again = GroupedPoints(5, seed=3)
    session = open_simulator(lambda: make(5, seed=3), algo, kwargs=GROUPED)
    obs = joined(again.reset(torch.arange(5)))
    ends = [0, 0]
    for _ in range(3):
        rows = take_rollout(session)
        for t in range(24):
            torch.testing.assert_close(rows["obs"][t], obs)
            now, _, terminated, truncated, final_obs, _ = again.step(rows["actions"][t].clamp(-1, 1))
            wanted = joined(final_obs) if make is GroupedPoints else obs
            done = terminated | truncated
            torch.testing.assert_close(rows["final_obs"][t][done], wanted[done])
            obs, ends = joined(now), [ends[0] + int(terminated.sum()), ends[1] + int(truncated.sum())]
        torch.testing.assert_close(rows["obs"][24], obs)
    assert min(ends) > 0


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_replay_holds_both_groups_and_their_final_observations(algo: str) -> None:
    session = open_simulator(lambda: GroupedPoints(4, seed=3), algo, kwargs=GROUPED)
    store: Any = session.store
    taken = 0
    while taken < 300:
        taken += store.add(session.collect(store.request(taken)), taken)
    batch = store.buffer.sample(2_000, np.random.default_rng(0))
    for name in ("obs", "next_obs"):
        critic, actor = batch[name].split([3, 2], -1)
        torch.testing.assert_close(critic, as_groups(actor)["critic"])
    moved = batch["obs"][:, 3] + 0.5 * batch["actions"][:, 0]
    torch.testing.assert_close(batch["next_obs"][:, 3], moved)  # not the place of a new episode
    torch.testing.assert_close(batch["next_obs"][:, 4], batch["obs"][:, 4] + 0.1)
    ends = batch["obs"][:, 4] > 0.85
    assert ends.any()
    assert (batch["next_obs"][ends, 1] > 100.95).all(), "the critic's group too"


# ---- who sees what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", [*ROLLOUTS, *REPLAY])
def test_what_is_for_the_critic_reaches_it_alone(algo: str, tmp_path: Path) -> None:
    result = train(grouped_config(algo, tmp_path), console=False)
    assert result.metrics["eval_episodes"] == 2
    policy = load_policy(result.checkpoint_path)
    assert policy.spaces.critic_obs == ("critic",)
    places = torch.tensor([[0.3, 0.2], [-0.9, 0.7]])
    whole = [{name: part[i].numpy() for name, part in as_groups(places).items()} for i in range(2)]
    others = [row | {"critic": np.array([3.0, -60.0, 7.0], np.float32)} for row in whole]
    chosen = policy.predict([{"actor": row["actor"]} for row in whole])
    np.testing.assert_array_equal(policy.predict(whole), chosen)
    np.testing.assert_array_equal(policy.predict(others), chosen)
    assert abs(chosen[0] - chosen[1]) > 1e-5, "it does see its own group"
    algorithm: Any = policy.algorithm
    obs = torch.from_numpy(np.stack([np.concatenate([row["critic"], row["actor"]]) for row in (whole[0], others[0])]))
    still = torch.zeros(2, 1)
    critic = algorithm.policy.values if algo in ROLLOUTS else partial(algorithm.model.q_values, actions=still)
    one, other = critic(obs).detach().reshape(-1, 2)[0].tolist()
    assert one != pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_both_groups_are_normalized_and_the_actors_is_exported(algo: str, tmp_path: Path) -> None:
    env_kwargs = {"simulator": {"eval_rows": 2}, "wrappers": {"normalize_observation": True}}
    result = train(grouped_config(algo, tmp_path, env_kwargs=env_kwargs, total_timesteps=512), console=False)
    policy: Any = load_policy(result.checkpoint_path)
    means = next(part.mean for part in policy.algorithm.modules() if isinstance(part, ObservationNorm))
    assert (means[:3] > 90).all(), "the critic's"
    assert (means[3:].abs() < 2).all(), "the actor's"
    facts = export_policy(result.checkpoint_path, "torch").facts
    assert [(entry["name"], entry["shape"][1:]) for entry in facts["inputs"]] == [("obs.actor", [2])]
    assert facts["parity"]["different"] == 0


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "impala", "sac", "td3"])
def test_a_resume_is_exact(algo: str, tmp_path: Path) -> None:
    whole = train(grouped_config(algo, tmp_path / "whole"), console=False)
    half = train(grouped_config(algo, tmp_path / "halves"), callbacks=[StopAt(64)], console=False)
    assert_same_run(whole, resume_training(half.checkpoint_path, console=False))


# ---- environments of tensor functions --------------------------------------------------------------------------------


class Drift(DeviceEnvironment):
    """A point is pushed by the actions; it is lost beyond 2."""

    observation_space: Any = gs.Dict(
        [("critic", gs.Box(-np.inf, np.inf, (3,), np.float32)), ("actor", gs.Box(-np.inf, np.inf, (2,), np.float32))]
    )
    action_space = gs.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 10
    reset_noise = 1

    def reset(self, noise: Tensor) -> Tensor:
        return torch.cat([2.0 * noise - 1.0, torch.zeros_like(noise)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = state[:, :1] + 0.5 * actions
        return torch.cat([place, state[:, 1:] + 0.1], -1), 1.0 - place[:, 0].abs(), place[:, 0].abs() > 2.0

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return as_groups(state)


def drift_config(algo: str, folder: Path, **fields: Any) -> Any:
    kwargs = GROUPED | SUPPORT.get(algo, {})
    return tiny(algo, folder, env_id="Drift", num_envs=8, kwargs=kwargs, **{"vectorization": "device", **fields})


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_rollouts_and_replay_on_the_device_hold_both_groups(algo: str) -> None:
    session = open_session(drift_config(algo, Path("unused")), env=Drift)
    store: Any = session.store
    assert isinstance(session.collector, DeviceCollector)
    assert isinstance(store, DeviceReplayStore) == (algo == "sac")
    taken = 0
    while taken < 640:
        taken += store.add(session.collect(store.request(taken)), taken)
    if algo == "sac":
        batch = next(batch for _, batch in store.batches(session.algorithm, taken))
        seen, last, actions = batch["obs"], batch["next_obs"], batch["actions"]
    else:
        rows = session.collector.experience.arrays  # type: ignore[attr-defined]
        done = rows["terminated"] | rows["truncated"]
        seen, last, actions = (part[done] for part in (rows["obs"][:-1], rows["final_obs"], rows["actions"]))
    assert len(seen) > 5
    for obs in (seen, last):
        torch.testing.assert_close(obs[:, :3], as_groups(obs[:, 3:])["critic"])
    torch.testing.assert_close(last[:, 3], seen[:, 3] + 0.5 * actions[:, 0].clamp(-1, 1))


@pytest.mark.parametrize("algo", ["ppo", "sac", "d4pg"])
def test_a_run_on_the_device_is_evaluated_and_resumes_exactly(algo: str, tmp_path: Path) -> None:
    whole = train(drift_config(algo, tmp_path / "whole"), env=Drift, console=False)
    assert whole.metrics["eval_episodes"] == 2
    half = train(drift_config(algo, tmp_path / "halves"), env=Drift, callbacks=[StopAt(64)], console=False)
    assert_same_run(whole, resume_training(half.checkpoint_path, env=Drift, console=False))
    policy = load_policy(whole.checkpoint_path)
    row = {name: part[0].numpy() for name, part in as_groups(torch.tensor([[0.3, 0.2]])).items()}
    np.testing.assert_array_equal(policy.predict(row), policy.predict({"actor": row["actor"]}))


def test_one_row_is_an_ordinary_environment_with_a_dict() -> None:
    env = make_env(read_recipe("Drift", {}, Drift))
    check_env(OneEnvironment(Drift()), skip_render_check=True)
    obs, _ = env.reset(seed=3)
    assert obs.shape == (5,)
    assert obs[0] == pytest.approx(100.0 + obs[3])


# ---- refusals --------------------------------------------------------------------------------------------------------


def gives(*, space: Any = GroupedPoints.observation_space, keep: Any = dict) -> Any:
    """A simulator with another space, or that changes its groups before they are returned."""

    class Other(GroupedPoints):
        observation_space = space

        def step(self, actions: Tensor) -> Any:
            obs, *rest = super().step(actions)
            return keep(obs), *rest

    return Other


ACTOR, IMAGE = gs.Box(-1, 1, (2,)), gs.Box(0, 255, (8, 8, 3), np.uint8)
CRITIC_SEEN = "the actor would see the group 'critic' of the observations of points; name it in critic_obs, or leave it"
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (GroupedPoints, "ppo", {}, CRITIC_SEEN),
    (GroupedPoints, "naf", {}, CRITIC_SEEN),
    (GroupedPoints, "ppo", {"critic_obs": ["kritic"]}, "points has no part 'kritic'; did you mean 'critic'"),
    (GroupedPoints, "ppo", {"critic_obs": ["critic", "actor"]}, "the actor of points must see at least one part"),
    (GroupedPoints, "naf", GROUPED, "unknown key 'critic_obs'"),
    (Points, "ppo", GROUPED, "points has no Dict observation: Box"),
    (gives(space=gs.Dict(actor=ACTOR, critic=gs.Dict(a=ACTOR))), "ppo", GROUPED, "must be a Box or a Dict of Boxes"),
    (gives(space=gs.Dict(actor=ACTOR, critic=gs.Discrete(2))), "ppo", GROUPED, "must be a Box or a Dict of Boxes"),
    (gives(space=gs.Dict(actor=ACTOR, camera=IMAGE)), "ppo", {}, "the part 'camera' of observation_space is an image"),
    (gives(keep=lambda obs: {"actor": obs["actor"]}), "ppo", GROUPED,
     "the observations of points have the groups actor; they must be a mapping with critic and actor"),
    (gives(keep=lambda obs: obs["actor"]), "ppo", GROUPED,
     "the observations of points are a Tensor; they must be a mapping with critic and actor"),
    (gives(keep=lambda obs: obs | {"critic": obs["actor"]}), "ppo", GROUPED,
     r"observations in the group 'critic' of points are \(16, 2\) on cpu; they must be a tensor of shape \(16, 3\)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "algo", "kwargs", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(make: Any, algo: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        take_rollout(open_simulator(make, algo, kwargs=kwargs))


def test_groups_that_the_actor_sees_too_are_for_every_algorithm(tmp_path: Path) -> None:
    renamed = gs.Dict([("goal", gs.Box(-np.inf, np.inf, (3,))), ("actor", gs.Box(-np.inf, np.inf, (2,)))])

    class Goals(GroupedPoints):
        observation_space = renamed

        def reset(self, rows: Tensor) -> Any:
            return self.rename(super().reset(rows))

        def step(self, actions: Tensor) -> Any:
            obs, rewards, terminated, truncated, final_obs, log = super().step(actions)
            return self.rename(obs), rewards, terminated, truncated, self.rename(final_obs), log

        def rename(self, groups: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"actor": groups["actor"], "goal": groups["critic"], "unused": self.place}

    config = tiny("naf", tmp_path, env_id="goals", num_envs=6, vectorization="device")
    assert train(config, env=lambda: Goals(6), console=False).metrics["eval_episodes"] == 2
