"""SimbaV2: unit vectors and weights, projections after steps, a categorical critic, and scaled rewards."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_cases import assert_solves_bandit, make_batch, make_learner, move_target
from registry_contract import TrainerSmoke
from resume_cases import take_steps, tiny
from rl_training.algorithms.critic_heads import CategoricalHead
from rl_training.algorithms.reward_scale import ReturnScale
from rl_training.algorithms.sac import SAC
from rl_training.config.params import read_params
from rl_training.config.spec import get_algorithm_spec
from rl_training.errors import UserError
from rl_training.models.bodies import Shape
from rl_training.models.hypersphere import Scaler, SphericalBlock, SphericalBody, UnitLinear, unit
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.ops.distributional import categorical_cross_entropy
from rl_training.run.build import open_session

SPHERE: dict[str, Any] = {"architecture": "hypersphere"}
ATOMS: dict[str, Any] = {"num_atoms": 21, "v_min": -5.0, "v_max": 5.0}


class TestSimbaV2(TrainerSmoke):
    algo = "simbav2"


def make(**options: Any) -> Any:
    return make_learner(SAC, partial(MLPSACModel, **SPHERE, num_atoms=21), **{**ATOMS, "actor_first": True, **options})


def norms(module: torch.nn.Module) -> list[Tensor]:
    return [part.weight.detach().norm(dim=1) for part in module.modules() if isinstance(part, UnitLinear)]


def assert_unit(module: torch.nn.Module) -> None:
    assert norms(module)
    for found in norms(module):
        torch.testing.assert_close(found, torch.ones_like(found), rtol=0, atol=1e-6)


# ---- the network --------------------------------------------------------------------------------------------------


def test_the_input_is_a_unit_vector_that_keeps_the_size_of_an_observation() -> None:
    body = SphericalBody(1, Shape(inputs=2, hidden_sizes=(4,)))
    seen: list[Tensor] = []
    body.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    body(torch.tensor([[1.0, -2.0]]))
    assert seen[0].flatten().tolist() == pytest.approx([0.267261, -0.534522, 0.801784], abs=1e-6)


def test_a_block_moves_on_the_sphere() -> None:
    block = SphericalBlock(1, 2, 2, "relu").double()
    block.narrow = torch.nn.Identity()  # type: ignore[assignment]
    block.widen.forward = lambda h: torch.tensor([[[1.0, 0]]], dtype=torch.float64)  # type: ignore[method-assign]
    block.inner = torch.nn.Identity()  # type: ignore[assignment]
    found = block(torch.tensor([[[0.6, 0.8]]], dtype=torch.float64)).flatten().tolist()
    assert found == pytest.approx([0.808736, 0.588172], abs=1e-6)  # with a = 1 / (2 + 1)


def test_scalers_start_at_their_initial_value_and_learn_as_if_at_their_scale() -> None:
    scaler = Scaler(1, 3, initial=1 / 3, scale=0.5)
    assert scaler(torch.ones(1, 1, 3)).flatten().tolist() == pytest.approx(3 * [1 / 3])
    assert scaler.scale.flatten().tolist() == 3 * [0.5]
    body = SphericalBody(2, Shape(inputs=3, hidden_sizes=(8, 8), outputs=5))
    assert body.scaler.scale.unique().tolist() == pytest.approx([math.sqrt(2 / 8)])
    assert body.scaler.ratio == 1.0
    block = body.blocks[0]
    assert block.inner.scale.shape == (2, 1, 32)
    assert block.inner.scale.unique().tolist() == pytest.approx([math.sqrt(2 / 8) / 2])
    assert block.share.scale.unique().tolist() == pytest.approx([1 / math.sqrt(8)])
    assert block.share.ratio == pytest.approx(math.sqrt(8) / 3)


def test_outputs_are_those_of_the_equations() -> None:
    torch.manual_seed(0)
    body, x = SphericalBody(2, Shape(inputs=3, hidden_sizes=(4, 4), outputs=6, groups=2)), torch.randn(5, 3)
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if "scale" in name or "bias" in name:
                parameter.add_(0.1 * torch.rand_like(parameter))
    for m, out in enumerate(body(x)):

        def scale(scaler: Scaler, m: int = m) -> Tensor:
            return scaler.scale[m] * scaler.ratio

        h = unit(torch.cat([x, torch.full((5, 1), 3.0)], -1)) @ body.embed.weight[m]
        h = unit(h * scale(body.scaler))
        for block in body.blocks:
            y = unit((h @ block.widen.weight[m] * scale(block.inner)).relu() @ block.narrow.weight[m])
            h = unit(h + scale(block.share) * (y - h))
        head = body.head
        parts = [(h @ a.weight[m] * scale(s)) @ b.weight[m] for a, s, b in zip(head.first, head.scalers, head.last)]  # noqa: B905
        torch.testing.assert_close(out, torch.cat(parts, -1) + head.bias[m], rtol=1e-4, atol=1e-5)


# ---- projection ---------------------------------------------------------------------------------------------------


def test_weights_are_projected_over_the_inputs_of_each_output() -> None:
    layer = UnitLinear(2, 5, 3)
    assert_unit(layer)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(2, 5, 3) + 0.5)
    direction = unit(layer.weight.detach().clone(), 1)
    layer.project_()
    torch.testing.assert_close(layer.weight.detach(), direction)
    assert_unit(layer)


def trained(learner: Any, updates: int = 3) -> Any:
    for seed in range(updates):
        learner.update(make_batch(seed=seed))
    return learner


@pytest.mark.parametrize("how", ["trained", "copied", "pickled", "loaded"])
def test_weights_have_norm_one_after_every_step(how: str) -> None:
    learner = trained(make(learning_rate=0.05))
    if how == "copied":
        learner = trained(copy.deepcopy(learner))
    elif how == "pickled":
        learner = trained(pickle.loads(pickle.dumps(learner)))
    elif how == "loaded":
        state, learner = learner.state_dict(), make(learning_rate=0.05)
        learner.load_state_dict(state)
        for name, value in learner.state_dict().items():  # exactly what was saved
            assert not isinstance(value, Tensor) or torch.equal(value, state[name]), name
        trained(learner)
    assert_unit(learner.model.actor)
    assert_unit(learner.model.critics)
    assert learner.critic_optimizer.flat.data_ptr() == learner.critic_optimizer._params[0].data_ptr()


def test_steps_are_projected_and_nothing_else_is() -> None:
    learner, batch = make(learning_rate=0.05), make_batch()
    reference = copy.deepcopy(learner)
    reference.critic_optimizer._projected = ()
    for one in (learner, reference):
        one.critic_step(batch, torch.zeros(8, 2))
    pairs = zip(learner.model.critics.named_parameters(), reference.model.critics.parameters(), strict=True)
    for (name, mine), plain in pairs:
        expected = unit(plain.detach(), 1) if name.endswith("weight") else plain.detach()
        torch.testing.assert_close(mine.detach(), expected)
    assert max(float((found - 1).abs().max()) for found in norms(reference.model.critics)) > 0.01


def test_the_target_is_a_plain_average_of_weights() -> None:
    learner = make(learning_rate=0.5, tau=0.5)
    before = [p.clone() for p in learner.target_critics.parameters()]
    learner.update(make_batch())
    for old, target, live in zip(
        before, learner.target_critics.parameters(), learner.model.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.5 * old + 0.5 * live.detach())
    assert max(float((found - 1).abs().max()) for found in norms(learner.target_critics)) > 1e-4


# ---- the categorical critic ---------------------------------------------------------------------------------------


def test_projection_and_loss_on_numbers_made_by_hand() -> None:
    head = CategoricalHead(torch.linspace(-1, 1, 5, dtype=torch.float64))
    probs = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1], dtype=torch.float64)
    targets = head.targets(probs.log().view(1, 1, 5), lambda z: 0.3 + 0.9 * (z + 0.1))
    assert targets.flatten().tolist() == pytest.approx([0.002, 0.122, 0.264, 0.376, 0.236], abs=1e-9)
    logits = torch.tensor([[[0.0, 1, 2, 1, 0]]], dtype=torch.float64)
    losses, priorities = head.losses(logits, targets, None)
    assert float(losses["critic_loss"]) == pytest.approx(1.670357, abs=1e-6)
    assert float(losses["target_q_mean"]) == pytest.approx(0.361)
    assert priorities.tolist() == pytest.approx([1.670357], abs=1e-6)


def test_each_row_takes_the_distribution_of_the_critic_with_the_smaller_mean() -> None:
    support = torch.tensor([-1.0, 0.0, 1.0])
    first, second = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]), torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0]])
    targets = CategoricalHead(support).targets(torch.stack([first, second]), lambda z: z)
    torch.testing.assert_close(targets, torch.stack([second[0].softmax(-1), first[1].softmax(-1)]))


def next_distribution(learner: Any, batch: dict[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    actions, logprobs = learner.model.actor.sample(batch["next_obs"], noise)
    outputs = learner.target_critics(learner.model.features(batch["next_obs"]), actions)
    return outputs.softmax(-1), learner.head.support, logprobs


def test_targets_are_the_soft_backup_of_the_smaller_target_critic() -> None:
    learner, batch, noise = make(alpha=0.3), make_batch(), torch.randn(8, 2)
    move_target(learner)
    probs, support, logprobs = next_distribution(learner, batch, noise)
    means = (probs * support).sum(-1)
    atoms = batch["rewards"].unsqueeze(1) + 0.9 * (support - 0.3 * logprobs.unsqueeze(1))
    chosen = torch.where((means[0] < means[1]).unsqueeze(1), probs[0], probs[1])
    expected = (chosen * atoms.clamp(-5, 5)).sum(-1).mean()  # a projection keeps the mean
    metrics, _ = learner.critic_step(batch, noise)
    assert float(metrics["target_q_mean"]) == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)


def test_the_actor_climbs_the_smaller_mean() -> None:
    learner, batch, noise = make(alpha=0.0), make_batch(), torch.randn(8, 2)
    actions = learner.model.actor.sample(batch["obs"], noise).actions
    outputs = learner.model.critics(learner.model.features(batch["obs"]), actions)
    expected = -(outputs.softmax(-1) * learner.head.support).sum(-1).amin(0).mean()
    assert float(learner.actor_step(batch["obs"], noise)["actor_loss"].detach()) == pytest.approx(float(expected))


def test_only_termination_stops_bootstrapping() -> None:
    batch, noise = make_batch(), torch.randn(8, 2)
    batch["rewards"].clamp_(-4, 4)
    for column, bootstraps in (("terminated", False), ("truncated", True)):
        learner = make()
        flags = {"terminated": torch.zeros(8), "truncated": torch.zeros(8), "dones": torch.ones(8)}
        found = float(learner.critic_step({**batch, **flags, column: torch.ones(8)}, noise)[0]["target_q_mean"])
        assert (found != pytest.approx(float(batch["rewards"].mean()), abs=1e-4)) == bootstraps


@pytest.mark.parametrize("of_model", [{}, {"num_critics": 4}], ids=["mlp", "subset with dropout"])
def test_a_categorical_critic_goes_with_plain_layers_too(of_model: dict[str, Any]) -> None:
    of_model |= {"critic_layer_norm": True, "critic_dropout": 0.1} if of_model else {}
    settings = ATOMS | ({"critic_subset_size": 2} if of_model else {})
    learner: Any = make_learner(SAC, partial(MLPSACModel, **of_model, num_atoms=21), **settings)
    assert learner.actor_q == ("mean" if of_model else "min")
    before = float(learner.update(make_batch()).metrics["critic_loss"])
    for _ in range(60):
        result = learner.update(make_batch())
    assert result.metrics["critic_loss"] < before
    assert result.priorities.shape == (8,)


def test_cross_entropy_is_its_mean_over_critics_and_rows() -> None:
    head, logits = CategoricalHead(torch.linspace(-1, 1, 5)), torch.randn(2, 3, 5)
    targets, weights = torch.randn(3, 5).softmax(-1), torch.tensor([0.0, 1.0, 3.0])
    each = torch.stack([categorical_cross_entropy(one, targets) for one in logits])
    losses, priorities = head.losses(logits, targets, weights)
    torch.testing.assert_close(losses["critic_loss"], (each * weights).mean())
    torch.testing.assert_close(priorities, each.mean(0))


# ---- the scale of rewards -----------------------------------------------------------------------------------------


def add(scale: ReturnScale, rewards: list[float], ends: list[bool], valid: list[bool] | None = None) -> None:
    count = len(rewards)
    counts = torch.tensor(valid or count * [True])
    returns = scale.returns_of(count, None)
    scale.keep(scale.add(returns, torch.tensor(rewards), torch.tensor(ends), counts, 0.99), None)


def test_returns_and_divisors_on_numbers_made_by_hand() -> None:
    scale, found, returns = ReturnScale(5.0), [], []
    for reward, end in ((1.0, False), (2.0, False), (0.5, True), (4.0, False)):
        add(scale, [reward], [end])
        assert scale.running is not None
        returns.append(scale.running.item())
        found.append(scale.divisor().item())
    assert returns == pytest.approx([1.0, 2.99, 0.5, 4.495])
    assert found == pytest.approx([0.2, 0.995100, 1.075527, 1.597883], abs=1e-6)


def test_a_reset_row_is_no_step() -> None:
    scale, alone = ReturnScale(5.0), ReturnScale(5.0)
    for rewards, valid in (([1.0, 2.0], [True, True]), ([9.0, 3.0], [False, True]), ([4.0, 9.0], [True, False])):
        add(scale, rewards, [False, False], valid)
    for reward in (1.0, 4.0):  # of the first environment
        add(alone, [reward], [False])
    assert scale.running is not None
    assert alone.running is not None
    assert scale.running[0] == alone.running[0]
    assert float(scale.statistics[0]) == pytest.approx(1e-4 + 4)


def test_workers_steps_reach_the_returns_of_their_environments() -> None:
    rows = [([0], [1.0]), ([2, 1], [3.0, 2.0]), ([0], [10.0])]
    scale = ReturnScale(5.0)
    for envs, rewards in rows:
        returns = scale.returns_of(len(envs), np.array(envs))
        valid, ends = torch.ones(len(envs), dtype=torch.bool), torch.zeros(len(envs), dtype=torch.bool)
        scale.keep(scale.add(returns, torch.tensor(rewards), ends, valid, 0.5), np.array(envs))
    assert scale.running is not None
    assert scale.running.tolist() == [10.5, 2.0, 3.0]


class Halves:
    """Two ranks, of which the other one has these sums and this largest return."""

    count = 2

    def __init__(self, sums: list[float], largest: float) -> None:
        self.sums, self.largest = torch.tensor(sums, dtype=torch.float64), torch.tensor(largest, dtype=torch.float64)

    def mean_(self, sums: Tensor) -> Tensor:
        return (sums + self.sums) / 2

    def largest_(self, largest: Tensor) -> Tensor:
        return torch.maximum(largest, self.largest)


def test_several_learners_have_the_statistics_of_all_returns() -> None:
    one, both = ReturnScale(5.0), ReturnScale(5.0)
    both.ranks = Halves([2.0, 11.0, 73.0], 8.0)  # of the returns 3 and 8
    add(both, [1.0, 2.0], [False, False])
    add(one, [1.0, 2.0, 3.0, 8.0], 4 * [False])
    torch.testing.assert_close(both.statistics, one.statistics)


def test_every_step_counts_once_and_batches_are_divided_by_the_current_scale(tmp_path: Path) -> None:
    config = tiny("simbav2", tmp_path, threads=1, num_envs=2, env_kwargs={"max_episode_steps": 9})
    session = open_session(config)
    learner: Any = session.algorithm
    given: list[float] = []
    learner.critic_step = lambda batch, *rest, step=learner.critic_step: (
        given.append(float(batch["rewards"].mean())) or step(batch, *rest)
    )
    step = 0
    rewards, ends = [], []
    while step < 60:
        experience = session.collect(session.store.request(step))
        rewards += list(experience.rewards[: experience.steps].copy())
        ends += list((experience.terminated | experience.truncated)[: experience.steps].copy())
        step += session.store.add(experience, step)
        for _, batch in session.store.batches(learner, step):
            expected = float((batch["rewards"] / learner.return_scale.divisor()).mean())
            learner.update(batch)
            assert given.pop() == pytest.approx(expected, rel=1e-5)
    session.close()
    total, seen = np.zeros(2), []
    for row, end in zip(rewards, ends, strict=True):
        total = 0.99 * total * ~end + row
        seen.append(total)
    _, mean, var, largest = learner.return_scale.statistics.tolist()
    assert mean == pytest.approx(np.mean(seen), rel=1e-3)
    assert var == pytest.approx(np.var(seen), rel=1e-3)
    assert largest == pytest.approx(np.abs(seen).max(), rel=1e-5)


# ---- the name -----------------------------------------------------------------------------------------------------


def test_simbav2_solves_a_bandit() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_sizes": (16,), "critic_hidden_sizes": (32,), "num_atoms": 41}
    model = MLPSACModel(obs_dim=3, action_dim=1, **shape, **SPHERE)
    settings: dict[str, Any] = {"alpha": 0.01, "actor_first": True, "num_atoms": 41, "v_min": -3.0, "v_max": 3.0}
    assert_solves_bandit(SAC(model=model, learning_rate=1e-2, **settings), 500)


def test_the_name_has_its_published_settings() -> None:
    spec = get_algorithm_spec("simbav2")
    params: Any = spec.params()
    published = {
        "learning_rate": 1e-4, "optimizer": "adam", "hidden_sizes": (128,), "critic_hidden_sizes": (512, 512),
        "num_critics": 2, "num_atoms": 101, "return_bound": 5.0, "actor_first": True, "initial_alpha": 0.01,
        "target_entropy_per_dimension": -0.5, "batch_size": 256, "learning_starts": 5_000, "tau": 0.005,
        "observation_statistics": "steps", "architecture": "hypersphere", "gradient_updates_per_step": 1,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in published} == published
    schedule = params.built_in_schedules()["learning_rate"]
    assert [schedule.value(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([1e-4, 7.5e-5, 5e-5])
    assert spec.defaults["env_kwargs"] == {"wrappers": {"normalize_observation": "auto"}}


@pytest.mark.parametrize(
    ("algo", "given", "message"),
    [
        ("sac", {"num_atoms": 11}, "num_atoms is 11; give v_min and v_max, or a return_bound, too"),
        ("sac", {"num_atoms": 11, "v_min": 1.0, "v_max": 1.0}, "v_max is 1.0; it must be above v_min (1.0)"),
        ("simbav2", {"v_min": 6.0}, "v_max is 5.0; it must be above v_min (6.0)"),
        ("simbav2", {"num_quantiles": 9}, "num_quantiles is 9; with num_atoms (101) it must be null"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_sentence(algo: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_params(get_algorithm_spec(algo).params, given)
    assert message in str(refused.value)


def test_a_learner_refuses_atoms_without_ends() -> None:
    with pytest.raises(UserError, match=r"v_min is None and v_max 5\.0; num_atoms needs two ends, or a return_bound"):
        make(v_min=None)
    assert make(v_min=None, v_max=None, return_bound=2.0).head.support[[0, -1]].tolist() == [-2.0, 2.0]


def test_the_statistics_of_returns_are_in_the_learners_state(tmp_path: Path) -> None:
    session = open_session(tiny("simbav2", tmp_path, threads=1))
    learner: Any = session.algorithm
    step = 0
    while step < 20:
        step += take_steps(session, step)
        for _, batch in session.store.batches(learner, step):
            learner.update(batch)
    other: Any = open_session(tiny("simbav2", tmp_path, threads=1)).algorithm
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.return_scale.statistics, learner.return_scale.statistics)
    assert torch.equal(other.return_scale.running, learner.return_scale.running)
    session.forget_returns()
    assert learner.return_scale.running is None
    session.close()
