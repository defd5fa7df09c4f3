"""SimBa: residual networks, statistics of observations that move with every step, and the order of an update."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner
from registry_contract import TrainerSmoke
from resume_cases import take_steps, tiny
from rl_training.algorithms.sac import SAC
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.errors import UserError
from rl_training.models.blocks import ObservationInput, ObservationNorm
from rl_training.models.bodies import BatchedLayerNorm, ResidualBody, Shape
from rl_training.models.mlp_sac import MLPSACModel, SquashedGaussianActor
from rl_training.run.build import open_session

RESIDUAL: dict[str, Any] = {"architecture": "residual"}
SHAPE: dict[str, Any] = {"inputs": 3, "hidden_sizes": (4, 4), "outputs": 5}


class TestSimBa(TrainerSmoke):
    algo = "simba"


def make(**options: Any) -> Any:
    return make_learner(SAC, partial(MLPSACModel, **RESIDUAL), **{"actor_first": True, **options})


# ---- the network --------------------------------------------------------------------------------------------------


def test_layer_normalization_on_numbers_made_by_hand() -> None:
    found = BatchedLayerNorm(1, 4).double()(torch.tensor([[[1.0, 2, 3, 4]]], dtype=torch.float64))
    assert found.flatten().tolist() == pytest.approx([-1.341635, -0.447212, 0.447212, 1.341635], abs=1e-6)


def test_a_block_adds_to_what_it_does_not_normalize_and_is_four_times_as_wide_inside() -> None:
    torch.manual_seed(0)
    body, x = ResidualBody(2, Shape(**SHAPE)), torch.randn(6, 3)
    first = body.blocks[0]
    assert first.widen.weight.shape == (2, 4, 16)
    with torch.no_grad():
        for p in body.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases and scales too
    for member, out in enumerate(body(x)):

        def linear(layer: Any, x: Tensor, m: int = member) -> Tensor:
            return x @ layer.weight[m] + layer.bias[m]

        def norm(layer: Any, x: Tensor, m: int = member) -> Tensor:
            return F.layer_norm(x, (4,)) * layer.scale[m] + layer.shift[m]

        h = linear(body.embed, x)
        for block in body.blocks:
            h = h + linear(block.narrow, linear(block.widen, norm(block.norm, h)).relu())
        torch.testing.assert_close(out, linear(body.head, norm(body.norm, h)))


def test_initial_weights_are_orthogonal_outside_of_blocks_and_he_normal_inside() -> None:
    torch.manual_seed(0)
    body = ResidualBody(2, Shape(inputs=64, hidden_sizes=(64,), outputs=8))
    eye = torch.eye(64).expand(2, 64, 64)
    torch.testing.assert_close(body.embed.weight @ body.embed.weight.mT, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(body.head.weight.mT @ body.head.weight, eye[:, :8, :8], rtol=0, atol=1e-5)
    inside = body.blocks[0]
    assert float(inside.widen.weight.detach().std()) == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    assert float(inside.narrow.weight.detach().std()) == pytest.approx((2 / 256) ** 0.5, rel=0.05)


def test_log_deviations_are_bounded_by_tanh() -> None:
    actor = SquashedGaussianActor(obs_dim=3, action_dim=2, hidden_sizes=(8,), activation="relu", **RESIDUAL)
    with torch.no_grad():
        actor.network.head.weight.zero_()
        for raw, expected in ((0.0, -4.0), (50.0, 2.0), (-50.0, -10.0), (0.5, -4.0 + 6 * np.tanh(0.5))):
            actor.network.head.bias.fill_(raw)
            assert actor.gaussian(torch.randn(1, 3))[1].flatten().tolist() == pytest.approx(2 * [expected], rel=1e-5)
        assert float(torch.tensor(-4.0).exp()) == pytest.approx(0.018, abs=5e-4)  # the initial deviation


@pytest.mark.parametrize("given", [{"hidden_sizes": [8, 9]}, {"critic_hidden_sizes": [8, 9, 8]}])
def test_blocks_of_several_widths_are_refused_in_a_sentence(given: dict[str, Any]) -> None:
    (name, sizes), = given.items()  # fmt: skip
    expected = f"{name} is {sizes}; with architecture residual it must be one width, given once for each block"
    with pytest.raises(UserError) as refused:
        read_params(get_algorithm_spec("simba").params, given)
    assert expected in str(refused.value)
    assert read_params(get_algorithm_spec("sac").params, given)
    with pytest.raises(UserError, match="residual blocks need one width"):
        ResidualBody(1, Shape(3, sizes))


# ---- the statistics of observations -------------------------------------------------------------------------------


def test_statistics_on_numbers_made_by_hand() -> None:
    norm = ObservationNorm(1)
    for value in (1.0, 2.0, 4.0):
        norm.update_where(torch.tensor([[value]]), torch.tensor([True]))
    assert (norm.mean.item(), norm.var.item()) == pytest.approx((2.333256, 1.555719), abs=2e-6)
    assert norm(torch.tensor([[3.0]])).item() == pytest.approx(0.534557, abs=1e-6)


def test_rows_that_do_not_count_change_nothing() -> None:
    draws = torch.Generator().manual_seed(0)
    some, all_at_once = ObservationNorm(2), ObservationNorm(2)
    rows = 3.0 + 2.0 * torch.randn(5, 4, 2, generator=draws)
    valid = torch.rand(5, 4, generator=draws) < 0.5
    valid[2] = False
    for row, mask in zip(rows, valid, strict=True):
        some.update_where(row, mask)
    all_at_once.update_where(rows.flatten(0, 1), valid.flatten())
    expected = rows[valid].double()
    for norm in (some, all_at_once):
        assert float(norm.count) == pytest.approx(1e-4 + len(expected))
        torch.testing.assert_close(norm.mean.double(), expected.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(norm.var.double(), expected.var(0, correction=0), rtol=1e-3, atol=1e-3)


class Halves:
    """Two ranks whose sums are those of both."""

    count = 2

    def __init__(self, other: Tensor) -> None:
        self.other = other

    def mean_(self, sums: Tensor) -> Tensor:
        return (sums + self.other) / 2


def test_several_learners_count_all_rows_even_if_their_numbers_differ() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
    one, both = ObservationNorm(1), ObservationNorm(1)
    both.ranks = Halves(torch.tensor([3.0, 15.0, 101.0], dtype=torch.float64))  # of the other three rows
    both.update_where(rows[:1], torch.tensor([True]))
    one.update_where(rows, torch.ones(4, dtype=torch.bool))
    for name in ("mean", "var", "count"):
        torch.testing.assert_close(getattr(both, name), getattr(one, name))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("statistics", ["steps", "batches"])
def test_every_step_counts_once_when_it_is_taken(statistics: str, num_envs: int, tmp_path: Path) -> None:
    """From the first, random one on, and before the update that it makes due; final observations do not count."""
    wrappers = {"wrappers": {"normalize_observation": True}, "max_episode_steps": 7}
    kwargs = {"observation_statistics": statistics, "learning_starts": 12}
    config = tiny("simba", tmp_path, threads=1, num_envs=num_envs, env_kwargs=wrappers, kwargs=kwargs)
    session = open_session(config)
    learner: Any = session.algorithm
    norm, step, seen = learner.model.actor.observation_input.norm, 0, []
    for _ in range(20):
        request = session.store.request(step)
        experience = session.collect(request)
        seen.append(experience.obs[: experience.steps].reshape(-1, 3).copy())
        step += session.store.add(experience, step)
        for _, batch in session.store.batches(learner, step):
            if statistics == "steps":
                assert float(norm.count) == pytest.approx(1e-4 + step)
            learner.update(batch)
    session.close()
    rows = np.concatenate(seen)
    assert len(rows) == step
    counted = statistics == "steps"
    assert (float(norm.count) == pytest.approx(1e-4 + step)) == counted
    assert np.allclose(norm.mean.numpy(), rows.mean(0), atol=1e-4) == counted
    assert np.allclose(norm.var.numpy(), rows.var(0), rtol=1e-3, atol=1e-3) == counted


def test_replay_keeps_raw_observations_and_batches_have_the_current_statistics(tmp_path: Path) -> None:
    wrappers = {"wrappers": {"normalize_observation": True}}
    session = open_session(tiny("simba", tmp_path, threads=1, env_kwargs=wrappers))
    learner: Any = session.algorithm
    step = 0
    while step < 40:
        step += take_steps(session, step)
        for _, batch in session.store.batches(learner, step):
            assert float(batch["obs"][:, :2].square().sum(1).mean()) == pytest.approx(1.0, abs=1e-4)  # cos and sin
            norm = learner.model.actor.observation_input.norm
            expected = (batch["obs"] - norm.mean) / (norm.var + 1e-8).sqrt()
            torch.testing.assert_close(learner.model.features(batch["obs"]), expected.clamp(-10, 10))
            learner.update(batch)
    session.close()


def test_images_and_raw_vectors_have_no_statistics_to_move() -> None:
    learner = make(observation_statistics="steps")
    assert not learner.observes
    assert "observe_step" not in learner.graphs
    ObservationInput().update(torch.ones(2, 3), torch.ones(2, dtype=torch.bool))


# ---- the update ---------------------------------------------------------------------------------------------------


def test_the_actor_learns_from_the_old_critics_and_the_critics_from_the_new_actor() -> None:
    learner, batch = make(initial_alpha=0.01, target_entropy_per_dimension=-0.5), make_batch()
    reference = copy.deepcopy(learner)
    reference.generator.set_state(learner.generator.get_state())
    noises = [reference.draw_noise(batch["obs"]) for _ in range(2)]
    reference.actor_step(batch["obs"], noises[0])
    reference.critic_step({**batch, "discounts": torch.full((8,), 0.9)}, noises[1])
    learner.update(batch)
    for one, other in zip(learner.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert float(learner.alpha) == pytest.approx(float(reference.alpha))
    assert float(learner.target_entropy) == -1.0


@pytest.mark.parametrize(("first", "expected"), [(True, [0, 3]), (False, [2, 5])])
def test_a_delayed_actor_learns_at_the_first_or_the_last_update_of_an_interval(
    first: bool, expected: list[int]
) -> None:
    learner, moved = make(actor_first=first, actor_update_interval=3), []
    for update in range(6):
        before = learner.actor_optimizer.flat.clone()
        learner.update(make_batch(seed=update))
        moved += [update] * (not torch.equal(before, learner.actor_optimizer.flat))
    assert moved == expected


def test_weights_of_networks_decay_and_the_temperature_does_not() -> None:
    learner = make(optimizer="adamw", weight_decay=0.5, learning_rate=0.1)
    still = [torch.zeros_like(p) for p in learner.critic_optimizer._params]
    before = learner.critic_optimizer.flat.clone()
    learner.critic_optimizer.apply_gradients(still)
    torch.testing.assert_close(learner.critic_optimizer.flat, 0.95 * before)  # scales and biases too
    learner.log_alpha.data.fill_(1.0)
    learner.alpha_optimizer.apply_gradients([torch.zeros(())])
    assert float(learner.log_alpha.detach()) == 1.0


def test_simba_solves_a_bandit() -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(16,), critic_hidden_sizes=(32,), **RESIDUAL)
    assert_solves_bandit(SAC(model=model, learning_rate=3e-3, alpha=0.01, optimizer="adamw", actor_first=True), 400)


def test_the_name_has_its_published_settings() -> None:
    spec = get_algorithm_spec("simba")
    params: Any = spec.params()
    published = {
        "learning_rate": 1e-4, "optimizer": "adamw", "weight_decay": 0.01, "hidden_sizes": (128,), "tau": 0.005,
        "critic_hidden_sizes": (512, 512), "num_critics": 2, "actor_first": True, "initial_alpha": 0.01,
        "target_entropy_per_dimension": -0.5, "batch_size": 256, "learning_starts": 5_000, "target_networks": True,
        "observation_statistics": "steps", "architecture": "residual", "gradient_updates_per_step": 1,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in published} == published
    assert spec.defaults["env_kwargs"] == {"wrappers": {"normalize_observation": "auto"}}
