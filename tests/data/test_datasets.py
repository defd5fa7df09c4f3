"""`TransitionDataset`: npz, Minari, random and replay data, and what is said about data that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.data import (
    ReplayBuffer,
    TransitionDataset,
    export_random_transition_dataset,
    load_transition_dataset,
)
from rl_training.data.loading import _random_action, read_minari, write_minari
from rl_training.errors import UserError


def episodes(lengths: tuple[int, ...] = (3, 4, 2), *, open_end: bool = False, **extra: Any) -> TransitionDataset:
    """Episodes of a counter; they end by termination and truncation in turn."""
    total = sum(lengths)
    ends = np.cumsum(lengths) - 1
    terminated, truncated = np.zeros(total, bool), np.zeros(total, bool)
    terminated[ends[::2]], truncated[ends[1::2]] = True, True
    if open_end:
        terminated[-1] = truncated[-1] = False
    obs = np.concatenate([np.arange(n) + 100 * i for i, n in enumerate(lengths)]).astype(np.float32)[:, None]
    return TransitionDataset(obs, np.arange(total) % 2, np.ones(total), obs + 1, terminated, truncated, **extra)


def same(a: TransitionDataset, b: TransitionDataset) -> bool:
    return all(np.array_equal(array, b.arrays()[name]) for name, array in a.arrays().items())


def test_npz_round_trip_keeps_data_metadata_and_hash(tmp_path: Path) -> None:
    dataset = episodes(metadata={"env_id": "X-v0", "seed": 3})
    path = dataset.save_npz(tmp_path / "deep" / "data")
    again = load_transition_dataset("npz", path=path)
    assert path.name == "data.npz"
    assert same(dataset, again)
    assert again.metadata == {"env_id": "X-v0", "seed": 3}
    assert again.sha256 == dataset.sha256
    assert dataset.map(obs=lambda o: o + 1e-3).sha256 != dataset.sha256
    assert len(load_transition_dataset("npz", path=path, size=4)) == 4


def test_d4rl_names_are_understood(tmp_path: Path) -> None:
    data = episodes().arrays()
    names = {"obs": "observations", "next_obs": "next_observations", "terminated": "terminals", "truncated": "timeouts"}
    np.savez(tmp_path / "d4rl.npz", **{names.get(name, name): array for name, array in data.items()})
    assert same(load_transition_dataset("npz", path=tmp_path / "d4rl.npz"), episodes())


def test_files_that_are_no_data_sets_are_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(match: str, **arrays: Any) -> None:
        path = tmp_path / "bad.npz"
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=match):
            TransitionDataset.from_npz(path)

    data = episodes().arrays()
    refused("holds no truncated; a data set needs", **{k: v for k, v in data.items() if k != "truncated"})
    plain = {name: array for name, array in data.items() if name not in ("terminated", "truncated")}
    refused("holds no terminated, truncated", **plain, dones=data["terminated"])
    refused("equally many rows", **{**data, "rewards": np.ones(4)})
    refused("rewards .* one number per row", **{**data, "rewards": np.ones((9, 2))})
    refused("next_obs", **{**data, "next_obs": np.ones((9, 7))})
    refused("pickled objects", **{**data, "obs": np.array([{}] * 9, dtype=object)})
    (tmp_path / "code.py").write_text("print()")
    with pytest.raises(UserError, match="damaged, or of another kind"):
        TransitionDataset.from_npz(tmp_path / "code.py")
    refused("rows of numbers", **{**data, "actions": np.array(["left"] * 9)})
    with pytest.raises(UserError, match="does not exist"):
        TransitionDataset.from_npz(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match="cannot be read as npz"):
        TransitionDataset.from_npz(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(UserError, match="single array"):
        TransitionDataset.from_npz(tmp_path / "one.npy")


def test_kinds_and_sizes_are_checked(tmp_path: Path) -> None:
    path = episodes().save_npz(tmp_path / "d")
    for match, kwargs in [
        ("unknown dataset_kind 'npx': did you mean 'npz'", {"kind": "npx"}),
        ("'checkpoint', which only a run reads; .* --from-replay", {"kind": "checkpoint", "path": path}),
        ("needs dataset_path", {"kind": "npz"}),
        ("needs dataset_id", {"kind": "minari"}),
        ("needs env_id", {"kind": "random"}),
        ("dataset_size is 0", {"kind": "npz", "path": path, "size": 0}),
        ("has only 9 rows", {"kind": "npz", "path": path, "size": 10}),
        ("NoSuch-v0 cannot be made", {"kind": "random", "env_id": "NoSuch-v0"}),
    ]:
        with pytest.raises(UserError, match=match):
            load_transition_dataset(**kwargs)  # type: ignore[arg-type]


def test_random_data_is_the_environments_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = export_random_transition_dataset("CartPole-v1", tmp_path / "cart.npz", 200, seed=3)
    dataset = load_transition_dataset("npz", path=path)
    again = load_transition_dataset("random", env_id="CartPole-v1", size=200, seed=3)
    assert dataset.sha256 == again.sha256 != load_transition_dataset("random", env_id="CartPole-v1", size=200).sha256
    report = dataset.check(observation_space=gym.make("CartPole-v1").observation_space, action_space=spaces.Discrete(2))
    assert report["problems"] == []
    assert report["breaks"] == 0
    assert sum(count for _, count in report["coverage"]["action_counts"]) == 200
    np.testing.assert_array_equal(dataset.episode_lengths[:-1], dataset.episode_returns[:-1])


def test_continuous_actions_are_stored_as_the_environments() -> None:
    dataset = load_transition_dataset("random", env_id="Pendulum-v1", size=250)
    assert dataset.truncated.sum() == 1
    assert np.abs(dataset.actions).max() > 1.0
    assert dataset.check(action_space=spaces.Box(-2, 2, (1,)))["coverage"]["visited_bins"] == [1.0]


def test_observations_that_are_not_boxes_are_flattened_and_masks_obeyed() -> None:
    class Masked(gym.Env):  # type: ignore[type-arg]
        observation_space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (2,))})
        action_space = spaces.Discrete(4)

        def reset(self, **kwargs: Any) -> Any:
            return self.look()

        def look(self) -> Any:
            return {"a": 1, "b": np.ones(2, np.float32)}, {"action_mask": np.array([0, 0, 1, 0], np.int8)}

        def step(self, action: Any) -> Any:
            obs, info = self.look()
            return obs, 0.0, False, False, info

    dataset = load_transition_dataset("random", make_env=Masked, size=5)
    assert dataset.obs[0].tolist() == [0, 1, 0, 1, 1]
    assert set(dataset.actions.tolist()) == {2}


@pytest.mark.parametrize("kind", [np.int8, np.int64, bool, np.float32, list])
@pytest.mark.parametrize("name", ["Discrete", "MultiDiscrete", "MultiBinary"])
def test_random_actions_obey_masks_of_any_dtype_in_every_space(name: str, kind: Any) -> None:
    space, flat, parts = {
        "Discrete": (spaces.Discrete(4, start=3), [0, 1, 0, 1], [[0, 1, 0, 1]]),
        "MultiDiscrete": (spaces.MultiDiscrete([3, 2], start=[1, 0]), [0, 0, 1, 1, 1], [[0, 0, 1], [1, 1]]),
        "MultiBinary": (spaces.MultiBinary(2), [1, 0, 1, 1], [[1, 0], [1, 1]]),
    }[name]  # fmt: skip
    wanted = {"Discrete": {4, 6}, "MultiDiscrete": {(3, 0), (3, 1)}, "MultiBinary": {(0, 0), (0, 1)}}[name]
    space.seed(0)
    for mask in (flat, parts) if kind is list else (np.array(flat, kind), tuple(np.array(p, kind) for p in parts)):
        drawn = [_random_action(space, {"action_mask": mask}, "mine") for _ in range(30)]
        assert all(space.contains(action) for action in drawn)
        assert {tuple(a) if np.ndim(a) else int(a) for a in drawn} == wanted
    with pytest.raises(UserError, match="mine forbids every action"):
        _random_action(space, {"action_mask": np.zeros(len(flat), bool)}, "mine")


def test_a_replay_buffer_becomes_a_data_set_in_time_order() -> None:
    buffer = ReplayBuffer(20, 2, obs_shape=(1,), n_step=3)
    no = np.zeros(2, bool)
    for t in range(15):
        obs = np.array([[t], [100 + t]], np.float32)
        done = np.array([t == 9, False])
        buffer.add(obs, np.zeros(2, np.int64), np.full(2, t), no, done, obs + 1, final_obs=obs + 0.5)
    dataset = TransitionDataset.from_replay(buffer, env_id="X")
    assert dataset.obs[:, 0].tolist() == [*range(5, 15), *range(105, 115)]
    assert np.flatnonzero(dataset.truncated).tolist() == [4, 9, 19]  # the open episodes end where the ring does
    assert dataset.next_obs[4, 0] == 9.5
    assert dataset.check()["breaks"] == 0
    with pytest.raises(UserError, match="empty"):
        TransitionDataset.from_replay(ReplayBuffer(20, obs_shape=(1,)))


def test_check_counts_and_names_what_is_wrong() -> None:
    dataset = episodes(open_end=True)
    report = dataset.check()
    assert (report["transitions"], report["episodes"], report["terminated"], report["truncated"]) == (9, 3, 1, 1)
    assert report["last_episode_is_open"]
    assert report["episode_length"] == pytest.approx({"min": 2, "mean": 3, "max": 4, "std": np.std([3, 4, 2])})
    assert report["problems"] == []
    broken = TransitionDataset(**{**dataset.arrays(), "obs": dataset.obs[::-1].copy(), "rewards": np.full(9, np.nan)})
    fitted = broken.check(observation_space=spaces.Box(0, 50, (1,)), action_space=spaces.Discrete(1))
    problems = " ".join(fitted["problems"])
    assert "rewards holds 9 values that are NaN" in problems
    assert "without an end being marked" in problems
    assert "rows of obs lie outside" in problems
    assert "4 rows of actions lie outside" in problems
    wrong = dataset.check(observation_space=spaces.Box(0, 1, (4,)), action_space=spaces.Box(0, 1, (2,)))["problems"]
    assert [text.split()[0] for text in wrong] == ["obs", "actions"]
    assert episodes((1,) * 4).check()["breaks"] == 0  # every row ends


def test_split_holds_out_whole_episodes() -> None:
    dataset = episodes((5,) * 10)
    train, held = dataset.split(0.2, seed=1)
    assert (len(train), len(held)) == (40, 10)
    assert not set(train.obs[:, 0]) & set(held.obs[:, 0])
    assert same(held, dataset.split(0.2, seed=1)[1])
    assert (held.episode_lengths == 5).all()
    one = episodes((10,)).split(0.3, seed=0)
    assert (len(one[0]), len(one[1])) == (7, 3)
    with pytest.raises(UserError, match="heldout_fraction is 1"):
        dataset.split(1.0, seed=0)


def test_minibatches_have_the_keys_of_replay() -> None:
    dataset = episodes()
    batch = dataset.minibatch(np.random.default_rng(0), 32, gamma=0.9)
    buffer = ReplayBuffer(4, obs_shape=(1,))
    no = np.zeros(1, bool)
    buffer.add(np.zeros((1, 1)), np.zeros(1, np.int64), np.zeros(1), no, no, np.ones((1, 1)))
    replay = buffer.sample(32, np.random.default_rng(0))
    assert {key: value.dtype for key, value in batch.items()} == {key: value.dtype for key, value in replay.items()}
    assert torch.equal(batch["discounts"], 0.9 * (1 - batch["terminated"].float()))
    rows = batch["indices"].numpy()
    np.testing.assert_array_equal(batch["obs"].numpy(), dataset.obs[rows])


def test_arrays_of_another_byte_order_are_read_and_of_another_width_refused() -> None:
    rows = episodes().arrays()
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in rows.items()}
    dataset = TransitionDataset.from_arrays(swapped, "big.npz")
    assert dataset.minibatch(np.random.default_rng(0), 4)["obs"].shape[0] == 4
    assert dataset.sha256 == TransitionDataset.from_arrays(rows, "little.npz").sha256
    with pytest.raises(UserError, match="not rows of numbers"):
        TransitionDataset.from_arrays({**rows, "obs": rows["obs"].astype(np.longdouble)}, "long.npz")


def test_minari_round_trip(tmp_path: Path) -> None:
    pytest.importorskip("minari")
    dataset = load_transition_dataset("random", env_id="CartPole-v1", size=120, seed=1)
    write_minari(dataset, "cartpole/random-v0", tmp_path / "minari")
    again = load_transition_dataset("minari", dataset_id="cartpole/random-v0", path=tmp_path / "minari")
    expected = {**dataset.arrays(), "truncated": dataset.truncated.copy()}
    expected["truncated"][-1] |= not dataset.terminated[-1]  # Minari's episodes are whole
    for name, array in again.arrays().items():
        np.testing.assert_array_equal(array, expected[name])
    assert again.metadata["env_id"] == "CartPole-v1"
    assert len(read_minari("cartpole/random-v0", tmp_path / "minari", size=30)) in range(30, 120)
    first = load_transition_dataset("minari", dataset_id="cartpole/random-v0", path=tmp_path / "minari", size=30)
    assert len(first) == 30
    assert TransitionDataset.from_npz(again.save_npz(tmp_path / "back")).sha256 == again.sha256
    with pytest.raises(UserError, match="Minari refuses"):
        write_minari(dataset, "cartpole/random-v0", tmp_path / "minari")
    with pytest.raises(UserError, match="minari download cartpole/none-v0"):
        read_minari("cartpole/none-v0", tmp_path / "minari")
    with pytest.raises(UserError, match="give env_id"):
        write_minari(episodes(), "x/y-v0", tmp_path / "minari")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_data_set_that_minari_itself_collected_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    space = spaces.Dict({"position": spaces.Box(-9, 9, (2,), np.float64), "key": spaces.Discrete(2)})
    observations = {"position": np.arange(8.0).reshape(4, 2), "key": np.array([0, 1, 0, 1])}
    episode = EpisodeBuffer(id=0, observations=observations, actions=np.arange(3.0)[:, None], rewards=[1.0, 2.0, 3.0],
                            terminations=[False] * 3, truncations=[False, False, True], infos={})  # fmt: skip
    minari.create_dataset_from_buffers(
        "maze/hand-v1", buffer=[episode], observation_space=space, action_space=spaces.Box(-9, 9, (1,), np.float64)
    )
    dataset = read_minari("maze/hand-v1")
    assert dataset.obs.tolist() == [[1, 0, 0, 1], [0, 1, 2, 3], [1, 0, 4, 5]]
    assert dataset.next_obs[-1].tolist() == [0, 1, 6, 7]
    assert dataset.rewards.tolist() == [1, 2, 3]
    assert dataset.truncated.tolist() == [False, False, True]
    assert not dataset.terminated.any()


def test_image_data_sets_survive_minari_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("minari")

    class Pictures(gym.Env):  # type: ignore[type-arg]
        observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.np_random.integers(0, 256, (8, 8, 3), dtype=np.uint8), {}

        def step(self, action: Any) -> Any:
            return self.np_random.integers(0, 256, (8, 8, 3), dtype=np.uint8), 0.0, False, False, {}

    dataset = load_transition_dataset("random", make_env=lambda: gym.wrappers.TimeLimit(Pictures(), 5), size=10)
    write_minari(dataset, "pictures/random-v0", tmp_path, observation_space=Pictures.observation_space,
                 action_space=Pictures.action_space)  # fmt: skip
    assert read_minari("pictures/random-v0", tmp_path).sha256 == dataset.sha256


def test_a_missing_minari_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    with pytest.raises(UserError, match=r"pip install 'rl-training\[offline\]'"):
        load_transition_dataset("minari", dataset_id="a/b-v0")
