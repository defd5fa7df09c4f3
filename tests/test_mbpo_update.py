"""MBPO's mathematics: the ensemble and its loss, fits that stop, rollouts through drawn members, mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from continuous_cases import SIZES, make_batch, same, tensors
from resume_cases import SPECS, StopAt, assert_same_run, stop_and_resume, take_steps, tiny
from rl_training.algorithms.mbpo import MBPO, dynamics_targets, mbpo_model_loss
from rl_training.algorithms.mopo import mopo_model_loss
from rl_training.algorithms.sac import SAC
from rl_training.config.params import read_params
from rl_training.config.train_config import Presets, load_config
from rl_training.data.model_store import ModelReplayStore, SyntheticBuffer
from rl_training.envs.factory import read_recipe
from rl_training.envs.outcomes import TERMINATIONS, known_termination, never
from rl_training.errors import UserError
from rl_training.models.mlp_mopo import MLPMOPOEnsembleModel
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train
from rl_training.runtime.mbpo_trainer import MBPOParams


def make(
    learner: type[MBPO] = MBPO, num_ensembles: int = 7, logvar_units: Any = "environment", **options: Any
) -> Any:
    torch.manual_seed(0)
    made = learner(
        policy_model=MLPSACModel(**SIZES),
        dynamics_model=MLPMOPOEnsembleModel(**SIZES, num_ensembles=num_ensembles, logvar_units=logvar_units),
        **{"policy_learning_rate": 1e-3, "gamma": 0.9, "tau": 0.1, **options},
    )  # fmt: skip
    made.seed(0)
    return made


def by_hand(model: MLPMOPOEnsembleModel, means: Tensor, logvars: Tensor) -> None:
    """Make each member say the same at any input: [E, D] each."""
    with torch.no_grad():
        for parameter in model.members.parameters():
            parameter.zero_()
        head = [p for name, p in model.members.named_parameters() if name.startswith("bias")][-1]
        head[:, 0, : model.targets], head[:, 0, model.targets : 2 * model.targets] = means, logvars
        model.max_logvar.fill_(20.0)
        model.min_logvar.fill_(-30.0)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_loss_is_twice_torchs_gaussian_nll_summed_over_members() -> None:
    draws = torch.Generator().manual_seed(0)
    means, logvars = torch.randn(3, 8, 4, generator=draws), torch.randn(3, 8, 4, generator=draws)
    targets = torch.randn(8, 4, generator=draws)
    batch = {"predicted_means": means, "predicted_logvars": logvars, "targets": targets}
    losses = mopo_model_loss({**batch, "ensemble_disagreement": torch.tensor(0.25)})
    expected = sum(
        nn.GaussianNLLLoss()(mean, targets, logvar.exp()) for mean, logvar in zip(means, logvars, strict=True)
    )
    assert list(losses) == ["mopo_model_loss", "reward_mae", "delta_obs_mae", "ensemble_disagreement"]
    assert losses["mopo_model_loss"].item() == pytest.approx(2 * float(expected), rel=1e-5)
    assert losses["reward_mae"].item() == pytest.approx((means - targets)[..., 0].abs().mean().item(), rel=1e-5)
    assert losses["delta_obs_mae"].item() == pytest.approx((means - targets)[..., 1:].abs().mean().item(), rel=1e-5)
    assert losses["ensemble_disagreement"] == 0.25
    rows = mopo_model_loss({**batch, "ensemble_disagreement": torch.linspace(0.0, 0.5, 8)})
    assert rows["ensemble_disagreement"].shape == ()
    assert rows["ensemble_disagreement"].item() == pytest.approx(0.25)
    own = mbpo_model_loss({**batch, "targets": targets.expand(3, 8, 4), "ensemble_disagreement": torch.tensor(0.25)})
    assert own["mbpo_model_loss"] == losses["mopo_model_loss"]


def test_log_variances_are_softly_bounded_and_the_bounds_learn() -> None:
    model = MLPMOPOEnsembleModel(**SIZES)
    values = model.bound(torch.tensor([-1e4, -9.0, -3.0, 0.0, 1e4]).unsqueeze(-1).expand(5, 4))
    assert values[0, 0].item() == pytest.approx(-10.0)
    assert values[-1, 0].item() == pytest.approx(0.5, abs=1e-3)
    assert values[2, 0].item() == pytest.approx(-3.0, abs=0.05)  # far from both bounds nothing changes
    assert (values.diff(dim=0) > 0).all()
    wide, narrow = torch.autograd.grad(model.bounds_loss(), [model.max_logvar, model.min_logvar])
    assert torch.equal(wide, torch.full((4,), 0.01))
    assert torch.equal(narrow, torch.full((4,), -0.01))
    learner = make()
    before = learner.dynamics_model.max_logvar.clone(), learner.dynamics_model.min_logvar.clone()
    learner.update_model(make_batch())
    assert (learner.dynamics_model.max_logvar != before[0]).all()
    assert (learner.dynamics_model.min_logvar != before[1]).all()


def test_members_as_one_network_equal_members_one_by_one() -> None:
    torch.manual_seed(0)
    model, batch = MLPMOPOEnsembleModel(**SIZES, num_ensembles=3), make_batch()
    together = model(batch["obs"], batch["actions"])
    own = model(batch["obs"].expand(3, 8, 3), batch["actions"].expand(3, 8, 2))
    for i in range(3):
        alone = model(batch["obs"], batch["actions"], torch.tensor([i]))
        for whole, each, one in zip(together, own, alone, strict=True):
            torch.testing.assert_close(whole[i], one[0])
            torch.testing.assert_close(whole[i], each[i])
    assert not torch.allclose(together.means[0], together.means[1])


def test_units_are_the_environments_own_and_standardising_is_inside() -> None:
    torch.manual_seed(0)
    model, batch = MLPMOPOEnsembleModel(**SIZES, logvar_units="standardized"), make_batch(64)
    inputs, targets = torch.cat([batch["obs"], batch["actions"]], -1), dynamics_targets(batch)
    targets[:, 2] = 7.0  # never changes
    model.standardize(inputs, targets)
    assert model.target_std[2].item() == pytest.approx(7e-4, rel=1e-2)
    before = model(batch["obs"], batch["actions"])
    model.standardize(100 * inputs + 5, 100 * targets + 5)
    after = model(100 * batch["obs"] + 5, 100 * batch["actions"] + 5)
    varies = [0, 1, 3]
    torch.testing.assert_close(after.means[..., varies], 100 * before.means[..., varies] + 5, rtol=1e-3, atol=1e-2)
    shift = 2 * np.log(100.0)
    torch.testing.assert_close(after.logvars[..., varies], before.logvars[..., varies] + shift, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-4, 0.05, 1.0, 30.0])
def test_bounds_are_in_the_environments_units(scale: float) -> None:
    """As in the published code, which standardizes inputs only: softplus(x) is log(1 + e^x) of raw log-variances."""
    torch.manual_seed(0)
    models = [MLPMOPOEnsembleModel(**SIZES, num_ensembles=2, logvar_units=u) for u in ("environment", "standardized")]
    models[1].load_state_dict(models[0].state_dict())
    batch = make_batch(64)
    for model in models:
        model.standardize(torch.cat([batch["obs"], batch["actions"]], -1), scale * dynamics_targets(batch))
        model.max_logvar.data.copy_(torch.tensor([0.5, 0.4, 0.3, 0.2]))
    raw, standardized = (model(batch["obs"], batch["actions"]) for model in models)
    assert torch.equal(raw.means, standardized.means)
    std = models[0].target_std.double().numpy()
    inputs = (torch.cat([batch["obs"], batch["actions"]], -1) - models[0].input_mean) / models[0].input_std
    outputs = models[0].members.run(inputs, None)[..., 4:8].detach().double().numpy() + 2 * np.log(std)
    high, low = np.array([0.5, 0.4, 0.3, 0.2]), np.full(4, -10.0)
    expected = high - np.logaddexp(0, high - outputs)
    expected = low + np.logaddexp(0, expected - low)
    np.testing.assert_allclose(raw.logvars.detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    assert (raw.logvars > -10.0).all()
    assert (raw.logvars < 0.51).all()
    apart = standardized.logvars.detach().numpy() - 2 * np.log(std)  # wide and narrow targets alike
    assert (apart > -10.0).all()
    assert (apart < 0.51).all()


def test_model_update_moves_the_model_alone_and_needs_no_dones() -> None:
    learner, batch = make(), make_batch()
    del batch["dones"]
    policy, dynamics = tensors(learner.model), tensors(learner.dynamics_model)
    metrics = learner.update(batch, phase="model").metrics
    assert list(metrics) == ["mbpo_model_loss", "reward_mae", "delta_obs_mae", "ensemble_disagreement"]
    assert metrics["ensemble_disagreement"] > 0
    assert all(same(policy, learner.model))
    assert not all(same(dynamics, learner.dynamics_model))
    dynamics = tensors(learner.dynamics_model)
    assert {"critic_loss", "actor_loss", "target_q_mean", "entropy_term"} <= set(learner.update(make_batch()).metrics)
    assert all(same(dynamics, learner.dynamics_model))


def test_each_member_learns_from_its_own_rows() -> None:
    learners = make(num_ensembles=2), make(num_ensembles=2)
    rows = {name: torch.stack([value, value]) for name, value in make_batch().items()}
    learners[0].update_model(rows)
    rows["rewards"][1] = 50.0
    learners[1].update_model(rows)
    for one, other in zip(*(learner.dynamics_model.member_parameters() for learner in learners), strict=True):
        assert torch.equal(one[0], other[0])
        assert not torch.equal(one[1], other[1])


def test_the_head_of_termination_learns_where_the_batch_says_what_terminated() -> None:
    learner, batch = make(), make_batch()
    ends = batch["obs"][:, 0] > 0
    for _ in range(200):
        learner.update_model({**batch, "terminated": ends})
    assert torch.equal(learner.dynamics_model(batch["obs"], batch["actions"]).termination_logits.mean(0) > 0, ends)
    imagined = learner.imagine(batch["obs"].repeat(50, 1))
    assert (imagined["terminated"] == (imagined["obs"][:, 0] > 0)).float().mean() > 0.5


def test_policy_updates_are_sacs_to_the_bit() -> None:
    learner = make()
    torch.manual_seed(0)
    sac = SAC(model=MLPSACModel(**SIZES), learning_rate=1e-3, gamma=0.9, tau=0.1)
    sac.seed(0)
    for i in range(3):
        learner.update_model(make_batch(seed=i))
        assert learner.update(make_batch(seed=i)).metrics == sac.update(make_batch(seed=i)).metrics
    for name, value in sac.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, learner.state_dict()[name]), name


def test_the_two_learning_rates_move_apart() -> None:
    learner = make(model_learning_rate=0.5)
    learner.learning_rate = 0.25
    assert (learner.policy_learning_rate, learner.model_learning_rate) == (0.25, 0.5)
    learner.model_learning_rate = 0.125
    assert learner.actor_optimizer.learning_rate == 0.25
    assert learner.model_optimizer.learning_rate == 0.125
    with pytest.raises(UserError, match="num_elites is 8; from 1 to num_ensembles"):
        make(num_elites=8)


@pytest.mark.parametrize(
    ("algo", "other", "default"),
    [("mbpo", "policy_learning_rate", 3e-4), ("mopo", "policy_learning_rate", 3e-4),
     ("trpo", "value_learning_rate", 1e-3)],
)  # fmt: skip
def test_learning_rate_and_its_own_name_are_one_number(algo: str, other: str, default: float) -> None:
    model = SPECS[algo].params

    def rates(**given: Any) -> tuple[float, float]:
        params: Any = read_params(model, given)
        return params.learning_rate, getattr(params, other)

    assert rates() == (default, default)
    assert rates(learning_rate=0.01) == rates(**{other: 0.01}) == (0.01, 0.01)
    assert rates(learning_rate="1e-2", **{other: 0.01}) == (0.01, 0.01)
    assert rates(learning_rate=3e-4, **{other: 0.01}) == (0.01, 0.01)  # as earlier runs stored it
    with pytest.raises(UserError, match=rf"learning_rate is 0\.5 and {other} 0\.01; they mean the same"):
        rates(learning_rate=0.5, **{other: 0.01})
    schedule = {"start": 0.1, "end": 0.01}
    with pytest.raises(UserError, match=f"learning_rate_schedule and {other}_schedule mean the same"):
        rates(**dict.fromkeys(("learning_rate_schedule", f"{other}_schedule"), schedule))


@pytest.mark.parametrize("name", ["learning_rate", "policy_learning_rate"])
def test_a_forced_resume_changes_the_policys_rate_by_either_name(tmp_path: Path, name: str) -> None:
    config = tiny("mbpo", tmp_path, eval_episodes=0, kwargs={"policy_learning_rate": 0.01})
    halfway = train(config, callbacks=[StopAt(64)], console=False)

    def resume(**changes: Any) -> Any:
        return resume_training(
            halfway.checkpoint_path, output_dir=tmp_path, changes={"algo_kwargs": changes}, force=True, console=False
        )

    result = resume(**{name: 0.0005})
    assert result.policy.algorithm.critic_optimizer.learning_rate == 0.0005
    stored = load_checkpoint(result.checkpoint_path)["config"]["algo_kwargs"]
    assert stored["learning_rate"] == stored["policy_learning_rate"] == 0.0005
    scheduled = resume(**{f"{name}_schedule": {"start": 0.02, "end": 0.0}})
    assert scheduled.metrics[name] == 0.0


# ---- imagination -----------------------------------------------------------------------------------------------------


def watch_rows(learner: MBPO) -> list[int]:
    """How many rows pass through networks of the ensemble, call by call."""
    seen: list[int] = []
    run = learner.dynamics_model.members.run

    def watched(x: Tensor, subset: Any = None) -> Tensor:
        out = run(x, subset)
        seen.append(out.shape[0] * out.shape[1])
        return out

    learner.dynamics_model.members.run = watched
    return seen


@pytest.mark.parametrize("rows", [1, 3, 10, 101])
def test_each_row_is_computed_by_its_drawn_elite_alone(rows: int) -> None:
    learner = make(num_elites=5)
    learner.elites.copy_(torch.tensor([1, 3, 4, 6, 0]))
    by_hand(learner.dynamics_model, torch.arange(7.0).unsqueeze(-1).expand(7, 4), torch.tensor(-25.0))
    seen, obs = watch_rows(learner), torch.randn(rows, 3)
    counts = torch.zeros(7)
    for _ in range(200 if rows < 100 else 20):
        step = learner.imagine(obs, lambda *step: step[2][:, 0] > 1e9)
        member = step["rewards"].round()
        torch.testing.assert_close(step["rewards"], member, rtol=0, atol=1e-3)
        torch.testing.assert_close(
            step["next_obs"] - step["obs"], member.unsqueeze(-1).expand(rows, 3), atol=1e-3, rtol=0
        )
        counts += member.long().bincount(minlength=7)
        assert sorted(step["obs"][:, 0].tolist()) == sorted(obs[:, 0].tolist())  # every state once
    assert set(seen) == {-(-rows // 5) * 5}  # one pass, in which no row meets a second member
    assert counts[2] == counts[5] == 0
    shares = counts[learner.elites] / counts.sum()
    assert (shares - 0.2).abs().max() < 0.1


def test_imagined_outcomes_have_the_predicted_deviation() -> None:
    learner = make(num_ensembles=1, num_elites=1)
    deviations = torch.tensor([0.5, 1.0, 2.0, 0.1])
    by_hand(learner.dynamics_model, torch.zeros(1, 4), 2 * deviations.log().unsqueeze(0))
    step = learner.imagine(torch.zeros(20_000, 3), lambda *step: step[2][:, 0] > 1e9)
    found = torch.cat([step["rewards"].unsqueeze(-1), step["next_obs"]], -1).std(0)
    torch.testing.assert_close(found, deviations, rtol=0.03, atol=0)
    assert step["actions"].abs().max() <= 1.0


def test_imagined_actions_are_drawn_from_the_policy() -> None:
    learner, obs = make(), torch.zeros(5_000, 3)
    imagined, acted = learner.imagine(obs)["actions"], learner.act(obs).actions
    assert acted.std(0).min() > 0.1
    torch.testing.assert_close(imagined.std(0), acted.std(0), rtol=0.05, atol=0)
    torch.testing.assert_close(imagined.mean(0), acted.mean(0), rtol=0, atol=0.05)


@pytest.mark.parametrize("algo", ["mbpo", "mopo"])
def test_a_round_starts_all_over_the_real_states(tmp_path: Path, algo: str) -> None:
    kwargs = {"rollout_batch_size": 2_000, "rollout_horizon": 1, "synthetic_buffer_capacity": 2_000}
    session = open_session(tiny(algo, tmp_path, kwargs=kwargs))
    store: Any = session.store
    starts: list[Tensor] = []
    imagine = store.imagine

    def watched(learner: MBPO, states: Tensor, horizon: float) -> None:
        starts.append(states)
        imagine(learner, states, horizon)

    store.imagine = watched
    for step in range(0, 20, 4):
        take_steps(session, step)
        for phase, batch in store.batches(session.algorithm, step + 4):
            store.feedback(batch, session.algorithm.update(batch, phase=phase))
    session.close()
    (found,) = starts
    real = store.buffer.transitions()["obs"] if algo == "mbpo" else store.dataset.obs
    assert len(found) == 2_000
    states, counts = np.unique(found.numpy(), axis=0, return_counts=True)
    np.testing.assert_array_equal(states, np.unique(real, axis=0))
    assert counts.max() < 3 * 2_000 / len(real)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    session = open_session(tiny("mbpo", tmp_path, kwargs={"rollout_horizon": 3}))
    assert isinstance(session.store, ModelReplayStore)
    yield session.store
    session.close()


def test_rows_that_end_are_not_rolled_out_further(store: ModelReplayStore) -> None:
    learner = make(num_ensembles=1, num_elites=1)
    by_hand(learner.dynamics_model, torch.ones(1, 4), torch.tensor(-25.0))
    store.imagined = SyntheticBuffer(100, obs_dim=3, action_dim=2)
    store.outcomes.ends = lambda *step: step[2][:, 0] > 1.5
    states = torch.zeros(10, 3)
    states[:4, 0] = 1.0  # end at once; the others after two of the three steps
    store.imagine(learner, states, 3)
    assert len(store.imagined) == 10 + 6
    stored = store.imagined.state_dict()["arrays"]
    assert stored["dones"].sum() == 10
    np.testing.assert_array_equal(stored["dones"] > 0, stored["next_obs"][:, 0] > 1.5)


def test_imagined_ends_reach_the_policys_batch(store: ModelReplayStore) -> None:
    store.imagined = SyntheticBuffer(100, obs_dim=3, action_dim=2)
    store.outcomes.ends = lambda *step: step[2][:, 0] > -1e9
    store.imagine(make(), torch.zeros(10, 3), 3)
    assert store.mix(make_batch(2))["dones"].tolist() == [0.0] * 2 + [1.0] * store.synthetic_batch_size


def test_the_synthetic_buffer_forgets_the_oldest() -> None:
    buffer = SyntheticBuffer(5, obs_dim=1, action_dim=1)

    def rows(*numbers: float) -> dict[str, Tensor]:
        column = torch.tensor(numbers)
        wide = column.unsqueeze(-1)
        return {"obs": wide, "actions": wide, "next_obs": wide, "rewards": column, "terminated": column > 4}

    buffer.add(rows(1, 2, 3))
    assert len(buffer) == 3
    buffer.add(rows(4, 5, 6, 7))
    batch = buffer.sample(500, np.random.default_rng(0))
    assert set(batch["rewards"].tolist()) == {3, 4, 5, 6, 7}
    assert torch.equal(batch["dones"], (batch["rewards"] > 4).float())
    buffer.add(rows(*range(10, 22)))
    assert set(buffer.sample(500, np.random.default_rng(0))["rewards"].tolist()) == {17, 18, 19, 20, 21}
    again = SyntheticBuffer(5, obs_dim=1, action_dim=1)
    again.load_state_dict(buffer.state_dict())
    for one in (buffer, again):
        one.add(rows(99))
    assert again.sample(9, np.random.default_rng(1))["obs"].equal(buffer.sample(9, np.random.default_rng(1))["obs"])
    with pytest.raises(UserError, match="stored synthetic buffer has capacity 5, this one 6"):
        SyntheticBuffer(6, obs_dim=1, action_dim=1).load_state_dict(buffer.state_dict())


def test_batches_may_be_drawn_from_the_newest_imagined_rows_only() -> None:
    buffer = SyntheticBuffer(5, obs_dim=1, action_dim=1)
    zeros = torch.zeros(8, 1)
    rows = {"obs": torch.arange(8.0).unsqueeze(-1), "actions": zeros, "rewards": zeros[:, 0], "next_obs": zeros}
    buffer.add({**rows, "terminated": torch.zeros(8, dtype=torch.bool)})  # 3 to 7 are kept, and the ring has wrapped
    buffer.forget(9)
    assert set(buffer.sample(200, np.random.default_rng(0))["obs"].flatten().tolist()) == {3, 4, 5, 6, 7}
    buffer.forget(2)
    assert len(buffer) == 2
    again = SyntheticBuffer(5, obs_dim=1, action_dim=1)
    again.load_state_dict(buffer.state_dict())
    for one in (buffer, again):
        assert set(one.sample(200, np.random.default_rng(0))["obs"].flatten().tolist()) == {6.0, 7.0}
        one.add({name: column[:1] for name, column in rows.items()} | {"terminated": torch.zeros(1, dtype=torch.bool)})
        assert set(one.sample(200, np.random.default_rng(0))["obs"].flatten().tolist()) == {6.0, 7.0, 0.0}


def test_the_pool_of_imagined_rows_is_that_of_the_published_code(tmp_path: Path) -> None:
    """Four rounds at the current horizon: a pool that grows keeps what it has, and what it dropped stays dropped."""
    kwargs = {
        "synthetic_rounds": 4, "rollout_batch_size": 5, "synthetic_buffer_capacity": None,
        "rollout_horizon_schedule": {"start": 1, "end": 3},
    }  # fmt: skip
    session = open_session(tiny("mbpo", tmp_path, kwargs=kwargs))
    store: Any = session.store
    assert store.imagined.capacity == 4 * 5 * 3
    store.imagined = SyntheticBuffer(store.imagined.capacity, obs_dim=3, action_dim=2)
    learner, store.outcomes.ends = make(), never
    by_hand(learner.dynamics_model, torch.zeros(7, 4), torch.tensor(-25.0))  # a rollout stays where it starts
    published: list[float] = []  # `_reallocate_model_pool` and `_rollout_model`: the largest size, then the rows
    for number, horizon in enumerate([1.0] * 9 + [1.9, 2.0, 2.4] + [2.0] * 5 + [3.0] * 6):
        store.imagine(learner, torch.full((5, 3), float(number)), horizon)
        published = (published + [float(number)] * (5 * int(horizon)))[-4 * 5 * int(horizon) :]
        drawn = store.imagined.sample(5_000, np.random.default_rng(0))["obs"][:, 0]
        assert len(store.imagined) == len(published)
        assert set(drawn.round().tolist()) == set(published)
    session.close()


def test_the_presets_have_the_published_schedules() -> None:
    """`_set_rollout_length` of the published code with [20, 150, 1, 15], an epoch being 1,000 steps."""
    config = load_config(Presets / "mbpo" / "hopper.yaml")
    schedule = read_params(MBPOParams, config.algo_kwargs).schedules["rollout_horizon"]
    for epoch in range(100):
        share = min(max(0.0, (epoch - 20) / (150 - 20)), 1.0)
        assert int(schedule.value((1_000 * epoch + 1) / config.total_timesteps)) == int(share * 14 + 1), epoch
    published = {"mbpo/hopper": (20, -1), "mbpo/walker2d": (20, -3), "mbpo/halfcheetah": (40, -3)}
    for name, (updates, entropy) in published.items():
        params: Any = read_params(MBPOParams, load_config(Presets / f"{name}.yaml").algo_kwargs)
        params.check_new_run()
        assert (params.gradient_updates_per_step, params.target_entropy) == (updates, entropy)
        assert (params.learning_starts, params.random_action_hold) == (5_000, 1.0)
        assert params.rollout_refresh_interval == params.model_train_frequency * updates  # rounds come with the fits
        assert (params.rollout_batch_size, params.synthetic_rounds, params.model_updates) == (100_000, 4, None)
        assert (params.hidden_sizes, params.batch_size, params.logvar_units) == ((256, 256), 256, "environment")


def test_rows_that_cannot_be_moved_change_nothing() -> None:
    buffer = SyntheticBuffer(3, obs_dim=1, action_dim=1)
    wide, column = torch.ones(3, 1), torch.ones(3)
    rows = {"obs": wide, "actions": wide, "next_obs": wide, "rewards": column, "terminated": column > 1}
    buffer.add(rows)
    before = {name: array.copy() for name, array in buffer.state_dict()["arrays"].items()}
    with pytest.raises(NotImplementedError, match="meta tensor"):
        buffer.add({**rows, "obs": wide * 2, "terminated": torch.empty(3, device="meta")})
    np.testing.assert_equal(buffer.state_dict()["arrays"], before)


@pytest.mark.parametrize("sizes", [(3, 4, 12, 1), (5, 5), (2, 2, 2, 13)])
def test_the_synthetic_buffer_keeps_the_newest_rows_in_place(sizes: tuple[int, ...]) -> None:
    buffer, added, expected = SyntheticBuffer(5, obs_dim=2, action_dim=1), 0, np.zeros(5, np.float32)
    for size in sizes:
        numbers = torch.arange(added, added + size, dtype=torch.float32)
        wide = numbers.unsqueeze(-1)
        buffer.add({"obs": wide.expand(-1, 2), "actions": wide, "next_obs": -wide.expand(-1, 2), "rewards": numbers,
                    "terminated": numbers > 1})  # fmt: skip
        for number in range(added, added + size):
            expected[number % 5] = number
        added += size
        state = buffer.state_dict()
        np.testing.assert_array_equal(state["arrays"]["rewards"], expected[: len(buffer)])
        np.testing.assert_array_equal(state["arrays"]["next_obs"][:, 1], -expected[: len(buffer)])
        assert (state["head"], state["size"]) == (added % 5, min(added, 5))


def test_a_large_synthetic_buffer_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 2_000))
    buffer = SyntheticBuffer(100, obs_dim=3, action_dim=1, device="cuda")
    assert (buffer.nbytes, buffer.on_gpu) == (3_600, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_synthetic_buffer_moves_between_gpu_and_host() -> None:
    there, here, back = (SyntheticBuffer(7, obs_dim=3, action_dim=1, device=x) for x in ("cuda", "cpu", "cuda"))
    step = make().imagine(torch.randn(5, 3))
    rows = {**step, "actions": step["actions"][:, :1]}
    for _ in range(2):
        there.add({name: value.cuda() for name, value in rows.items()})
    here.load_state_dict(there.state_dict())
    back.load_state_dict(here.state_dict())
    batches = [buffer.sample(20, np.random.default_rng(3)) for buffer in (there, here, back)]
    for name, column in batches[0].items():
        assert column.is_cuda
        assert all(torch.equal(column.cpu(), batch[name].cpu()) for batch in batches)


@pytest.mark.parametrize("ends", [True, False])
def test_where_nothing_ends_a_round_keeps_every_row(store: ModelReplayStore, ends: bool) -> None:
    rounds = []
    for terminates in (never, lambda *step: step[2][:, 0] > (-1e9 if ends else 1e9)):
        store.imagined = SyntheticBuffer(100, obs_dim=3, action_dim=2)
        store.outcomes.ends = terminates
        store.imagine(make(), torch.zeros(10, 3), 3)
        rounds.append(store.imagined.state_dict()["arrays"])
    assert [len(found["obs"]) for found in rounds] == [30, 10 if ends else 30]
    if not ends:
        np.testing.assert_array_equal(rounds[0]["next_obs"], rounds[1]["next_obs"])


@pytest.mark.parametrize("env_id", TERMINATIONS)
def test_known_ends_are_the_environments_own(env_id: str) -> None:
    if env_id.endswith("-v5"):
        pytest.importorskip("mujoco")
    ends, env = known_termination(read_recipe(env_id, {})), gym.make(env_id)
    assert ends is not None
    env.reset(seed=0)
    env.action_space.seed(0)
    observed, ended = [], []
    for _ in range(200):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        observed.append(obs)
        ended.append(terminated)
        if terminated or truncated:
            env.reset()
    env.close()
    rows = torch.from_numpy(np.array(observed, dtype=np.float32))
    assert ends(rows).tolist() == ended
    assert ends(rows.numpy()).tolist() == ended


def test_options_and_wrappers_make_the_ends_unknown() -> None:
    assert known_termination(read_recipe("Hopper-v5", {"terminate_when_unhealthy": False})) is None
    assert known_termination(read_recipe("Hopper-v5", {"wrappers": {"frame_stack": 2}})) is None
    assert known_termination(read_recipe("env_zoo:BoxActions", {})) is None


# ---- fits ------------------------------------------------------------------------------------------------------------


class Scripted(MBPO):
    """A learner whose held-out errors are given, epoch by epoch, and whose members are marked by the epoch."""

    def __init__(self, *errors: list[float]) -> None:
        sizes: dict[str, Any] = {"obs_dim": 3, "action_dim": 1, "hidden_sizes": (4,)}
        model = MLPMOPOEnsembleModel(**sizes, num_ensembles=3)
        super().__init__(policy_model=MLPSACModel(**sizes), dynamics_model=model, num_elites=2)
        self.errors, self.epoch = [torch.tensor(each) for each in errors], 0

    def heldout_errors(self, batch: Any) -> Tensor:
        self.epoch += 1
        for weight in self.dynamics_model.member_parameters():
            weight.fill_(float(self.epoch))
        return self.errors[min(self.epoch, len(self.errors)) - 1]


def transitions(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"obs": (rows, 3), "actions": (rows, 1), "rewards": (rows,), "next_obs": (rows, 3)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_fit_stops_after_five_epochs_without_a_gain_and_keeps_each_members_best(store: ModelReplayStore) -> None:
    store.params = store.params.model_copy(update={"model_updates": 1000})
    learner: Any = Scripted([0.5, 2.0, 0.9], [0.4, 1.99, 0.895], [0.9, 1.9, 0.895], [9.0, 9.0, 9.0])
    batches = list(store.fit(learner, transitions(50)))
    assert learner.epoch == 3 + 5
    assert len(batches) == 8 * 3  # forty rows in steps of sixteen
    assert {phase for phase, _ in batches} == {"model"}
    assert batches[0][1]["obs"].shape == (3, 16, 3)
    assert batches[2][1]["rewards"].shape == (3, 8)
    kept = [weight.flatten(1)[:, 0].tolist() for weight in learner.dynamics_model.member_parameters()]
    assert all(each == [2.0, 3.0, 1.0] for each in kept)  # gains under one per cent do not count
    assert learner.elites.tolist() == [0, 2]
    assert store.metrics["heldout_error"] == pytest.approx((0.4 + 0.9) / 2)


def test_what_a_member_was_before_a_fit_does_not_hold_it_back() -> None:
    """The held-out rows of a second fit were mostly trained on in the first: a pre-fit error on them flatters it."""
    learner, rng = make(num_ensembles=3, model_learning_rate=3e-3), np.random.default_rng(0)
    data = {name: torch.from_numpy(rng.normal(size=(60, size))).float() for name, size in (("obs", 3), ("actions", 2))}
    data |= {"rewards": torch.from_numpy(rng.normal(size=60)).float()}  # noise, to be learned by heart
    data["next_obs"] = data["obs"] + torch.from_numpy(rng.normal(size=(60, 3))).float()
    for _ in range(300):  # all rows by heart, those that the fit holds out too
        learner.update_model(data)
    weights = learner.dynamics_model.member_parameters()
    before = [weight.clone() for weight in weights]
    for batch in learner.fit(data, rng, 1000, 16):
        learner.update_model(batch)
    moved = [[not torch.equal(new[i], old[i]) for i in range(3)] for new, old in zip(weights, before, strict=True)]
    assert moved == [[True] * 3] * len(weights)


def test_weights_are_pulled_to_zero_layer_by_layer_as_published() -> None:
    sizes: dict[str, Any] = {"obs_dim": 3, "action_dim": 2, "num_ensembles": 2}
    for hidden, decays in (((4, 4, 4, 4), [2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4]), ((4,), [2.5e-5, 1e-4])):
        model = MLPMOPOEnsembleModel(**sizes, hidden_sizes=hidden)
        weights = [p for name, p in model.members.named_parameters() if name.startswith("weight")]
        gradients = torch.autograd.grad(model.weight_loss(), weights)
        for weight, gradient, decay in zip(weights, gradients, decays, strict=True):
            torch.testing.assert_close(gradient, decay * weight.detach())
    norms = []
    for factor in (0.0, 1e5):
        learner = make(model_weight_decay=factor)
        for i in range(50):
            learner.update_model(make_batch(seed=i))
        norms.append(sum(weight.norm().item() for weight in learner.dynamics_model.member_parameters()))
    assert norms[1] < 0.9 * norms[0]


def test_a_fit_has_a_most_number_of_updates_and_holds_a_fifth_out(store: ModelReplayStore) -> None:
    learner: Any = Scripted(*([0.5**i] * 3 for i in range(100)))
    data = transitions(100)
    data["rewards"][:] = np.arange(100)
    store.params = store.params.model_copy(update={"model_updates": 12})
    batches = [batch for _, batch in store.fit(learner, data)]
    assert len(batches) == store.metrics["model_fit_updates"] == 12  # two epochs of five and a part
    used = {number for batch in batches for number in batch["rewards"].flatten().tolist()}
    assert len(used) <= 80
    epoch = torch.cat([batch["rewards"] for batch in batches[:5]], -1)
    assert epoch.shape == (3, 80)
    assert not torch.equal(epoch[0].sort().values, epoch[1].sort().values)  # each member has its own bootstrap sample
    again = torch.cat([batch["rewards"] for batch in batches[5:10]], -1)
    assert torch.equal(epoch.sort(-1).values, again.sort(-1).values)  # and keeps it


def test_a_fit_without_a_most_number_of_updates_ends_by_its_error() -> None:
    learner: Any = Scripted(*([0.9**i] * 3 for i in range(600)), *([[9.0] * 3] * 9))
    data = {name: torch.from_numpy(column) for name, column in transitions(10).items()}
    assert len(list(learner.fit(data, np.random.default_rng(0), None, 4))) == (600 + 5) * 2  # 8 rows in steps of 4
    assert learner.fit_metrics["model_fit_updates"] == 605 * 2


def test_a_fit_learns_a_linear_world() -> None:
    """Where units are far apart, the bounds are best in those of standardized targets."""
    learner, rng = make(num_ensembles=3, num_elites=2, logvar_units="standardized"), np.random.default_rng(0)
    data = {name: rng.normal(size=(400, size)).astype(np.float32) for name, size in (("obs", 3), ("actions", 2))}
    data["rewards"] = 100 * data["actions"].sum(1)
    data["next_obs"] = data["obs"] + 0.01 * data["obs"][:, ::-1]
    session = open_session(tiny("mbpo", Path("unused"), kwargs={"model_updates": 1000, "model_batch_size": 64}))
    for phase, batch in session.store.fit(learner, data):  # type: ignore[attr-defined]
        session.store.feedback(batch, learner.update(batch, phase=phase, sync=False))
    metrics = session.store.metrics  # type: ignore[attr-defined]
    session.close()
    assert metrics["heldout_error"] < 0.02
    assert metrics["reward_mae"] < 20
    assert metrics["delta_obs_mae"] < 0.002


# ---- the lane --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "imagined"), [(0.5, 4), (0.95, 8), (0.0, 0)])
def test_every_policy_batch_has_exactly_the_configured_share(tmp_path: Path, ratio: float, imagined: int) -> None:
    session = open_session(tiny("mbpo", tmp_path, kwargs={"synthetic_batch_ratio": ratio}))
    store = session.store
    assert isinstance(store, ModelReplayStore)
    sizes, phases = [], []
    for step in range(0, 60, 4):
        take_steps(session, step)
        for phase, batch in store.batches(session.algorithm, step + 4):
            phases.append(phase)
            store.feedback(batch, session.algorithm.update(batch, phase=phase))
            if phase == "policy":
                real = set(store.buffer.transitions()["rewards"].tolist())
                sizes.append(sum(reward not in real for reward in batch["rewards"].tolist()))
                assert batch["rewards"].shape == (8,)
    session.close()
    assert sizes == [imagined] * 11  # a turn per four steps after the first sixteen
    assert phases[0] == ("model" if imagined else "policy")
    fits = [i for i, phase in enumerate(phases) if phase == "model" and (i == 0 or phases[i - 1] == "policy")]
    assert len(fits) == (2 if imagined else 0)  # at step 20 and forty later


def test_rollouts_are_made_anew_after_a_fit_and_every_interval(tmp_path: Path) -> None:
    session = open_session(tiny("mbpo", tmp_path, kwargs={"rollout_refresh_interval": 4, "rollout_batch_size": 3}))
    store = session.store
    assert isinstance(store, ModelReplayStore)
    rounds = []
    for step in range(0, 100, 4):
        take_steps(session, step)
        before = len(store.imagined)
        for phase, batch in store.batches(session.algorithm, step + 4):
            store.feedback(batch, session.algorithm.update(batch, phase=phase))
        if len(store.imagined) > before:
            rounds.append(step + 4)
    session.close()
    assert rounds == [20, 36, 52, 60, 76, 92, 100]  # fits at 20, 60 and 100, else every four updates


def test_the_horizon_may_be_scheduled(tmp_path: Path) -> None:
    kwargs = {"rollout_horizon_schedule": {"start": 1, "end": 4}, "synthetic_buffer_capacity": 10_000}
    config = tiny("mbpo", tmp_path, eval_episodes=0, kwargs=kwargs)
    result = train(config, console=False)
    assert result.metrics["rollout_horizon"] == 4
    assert 20 * 2 < result.metrics["synthetic_size"] < 20 * 4 * 30
    with pytest.raises(UserError, match=r"rollout_horizon is 0\.0"):
        open_session(tiny("mbpo", tmp_path, kwargs={"rollout_horizon_schedule": {"start": 0, "end": 4}}))


@pytest.mark.parametrize("algo", ["mbpo", "mopo"])
def test_a_buffer_smaller_than_a_round_of_rollouts_is_refused(tmp_path: Path, algo: str) -> None:
    def kwargs(capacity: int, **more: Any) -> dict[str, Any]:
        return {"rollout_horizon": 4, "synthetic_buffer_capacity": capacity, **more}

    words = r"synthetic_buffer_capacity is 79; it must be at least .* \(20 x 4\), or it keeps only the ends of rollouts"
    with pytest.raises(UserError, match=words):
        train(tiny(algo, tmp_path, kwargs=kwargs(79)), console=False)
    growing = {"start": 1, "end": 6.6}
    with pytest.raises(UserError, match=r"is 119; .* \(20 x 6\)"):
        train(tiny(algo, tmp_path, kwargs=kwargs(119, rollout_horizon_schedule=growing)), console=False)
    assert list(tmp_path.iterdir()) == []
    for fits in (kwargs(80), kwargs(120, rollout_horizon_schedule=growing), kwargs(1, synthetic_batch_ratio=0.0)):
        open_session(tiny(algo, tmp_path, kwargs=fits)).close()
    words = r"synthetic_buffer_capacity is 359; .*synthetic_rounds times .* \(3 x 20 x 6\), or null, which is that"
    with pytest.raises(UserError, match=words):
        train(tiny(algo, tmp_path, kwargs=kwargs(359, rollout_horizon_schedule=growing, synthetic_rounds=3)))
    with pytest.raises(UserError, match=r"synthetic_buffer_capacity is null, .* as synthetic_rounds have; give one"):
        train(tiny(algo, tmp_path, kwargs={"synthetic_buffer_capacity": None}))


def test_a_run_that_began_with_a_smaller_buffer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(MBPOParams, "check_new_run", lambda params: None)
        config = tiny("mbpo", tmp_path, eval_episodes=0, kwargs={"synthetic_buffer_capacity": 10})
        halfway = train(config, callbacks=[StopAt(64)], console=False)
    assert resume_training(halfway.checkpoint_path, console=False).metrics["global_step"] == 128


def test_a_checkpoint_without_buffers_makes_them_again(tmp_path: Path) -> None:
    config = tiny("mbpo", tmp_path, eval_episodes=0, replay_in_checkpoint=False)
    halfway = train(config, callbacks=[StopAt(64)], console=False)
    assert "replay" not in load_checkpoint(halfway.checkpoint_path)["source"]
    assert resume_training(halfway.checkpoint_path, console=False).metrics["global_step"] == 128


def test_learned_ends_resume_exactly(tmp_path: Path) -> None:
    config = tiny("mbpo", tmp_path, env_id="env_zoo:BoxActions", num_envs=2, log_interval=3)
    assert_same_run(train(config, console=False), stop_and_resume(config, 30, 70))


def test_the_log_says_where_ends_come_from(tmp_path: Path) -> None:
    for env_id, words in (("Pendulum-v1", "ends by a known function"), ("env_zoo:BoxActions", "ends learned by")):
        session = open_session(tiny("mbpo", tmp_path, env_id=env_id))
        assert words in session.store.describe()
        session.close()


# ---- what the members compute ----------------------------------------------------------------------------------------


def test_a_learned_end_comes_with_its_probability() -> None:
    learner = make(num_ensembles=1, num_elites=1)
    by_hand(learner.dynamics_model, torch.zeros(1, 4), torch.full((1, 4), -10.0))
    head = [p for name, p in learner.dynamics_model.members.named_parameters() if name.startswith("bias")][-1]
    for chance in (0.1, 0.7):
        with torch.no_grad():
            head[..., -1] = float(np.log(chance / (1.0 - chance)))
        ended = learner.imagine(torch.zeros(20_000, 3))["terminated"].float().mean().item()
        assert ended == pytest.approx(chance, abs=0.02)


def test_an_input_that_was_constant_keeps_its_own_scale() -> None:
    """It may change later: divided by almost nothing, a small change would be a huge input."""
    model = MLPMOPOEnsembleModel(**SIZES)
    inputs = torch.randn(64, 5)
    inputs[:, 1] = 3.0
    model.standardize(inputs, torch.randn(64, 4))
    seen: list[Tensor] = []
    run = model.members.run
    model.members.run = lambda x, subset=None: seen.append(x) or run(x, subset)  # type: ignore
    row = torch.tensor([[0.0, 3.5, 0.0]])
    model(row, torch.zeros(1, 2))
    assert seen[0][0, 1].item() == pytest.approx(0.5)
    assert seen[0][0, 0].item() == pytest.approx(-inputs[:, 0].mean().item() / inputs[:, 0].std().item(), rel=0.02)


def test_members_have_hidden_layers_with_swish() -> None:
    torch.manual_seed(0)
    model, batch = MLPMOPOEnsembleModel(**SIZES, num_ensembles=2), make_batch()
    found = model(batch["obs"], batch["actions"])
    weights = {name: value.double().numpy() for name, value in model.members.state_dict().items()}
    for member in range(2):
        x = torch.cat([batch["obs"], batch["actions"]], -1).double().numpy()
        for layer in range(3):
            x = x @ weights[f"weight{layer}"][member] + weights[f"bias{layer}"][member]
            if layer < 2:
                x = x / (1.0 + np.exp(-x))
        np.testing.assert_allclose(found.means[member].detach().numpy(), x[:, :4], atol=1e-5)
        np.testing.assert_allclose(found.termination_logits[member].detach().numpy(), x[:, 8], atol=1e-5)


@pytest.mark.parametrize(("horizon", "steps"), [(1.0, 1), (1.9, 1), (2.0, 2), (2.5, 2), (3.6, 3)])
def test_a_horizon_between_two_numbers_is_the_smaller_one(
    store: ModelReplayStore, horizon: float, steps: int
) -> None:
    """As in the published code, so that a schedule reaches its last number at its end."""
    store.imagined = SyntheticBuffer(100, obs_dim=3, action_dim=2)
    store.outcomes.ends = never
    store.imagine(make(), torch.zeros(10, 3), horizon)
    assert len(store.imagined) == 10 * steps
