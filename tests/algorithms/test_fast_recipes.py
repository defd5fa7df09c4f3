"""FastTD3 and FastSAC: several categorical critics, an actor without a target, noise of another size in every row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import rl_training
from continuous_cases import assert_solves_bandit, make_batch, make_learner, move_target
from recorded_steps import Reads, Recorded
from resume_cases import assert_same, assert_same_run, stop_and_resume, take_steps, tiny
from rl_training.algorithms.base import Numbers
from rl_training.algorithms.d4pg import D4PG
from rl_training.algorithms.ddpg import DDPG
from rl_training.algorithms.sac import SAC
from rl_training.envs.device import DeviceEnvironment
from rl_training.errors import UserError
from rl_training.experiment.registry import get_algorithm_spec
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.ops.distributional import project_categorical as project
from rl_training.run.build import Session, open_session
from rl_training.run.workflows import train
from rl_training.speed.capture import PLAIN_CALLS

SUPPORT: dict[str, Any] = {"v_min": -1.0, "v_max": 1.0, "num_atoms": 5}
FAST: dict[str, Any] = {
    "num_critics": 2, "actor_q": "min", "target_actor": False, "policy_noise": 0.1, "policy_delay": 2,
    "exploration_noise": 0.4, "exploration_noise_min": 0.1,
}  # fmt: skip
OF_LEARNER = {name: value for name, value in FAST.items() if name != "num_critics"}
make = partial(make_learner, D4PG, partial(MLPD4PGModel, num_critics=2, **SUPPORT))


def targets_of(learner: Any, batch: dict[str, Tensor], next_probs: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the critics of D4PG learn, if the target critics predict these probabilities [E, B, K]."""
    found = []
    monkeypatch.setattr(learner.target_network, "ensemble_values", lambda obs, actions: next_probs.log())
    monkeypatch.setattr("rl_training.algorithms.d4pg.project_categorical",
                        lambda **given: found.append(project(**given)) or found[-1])  # fmt: skip
    learner.critic_step(batch, None)
    return found[0]



# ---- the critics ----------------------------------------------------------------------------------------------------


def test_the_projection_of_three_steps_on_numbers_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The discount of three rewards is g^3, not g; and no mass is lost where an atom falls on another."""
    probs = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    higher = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    batch = make_batch(2) | {"rewards": torch.full((2,), 0.5), "discounts": torch.full((2,), 0.97**3)}
    found = targets_of(make(gamma=0.97), batch, torch.stack([higher, probs]).unsqueeze(1).expand(2, 2, 5), monkeypatch)
    for row in found:
        assert row.tolist() == pytest.approx([0.0, 0.082535, 0.2, 0.434931, 0.282535], abs=2e-6)
        assert float(row @ torch.linspace(-1, 1, 5)) == pytest.approx(0.458733, abs=2e-6)


def test_each_row_takes_the_whole_distribution_with_the_smaller_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5])
    batch = make_batch(2) | {"rewards": torch.zeros(2), "discounts": torch.ones(2)}
    next_probs = torch.stack([torch.stack([low, high]), torch.stack([high, low])])
    found = targets_of(make(), batch, next_probs, monkeypatch)
    torch.testing.assert_close(found, torch.stack([low, low]))


def test_every_critic_learns_the_same_target_and_losses_are_summed() -> None:
    learner, batch = make(), make_batch() | {"rewards": torch.full((8,), 0.5), "dones": torch.ones(8)}
    log_probs = learner.model.ensemble_values(batch["obs"], batch["actions"]).log_softmax(-1).detach()
    errors = -log_probs[:, :, 3]  # the atom at 0.5
    result = learner.update(batch)
    assert errors.shape == (2, 8)
    assert result.metrics["critic_loss"] == pytest.approx(float(errors.mean(1).sum()), rel=1e-5)
    torch.testing.assert_close(result.priorities, errors.mean(0))


@pytest.mark.parametrize("kind", [D4PG, DDPG])
def test_without_a_target_actor_the_actor_chooses_and_its_noise_is_clipped(kind: Any) -> None:
    network = partial(MLPD4PGModel, num_critics=2, **SUPPORT) if kind is D4PG else MLPTD3Model
    learner, batch = make_learner(kind, network, target_actor=False), make_batch()
    move_target(learner)
    noise = torch.full((8, 2), 0.3)
    chosen = learner.next_actions(batch["next_obs"], noise)
    torch.testing.assert_close(chosen, (learner.model.actor(batch["next_obs"]) + noise).clamp(-1, 1))
    other = make_learner(kind, network)
    move_target(other)
    of_target = other.target_network.actor(batch["next_obs"])
    torch.testing.assert_close(other.next_actions(batch["next_obs"], None), of_target)
    assert not torch.allclose(other.next_actions(batch["next_obs"], noise), chosen)


@pytest.mark.parametrize("actor_q", ["first", "min", "mean"])
@pytest.mark.parametrize("kind", [D4PG, DDPG])
def test_the_actor_climbs_what_is_named(kind: Any, actor_q: str) -> None:
    network = partial(MLPD4PGModel, num_critics=2, **SUPPORT) if kind is D4PG else MLPTD3Model
    learner, obs = make_learner(kind, network, actor_q=actor_q), make_batch()["obs"]
    values = learner.model.ensemble_values(obs, learner.model.actor(obs))
    values = values.softmax(-1) @ torch.linspace(-1, 1, 5) if kind is D4PG else values
    wanted = {"first": values[0], "min": values.amin(0), "mean": values.mean(0)}[actor_q]
    found = learner.actor_step(obs, obs[:, :2])["actor_loss"]
    torch.testing.assert_close(found, -wanted.mean())
    with pytest.raises(UserError, match="actor_q is 'max'; it must be 'first', 'min' or 'mean'"):
        make_learner(kind, network, actor_q="max")


def test_fast_td3_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPD4PGModel(
        obs_dim=3, action_dim=1, hidden_sizes=(32,), critic_hidden_sizes=(64, 32), num_critics=2, v_min=-2.0, v_max=0.5
    )
    assert_solves_bandit(D4PG(model=model, learning_rate=3e-3, tau=0.1, optimizer="adamw", **OF_LEARNER), 800)


# ---- each critic its own target -------------------------------------------------------------------------------------


@pytest.mark.parametrize("atoms", [{}, {"num_atoms": 5}])
def test_with_own_targets_each_critic_learns_as_if_it_were_alone(atoms: dict[str, int]) -> None:
    ends = {"num_atoms": 5, "v_min": -1.0, "v_max": 1.0} if atoms else {}
    learner = make_learner(SAC, partial(MLPSACModel, **atoms), own_targets=True, **ends)
    move_target(learner)
    batch = make_batch()
    noise = torch.randn(8, 2)
    actions, logprobs = learner.next_actions(batch, noise)
    outputs, following = learner.critic_outputs(batch, actions, None, (None, None))

    def backup(values: Tensor) -> Tensor:
        entropy = (learner.alpha * logprobs).view(-1, *[1] * (values.dim() - 1))
        return batch["rewards"].view(-1, *[1] * (values.dim() - 1)) + 0.9 * (values - entropy)

    each = zip(outputs.split(1), following.split(1), strict=True)
    alone = [learner.head.losses(one, learner.head.targets(then, backup), None) for one, then in each]
    metrics, priorities = learner.critic_step(batch, noise)
    expected = sum(losses["critic_loss"] for losses, _ in alone) / 2
    torch.testing.assert_close(metrics["critic_loss"], expected)
    torch.testing.assert_close(priorities, (alone[0][1] + alone[1][1]) / 2)
    smallest = make_learner(SAC, partial(MLPSACModel, **atoms), **ends)
    move_target(smallest)
    assert not torch.allclose(smallest.critic_step(batch, noise)[0]["critic_loss"], expected)


def test_own_targets_need_all_critics_and_no_quantiles() -> None:
    for options in ({"num_quantiles": 5}, {"num_critics": 3}):
        subset = {"critic_subset_size": 2} if "num_critics" in options else {}
        with pytest.raises(UserError, match="own_targets is true; it must be false"):
            make_learner(SAC, partial(MLPSACModel, **options), own_targets=True, **subset)
        with pytest.raises(ValueError, match="own_targets is true; with num_quantiles"):
            get_algorithm_spec("sac").params(own_targets=True, **options, **subset)


def test_targets_at_the_ends_are_a_metric() -> None:
    learner = make_learner(SAC, partial(MLPSACModel, num_atoms=5), num_atoms=5, v_min=-1.0, v_max=1.0)
    batch = make_batch() | {"dones": torch.ones(8)}
    batch["rewards"] = torch.tensor([5.0, -5.0, 0, 0, 0, 0, 0, 0])
    assert learner.update(batch).metrics["edge_targets"] == pytest.approx(0.25)


# ---- noise of another size in every row -----------------------------------------------------------------------------


class Lane(DeviceEnvironment):
    """Episodes of 3 to 7 steps, by the row's first random number."""

    observation_space = gym.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 6

    def reset(self, noise: Tensor) -> Tensor:
        return torch.cat([(4.0 * noise).floor(), torch.zeros_like(noise)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = torch.stack([state[:, 0], state[:, 1] + 1.0], -1)
        return after, actions[:, 0], after[:, 1] >= 3.0 + after[:, 0]

    def observe(self, state: Tensor) -> Tensor:
        return state


def open_lane(algo: str = "d4pg", num_envs: int = 16, **kwargs: Any) -> Session:
    ends = {"v_min": -10.0, "v_max": 10.0} if algo == "d4pg" else {}
    settings = {**FAST, **ends, "learning_starts": 0, "buffer_capacity": 4000, "train_frequency": num_envs, **kwargs}
    config = tiny(algo, Path("unused"), kwargs=settings, num_envs=num_envs, env_id="mine", vectorization="device")
    return open_session(config, env=Lane)


def test_deviations_are_drawn_where_an_episode_begins_and_between_the_ends() -> None:
    learner = make(exploration_noise=0.4, exploration_noise_min=0.1)
    carry = learner.exploring_carry(4000)
    first = learner.draw_deviations(carry, None)
    assert 0.1 <= float(first.min()) < 0.11
    assert 0.39 < float(first.max()) <= 0.4
    assert float(first.mean()) == pytest.approx(0.25, abs=0.01)
    begins = torch.arange(4000) % 2 == 0
    then = learner.draw_deviations(first, begins)
    assert torch.equal((then != first).squeeze(-1), begins)
    assert torch.equal(learner.draw_deviations(first, torch.zeros(4000, dtype=torch.bool)), first)


def test_actions_have_the_deviation_of_their_row() -> None:
    learner, obs = make(exploration_noise=0.4, exploration_noise_min=0.1), torch.zeros(2, 3)
    carry, drawn = torch.tensor([[0.02], [0.3]]), []
    for _ in range(2000):
        out = learner.act(obs, carry, is_first=torch.zeros(2, dtype=torch.bool))
        assert torch.equal(out.carry, carry)
        drawn.append(out.actions)
    torch.testing.assert_close(torch.stack(drawn).std(0).mean(-1), torch.tensor([0.02, 0.3]), rtol=0.05, atol=0)
    torch.testing.assert_close(learner.act(obs, carry, deterministic=True).actions, learner.model.actor(obs))
    assert make().exploring_carry(2) is None
    assert learner.numpy_policy() is None, "numpy has one deviation for all rows"


@pytest.mark.parametrize("algo", ["d4pg", "td3"])
def test_on_the_device_a_deviation_changes_only_where_an_episode_ended(algo: str) -> None:
    session = open_lane(algo)
    collector: Any = session.collector
    step, changes = 10**6, 0
    take_steps(session, step)
    for _ in range(40):
        before = collector.actor.memory.clone()
        begins = collector.engine.ages == 0
        take_steps(session, step)
        changed = (collector.actor.memory != before).squeeze(-1)
        assert torch.equal(changed, begins)
        changes += int(changed.sum())
    assert changes > 16 * 40 / 7
    session.close()


def test_first_episodes_of_random_age_have_a_deviation_too() -> None:
    config = tiny("d4pg", Path("unused"), kwargs={**FAST, "v_min": -9.0, "v_max": 9.0}, num_envs=64, env_id="mine",
                  vectorization="device", env_kwargs={"simulator": {"random_ages": True}})  # fmt: skip
    session = open_session(config, env=Lane)
    collector: Any = session.collector
    take_steps(session, 10**6)
    assert 0.1 <= float(collector.actor.memory.min()) <= float(collector.actor.memory.max()) <= 0.4
    session.close()


def test_captured_steps_with_deviations_are_plain_ones_and_read_nothing_on_the_host() -> None:
    plain, captured = open_lane(), open_lane()
    collector: Any = captured.collector
    collector._roll = Recorded(collector._roll_out, Numbers(), collector.actor.algorithm.generator)
    rows: list[Any] = []
    for _ in range(PLAIN_CALLS + 10):
        rows.clear()
        for session in (plain, captured):
            take_steps(session, 10**6)
            arrays = session.collector.experience.arrays  # type: ignore[attr-defined]
            rows.append({name: array.clone() for name, array in arrays.items()})
        assert_same(*rows)
    assert collector._roll.replays == [10]
    assert_same(captured.collector.state_dict(), plain.collector.state_dict())
    with Reads() as reads:
        for _ in range(20):
            take_steps(plain, 10**6)
    assert reads.count == 0
    for session in (plain, captured):
        session.close()


@pytest.mark.parametrize("vectorization", ["device", "sync"])
def test_a_resume_is_exact(vectorization: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "vectorization": vectorization, "num_envs": 4, "total_timesteps": 400, "log_interval": 1,
        "kwargs": {**FAST, "n_step": 3, "buffer_capacity": 120, "gradient_updates_per_step": 2, "v_min": -2000.0,
                   "v_max": 100.0, "optimizer": "adamw", "weight_decay": 0.1},
        "env_kwargs": {"max_episode_steps": 15, "wrappers": {"normalize_observation": True}},
    }  # fmt: skip
    whole = train(tiny("d4pg", tmp_path / "whole", **given), console=False)
    parts = stop_and_resume(tiny("d4pg", tmp_path / "parts", **given), 60, 270)
    assert_same_run(whole, parts)


def test_a_smallest_deviation_above_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exploration_noise_min is 0.5; it must be at most exploration_noise \(0.1\)"):
        get_algorithm_spec("td3").params(exploration_noise_min=0.5)


# ---- the presets ----------------------------------------------------------------------------------------------------


def settings_of(preset: str) -> dict[str, Any]:
    path = Path(rl_training.__file__).parent / "assets" / "configs" / f"{preset}.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("preset", ["d4pg/halfcheetah_fast", "d4pg/humanoid_fast"])
def test_the_presets_of_fast_td3_have_its_settings(preset: str) -> None:
    config = settings_of(preset)
    params: Any = get_algorithm_spec("d4pg").params(**config["algo_kwargs"])
    recipe = {
        "critic_hidden_sizes": (1024, 512, 256), "hidden_sizes": (512, 256, 128), "num_atoms": 101, "num_critics": 2,
        "batch_size": 32_768, "tau": 0.1, "target_update_interval": 1, "policy_delay": 2, "optimizer": "adamw",
        "weight_decay": 0.1, "learning_rate": 3e-4, "target_actor": False, "actor_q": "min", "exploration_noise": 0.4,
        "gradient_updates_per_step": 2, "learning_starts": 10_240, "train_frequency": 1024,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in recipe} == recipe
    assert (config["num_envs"], config["vectorization"]) == (1024, "device")


def test_the_preset_of_fast_sac_has_its_settings() -> None:
    params: Any = get_algorithm_spec("sac").params(**settings_of("sac/halfcheetah_fast")["algo_kwargs"])
    recipe = {
        "critic_hidden_sizes": (768, 384, 192), "hidden_sizes": (512, 256, 128), "num_atoms": 101, "own_targets": True,
        "batch_size": 8192, "tau": 0.125, "actor_q": "mean", "actor_update_interval": 4, "optimizer": "adamw",
        "weight_decay": 0.001, "learning_rate": 3e-4, "critic_layer_norm": True, "activation": "silu",
        "gradient_updates_per_step": 8,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in recipe} == recipe
