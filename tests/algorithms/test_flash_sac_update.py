"""FlashSAC: batch normalization with unit weights, one pass over both states, and noise that is held."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner, move_target
from registry_contract import TrainerSmoke
from resume_cases import tiny
from rl_training.algorithms.sac import SAC
from rl_training.config.spec import get_algorithm_spec
from rl_training.models.bodies import Shape
from rl_training.models.hypersphere import BatchNormBody, UnitLinear, UnitRMSNorm
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.models.normalization import UnitBatchNorm
from rl_training.run.build import open_session

BODY: dict[str, Any] = {"architecture": "unit_batch_norm", "num_atoms": 21}
FLASH: dict[str, Any] = {
    "joint_forward": "both", "actor_first": True, "num_atoms": 21, "v_min": -5.0, "v_max": 5.0,
    "actor_update_interval": 2,
}  # fmt: skip


class TestFlashSAC(TrainerSmoke):
    algo = "flash_sac"


def make(**options: Any) -> Any:
    return make_learner(SAC, partial(MLPSACModel, **BODY), **{**FLASH, **options})


def statistics(module: torch.nn.Module) -> list[Tensor]:
    return [value.clone() for name, value in module.named_buffers() if name.endswith((".mean", ".var"))]


# ---- the network --------------------------------------------------------------------------------------------------


def test_scales_and_shifts_are_projected_together() -> None:
    norm = UnitBatchNorm(1, 3)
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([2.0, 1.0, 1.0]).view(1, 1, 3))
        norm.shift.copy_(torch.tensor([0.0, 1.0, 0.0]).view(1, 1, 3))
    norm.project_()
    assert norm.scale.flatten().tolist() == pytest.approx([1.309307, 0.654654, 0.654654], abs=1e-6)
    assert norm.shift.flatten().tolist() == pytest.approx([0.0, 0.654654, 0.0], abs=1e-6)
    rms = UnitRMSNorm(2, 4)
    with torch.no_grad():
        rms.scale.mul_(torch.tensor([3.0, 0.5]).view(2, 1, 1))
    rms.project_()
    torch.testing.assert_close(rms.scale.detach(), torch.ones(2, 1, 4))


def test_batch_normalization_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs, x = UnitBatchNorm(1, 3), torch.nn.BatchNorm1d(3, momentum=0.01, eps=1e-5), torch.randn(7, 3) * 4 + 2
    for _ in range(3):
        torch.testing.assert_close(ours(x.unsqueeze(0), by_batch=True)[0], theirs(x))
    torch.testing.assert_close(ours.mean.flatten(), theirs.running_mean)
    torch.testing.assert_close(ours.var.flatten(), theirs.running_var)  # unbiased
    torch.testing.assert_close(ours(x.unsqueeze(0))[0], theirs.eval()(x))


def test_outputs_are_those_of_the_equations() -> None:
    torch.manual_seed(0)
    body, x = BatchNormBody(2, Shape(inputs=3, hidden_sizes=(4, 4), outputs=5)), torch.randn(9, 3)
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if "scale" in name or "shift" in name or "bias" in name:
                parameter.add_(0.1 * torch.rand_like(parameter))
    assert body.blocks[0].widen.weight.shape == (2, 4, 16)
    for m, out in enumerate(body(x, by_batch=True)):

        def norm(layer: UnitBatchNorm, x: Tensor, m: int = m) -> Tensor:
            return F.batch_norm(x, None, None, layer.scale[m, 0], layer.shift[m, 0], training=True, eps=1e-5)

        h = norm(body.input_norm, x) @ body.embed.weight[m]
        for block in body.blocks:
            inside = norm(block.wide_norm, h @ block.widen.weight[m]).relu()
            h = h + norm(block.norm, inside @ block.narrow.weight[m]).relu()
        h = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * body.norm.scale[m]
        torch.testing.assert_close(out, h @ body.head.weight[m] + body.bias[m], rtol=1e-4, atol=1e-5)


def assert_projected(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, UnitLinear):
            norms = part.weight.detach().norm(dim=1)
            torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-5)
        elif isinstance(part, UnitBatchNorm):
            squares = part.scale.square().sum(-1) + part.shift.square().sum(-1)
            torch.testing.assert_close(squares, torch.full_like(squares, part.scale.shape[-1]), rtol=1e-5, atol=0)


def test_everything_is_projected_after_steps_and_the_target_is_a_plain_average() -> None:
    learner = make(learning_rate=0.1, tau=0.5)
    for seed in range(3):
        before = [p.clone() for p in learner.target_critics.parameters()]
        learner.update(make_batch(seed=seed))
        live = learner.model.critics.parameters()
        for old, target, new in zip(before, learner.target_critics.parameters(), live, strict=True):
            torch.testing.assert_close(target, 0.5 * old + 0.5 * new.detach())
    assert_projected(learner.model.actor)
    assert_projected(learner.model.critics)
    with pytest.raises(AssertionError):
        assert_projected(learner.target_critics)


# ---- the update ---------------------------------------------------------------------------------------------------


def test_targets_and_values_are_made_of_one_pass_over_both_states_each() -> None:
    learner, batch, noise = make(alpha=0.3), make_batch(rows=16), torch.randn(16, 2)
    move_target(learner)
    reference = copy.deepcopy(learner)
    actions, logprobs = reference.model.actor.sample(batch["next_obs"], noise)  # from running statistics
    states, chosen = torch.cat([batch["obs"], batch["next_obs"]]), torch.cat([batch["actions"], actions.detach()])
    with torch.no_grad():
        after = reference.target_critics(states, chosen, by_batch=True)[:, 16:]
    outputs = reference.model.critics(states, chosen, by_batch=True)[:, :16]
    atoms = reference.head.targets(
        after, lambda z: batch["rewards"].unsqueeze(1) + 0.9 * (z - 0.3 * logprobs.detach().unsqueeze(1))
    )
    loss, _ = reference.head.losses(outputs, atoms, None)
    metrics, _ = learner.critic_step(batch, noise)
    assert float(metrics["critic_loss"].detach()) == pytest.approx(float(loss["critic_loss"].detach()), rel=1e-5)
    assert float(metrics["target_q_mean"]) == pytest.approx(float(loss["target_q_mean"]), rel=1e-4, abs=1e-5)


def test_the_actor_learns_by_statistics_of_both_states_and_values_from_running_ones() -> None:
    learner, batch, noise = make(alpha=0.1), make_batch(rows=16), torch.randn(16, 2)
    critics = statistics(learner.model.critics)
    reference = copy.deepcopy(learner)
    both = torch.cat([batch["obs"], batch["next_obs"]])
    sampled = reference.model.actor.sample(both, noise.repeat(2, 1), by_batch=True)
    actions, logprobs = sampled.actions[:16], sampled.logprobs[:16]
    values = reference.head.values(reference.model.critics(batch["obs"], actions)).amin(0)
    expected = float((0.1 * logprobs - values).mean().detach())
    learner.draw_noise = lambda obs: noise
    learner.actor_part(batch)
    assert float(learner.last_actor[0]) == pytest.approx(expected, rel=1e-5)
    assert all(map(torch.equal, critics, statistics(learner.model.critics)))
    moved = zip(statistics(learner.model.actor), statistics(reference.model.actor), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in moved)


def test_passes_of_the_target_move_no_statistics_and_those_of_the_critics_move_them_once() -> None:
    learner, batch = make(), make_batch()
    learner.critic_step(batch, torch.randn(8, 2))
    norm = learner.model.critics.body.input_norm
    rows = torch.cat([torch.cat([batch["obs"], batch["next_obs"]])], -1)
    torch.testing.assert_close(norm.mean[0, 0, :3], 0.01 * rows.mean(0))
    assert learner.target_critics.body.input_norm.mean is norm.mean  # shared, because the target never reads it


def test_the_actor_learns_at_even_updates_first() -> None:
    learner, moved = make(), []
    for update in range(4):
        before = learner.actor_optimizer.flat.clone()
        learner.update(make_batch(seed=update))
        moved.append(not torch.equal(before, learner.actor_optimizer.flat))
    assert moved == [True, False, True, False]


# ---- noise that is held -------------------------------------------------------------------------------------------


def test_the_chances_of_lengths_are_those_of_a_zeta_distribution() -> None:
    learner = make(noise_repeat=16)
    carry, lengths = learner.exploring_carry(1), []
    for _ in range(20_000):
        if float(carry[0, -1]) == 0.0:
            lengths.append(1)
        else:
            lengths[-1] += 1
        carry = learner.hold(torch.randn(1, 2), carry)
    shares = np.bincount(lengths, minlength=17)[1:] / len(lengths)
    assert shares[:4] == pytest.approx([0.631175, 0.157794, 0.070131, 0.039448], abs=0.012)
    assert np.mean(lengths[:-1]) == pytest.approx(2.133832, abs=0.06)
    assert max(lengths) <= 16


def test_noise_is_held_for_the_same_steps_everywhere_and_each_environment_has_its_own() -> None:
    learner = make(noise_repeat=16)
    carry, before = learner.exploring_carry(3), None
    kept = 0
    for _ in range(200):
        left = carry[:, -1].clone()
        carry = learner.act(torch.zeros(3, 3), carry).carry
        assert len(carry[:, -1].unique()) == 1
        assert len({tuple(row) for row in carry[:, :-1].tolist()}) == 3
        if before is not None:
            same = torch.equal(carry[:, :-1], before)
            assert same == bool(left[0] > 0)
            kept += same
        before = carry[:, :-1].clone()
    assert 60 < kept < 160


def test_actions_are_made_of_the_held_noise() -> None:
    learner, obs = make(noise_repeat=16), torch.randn(2, 3)
    carry = torch.tensor([[0.5, -1.0, 3.0], [1.5, 0.2, 3.0]])
    out = learner.act(obs, carry)
    torch.testing.assert_close(out.actions, learner.model.actor.draw(obs, carry[:, :2]))
    assert out.carry[:, -1].tolist() == [2.0, 2.0]
    assert learner.act(obs).carry is None  # whoever has no memory, as an evaluation, draws every time
    assert make(noise_repeat=1).exploring_carry(2) is None


@pytest.mark.parametrize("vectorization", ["sync", "device"])
def test_environments_are_explored_with_held_noise(vectorization: str, tmp_path: Path) -> None:
    """A deviation of 1 and a mean of 0: actions show the noise."""
    kwargs = {"learning_starts": 0, "batch_size": 8, "train_frequency": 4, "noise_repeat": 16}
    config = tiny("flash_sac", tmp_path, threads=1, num_envs=4, vectorization=vectorization, kwargs=kwargs)
    session = open_session(config)
    actor: Any = session.algorithm.model.actor  # type: ignore[union-attr]
    actor.gaussian = lambda obs, **mode: (torch.zeros(len(obs), 1), torch.zeros(len(obs), 1))
    taken = []
    for turn in range(60):
        experience = session.collect(session.store.request(turn * 4))
        taken.append(torch.as_tensor(experience.actions[: experience.steps]).reshape(-1, 4).clone())
    session.close()
    rows = torch.cat(taken)
    held = (rows[1:] == rows[:-1]).all(1).float().mean()
    assert float(held) == pytest.approx(1 - 1 / 2.133832, abs=0.25)
    assert all(len(row.unique()) == 4 for row in rows)


# ---- the name -----------------------------------------------------------------------------------------------------


def test_flash_sac_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(16,), critic_hidden_sizes=(32,), **BODY)
    assert_solves_bandit(SAC(model=model, learning_rate=1e-2, alpha=0.01, **FLASH), 500, tolerance=0.15)


def test_the_name_has_its_published_settings() -> None:
    spec = get_algorithm_spec("flash_sac")
    params: Any = spec.params()
    published = {
        "learning_rate": 3e-4, "optimizer": "adam", "hidden_sizes": (128, 128), "critic_hidden_sizes": (256, 256),
        "num_critics": 2, "num_atoms": 101, "return_bound": 5.0, "actor_first": True, "actor_update_interval": 2,
        "initial_alpha": 0.01, "batch_size": 512, "learning_starts": 10_000, "tau": 0.01, "gamma": 0.99,
        "noise_repeat": 16, "joint_forward": "both", "architecture": "unit_batch_norm", "buffer_capacity": 1_000_000,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in published} == published
    schedule = params.built_in_schedules()["learning_rate"]
    assert [schedule.value(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([3e-4, 2.25e-4, 1.5e-4])
    each = params.target_entropy_per_dimension
    assert (each, 6 * each, 17 * each) == pytest.approx((-0.478181, -2.869089, -8.129085), abs=2e-6)
    assert each == pytest.approx(math.log(0.15 * math.sqrt(2 * math.pi * math.e)))
