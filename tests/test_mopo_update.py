"""MOPO's mathematics: the penalty over all members, MBPO as a special case, and a lane without an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_cases import make_batch
from resume_cases import StopAt, assert_same, edit_checkpoint, stop_and_resume, take_steps, tiny
from rl_training.algorithms.mbpo import MBPO
from rl_training.algorithms.mopo import MOPO
from rl_training.config.networks import build_on_ensemble
from rl_training.data import load_transition_dataset
from rl_training.data.model_store import ModelDatasetStore
from rl_training.envs.engines import make_engine
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run import build as session_module
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train
from test_mbpo_update import by_hand, make


def test_penalty_is_the_largest_norm_of_deviations_over_all_members_in_the_environments_units() -> None:
    learner, batch = make(MOPO, num_ensembles=3, num_elites=1, penalty_coef=2.0), make_batch()
    deviations = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 0.0, 4.0, 0.0], [1.0, 1.0, 1.0, 1.0]]).clamp(min=1e-6)
    by_hand(learner.dynamics_model, torch.zeros(3, 4), 2 * deviations.log())
    assert learner.elites.tolist() == [0]  # the second member is no elite, and decides
    torch.testing.assert_close(learner.uncertainty(batch["obs"], batch["actions"]), torch.full((8,), 5.0))
    rewards = learner.imagined_rewards(torch.arange(8.0), batch["obs"], batch["actions"])
    torch.testing.assert_close(rewards, torch.arange(8.0) - 10.0)
    learner.dynamics_model.target_std.copy_(torch.tensor([4.0, 1.0, 0.5, 1.0]))  # rewards are four times as wide
    expected = max((4**2 + 2**2 + 1**2) ** 0.5, (12**2 + 2**2) ** 0.5, (4**2 + 1 + 0.5**2 + 1) ** 0.5)
    torch.testing.assert_close(learner.uncertainty(batch["obs"], batch["actions"]), torch.full((8,), expected))


def test_the_penalty_lowers_imagined_rewards_and_nothing_else() -> None:
    steps = [make(MOPO, penalty_coef=coef).imagine(make_batch(50)["obs"]) for coef in (0.0, 0.5)]
    for name in ("obs", "actions", "next_obs", "terminated"):
        assert torch.equal(steps[0][name], steps[1][name])
    learner = make(MOPO)
    penalty = learner.uncertainty(steps[0]["obs"], steps[0]["actions"])
    torch.testing.assert_close(steps[1]["rewards"], steps[0]["rewards"] - 0.5 * penalty)
    assert (penalty > 0).all()


def run_lane(algorithm: MBPO, store: Any, turns: int) -> list[dict[str, float]]:
    """The loop without a run: the metrics of every update."""
    metrics = []
    for step in range(turns):
        for phase, batch in store.batches(algorithm, step + 1):
            result = algorithm.update(batch, phase=phase)
            store.feedback(batch, result)
            metrics.append({name.replace("mbpo", "mopo"): value for name, value in result.metrics.items()})
    return metrics


def test_coefficient_zero_is_offline_mbpo_to_the_bit(tmp_path: Path) -> None:
    runs = {}
    for coef in (0.0, 1.0):
        session = open_session(tiny("mopo", tmp_path, kwargs={"penalty_coef": coef}))
        runs[coef] = run_lane(session.algorithm, session.store, 30), dict(session.algorithm.state_dict())  # type: ignore[arg-type]
        session.close()
    session = open_session(tiny("mopo", tmp_path, kwargs={"penalty_coef": 0.0}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        mbpo = build_on_ensemble(MBPO, session.params, session.spaces)
    mbpo.seed(3)
    found = run_lane(mbpo, session.store, 30), dict(mbpo.state_dict())
    session.close()
    assert_same(found, runs[0.0])
    assert found[0] != runs[1.0][0]


def test_one_policy_update_is_one_timestep_and_no_environment_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("training environments were made")

    monkeypatch.setattr("rl_training.run.build.make_engine", never)
    result = train(tiny("mopo", tmp_path, total_timesteps=50, eval_episodes=0), console=False)
    assert result.metrics["global_step"] == 50
    assert result.metrics["updates"] == 50 + result.metrics["model_fit_updates"]
    assert result.metrics["model_fit_updates"] == 6
    assert {"mopo_model_loss", "reward_mae", "delta_obs_mae", "ensemble_disagreement"} <= set(result.metrics)


def test_the_model_is_fitted_once_and_rollouts_are_refreshed(tmp_path: Path) -> None:
    session = open_session(
        tiny("mopo", tmp_path, kwargs={"rollout_refresh_interval": 10, "synthetic_buffer_capacity": 999})
    )
    store: Any = session.store
    assert isinstance(store, ModelDatasetStore)
    phases, sizes = [], []
    for step in range(35):
        take_steps(session, step)
        for phase, batch in store.batches(session.algorithm, step + 1):
            phases.append(phase)
            store.feedback(batch, session.algorithm.update(batch, phase=phase))
        sizes.append(len(store.imagined))
    session.close()
    assert phases == ["model"] * 6 + ["policy"] * 35
    assert [step for step in range(1, 35) if sizes[step] != sizes[step - 1]] == [10, 20, 30]


def test_without_a_dataset_it_refuses_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mopo learns from recorded data alone; set dataset_kind to npz"):
        train(tiny("mopo", tmp_path, kwargs={"dataset_kind": None}), console=False)
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_made_closes_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def make_watched(*arguments: Any, **options: Any) -> Any:
        engine = make_engine(*arguments, **options)
        monkeypatch.setattr(engine, "close", lambda: closed.append(engine))
        return engine

    monkeypatch.setattr(session_module, "make_engine", make_watched)
    with pytest.raises(UserError, match=r"dataset_path is nowhere[.]npz, which does not exist"):
        train(tiny("rlpd", tmp_path, kwargs={"dataset_kind": "npz", "dataset_path": "nowhere.npz"}), console=False)
    assert len(closed) == 1


def test_other_data_is_refused_on_resume(tmp_path: Path) -> None:
    paths = [
        load_transition_dataset("random", env_id="Pendulum-v1", size=40, seed=seed).save_npz(tmp_path / f"{seed}.npz")
        for seed in (0, 1)
    ]
    data = {"dataset_kind": "npz", "dataset_path": str(paths[0]), "dataset_size": None}
    halfway = train(tiny("mopo", tmp_path, eval_episodes=0, kwargs=data), callbacks=[StopAt(9)], console=False)
    changed = edit_checkpoint(
        halfway.checkpoint_path, tmp_path / "changed.ckpt",
        lambda tree: tree["config"]["algo_kwargs"].update(dataset_path=str(paths[1])),
    )  # fmt: skip
    with pytest.raises(UserError, match="not what the checkpoint was trained with"):
        resume_training(changed, console=False)


def test_a_checkpoint_without_imagined_transitions_makes_them_again(tmp_path: Path) -> None:
    config = tiny("mopo", tmp_path, eval_episodes=0, replay_in_checkpoint=False)
    halfway = train(config, callbacks=[StopAt(64)], console=False)
    assert "replay" not in load_checkpoint(halfway.checkpoint_path)["source"]
    resumed = resume_training(halfway.checkpoint_path, console=False)
    assert resumed.metrics["global_step"] == 128
    assert resumed.metrics["updates"] == 128 + 6  # the model was not fitted again


def test_stopping_again_and_again_loses_nothing(tmp_path: Path) -> None:
    config = tiny("mopo", tmp_path, env_id="env_zoo:BoxActions", total_timesteps=40, log_interval=3)
    straight, resumed = train(config, console=False), stop_and_resume(config, 1, 8, 25)
    for part in ("algorithm", "source"):
        assert_same(*(load_checkpoint(run.checkpoint_path)[part] for run in (straight, resumed)), part)


def test_rollouts_start_at_rows_drawn_from_the_whole_dataset(tmp_path: Path) -> None:
    session = open_session(tiny("mopo", tmp_path, kwargs={"rollout_refresh_interval": 1}))
    store: Any = session.store
    index = {tuple(row): number for number, row in enumerate(store.dataset.obs.tolist())}
    starts: list[list[int]] = []
    imagine = store.imagine

    def watched(learner: MBPO, states: torch.Tensor, horizon: float) -> None:
        starts.append([index[tuple(state)] for state in states.tolist()])
        imagine(learner, states, horizon)

    store.imagine, store.fitted = watched, True
    for step in range(20):
        list(store.batches(session.algorithm, step))
    session.close()
    assert [len(rows) for rows in starts] == [20] * 20
    assert len({tuple(rows) for rows in starts}) == 20  # another draw every time
    counts = np.bincount(np.concatenate(starts), minlength=64)
    assert (counts > 0).sum() > 50  # six draws per row on average
    assert counts.max() < 20
