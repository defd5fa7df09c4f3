"""Learning from recorded data, then online: what counts as a step, the rows of batches, and what is added to them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_cases import StopAt, assert_same_run, stop_and_resume, tiny
from rl_training.config.train_config import TrainConfig
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.episode_replay import EpisodeReplayBuffer, Returns
from rl_training.data.offline_store import OfflineStore, find_returns, with_next_actions
from rl_training.errors import UserError
from rl_training.models.blocks import ObservationNorm
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.build import open_session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import predict_checkpoint, resume_training, train

ROWS = 60


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty random steps of Pendulum as three episodes: two are cut off, one terminates; every reward is 7."""
    dataset = load_transition_dataset("random", env_id="Pendulum-v1", size=ROWS, seed=1)
    ends = np.zeros((2, ROWS), bool)
    ends[0, 39] = ends[1, 19] = ends[1, 59] = True
    dataset = replace(dataset, rewards=np.full(ROWS, 7.0), terminated=ends[0], truncated=ends[1])
    return dataset.save_npz(tmp_path_factory.mktemp("data") / "recorded.npz")


def offline(output: Path, data: Path, algo: str = "iql", *, timesteps: int = 40, **given: Any) -> TrainConfig:
    """A tiny run on the data; with `offline_updates` None there are no environment steps."""
    fields = {name: given.pop(name) for name in ("num_envs", "execution_backend") if name in given}
    kwargs = {"dataset_kind": "npz", "dataset_path": str(data), "dataset_size": None, **given}
    return tiny(algo, output, total_timesteps=timesteps, eval_episodes=1, kwargs=kwargs, **fields)


class Batches(Callback):
    """Every batch that the learner is given, with the step at which it was."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, torch.Tensor]]] = []

    def on_start(self, run: Run) -> None:
        algorithm = run.session.algorithm
        update = algorithm.update

        def watched(batch: Any, *, global_step: int, **options: Any) -> Any:
            self.seen.append((global_step, dict(batch)))
            return update(batch, global_step=global_step, **options)

        algorithm.update = watched  # type: ignore[method-assign]


def evaluated_at(run_dir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run_dir / "metrics.jsonl") if row["kind"] == "eval"]


def test_on_data_alone_an_update_is_a_timestep_and_nothing_is_stepped(tmp_path: Path, recorded: Path) -> None:
    session = open_session(offline(tmp_path, recorded, offline_updates=None))
    assert not session.steps_environments
    assert session.engine is None
    assert "60 transitions of recorded data" in session.store.describe()
    session.close()
    batches = Batches()
    config = offline(tmp_path, recorded, timesteps=30, offline_updates=None, eval_interval=10)
    result = train(config, callbacks=[batches], console=False)
    assert result.metrics["global_step"] == result.metrics["updates"] == len(batches.seen) == 30
    assert all((batch["rewards"] == 7.0).all() for _, batch in batches.seen)
    assert evaluated_at(result.run_dir) == [10, 20, 30]


def test_before_the_first_step_updates_are_no_timesteps_and_then_batches_are_mixed(
    tmp_path: Path, recorded: Path
) -> None:
    batches = Batches()
    config = offline(
        tmp_path, recorded, timesteps=20, offline_updates=12, offline_batch_ratio=0.25, train_frequency=1,
        learning_starts=0, gradient_updates_per_step=2, eval_interval=10,
    )  # fmt: skip
    result = train(config, callbacks=[batches], console=False)
    assert [step for step, _ in batches.seen[:12]] == [0] * 12
    assert all((batch["rewards"] == 7.0).all() for _, batch in batches.seen[:12])
    assert [step for step, _ in batches.seen[12:]] == [step for step in range(1, 21) for _ in range(2)]
    assert all((batch["rewards"] == 7.0).sum() == 2 for _, batch in batches.seen[12:])  # of eight rows
    assert result.metrics["global_step"] == 20
    assert result.metrics["updates"] == 12 + 2 * 20
    assert evaluated_at(result.run_dir) == [0, 10, 20]  # the first one before the first step


@pytest.mark.parametrize("share", [{}, {"offline_updates": 0, "offline_batch_ratio": 0.0}])
def test_rewards_are_scaled_and_shifted_in_recorded_and_in_new_rows(
    share: dict[str, Any], tmp_path: Path, recorded: Path
) -> None:
    plain, changed = Batches(), Batches()
    common = {"learning_rate": 0.0, "train_frequency": 1, "learning_starts": 0, **share}
    for batches, kwargs in ((plain, {}), (changed, {"reward_scale": 10.0, "reward_shift": -5.0})):
        config = offline(tmp_path, recorded, timesteps=10, **common)
        config = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, **kwargs}})
        train(config, callbacks=[batches], console=False)
    for (_, one), (_, other) in zip(plain.seen, changed.seen, strict=True):
        torch.testing.assert_close(other["rewards"], 10.0 * one["rewards"] - 5.0)


def test_return_range_makes_the_recorded_returns_a_thousand_wide(tmp_path: Path, recorded: Path) -> None:
    varied = TransitionDataset.from_npz(recorded)
    varied = replace(varied, rewards=np.repeat([1.0, 2.0, 3.0], 20))  # returns 20, 40 and 60
    config = offline(tmp_path, varied.save_npz(tmp_path / "varied.npz"), reward_scale="return_range")
    session = open_session(config)
    store = session.store
    session.close()
    assert isinstance(store, OfflineStore)
    np.testing.assert_allclose(store.rows.rewards, varied.rewards * 1000.0 / 40.0)
    with pytest.raises(UserError, match="reward_scale is 'return_range', but all episodes of the data have the return"):
        open_session(offline(tmp_path, recorded, reward_scale="return_range"))


# ---- next actions -------------------------------------------------------------------------------------------------


def small(terminated: list[int], truncated: list[int], rows: int = 6) -> TransitionDataset:
    """Rows 0, 1, ... whose actions are ten times their number, and whose rewards are it."""
    number = np.arange(rows, dtype=np.float32)
    ends = [np.isin(np.arange(rows), where) for where in (terminated, truncated)]
    return TransitionDataset(number[:, None], 10 * number[:, None], number, number[:, None] + 1, *ends)


@pytest.mark.parametrize(
    ("terminated", "truncated", "kept"),
    [
        ([], [], [0, 1, 2, 3, 4]), ([5], [], [0, 1, 2, 3, 4, 5]), ([2], [5], [0, 1, 2, 3, 4]),
        ([5], [2], [0, 1, 3, 4, 5]),
    ],
)  # fmt: skip
def test_rows_after_which_nobody_acted_are_left_out(
    terminated: list[int], truncated: list[int], kept: list[int]
) -> None:
    rows, actions = with_next_actions(small(terminated, truncated))
    assert rows.obs[:, 0].tolist() == kept
    going = [row for row in kept if row not in terminated]
    assert [actions[kept.index(row), 0] for row in going] == [10 * (row + 1) for row in going]


def test_data_without_any_next_action_is_refused() -> None:
    with pytest.raises(UserError, match="cut off after one step; critic_bc_coef must be 0"):
        with_next_actions(small([], list(range(6))))


def test_rebrac_gets_the_next_actions_of_recorded_batches_and_none_of_mixed_ones(
    tmp_path: Path, recorded: Path
) -> None:
    batches = Batches()
    config = offline(tmp_path, recorded, "rebrac", offline_updates=5, train_frequency=1, learning_starts=0, timesteps=5)
    train(config, callbacks=[batches], console=False)
    source = TransitionDataset.from_npz(recorded)
    kept = np.delete(np.arange(ROWS), [19, 59])  # row 39 terminated
    for _, batch in batches.seen[:5]:
        rows = kept[batch["indices"].numpy()]
        np.testing.assert_array_equal(batch["obs"], source.obs[rows])
        going = rows != 39
        found = batch["next_actions"].numpy()[going]
        np.testing.assert_allclose(found, source.actions[rows[going] + 1] / 2, rtol=1e-5)  # torque in [-2, 2]
    assert not any("next_actions" in batch for _, batch in batches.seen[5:])
    assert len(batches.seen) == 10


# ---- returns --------------------------------------------------------------------------------------------------------


def test_returns_to_go_stop_at_both_kinds_of_ends() -> None:
    found = find_returns(small([1], [3]), Returns(gamma=0.5))
    np.testing.assert_allclose(found, [0.5, 1, 2 + 1.5, 3, 4 + 2.5, 5])


def test_returns_are_of_changed_rewards_and_a_failed_episode_fails_for_ever() -> None:
    returns = Returns(gamma=0.9, scale=10.0, shift=-5.0, failure=-5.0)
    np.testing.assert_allclose(returns.of(np.array([0.0, 0.0], np.float32)), [-50.0, -50.0])
    np.testing.assert_allclose(returns.of(np.array([0.0, 1.0], np.float32)), [-5.0 + 0.9 * 5.0, 5.0])


def fill(buffer: EpisodeReplayBuffer, steps: range, lengths: tuple[int, int] = (4, 3)) -> None:
    """Two environments with episodes of these lengths; an observation is its step, a reward 1 or 10."""
    for step in steps:
        ends = np.array([(step + 1) % length == 0 for length in lengths])
        obs, after = (np.full((2, 1), float(at)) for at in (step, step + 1))
        rewards, none = np.array([1.0, 10.0]), np.zeros(2, bool)
        buffer.add(obs, np.zeros((2, 1)), rewards, none, ends, after, final_obs=after)


def make_episodes(capacity: int = 40) -> EpisodeReplayBuffer:
    options: dict[str, Any] = {"obs_shape": (1,), "obs_dtype": "float32", "action_shape": (1,), "continuous": True}
    return EpisodeReplayBuffer(capacity, 2, returns=Returns(gamma=0.5), **options)


@pytest.mark.parametrize("capacity", [40, 12])  # without and with rows that were overwritten
def test_new_rows_are_sampled_with_their_returns_once_their_episode_has_ended(capacity: int) -> None:
    buffer, rng = make_episodes(capacity), np.random.default_rng(0)
    fill(buffer, range(3))
    assert buffer.complete.tolist() == [0, 3]
    fill(buffer, range(3, 14))
    kept = capacity // 2
    # episodes end after steps 3, 7 and 11 in the first environment, after 2, 5, 8 and 11 in the second one
    first = max(0, 14 - kept)
    assert buffer.complete.tolist() == [12 - first, 12 - first]
    batch = buffer.sample(2_000, rng)
    steps, rewards = batch["obs"][:, 0].numpy(), batch["rewards"].numpy()
    assert {(step, reward) for step, reward in zip(steps, rewards, strict=True)} == {
        (float(step), reward) for step in range(first, 12) for reward in (1.0, 10.0)
    }
    left = np.where(rewards == 1.0, 4 - steps % 4, 3 - steps % 3)  # steps to the end, this one included
    np.testing.assert_allclose(batch["returns_to_go"], rewards * 2.0 * (1.0 - 0.5**left), rtol=1e-6)


def test_an_episode_that_was_moved_ends_there() -> None:
    buffer = make_episodes()
    fill(buffer, range(2))
    fill(buffer, range(100, 101))
    assert buffer.complete.tolist() == [2, 2]
    rows = buffer.sample(100, np.random.default_rng(0))
    assert set(rows["returns_to_go"].tolist()) == {1.5, 1.0, 15.0, 10.0}


def test_a_copy_of_its_state_continues_the_same() -> None:
    one, other = make_episodes(12), make_episodes(12)
    fill(one, range(10))
    other.load_state_dict(one.state_dict())
    for buffer in (one, other):
        fill(buffer, range(10, 17))
    batches = [buffer.sample(50, np.random.default_rng(3)) for buffer in (one, other)]
    for name, value in batches[0].items():
        assert torch.equal(value, batches[1][name]), name


def test_cal_ql_gets_the_returns_of_recorded_and_of_new_rows(tmp_path: Path, recorded: Path) -> None:
    batches = Batches()
    config = offline(
        tmp_path, recorded, "cql", calibrated=True, offline_updates=3, train_frequency=1, learning_starts=0, gamma=0.5,
        timesteps=8,
    )  # fmt: skip
    config = config.model_copy(update={"env_kwargs": {"max_episode_steps": 5}})
    train(config, callbacks=[batches], console=False)
    shares = [int((batch["rewards"] == 7.0).sum()) for _, batch in batches.seen]
    assert shares == [8] * 3 + [8] * 4 + [4] * 4  # the first new episode is complete after five steps
    for _, batch in batches.seen:
        old = batch["rewards"] == 7.0
        left = 20 - batch["indices"][old] % 20
        torch.testing.assert_close(batch["returns_to_go"][old], 14.0 * (1.0 - 0.5**left).float())
    new = batches.seen[-1][1]
    assert (new["returns_to_go"][4:] < new["rewards"][4:] + 1e-6).all()  # Pendulum's rewards are negative


# ---- normalized observations ---------------------------------------------------------------------------------------


def test_the_policy_normalizes_by_the_recorded_data_for_good(tmp_path: Path, recorded: Path) -> None:
    config = offline(tmp_path, recorded, "td3_bc", timesteps=30, offline_updates=5)
    result = train(config, console=False)
    data = TransitionDataset.from_npz(recorded)
    actor = result.policy.algorithm.model.actor
    norm = actor.observation_input.norm
    np.testing.assert_allclose(norm.mean, data.obs.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm.var.sqrt(), data.obs.std(0), rtol=1e-4)
    obs = np.array([0.3, -0.9, 2.0], np.float32)
    scaled = (obs - data.obs.mean(0)) / (data.obs.std(0) + 1e-3)
    torch.testing.assert_close(norm(torch.from_numpy(obs)), torch.from_numpy(scaled), rtol=1e-4, atol=1e-5)
    by_hand = 2.0 * actor.network(torch.from_numpy(scaled)).detach().numpy()
    np.testing.assert_allclose(predict_checkpoint(result.checkpoint_path, obs), by_hand, rtol=1e-4, atol=1e-5)


def test_the_wrapper_that_normalizes_replaces_the_recorded_statistics(tmp_path: Path, recorded: Path) -> None:
    config = offline(tmp_path, recorded, "td3_bc", timesteps=12, normalize_states=True).model_copy(
        update={"env_kwargs": {"wrappers": {"normalize_observation": True}}}
    )
    session = open_session(config)
    norm = session.algorithm.acting().observation_input.norm  # type: ignore[union-attr]
    notes = " ".join(session.notes)
    session.close()
    assert type(norm) is ObservationNorm
    assert "normalize_states has no effect: env_kwargs.wrappers has normalize_observation" in notes


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "kwargs", "stops"),
    [
        ("td3_bc", {"offline_updates": None}, (15,)), ("iql", {"offline_updates": 10, "reward_scale": 0.1}, (9, 25)),
        ("cql", {"offline_updates": 4, "calibrated": True, "target_gap": 0.5}, (9, 25)),
    ],
)  # fmt: skip
def test_a_resumed_run_is_the_same(
    algo: str, kwargs: dict[str, Any], stops: tuple[int, ...], tmp_path: Path, recorded: Path
) -> None:
    config = offline(tmp_path, recorded, algo, train_frequency=1, learning_starts=0, **kwargs)
    config = config.model_copy(update={"env_kwargs": {"max_episode_steps": 5}})
    whole = train(config, console=False)
    assert_same_run(whole, stop_and_resume(config, *stops))


def test_a_run_on_data_alone_has_no_replay_to_save(tmp_path: Path, recorded: Path) -> None:
    config = offline(tmp_path, recorded, offline_updates=None).model_copy(update={"replay_in_checkpoint": False})
    stopped = train(config, callbacks=[StopAt(15)], console=False)
    assert "replay" not in load_checkpoint(stopped.checkpoint_path)["source"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = resume_training(stopped.checkpoint_path, console=False)
    assert resumed.metrics["global_step"] == 40


def test_a_run_stopped_before_its_first_step_resumes_there(tmp_path: Path, recorded: Path) -> None:
    config = offline(tmp_path, recorded, offline_updates=10, timesteps=8)
    whole = train(config, console=False)
    early = config.model_copy(update={"algo_kwargs": {**config.algo_kwargs, "max_updates": 6}})
    stopped = train(early, console=False)
    assert (stopped.metrics["global_step"], stopped.metrics["updates"]) == (0, 6)
    again = resume_training(stopped.checkpoint_path, console=False, changes={"algo_kwargs": {"max_updates": None}})
    assert again.metrics["updates"] == whole.metrics["updates"]
    for one, other in zip(*(run.policy.algorithm.parameters() for run in (whole, again)), strict=True):
        assert torch.equal(one, other)


def test_other_data_is_refused(tmp_path: Path, recorded: Path) -> None:
    data = Path(tmp_path / "mine.npz")
    data.write_bytes(recorded.read_bytes())
    stopped = train(offline(tmp_path, data), callbacks=[StopAt(10)], console=False)
    other = TransitionDataset.from_npz(data)
    replace(other, rewards=other.rewards + 1).save_npz(data)
    with pytest.raises(UserError, match="the recorded data is not what the checkpoint was trained with"):
        resume_training(stopped.checkpoint_path, console=False)


def test_what_only_steps_need_is_named_without_them(tmp_path: Path, recorded: Path) -> None:
    idle = {"buffer_capacity": 600, "gradient_updates_per_step": 2, "offline_batch_ratio": 0.1}
    config = offline(tmp_path, recorded, offline_updates=None, num_envs=3, execution_backend="local_async", **idle)
    session = open_session(config)
    session.close()
    notes = " ".join(session.notes)
    for name in (*idle, "num_envs", "execution_backend"):
        assert name in notes, name
    assert "offline_updates is null" in notes
