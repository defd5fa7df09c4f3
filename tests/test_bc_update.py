"""BC's mathematics, its data, and what it reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import env_zoo
from resume_cases import StopAt, tiny
from rl_training.algorithms.bc import BC, bc_loss
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.recorded_store import DatasetStore
from rl_training.errors import UserError
from rl_training.record.metrics_file import read_metrics
from rl_training.run.build import open_session
from rl_training.run.workflows import resume_training, train
from rollout_cases import KINDS, OBS_DIM, PLAIN_STEP, by_torch_distributions, gradient_of, make_policy, weights_of


def recorded(kind: str, rows: int = 12, seed: int = 5) -> dict[str, torch.Tensor]:
    """Observations, and actions of no policy in particular."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, OBS_DIM, generator=generator)
    if kind == "continuous":
        return {"obs": obs, "actions": torch.rand(rows, len(KINDS[kind]), generator=generator) * 2 - 1}
    columns = [torch.randint(size, (rows,), generator=generator) for size in KINDS[kind]]
    return {"obs": obs, "actions": columns[0] if kind == "discrete" else torch.stack(columns, -1)}


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multi_discrete"])
def test_a_step_descends_the_negative_log_likelihood(kind: str) -> None:
    policy, batch = make_policy(kind), recorded(kind)
    learner = BC(policy=policy, ent_coef=0.1, **PLAIN_STEP)
    logprobs, entropy, _ = by_torch_distributions(policy, batch["obs"], batch["actions"])
    loss = -logprobs.mean() - 0.1 * entropy.mean()
    before, gradient = weights_of(policy), gradient_of(loss, policy)
    result = learner.update(batch)
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(weights_of(policy), before - gradient, rtol=1e-4, atol=1e-6)  # the critic's is 0


def test_loss_is_the_mean_and_the_entropy_lowers_it() -> None:
    terms = {"logprobs": torch.tensor([-1.0, -3.0]), "entropy": torch.tensor([0.5, 1.5])}
    assert bc_loss(terms)["loss"] == 2.0
    assert bc_loss(terms, ent_coef=0.5)["loss"] == 1.5


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
def test_accuracy_is_the_share_of_whole_actions_that_the_policy_would_choose(kind: str) -> None:
    learner, batch = BC(policy=make_policy(kind), learning_rate=0.0), recorded(kind, rows=8)
    with torch.no_grad():
        batch["actions"] = learner.policy.distribution(batch["obs"]).mode()  # type: ignore[operator]
    assert learner.update(batch).metrics["accuracy"] == 1.0
    batch["actions"] = batch["actions"].clone()
    wrong = batch["actions"][:2] if kind == "discrete" else batch["actions"][:2, 0]  # one factor of two actions
    wrong.copy_(1 - wrong.clamp(max=1))
    assert learner.update(batch).metrics["accuracy"] == 0.75


def test_it_learns_a_rule_and_says_how_well() -> None:
    torch.manual_seed(0)
    for kind, metric in (("discrete", "accuracy"), ("continuous", "mse")):
        learner = BC(policy=make_policy(kind), learning_rate=0.05)
        learner.seed(0)
        batch = recorded(kind, rows=64)
        batch["actions"] = (batch["obs"][:, 0] > 0).long() if kind == "discrete" else 0.5 * batch["obs"][:, :1]
        first = learner.update(batch).metrics
        for _ in range(300):
            last = learner.update(batch).metrics
        assert last["loss"] < first["loss"] - 0.5
        assert last[metric] > 0.95 if metric == "accuracy" else last[metric] < 0.05 * first[metric]


def test_the_heldout_loss_is_that_of_the_heldout_rows_and_moves_nothing() -> None:
    batch, other = recorded("discrete"), recorded("discrete", seed=6)
    held = {"heldout_obs": other["obs"], "heldout_actions": other["actions"]}
    one, two = (BC(policy=make_policy(), **PLAIN_STEP) for _ in range(2))
    expected = BC(policy=make_policy(), **PLAIN_STEP).update(other).metrics["loss"]
    assert one.update({**batch, **held}).metrics["heldout_loss"] == pytest.approx(expected)
    assert two.update(batch).metrics["heldout_loss"] == two.heldout_loss.item()
    torch.testing.assert_close(weights_of(one), weights_of(two), rtol=0, atol=0)
    assert one.update(batch).metrics["heldout_loss"] == pytest.approx(expected)  # as it was when last computed


# ---- the lane --------------------------------------------------------------------------------------------------------


def bc(folder: Path, **kwargs: Any) -> Any:
    return tiny("bc", folder, total_timesteps=20, eval_episodes=0, kwargs=kwargs)


def test_an_update_is_a_timestep_and_the_environment_is_never_stepped(tmp_path: Path) -> None:
    config = tiny("bc", tmp_path, env_id="env_zoo:CountsSteps", total_timesteps=20, eval_episodes=0)
    made = env_zoo.CountsSteps.steps
    result = train(config, console=False)
    assert result.metrics["global_step"] == result.metrics["updates"] == 20
    assert env_zoo.CountsSteps.steps - made == 64  # those of the random data
    rows = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert len({row["heldout_loss"] for row in rows}) == 4  # every 5 updates


def test_whole_episodes_are_held_out_and_continuous_actions_are_scaled(tmp_path: Path) -> None:
    kwargs = {"dataset_kind": "npz", "dataset_path": "pendulum_expert.npz", "dataset_size": None}
    config = tiny("bc", tmp_path, env_id="Pendulum-v1", kwargs=kwargs)
    session = open_session(config)
    store = session.store
    session.close()
    assert isinstance(store, DatasetStore)
    assert (len(store.training), len(store.heldout)) == (1800, 200)
    assert store.heldout.truncated.sum() == 1
    stored = load_transition_dataset("npz", path="pendulum_expert.npz")
    np.testing.assert_allclose(store.dataset.actions, stored.actions / 2.0, rtol=1e-6)  # torque in [-2, 2]


@pytest.mark.parametrize("most", [1024, 4])
def test_a_look_at_held_out_data_sees_all_of_it_or_as_much_as_it_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("rl_training.data.recorded_store.MOST_HELDOUT", most)
    session = open_session(bc(tmp_path, dataset_size=200))
    store = session.store
    session.close()
    assert isinstance(store, DatasetStore)
    held, training = ({tuple(row) for row in side.obs.tolist()} for side in (store.heldout, store.training))
    assert not held & training
    assert len(held) > 4
    looks = []
    for update in range(10):
        ((_, batch),) = store.batches(session.algorithm, update)
        assert {tuple(row) for row in batch["obs"].tolist()} <= training
        if update % 5 == 0:
            looks.append(batch["heldout_obs"])
        assert ("heldout_obs" in batch) == (update % 5 == 0)
    for look in looks:
        assert len(look) == min(most, len(store.heldout))
        assert {tuple(row) for row in look.tolist()} <= held
    if most == 1024:
        assert np.array_equal(looks[0].numpy(), store.heldout.obs)


def test_a_look_does_not_change_which_rows_are_drawn_after_it(tmp_path: Path) -> None:
    """The batches of recorded runs come from a generator that draws for every look."""
    session = open_session(bc(tmp_path, dataset_size=200))
    store: Any = session.store
    session.close()
    rng, count = np.random.default_rng(np.random.SeedSequence([3, 1])), len(store.heldout)
    for update in range(7):
        expected = store.training.obs[rng.integers(0, len(store.training), 8)]
        if update % 5 == 0:
            rng.integers(0, count, count)
        ((_, batch),) = store.batches(session.algorithm, update)
        np.testing.assert_array_equal(batch["obs"].numpy(), expected)


def test_choices_are_not_read_as_real_numbers(tmp_path: Path) -> None:
    choices = load_transition_dataset("random", size=40, make_env=env_zoo.Walk).save_npz(tmp_path / "walk.npz")
    kwargs = {"dataset_kind": "npz", "dataset_path": str(choices), "dataset_size": None}
    with pytest.raises(UserError, match=r"ScalarActions: actions are int64, but .*Box.* wants real numbers"):
        open_session(tiny("bc", tmp_path, env_id="env_zoo:ScalarActions", kwargs=kwargs))


def test_data_of_another_version_is_taken_and_named(tmp_path: Path) -> None:
    kwargs = {"dataset_kind": "npz", "dataset_path": "cartpole_expert.npz", "dataset_size": None}
    session = open_session(tiny("bc", tmp_path, env_id="CartPole-v0", kwargs=kwargs))
    store = session.store
    session.close()
    assert store.describe().endswith("from cartpole_expert.npz (note: recorded in CartPole-v1, not in CartPole-v0)")
    session = open_session(bc(tmp_path))
    store = session.store
    session.close()
    assert store.describe().endswith("from random play")


def test_a_packaged_set_is_found_from_any_folder_and_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, episodes in (("pendulum_expert.npz", 10), ("cartpole_expert.npz", 10)):
        packaged = load_transition_dataset("npz", path=name)
        assert len(packaged.episode_ends) == packaged.truncated.sum() == episodes  # and none is open or terminated
    packaged.take(slice(7)).save_npz("cartpole_expert.npz")
    assert len(load_transition_dataset("npz", path="cartpole_expert.npz")) == 7
    with pytest.raises(UserError, match=r"absent\.npz does not exist"):
        load_transition_dataset("npz", path="absent.npz")


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=40)
    path = dataset.save_npz(tmp_path / "rows.npz")
    config = bc(tmp_path, dataset_kind="npz", dataset_path=str(path), dataset_size=None)
    stopped = train(config, callbacks=[StopAt(9)], console=False)
    TransitionDataset(**replace(dataset, actions=1 - dataset.actions).arrays()).save_npz(path)
    with pytest.raises(UserError, match="recorded data is not what the checkpoint was trained with"):
        resume_training(stopped.checkpoint_path, console=False)
