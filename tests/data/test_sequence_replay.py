"""`RecurrentReplayBuffer`: rows are arrivals; windows never cross the place that is being written. And the lane on it:
the policy's memory goes along, and learning waits for a filled buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from resume_cases import take_steps, tiny
from rl_training.algorithms.dreamer import Dreamer
from rl_training.data import RecurrentReplayBuffer
from rl_training.errors import UserError
from rl_training.run.build import open_session

torch.set_num_threads(1)


class Counting:
    """Environments whose observation is a running number, so that a row tells where it belongs."""

    def __init__(self, num_envs: int, seed: int, next_step_resets: bool) -> None:
        self.rng, self.next_step = np.random.default_rng(seed), next_step_resets
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]  # the reference: rows as they arrive
        self.count = 0
        self.resetting = np.zeros(num_envs, bool)
        self.obs = np.stack([self.first(env) for env in range(num_envs)])

    def number(self) -> np.ndarray:
        self.count += 1
        return np.frombuffer(np.uint32(self.count).tobytes(), np.uint8).reshape(1, 2, 2)

    def first(self, env: int) -> np.ndarray:
        obs = self.number()
        self.rows[env].append({"obs": obs, "actions": 0, "rewards": 0.0, "terminated": False, "truncated": False,
                               "is_first": True})  # fmt: skip
        return obs

    def step(self) -> dict[str, Any]:
        n = len(self.rows)
        actions, rewards = self.rng.integers(1, 9, n), self.rng.normal(size=n).astype(np.float32)
        kinds = self.rng.random(n)
        terminated, truncated = kinds < 0.1, (kinds >= 0.1) & (kinds < 0.2)
        obs, final, valid = self.obs, np.zeros_like(self.obs), ~self.resetting
        following = np.zeros_like(self.obs)
        for env in range(n):
            if self.resetting[env]:
                terminated[env] = truncated[env] = False
                following[env] = self.first(env)
                continue
            final[env] = following[env] = self.number()
            row = {"actions": actions, "rewards": rewards, "terminated": terminated, "truncated": truncated}
            row["obs"] = final
            self.rows[env].append({"is_first": False, **{name: column[env].copy() for name, column in row.items()}})
            if (terminated[env] or truncated[env]) and not self.next_step:
                following[env] = self.first(env)
        self.resetting = (terminated | truncated) & self.next_step
        self.obs = following
        extra = {"valid": valid} if self.next_step else {"final_obs": final if (terminated | truncated).any() else None}
        return {"obs": obs, "actions": actions, "rewards": rewards, "terminated": terminated, "truncated": truncated,
                "next_obs": following, **extra}  # fmt: skip


def make(num_envs: int = 2, **kwargs: Any) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(
        60 * num_envs, num_envs, obs_shape=(1, 2, 2), obs_dtype=torch.uint8, **{"sequence_length": 8, **kwargs}
    )


@pytest.mark.parametrize("next_step_resets", [False, True])
def test_every_window_is_a_run_of_arrivals(next_step_resets: bool) -> None:
    buffer, world, rng = make(), Counting(2, 0, next_step_resets), np.random.default_rng(0)
    crossed = inside = 0
    for t in range(150):
        buffer.add(**world.step())
        if t < 8 or t % 10:
            continue
        batch = {key: value.numpy() for key, value in buffer.sample(200, rng).items()}
        kept = [rows[-60:] for rows in world.rows]
        starts = {(row["obs"].tobytes()): (env, i) for env, rows in enumerate(kept) for i, row in enumerate(rows)}
        for b in range(200):
            env, start = starts[batch["obs"][b, 0].tobytes()]
            window = kept[env][start : start + 8]
            assert len(window) == 8
            for key in ("obs", "actions", "rewards", "terminated", "truncated", "is_first"):
                np.testing.assert_array_equal(batch[key][b], np.stack([row[key] for row in window]))
            crossed += bool(batch["is_first"][b, 1:].any())
            inside += not batch["is_first"][b, 0]
        seen = {batch["obs"][b, 0].tobytes() for b in range(200)}
        assert len(seen) > 0.5 * buffer.num_windows()
    assert crossed > 100
    assert inside > 100


def test_rows_align_actions_and_rewards_with_the_observation_they_led_to() -> None:
    """obs 10 -(action 1, reward 0.5)-> 11 -(action 2, reward 0.7, terminated)-> 12; then an episode starts at 20."""
    buffer = RecurrentReplayBuffer(10, obs_shape=(1,), sequence_length=4)
    no, yes = np.array([False]), np.array([True])
    obs = {value: np.array([[value]], dtype=np.float32) for value in (10, 11, 12, 20)}
    buffer.add(obs[10], np.array([1]), np.array([0.5]), no, no, obs[11])
    buffer.add(obs[11], np.array([2]), np.array([0.7]), yes, no, obs[20], final_obs=obs[12])
    batch = buffer.sample(1, np.random.default_rng(0))
    assert batch["obs"][0, :, 0].tolist() == [10, 11, 12, 20]
    assert batch["actions"].tolist() == [[0, 1, 2, 0]]
    np.testing.assert_allclose(batch["rewards"].numpy(), [[0, 0.5, 0.7, 0]])
    assert batch["terminated"].tolist() == [[False, False, True, False]]
    assert batch["is_first"].tolist() == [[True, False, False, True]]


def test_an_environment_moved_by_others_begins_a_new_episode() -> None:
    buffer = RecurrentReplayBuffer(10, obs_shape=(1,), sequence_length=4)
    no = np.array([False])
    obs = [np.array([[value]], dtype=np.float32) for value in range(4)]
    buffer.add(obs[0], np.array([1]), np.array([0.5]), no, no, obs[1])
    buffer.add(obs[2], np.array([1]), np.array([0.5]), no, no, obs[3])
    batch = buffer.sample(1, np.random.default_rng(0))
    assert batch["is_first"].tolist() == [[True, False, True, False]]
    assert batch["truncated"].tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("steps", [20, 130])
def test_a_restored_buffer_goes_on_bit_for_bit(steps: int) -> None:
    world, buffer, other = Counting(3, 1, False), make(3), make(3)
    for _ in range(steps):
        buffer.add(**world.step())
    other.load_state_dict(buffer.state_dict())
    rngs = [np.random.default_rng(1), np.random.default_rng(1)]
    for _ in range(80):
        step = world.step()
        batches = []
        for one, rng in zip((buffer, other), rngs, strict=True):
            one.add(**step)
            batches.append(one.sample(4, rng, sequence_length=5))
        assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])


def test_too_few_rows_and_wrong_lengths_are_said() -> None:
    with pytest.raises(UserError, match="sequence_length is 100"):
        make(sequence_length=100)
    buffer = make()
    assert buffer.num_windows() == 0
    with pytest.raises(ValueError, match="no environment has 8 rows"):
        buffer.sample(1, np.random.default_rng(0))
    with pytest.raises(UserError, match="num_envs 2, this one 1"):
        RecurrentReplayBuffer(120, 1, obs_shape=(1, 2, 2), obs_dtype="uint8").load_state_dict(buffer.state_dict())


def test_mapped_storage_behaves_like_memory(tmp_path: Any) -> None:
    world, buffers = Counting(2, 3, False), [make(), make(folder=tmp_path)]
    for _ in range(100):
        step = world.step()
        for buffer in buffers:
            buffer.add(**step)
    batches = [buffer.sample(8, np.random.default_rng(0)) for buffer in buffers]
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])


# ---- the lane --------------------------------------------------------------------------------------------------------


def open_lane(folder: Path, learning_starts: int) -> Any:
    """Dreamer in two environments whose episodes have at most five steps."""
    kwargs = {"learning_starts": learning_starts, "batch_size": 2, "sequence_length": 4}
    return open_session(tiny("dreamer", folder, env_id="env_zoo:Walk", num_envs=2, vectorization="sync", kwargs=kwargs))


def test_the_lane_remembers_what_a_scan_over_its_stored_rows_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_luck(self: Dreamer, steps: int, rows: int) -> tuple[Tensor, Tensor]:
        return torch.full((steps, rows, self.world_model.rssm.size.latents, 1), 0.5), torch.full((steps, rows, 1), 0.5)

    monkeypatch.setattr(Dreamer, "draw_noise", no_luck)
    session = open_lane(tmp_path, learning_starts=0)
    store, algorithm, carries = session.store, session.algorithm, []
    for step in range(0, 40, 2):
        take_steps(session, step)
        carries.append(session.behaviour.memory)
    session.close()
    model, stored = algorithm.world_model, store.buffer.state_dict()
    for env, size in enumerate(stored["sizes"]):
        rows = {name: torch.as_tensor(array[:size, env : env + 1]) for name, array in stored["arrays"].items()}
        assert rows["is_first"].sum() > 3
        embeds, actions = model.encoder(model.prepare(rows["obs"])), algorithm.actor.input_of(rows["actions"])
        states = model.rssm.observe(embeds, actions, rows["is_first"], no_luck(algorithm, size, 1)[0])
        acted_on = ~(rows["terminated"] | rows["truncated"])[:, 0]  # an episode's last observation asks for no action
        remembered = torch.stack(carries)[:, env, : model.rssm.feature_dim]
        torch.testing.assert_close(remembered, states.features[acted_on, 0][: len(carries)].detach())


def test_resumed_without_its_buffer_the_lane_fills_it_again_before_learning_goes_on(tmp_path: Path) -> None:
    session = open_lane(tmp_path, learning_starts=30)
    store, algorithm, step = session.store, session.algorithm, 0

    def steps_to_an_update() -> int:
        nonlocal step
        taken = 0
        while True:
            taken += take_steps(session, step + taken)
            if list(store.batches(algorithm, step + taken)):
                step += taken
                return taken

    assert steps_to_an_update() > 30
    assert steps_to_an_update() == 2
    state = session.source_state()
    del state["replay"]
    session.close()
    session = open_lane(tmp_path, learning_starts=30)
    store = session.store
    assert "filled again before learning continues" in session.load_source(state)[-1]
    steps_to_an_update()
    assert len(store.buffer) >= 30
    assert steps_to_an_update() == 2
    session.close()


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("learning_starts", [6, 20])
def test_updates_keep_the_train_ratio_to_the_row(tmp_path: Path, learning_starts: int, ratio: int) -> None:
    """An update replays 2 x 4 rows; every step after the first ones makes `ratio` of them due."""
    kwargs = {"learning_starts": learning_starts, "batch_size": 2, "sequence_length": 4, "train_ratio": ratio}
    session = open_session(tiny("dreamer", tmp_path, env_id="env_zoo:Walk", num_envs=2, kwargs=kwargs))
    step, updates = 0, 0
    while step < 60:
        step += take_steps(session, step)
        updates += len(list(session.store.batches(session.algorithm, step)))
        if step >= 12:  # from here on there are windows of four rows
            assert updates == max(0, step - learning_starts) * ratio // 8
    session.close()
