"""Prior data in RLPD's replay: its share of every batch, pretraining, each kind of data, and exact resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gs
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from resume_cases import StopAt, assert_same_run, edit_checkpoint, stop_and_resume, take_steps, tiny
from rl_training.config.replay_params import DatasetKind, DatasetParams
from rl_training.config.train_config import TrainConfig
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.loading import write_minari
from rl_training.data.recorded_store import PriorReplayStore, find_dataset
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.build import open_session
from rl_training.run.evaluation import read_replay_buffer
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import predict_checkpoint, resume_training, train

MARK = 777.0  # a reward that Pendulum never gives


class WeakPendulum(PendulumEnv):
    """Pendulum with half the torque: other actions, of the same shape."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.action_space = gs.Box(-1.0, 1.0, (1,), np.float32)


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps of Pendulum whose rewards tell them from every other step."""
    dataset = load_transition_dataset("random", env_id="Pendulum-v1", size=40, seed=1)
    marked = replace(dataset, rewards=np.full(40, MARK))
    return marked.save_npz(tmp_path_factory.mktemp("prior") / "prior.npz")


@pytest.fixture(scope="module")
def sac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny SAC, with its replay buffer."""
    config = tiny("sac", tmp_path_factory.mktemp("sac"), total_timesteps=48, eval_episodes=0)
    return train(config, console=False).checkpoint_path


def rlpd(output: Path, prior: Path | None = None, *, timesteps: int = 40, **kwargs: Any) -> TrainConfig:
    """A tiny RLPD run, on a file of prior data where one is given."""
    data = {} if prior is None else {"dataset_kind": "npz", "dataset_path": str(prior), "dataset_size": None}
    return tiny("rlpd", output, total_timesteps=timesteps, eval_episodes=0, kwargs=data | kwargs)


class Batches(Callback):
    """Counts the marked rows of every batch that the learner is given, with the step at which it was."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []  # step, prior rows, all rows

    def on_start(self, run: Run) -> None:
        algorithm = run.session.algorithm
        update = algorithm.update

        def watched(batch: Any, *, global_step: int, **options: Any) -> Any:
            prior_rows = int((batch["rewards"] == MARK).sum())
            self.seen.append((global_step, prior_rows, len(batch["rewards"])))
            return update(batch, global_step=global_step, **options)

        algorithm.update = watched  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ratio", "size", "share"), [(0.5, 8, 4), (0.35, 8, 3), (0.0, 8, 0), (1.0, 8, 8), (0.3, 10, 3)]
)
def test_every_batch_has_exactly_the_configured_share(
    tmp_path: Path, prior: Path, ratio: float, size: int, share: int
) -> None:
    batches = Batches()
    config = rlpd(tmp_path, prior, offline_batch_ratio=ratio, batch_size=size, offline_pretrain_updates=0)
    result = train(config, callbacks=[batches], console=False)
    assert len(batches.seen) == result.metrics["updates"] > 3
    assert {(rows, total) for _, rows, total in batches.seen} == {(share, size)}
    assert (result.metrics["offline_batch_size"], result.metrics["online_batch_size"]) == (share, size - share)


def test_prior_rows_come_first_and_are_as_the_policy_sees_them(tmp_path: Path, prior: Path) -> None:
    session = open_session(rlpd(tmp_path, prior, offline_pretrain_updates=0))
    store = session.store
    assert isinstance(store, PriorReplayStore)
    for step in range(0, 20, 4):
        take_steps(session, step)
    batch = store.sample()
    session.close()
    assert (batch["rewards"][:4] == MARK).all()
    assert (batch["rewards"][4:] != MARK).all()
    stored = TransitionDataset.from_npz(prior)
    rows = batch["indices"][:4].numpy()
    np.testing.assert_allclose(batch["actions"][:4].numpy(), stored.actions[rows] / 2.0, rtol=1e-6)  # torque in [-2, 2]
    np.testing.assert_array_equal(batch["obs"][:4].numpy(), stored.obs[rows])
    assert {tensor.shape[0] for tensor in batch.values()} == {8}


def test_pretraining_takes_no_steps_and_is_counted(tmp_path: Path, prior: Path) -> None:
    batches = Batches()
    config = rlpd(tmp_path, prior, timesteps=32, offline_pretrain_updates=5, gradient_updates_per_step=2)
    result = train(config, callbacks=[batches], console=False)
    assert batches.seen[:5] == [(0, 8, 8)] * 5  # step 0, prior data alone
    assert all(step > 16 and rows == 4 for step, rows, _ in batches.seen[5:])
    assert result.metrics["pretrain_updates_done"] == 5
    assert result.metrics["global_step"] == 32
    assert result.metrics["updates"] == 5 + 2 * (32 - 16) // 4
    assert len(load_checkpoint(result.checkpoint_path)["source"]["replay"]["arrays"]["rewards"]) == 33
    first = next(iter(read_metrics(result.run_dir / "metrics.jsonl")))
    assert first["offline_batch_size"] == first["online_batch_size"] == 4


def test_no_prior_data_is_read_where_none_is_used(tmp_path: Path) -> None:
    config = rlpd(tmp_path, tmp_path / "absent.npz", offline_batch_ratio=0.0, offline_pretrain_updates=0)
    session = open_session(config)
    store = session.store
    session.close()
    assert isinstance(store, PriorReplayStore)
    assert store.dataset is None
    with pytest.raises(UserError, match=r"^dataset_path is .*absent\.npz, which does not exist"):
        open_session(rlpd(tmp_path, tmp_path / "absent.npz"))


def test_a_run_trains_on_each_kind_of_data(
    tmp_path: Path, prior: Path, sac: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_minari(TransitionDataset.from_npz(prior), "pendulum/prior-v0", env_id="Pendulum-v1")
    kinds: dict[str, dict[str, Any]] = {
        "random": {"dataset_size": 30, "dataset_seed": 5},
        "npz": {"dataset_path": str(prior), "dataset_size": 20},
        "minari": {"dataset_id": "pendulum/prior-v0", "dataset_size": None},
        "checkpoint": {"dataset_path": str(sac), "dataset_size": None},
    }
    rows = {"random": 30, "npz": 20, "minari": 40, "checkpoint": 48}
    for kind, options in kinds.items():
        config = rlpd(tmp_path / kind, dataset_kind=kind, **options)
        session = open_session(config)
        store = session.store
        session.close()
        assert isinstance(store, PriorReplayStore)
        assert store.dataset is not None
        assert len(store.dataset) == rows[kind]
        assert np.abs(store.dataset.actions).max() <= 1.0
        result = train(config, console=False)
        stored = load_checkpoint(result.checkpoint_path)["source"]["dataset_sha256"]
        assert stored == store.dataset.sha256
        assert result.metrics["updates"] > 3


def test_a_checkpoints_replay_and_the_file_collected_of_it_are_the_same_prior_data(tmp_path: Path) -> None:
    sac = train(tiny("sac", tmp_path, total_timesteps=48, eval_episodes=0, num_envs=2), console=False)
    path = read_replay_buffer(sac.checkpoint_path).save_npz(tmp_path / "replay.npz")
    sessions = [
        open_session(rlpd(tmp_path, path)),
        open_session(rlpd(tmp_path, dataset_kind="checkpoint", dataset_path=str(sac.checkpoint_path))),
    ]
    first, second = (session.store.dataset for session in sessions)  # type: ignore[attr-defined]
    for session in sessions:
        session.close()
    for name, array in second.arrays().items():
        np.testing.assert_allclose(first.arrays()[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_prior_data_of_a_checkpoint_leaves_the_runs_own_files_alone(tmp_path: Path, sac: Path) -> None:
    folder = tmp_path / "mapped"

    def point(tree: dict[str, Any]) -> None:
        tree["config"]["algo_kwargs"]["replay_folder"] = str(folder)

    path = edit_checkpoint(sac, tmp_path / "mapped.ckpt", point)
    open_session(rlpd(tmp_path, dataset_kind="checkpoint", dataset_path=str(path))).close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["random", "npz"])
def test_observations_that_are_numbers_fit_as_they_are_recorded(tmp_path: Path, kind: DatasetKind) -> None:
    name = "env_zoo:DiscreteObservation"
    recipe = read_recipe(name, {"action": "continuous"}, env=name)
    rows = load_transition_dataset("random", size=20, make_env=lambda: make_env(recipe))
    path = rows.save_npz(tmp_path / "rows.npz")
    params = DatasetParams(dataset_kind=kind, dataset_path=str(path) if kind == "npz" else None, dataset_size=20)
    dataset = find_dataset(params, recipe, probe_spaces(recipe))
    assert dataset.obs.shape == (20, 50)
    assert (dataset.obs.sum(axis=1) == 1).all()
    np.testing.assert_allclose(dataset.actions, rows.actions / 2.0, rtol=1e-5, atol=1e-6)  # actions in [-2, 2]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tree: tree.pop("source"), "is not a training checkpoint: it has no source"),
        (lambda tree: tree.update(source=[1]), "its source is not a mapping"),
        (lambda tree: tree.update(schema=-1), "has the schema -1"),
        (lambda tree: tree["source"]["replay"].pop("heads"), "its replay buffer cannot be read"),
        (lambda tree: tree["spaces"].update(obs_shape=[7]), "its spaces do not fit together"),
        (lambda tree: tree["config"].update(algo="ppo", algo_kwargs={}), "is a checkpoint of ppo, which has no replay"),
    ],
)
def test_a_foreign_or_damaged_checkpoint_is_refused(tmp_path: Path, sac: Path, edit: Any, said: str) -> None:
    path = edit_checkpoint(sac, tmp_path / "edited.ckpt", edit)
    with pytest.raises(UserError, match=said):
        open_session(rlpd(tmp_path, dataset_kind="checkpoint", dataset_path=str(path)))


def test_data_that_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    cartpole = load_transition_dataset("random", env_id="CartPole-v1", size=10).save_npz(tmp_path / "cartpole.npz")
    with pytest.raises(UserError, match="does not fit Pendulum-v1: obs has rows of shape"):
        open_session(rlpd(tmp_path, cartpole))
    dqn = train(tiny("dqn", tmp_path, total_timesteps=20, eval_episodes=0), console=False)
    with pytest.raises(UserError, match="was made in CartPole-v1, whose spaces are not those of Pendulum-v1"):
        open_session(rlpd(tmp_path, dataset_kind="checkpoint", dataset_path=str(dqn.checkpoint_path)))
    without = edit_checkpoint(dqn.checkpoint_path, tmp_path / "without.ckpt", lambda tree: tree["source"].pop("replay"))
    with pytest.raises(UserError, match="holds no replay buffer"):
        open_session(rlpd(tmp_path, dataset_kind="checkpoint", dataset_path=str(without)))
    with pytest.raises(UserError, match="needs dataset_path"):
        open_session(rlpd(tmp_path, dataset_kind="checkpoint"))
    with pytest.raises(UserError, match="n_step is 3"):
        open_session(rlpd(tmp_path, n_step=3))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (
            {"dataset_path": "absent.npz"},
            "dataset_path is 'absent.npz', but dataset_kind is 'random'.*set dataset_kind",
        ),
        ({"dataset_id": "x/y-v0"}, "dataset_id is 'x/y-v0', but dataset_kind is 'random'.*set dataset_kind to minari"),
        ({"dataset_kind": "npz", "dataset_path": "a", "dataset_id": "b"}, "dataset_id is 'b', but dataset_kind is"),
        ({"dataset_kind": "checkpoint", "dataset_path": "absent.ckpt"}, "dataset_path is absent.ckpt, which does not"),
    ],
)
@pytest.mark.parametrize("algo", ["bc", "rlpd", "mopo"])
def test_data_that_is_named_but_not_read_or_not_there_is_refused(
    tmp_path: Path, algo: str, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        open_session(tiny(algo, tmp_path, kwargs=kwargs))


def test_a_finished_run_that_names_data_it_did_not_read_still_predicts(tmp_path: Path) -> None:
    result = train(tiny("bc", tmp_path, total_timesteps=2, eval_episodes=0), console=False)
    path = edit_checkpoint(
        result.checkpoint_path, tmp_path / "old.ckpt", lambda t: t["config"]["algo_kwargs"].update(dataset_path="x.npz")
    )
    assert predict_checkpoint(path, np.zeros(4)) == predict_checkpoint(result.checkpoint_path, np.zeros(4))
    with pytest.raises(UserError, match=r"dataset_path is 'x\.npz', but dataset_kind is 'random'"):
        resume_training(path, console=False)


def test_the_start_says_where_the_data_comes_from(tmp_path: Path, prior: Path, sac: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "from random play": {"dataset_kind": "random"},
        f"from {prior}": {"dataset_kind": "npz", "dataset_path": str(prior), "dataset_size": None},
        f"from the replay in {sac}": {"dataset_kind": "checkpoint", "dataset_path": str(sac), "dataset_size": None},
    }
    for said, kwargs in kinds.items():
        session = open_session(rlpd(tmp_path, **kwargs))
        store = session.store
        session.close()
        assert store.describe().endswith(said)
    elsewhere = tiny("rlpd", tmp_path, env_id=f"{__name__}:WeakPendulum", kwargs=kinds["from random play"])
    session = open_session(elsewhere)
    store = session.store
    session.close()
    assert "note" not in store.describe()


def test_data_of_another_environment_with_the_same_shapes(tmp_path: Path, sac: Path) -> None:
    weak: dict[str, Any] = {"env_id": f"{__name__}:WeakPendulum", "total_timesteps": 8}
    replay = {"dataset_kind": "checkpoint", "dataset_path": str(sac), "dataset_size": None}
    with pytest.raises(UserError, match=r"Pendulum-v1, .*: its action_space is Box\(-2.0.*here it is Box\(-1.0"):
        open_session(tiny("rlpd", tmp_path, kwargs=replay, **weak))
    small = load_transition_dataset("random", env_id="Pendulum-v1", size=40)
    path = replace(small, actions=small.actions / 4.0).save_npz(tmp_path / "small.npz")
    session = open_session(
        tiny("rlpd", tmp_path, kwargs={"dataset_kind": "npz", "dataset_path": str(path), "dataset_size": None}, **weak)
    )
    store = session.store
    session.close()
    assert f"(note: recorded in Pendulum-v1, not in {__name__}:WeakPendulum)" in store.describe()


def test_a_relative_path_is_stored_so_that_the_run_resumes_from_another_folder(
    tmp_path: Path, prior: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prior.parent)
    stopped = train(rlpd(tmp_path, Path(prior.name)), callbacks=[StopAt(24)], console=False)
    stored = load_checkpoint(stopped.checkpoint_path)["config"]["algo_kwargs"]["dataset_path"]
    assert stored == str(prior)
    monkeypatch.chdir(tmp_path)
    assert resume_training(stopped.checkpoint_path, console=False).metrics["global_step"] == 40
    packaged = open_session(rlpd(tmp_path, Path("pendulum_half_trained.npz")))
    packaged.close()
    assert packaged.config.algo_kwargs["dataset_path"] == "pendulum_half_trained.npz"


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prior.npz"
    dataset = load_transition_dataset("random", env_id="Pendulum-v1", size=40, seed=1)
    dataset.save_npz(path)
    stopped = train(rlpd(tmp_path, path), callbacks=[StopAt(24)], console=False)
    replace(dataset, rewards=dataset.rewards + np.float32(1e-3)).save_npz(path)
    with pytest.raises(UserError, match=r"prior data is not what the checkpoint was trained with \(its hash differs\)"):
        resume_training(stopped.checkpoint_path, console=False)
    dataset.save_npz(path, compress=False)  # another file with the same data
    assert resume_training(stopped.checkpoint_path, console=False).metrics["global_step"] == 40


@pytest.mark.parametrize("stop", [0, 24])  # while pretraining, and after it
def test_a_resumed_run_with_prior_data_is_the_run_that_never_stopped(tmp_path: Path, prior: Path, stop: int) -> None:
    config = rlpd(tmp_path, prior, offline_pretrain_updates=4)
    straight = train(config, console=False)
    assert_same_run(straight, stop_and_resume(config, stop))
