"""The axes of SAC's critics, alone and together, and the names that are settings of them: TQC, REDQ and DroQ."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner, move_target, same, tensors
from registry_contract import TrainerSmoke
from resume_cases import take_steps, tiny
from rl_training.algorithms.sac import SAC
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.errors import UserError
from rl_training.models.blocks import MLPEnsemble
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.build import open_session

QUANTILES: dict[str, Any] = {"num_critics": 3, "num_quantiles": 5}
DROPOUT: dict[str, Any] = {"critic_dropout": 0.3, "critic_layer_norm": True}


class TestTQC(TrainerSmoke):
    algo = "tqc"


class TestREDQ(TrainerSmoke):
    algo = "redq"


class TestDroQ(TrainerSmoke):
    algo = "droq"


def make(of_model: dict[str, Any], **options: Any) -> Any:
    learner = make_learner(SAC, partial(MLPSACModel, **of_model), **options)
    move_target(learner)
    return learner


def next_outputs(learner: Any, batch: dict[str, Tensor], noise: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    actions, logprobs = learner.model.actor.sample(batch["next_obs"], noise)
    return learner.target_critics(batch["next_obs"], actions, *given), logprobs


# ---- quantiles (TQC) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dropped", "kept"), [(0, 15), (2, 9), (4, 3)])
def test_the_target_is_made_of_the_smallest_quantiles_of_all_target_critics(dropped: int, kept: int) -> None:
    learner, batch, noise = make(QUANTILES, alpha=0.3, top_quantiles_to_drop=dropped), make_batch(), torch.randn(8, 2)
    outputs, logprobs = next_outputs(learner, batch, noise)
    rows = torch.cat([*outputs], -1).sort(-1).values
    expected = batch["rewards"].unsqueeze(1) + 0.9 * (rows[:, :kept] - 0.3 * logprobs.unsqueeze(1))
    metrics, _ = learner.critic_step(batch, noise)
    assert float(metrics["target_q_mean"]) == pytest.approx(expected.mean().item(), rel=1e-5)
    alone = outputs.sort(-1).values[..., : 5 - dropped].transpose(0, 1).flatten(1)  # truncated critic by critic
    assert dropped == 0 or float(alone.mean()) > float(rows[:, :kept].mean()) + 1e-3


def test_the_actor_climbs_the_mean_of_all_quantiles() -> None:
    learner, batch, noise = make(QUANTILES, alpha=0.2), make_batch(), torch.randn(8, 2)
    actions, logprobs = learner.model.actor.sample(batch["obs"], noise)
    expected = (0.2 * logprobs).mean() - learner.model.q_values(batch["obs"], actions).mean()
    assert learner.actor_step(batch["obs"], noise)["actor_loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_termination_stops_the_targets_of_quantiles() -> None:
    batch, noise = make_batch(), torch.randn(8, 2)
    for column, bootstraps in (("terminated", False), ("truncated", True)):
        learner = make(QUANTILES)
        flags = {"terminated": torch.zeros(8), "truncated": torch.zeros(8), "dones": torch.ones(8)}
        ended = flags | {column: torch.ones(8)}
        found = float(learner.critic_step({**batch, **ended}, noise)[0]["target_q_mean"])
        assert (found != pytest.approx(float(batch["rewards"].mean()), abs=1e-6)) == bootstraps


# ---- subsets (REDQ) -----------------------------------------------------------------------------------------------


def test_one_subset_serves_the_whole_batch_and_the_next_update_draws_another() -> None:
    learner = make({"num_critics": 5}, critic_subset_size=2)
    drawn: list[Tensor] = []
    step = learner.critic_step
    learner.critic_step = lambda batch, noise, subset, masks: drawn.append(subset) or step(batch, noise, subset, masks)
    for seed in range(40):
        learner.update(make_batch(seed=seed))
    assert {subset.shape for subset in drawn} == {(2,)}  # not [B, 2]
    assert len({tuple(sorted(subset.tolist())) for subset in drawn}) == 10  # every pair of five critics


def test_every_update_of_a_turn_moves_the_targets_and_the_last_one_the_actor(tmp_path: Path) -> None:
    few = {"gradient_updates_per_step": 5, "num_critics": 4, "train_frequency": 1, "target_entropy": -3.0}
    session = open_session(tiny("redq", tmp_path, threads=1, kwargs=few))
    learner: Any = session.algorithm
    step, moved = 0, []
    while len(moved) < 15:
        step += take_steps(session, step)
        for _, batch in session.store.batches(learner, step):
            actor, targets, alpha = tensors(learner.model.actor), tensors(learner.target_critics), float(learner.alpha)
            learner.update(batch)
            assert not all(same(targets, learner.target_critics))
            moved.append(not all(same(actor, learner.model.actor)))
            assert (float(learner.alpha) != alpha) == moved[-1]
    session.close()
    assert moved[:15] == 3 * [False, False, False, False, True]


# ---- dropout (DroQ) -----------------------------------------------------------------------------------------------


def test_dropout_comes_before_layer_norm_and_relu() -> None:
    """On numbers made by hand: h = [1, -2, 3, 0.5], dropout 0.25, the third unit dropped."""
    network = MLPEnsemble(num_members=1, inputs=4, hidden_sizes=(4,), outputs=4, layer_norm=True, dropout=0.25)
    with torch.no_grad():
        network.weight0.copy_(torch.eye(4))
        network.weight1.copy_(torch.eye(4))
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]).view(1, 1, 4) / 0.75
    found = network.run(torch.tensor([[1.0, -2.0, 3.0, 0.5]]), None, (mask,)).flatten().tolist()
    assert found == pytest.approx([0.987876, 0.0, 0.109764, 0.548820], abs=1e-5)


def test_masks_drop_their_share_of_every_layer_and_keep_the_mean() -> None:
    network = MLPEnsemble(num_members=2, inputs=3, hidden_sizes=(40, 30), dropout=0.25)
    first, second = network.draw_masks(3, 500, torch.Generator().manual_seed(0))  # type: ignore[misc]
    assert (first.shape, second.shape) == ((3, 500, 40), (3, 500, 30))
    for mask in (first, second):
        assert mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert (mask == 0).float().mean((1, 2)).tolist() == pytest.approx(3 * [0.25], abs=0.02)
    assert not torch.equal(first[0], first[1])
    assert MLPEnsemble(num_members=2, inputs=3).draw_masks(2, 5, torch.Generator()) is None


@pytest.mark.parametrize("trains", [True, False])
def test_dropout_is_active_in_critics_targets_and_the_actors_loss_with_masks_of_its_own_each(trains: bool) -> None:
    learner = make(DROPOUT, actor_q="mean")
    calls: list[tuple[bool, Any]] = []
    for critics in (learner.model.critics, learner.target_critics):
        forward, is_target = critics.forward, critics is learner.target_critics

        def record(*inputs: Any, forward: Any = forward, is_target: bool = is_target) -> Tensor:
            calls.append((is_target, inputs[3]))
            return forward(*inputs)

        critics.forward = record
    for _ in range(2):
        learner.train(trains)
        learner.learn(make_batch())
    assert [is_target for is_target, _ in calls] == 2 * [True, False, False]
    drawn = [member for _, masks in calls for member in masks[0]]  # of both members, in the first layer
    assert len({tuple(mask.flatten().tolist()) for mask in drawn}) == 2 * 3 * 2


def test_masks_reach_the_target_the_critics_and_the_actor() -> None:
    """A mask of zeros leaves only the last layer's bias, which LayerNorm's shift and weights do not change here."""
    batch, noise = make_batch(), torch.randn(8, 2)
    nothing = tuple(torch.zeros(2, 8, 16) for _ in range(2))
    learner = make({"critic_dropout": 0.3}, alpha=0.0)
    with torch.no_grad():
        for critics in (learner.model.critics, learner.target_critics):
            critics.bias1.zero_()
            critics.bias2.copy_(torch.tensor([3.0, 5.0]).view(2, 1, 1))
    in_target = copy.deepcopy(learner).critic_step(batch, noise, None, (None, nothing))[0]
    assert float(in_target["target_q_mean"]) == pytest.approx(float((batch["rewards"] + 0.9 * 3.0).mean()), rel=1e-5)
    ended = {**batch, "dones": torch.ones(8)}
    of_critics = copy.deepcopy(learner).critic_step(ended, noise, None, (nothing, None))[0]
    errors = [(value - batch["rewards"]).square().mean() for value in (3.0, 5.0)]
    assert float(of_critics["critic_loss"]) == pytest.approx(sum(errors).item() / 2, rel=1e-5)
    assert float(learner.actor_step(batch["obs"], noise, nothing)["actor_loss"]) == pytest.approx(-3.0)


# ---- together -----------------------------------------------------------------------------------------------------


def test_quantiles_of_a_subset_with_dropout_are_pooled_from_the_masked_subset() -> None:
    learner = make({**QUANTILES, **DROPOUT}, critic_subset_size=2, top_quantiles_to_drop=3, alpha=0.3)
    batch, noise, subset = make_batch(), torch.randn(8, 2), torch.tensor([2, 0])
    masks = learner.draw_masks(batch["obs"], 2)
    whole = [torch.ones(3, *mask.shape[1:]).index_copy(0, subset, mask) for mask in masks]
    outputs, logprobs = next_outputs(learner, batch, noise, None, whole)
    kept = torch.cat([outputs[2], outputs[0]], -1).sort(-1).values[:, : 2 * 2]
    expected = batch["rewards"].unsqueeze(1) + 0.9 * (kept - 0.3 * logprobs.unsqueeze(1))
    metrics, _ = learner.critic_step(batch, noise, subset, (None, masks))
    assert float(metrics["target_q_mean"]) == pytest.approx(expected.mean().item(), rel=1e-5)
    result = learner.update(batch)
    assert result.priorities.shape == (8,)
    assert all(torch.isfinite(torch.tensor(value)) for value in result.metrics.values())


@pytest.mark.parametrize(
    ("of_model", "settings", "found"),
    [
        ({}, {}, "min"), ({"num_critics": 5}, {}, "min"), ({"num_critics": 5}, {"critic_subset_size": 2}, "mean"),
        ({"num_critics": 5}, {"critic_subset_size": 5}, "min"), (QUANTILES, {}, "mean"),
        ({}, {"actor_q": "mean"}, "mean"), (QUANTILES, {"actor_q": "min"}, "min"),
    ],
)  # fmt: skip
def test_the_actor_climbs_the_minimum_where_the_target_is_the_minimum_of_all(
    of_model: dict[str, Any], settings: dict[str, Any], found: str
) -> None:
    learner, batch, noise = make(of_model, alpha=0.0, **settings), make_batch(), torch.randn(8, 2)
    actions = learner.model.actor.sample(batch["obs"], noise).actions
    values = learner.model.q_values(batch["obs"], actions)
    values = values.mean(-1) if values.dim() == 3 else values
    expected = values.amin(0) if found == "min" else values.mean(0)
    loss = learner.actor_step(batch["obs"], noise)["actor_loss"]
    assert float(loss) == pytest.approx(float(-expected.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("of_model", "settings", "message"),
    [
        ({}, {"critic_subset_size": 3}, "critic_subset_size is 3; from 1 to 2 are possible."),
        (QUANTILES, {"top_quantiles_to_drop": 5}, "top_quantiles_to_drop is 5; it must be below num_quantiles (5)."),
        ({}, {"actor_q": "max"}, "actor_q is 'max'; it must be 'min' or 'mean'."),
    ],
)
def test_a_learner_refuses_settings_that_do_not_fit_its_critics(
    of_model: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        make(of_model, **settings)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_quantiles": 2}, "top_quantiles_to_drop is 2; it must be below num_quantiles (2)"),
        ({"critic_subset_size": 3}, "critic_subset_size is 3; it must be at most num_critics (2)"),
        ({"critic_dropout": 1.0}, "critic_dropout"), ({"num_quantiles": 1}, "num_quantiles"),
    ],
)  # fmt: skip
def test_hyper_parameters_that_do_not_fit_are_refused_in_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_params(get_algorithm_spec("sac").params, given)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("of_model", "settings"),
    [
        ({"num_critics": 2, "num_quantiles": 8}, {}),
        ({"num_critics": 4, "critic_dropout": 0.05, "critic_layer_norm": True},
         {"critic_subset_size": 2, "actor_update_interval": 2}),
    ],
    ids=["quantiles", "subset and dropout"],
)  # fmt: skip
def test_critics_with_axes_solve_a_bandit(of_model: dict[str, Any], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32), **of_model)
    assert_solves_bandit(SAC(model=model, learning_rate=3e-3, alpha=0.01, **settings), 400)


def test_critics_may_have_widths_of_their_own() -> None:
    model = MLPSACModel(obs_dim=3, action_dim=2, hidden_sizes=(7,), critic_hidden_sizes=(9, 5))
    assert [tuple(p.shape[1:]) for p in model.critics.parameters() if p.shape[1] > 1] == [(5, 9), (9, 5), (5, 1)]
    assert model.actor.network[0].weight.shape == (7, 3)


NAMES: list[tuple[str, dict[str, Any]]] = [
    ("tqc", {"num_critics": 5, "num_quantiles": 25, "top_quantiles_to_drop": 2, "critic_hidden_sizes": (512, 512, 512),
             "hidden_sizes": (256, 256), "gradient_updates_per_step": 1, "critic_dropout": 0.0}),
    ("redq", {"num_critics": 10, "critic_subset_size": 2, "gradient_updates_per_step": 20, "actor_q": "mean",
              "learning_starts": 5_000, "num_quantiles": None, "critic_layer_norm": False}),
    ("droq", {"num_critics": 2, "critic_subset_size": None, "gradient_updates_per_step": 20, "actor_q": "mean",
              "critic_dropout": 0.01, "critic_layer_norm": True, "learning_starts": 5_000}),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "settings"), NAMES)
def test_a_name_has_its_published_settings(algo: str, settings: dict[str, Any]) -> None:
    params = get_algorithm_spec(algo).params()
    assert {name: getattr(params, name) for name in settings} == settings
    plain = {"learning_rate": 3e-4, "batch_size": 256, "tau": 0.005, "gamma": 0.99, "alpha": "auto"}
    assert {name: getattr(params, name) for name in plain} == plain
    assert params.arguments_of(SAC)["actor_update_interval"] == params.gradient_updates_per_step  # type: ignore[attr-defined]


def overestimate(dropped: int) -> float:
    """How far the critics' mean is above the policy's true value, where few noisy rewards are known of each action."""
    torch.manual_seed(1)
    actions, obs = torch.rand(32, 1) * 2 - 1, torch.zeros(32, 3)
    noisy = 0.3 * torch.sin(10 * actions).squeeze(-1) + 0.5 * torch.randn(32)
    model = MLPSACModel(obs_dim=3, action_dim=1, hidden_sizes=(32, 32), num_critics=2, num_quantiles=10)
    settings: dict[str, Any] = {"learning_rate": 3e-3, "gamma": 0.9, "tau": 0.05, "alpha": 0.01}
    learner = SAC(model=model, top_quantiles_to_drop=dropped, **settings)
    learner.seed(1)
    for _ in range(250):
        learner.update({"obs": obs, "next_obs": obs, "actions": actions, "rewards": noisy, "dones": torch.zeros(32)})
    with torch.no_grad():
        states = torch.zeros(500, 3)
        chosen = model.actor.sample(states, torch.randn(500, 1)).actions
        true = 0.3 * torch.sin(10 * chosen).mean() / (1 - 0.9)
        return float(model.q_values(states, chosen).mean() - true)


def test_dropping_quantiles_lowers_the_values_that_noise_has_raised() -> None:
    with_all, without_largest = overestimate(0), overestimate(5)
    assert with_all > 1.0
    assert without_largest < with_all - 0.5
