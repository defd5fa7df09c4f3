"""`ReplayBuffer` against a plain list of transitions, on random episodes of several environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data import ReplayBuffer
from rl_training.data import memory as replay_memory
from rl_training.data.memory import Lane, Sender
from rl_training.errors import UserError

torch.set_num_threads(1)
GAMMA = 0.9


@dataclass
class Recorded:
    """One transition, as a reader of the paper would write it down."""

    obs: Any
    action: Any
    reward: float
    next_obs: Any
    terminated: bool
    truncated: bool


class Episodes:
    """Random episodes of N environments whose observations are all different; ends of both kinds."""

    def __init__(self, num_envs: int, seed: int, *, shape: tuple[int, ...] = (3,), image_stack: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.shape, self.stack = num_envs, shape, image_stack
        self.history: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self.obs = np.stack([self.reset(env) for env in range(num_envs)])
        self.resetting = np.zeros(num_envs, dtype=bool)

    def frame(self) -> np.ndarray:
        if self.stack:
            return self.rng.integers(0, 256, self.shape, dtype=np.uint8)
        return self.rng.normal(size=self.shape).astype(np.float32)

    def look(self, env: int) -> np.ndarray:
        if not self.stack:
            return self.history[env][-1]
        frames = self.history[env][-self.stack :]
        return np.concatenate([frames[0]] * (self.stack - len(frames)) + frames)

    def reset(self, env: int) -> np.ndarray:
        self.history[env] = [self.frame()]
        return self.look(env)

    def advance(self, env: int) -> np.ndarray:
        self.history[env].append(self.frame())
        return self.look(env)

    def step(self, *, next_step_resets: bool = False) -> dict[str, Any]:
        n, rng = self.num_envs, self.rng
        rewards, kinds = rng.normal(size=n).astype(np.float32), rng.random(n)
        terminated, truncated = kinds < 0.12, (kinds >= 0.12) & (kinds < 0.25)
        after = np.stack([self.advance(env) for env in range(n)])
        step = {"obs": self.obs, "actions": rng.integers(0, 5, n), "rewards": rewards, "terminated": terminated,
                "truncated": truncated}  # fmt: skip
        if next_step_resets:
            for env in np.flatnonzero(self.resetting):
                after[env], terminated[env], truncated[env] = self.reset(env), False, False
            step["valid"] = ~self.resetting if self.resetting.any() else None
            self.resetting = terminated | truncated
            self.obs = after
        else:
            done = terminated | truncated
            step["final_obs"] = after if done.any() else None
            self.obs = after.copy()
            for env in np.flatnonzero(done):
                self.obs[env] = self.reset(env)
        step["next_obs"] = self.obs
        return step


def record(lists: list[list[Recorded]], step: dict[str, Any]) -> None:
    """Append a step to each environment's list."""
    for env, rows in enumerate(lists):
        if step.get("valid") is not None and not step["valid"][env]:
            continue
        done = step["terminated"][env] or step["truncated"][env]
        next_obs = step["final_obs"][env] if done and step.get("final_obs") is not None else step["next_obs"][env]
        rows.append(Recorded(step["obs"][env], step["actions"][env], step["rewards"][env], next_obs,
                             step["terminated"][env], step["truncated"][env]))  # fmt: skip


def expected(rows: list[Recorded], start: int, n_step: int) -> dict[str, Any]:
    """The n-step transition from `start`: a loop that stops at an end and at the newest row."""
    total, length = 0.0, 0
    for row in rows[start : start + n_step]:
        total += GAMMA**length * row.reward
        length += 1
        if row.terminated or row.truncated:
            break
    last = rows[start + length - 1]
    return {"obs": rows[start].obs, "actions": rows[start].action, "rewards": total, "next_obs": last.next_obs,
            "terminated": last.terminated, "truncated": last.truncated, "dones": float(last.terminated),
            "discounts": GAMMA**length * (1 - last.terminated)}  # fmt: skip


def check_all_rows(buffer: ReplayBuffer, lists: list[list[Recorded]]) -> None:
    """Every row in the buffer is the reference's, and the reference's newest rows are all there."""
    starts = [(rows, i) for rows in lists for i in range(max(0, len(rows) - buffer.rows_per_env), len(rows))]
    wanted = [expected(rows, start, buffer.n_step) for rows, start in starts]
    assert len(buffer) == len(wanted)
    index = np.concatenate(
        [(buffer._heads[e] - buffer._sizes[e] + np.arange(buffer._sizes[e])) % buffer._slots * buffer.num_envs + e
         for e in range(buffer.num_envs)]
    )  # fmt: skip
    assert sorted(buffer._rows_of(np.arange(len(buffer)))) == sorted(index)
    batch = buffer.gather(index)
    for key in wanted[0]:
        found, want = batch[key].numpy(), np.stack([row[key] for row in wanted])
        if key in ("rewards", "discounts"):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, want)


def make(num_envs: int = 1, capacity: int = 60, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, **{"obs_shape": (3,), "gamma": GAMMA, **kwargs})


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("next_step_resets", [False, True])
def test_every_row_equals_a_plain_list_of_transitions(n_step: int, num_envs: int, next_step_resets: bool) -> None:
    buffer, world = make(num_envs, n_step=n_step), Episodes(num_envs, seed=n_step)
    lists: list[list[Recorded]] = [[] for _ in range(num_envs)]
    for t in range(150):
        step = world.step(next_step_resets=next_step_resets)
        record(lists, step)
        buffer.add(**step)
        if t % 7 == 0 or t < 5:
            check_all_rows(buffer, lists)
    check_all_rows(buffer, lists)
    assert buffer._finals._used <= buffer.capacity  # slots of dropped rows are used again


def test_three_rewards_of_one_and_their_discount_are_the_golden_ones() -> None:
    buffer, no = make(n_step=3, gamma=0.99), np.zeros(1, dtype=bool)
    for t in range(4):
        obs, one = np.full((1, 3), t), np.ones(1)
        buffer.add(obs=obs, next_obs=obs + 1, actions=one, rewards=one, terminated=no, truncated=no)
    batch = buffer.gather(np.zeros(1, dtype=np.int64))
    assert batch["rewards"].item() == pytest.approx(2.9701, abs=1e-6)
    assert batch["discounts"].item() == pytest.approx(0.970299, abs=1e-6)


@pytest.mark.parametrize("next_step_resets", [False, True])
@pytest.mark.parametrize("stack", [0, 3])
def test_environments_that_are_not_in_step_keep_their_rows_apart(stack: int, next_step_resets: bool) -> None:
    shape, rng = (1, 3, 3) if stack else (3,), np.random.default_rng(5)
    kwargs = {"obs_shape": (3, 3, 3), "obs_dtype": "uint8", "frame_stack": 3} if stack else {}
    buffer = make(4, n_step=3, **kwargs)
    parts = [(envs, Episodes(2, seed=envs[0], shape=shape, image_stack=stack)) for envs in ([2, 0], [1, 3])]
    parts[1][1].obs = np.stack([parts[1][1].advance(env) for env in range(2)])  # inside an episode
    lists: list[list[Recorded]] = [[] for _ in range(4)]
    for t in range(150):
        envs, world = parts[int(rng.random() < 0.7)]
        step = world.step(next_step_resets=next_step_resets)
        record([lists[env] for env in envs], step)
        buffer.add(**step, envs=np.array(envs))
        if t % 7 == 0 or t < 5:
            check_all_rows(buffer, lists)


def test_another_gamma_holds_for_the_rows_stored_before() -> None:
    moved, direct, world = make(n_step=3, gamma=0.5), make(n_step=3, gamma=0.9), Episodes(1, seed=4)
    for _ in range(40):
        step = world.step()
        moved.add(**step)
        direct.add(**step)
    moved.gamma = 0.9
    rows = np.arange(len(moved))
    for key, want in direct.gather(rows).items():
        assert torch.equal(moved.gather(rows)[key], want), key


def test_plain_tuples_with_the_true_next_observation_are_accepted() -> None:
    """Without `final_obs`, `next_obs` is the true successor and the reset observation appears as the next `obs`."""
    buffer, world, lists = make(2, n_step=3), Episodes(2, seed=5), [[], []]
    for _ in range(100):
        step = world.step()
        record(lists, step)
        final = step.pop("final_obs")
        done = step["terminated"] | step["truncated"]
        if final is not None:
            step["next_obs"] = np.where(done[:, None], final, step["next_obs"])
        buffer.add(**step)
    check_all_rows(buffer, lists)


def test_an_environment_moved_by_others_ends_its_episode_as_a_truncation() -> None:
    buffer = make(n_step=3)
    flags = {"terminated": np.array([False]), "truncated": np.array([False])}
    a, b, c, d = (np.full((1, 3), value, dtype=np.float32) for value in range(4))
    buffer.add(a, np.array([0]), np.array([1.0]), next_obs=b, **flags)
    buffer.add(c, np.array([1]), np.array([1.0]), next_obs=d, **flags)  # b was never acted on
    batch = buffer.gather(np.array([0, 1]))
    assert batch["truncated"].tolist() == [True, False]
    assert batch["next_obs"][:, 0].tolist() == [1.0, 3.0]
    assert batch["rewards"].tolist() == [1.0, 1.0]
    np.testing.assert_allclose(batch["discounts"].numpy(), [GAMMA, GAMMA])


def test_sampling_is_uniform_over_all_rows_also_when_rings_differ_in_size() -> None:
    buffer, world = make(3, capacity=90), Episodes(3, seed=2)
    for _ in range(20):
        buffer.add(**world.step(next_step_resets=True))
    assert len(set(buffer._sizes.tolist())) > 1
    drawn = buffer.sample(60_000, np.random.default_rng(0))["indices"].numpy()
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == len(buffer)
    assert abs(counts / counts.mean() - 1).max() < 0.2


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("next_step_resets", [False, True])
def test_frames_stored_once_give_back_the_original_stacks(n_step: int, next_step_resets: bool) -> None:
    kwargs = {"obs_shape": (8, 5, 4), "obs_dtype": torch.uint8, "frame_stack": 4, "n_step": n_step}
    buffer, world = make(2, **kwargs), Episodes(2, seed=4, shape=(2, 5, 4), image_stack=4)
    lists: list[list[Recorded]] = [[], []]
    for t in range(120):
        step = world.step(next_step_resets=next_step_resets)
        record(lists, step)
        buffer.add(**step)
        if t % 9 == 0:
            check_all_rows(buffer, lists)
    assert buffer.sample(8, np.random.default_rng(0))["obs"].dtype == torch.uint8
    whole = make(2, **{**kwargs, "frame_stack": 1})
    assert buffer.nbytes < 0.5 * whole.nbytes


def test_a_stream_that_begins_inside_an_episode_keeps_its_first_stack() -> None:
    world = Episodes(1, seed=4, shape=(1, 3, 3), image_stack=3)
    world.obs = np.stack([world.advance(0)])
    buffer = make(obs_shape=(3, 3, 3), obs_dtype="uint8", frame_stack=3)
    lists: list[list[Recorded]] = [[]]
    for _ in range(20):
        step = world.step()
        record(lists, step)
        buffer.add(**step)
    check_all_rows(buffer, lists)


def test_observations_that_are_no_stacks_are_refused() -> None:
    world = Episodes(1, seed=0, shape=(4, 3, 3), image_stack=1)
    buffer = make(obs_shape=(4, 3, 3), obs_dtype="uint8", frame_stack=4)
    with pytest.raises(UserError, match="not stacks of 4 frames"):
        buffer.add(**world.step())


def test_action_masks_follow_their_observations() -> None:
    buffer = make(mask_size=3, capacity=4)
    obs = np.arange(8, dtype=np.float32).reshape(8, 1, 1).repeat(3, axis=2)
    masks = np.eye(3, dtype=bool)[np.arange(8) % 3][:, None]
    for t in range(6):
        done = np.array([t == 4])
        buffer.add(obs[t], np.array([0]), np.array([0.0]), np.array([False]), done, obs[t + 1], masks=masks[t],
                   next_masks=masks[t + 1], final_obs=obs[7] if done[0] else None)  # fmt: skip
    batch = buffer.gather(buffer._rows_of(np.arange(4)))  # steps 2 to 5
    np.testing.assert_array_equal(batch["action_masks"].numpy(), masks[2:6, 0])
    np.testing.assert_array_equal(batch["next_action_masks"].numpy()[[0, 1, 3]], masks[[3, 4, 6], 0])
    assert batch["next_action_masks"][2].all()  # nothing is known of the final observation


@pytest.mark.parametrize("options", [{}, {"frame_stack": 4, "obs_shape": (4, 3, 3), "obs_dtype": "uint8"}])
@pytest.mark.parametrize("steps", [7, 75])
def test_a_restored_buffer_goes_on_bit_for_bit(options: dict[str, Any], steps: int) -> None:
    shape = {"shape": (1, 3, 3), "image_stack": 4} if options else {}
    world, buffer = Episodes(2, seed=9, **shape), make(2, n_step=3, **options)
    for _ in range(steps):
        buffer.add(**world.step())
    state = buffer.state_dict()
    assert np.shares_memory(state["arrays"]["obs"], buffer.columns["obs"])
    assert len(state["arrays"]["obs"]) == (buffer._slots if steps > 40 else steps + 1 + 3 * bool(options))
    other = make(2, n_step=3, **options)
    other.load_state_dict(state)
    rngs = [np.random.default_rng(1), np.random.default_rng(1)]
    for _ in range(60):
        step = world.step()
        batches = []
        for one, rng in zip((buffer, other), rngs, strict=True):
            one.add(**step)
            batches.append(one.sample(16, rng))
        assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])


def test_a_state_of_another_layout_is_refused() -> None:
    with pytest.raises(UserError, match="capacity 60, this one 30"):
        make(capacity=30).load_state_dict(make().state_dict())


def test_mapped_storage_behaves_like_memory(tmp_path: Any) -> None:
    buffer, world = make(2, n_step=3, folder=tmp_path / "replay"), Episodes(2, seed=3)
    lists: list[list[Recorded]] = [[], []]
    for _ in range(100):
        step = world.step()
        record(lists, step)
        buffer.add(**step)
    check_all_rows(buffer, lists)
    names = sorted(path.name for path in (tmp_path / "replay").glob("*/*"))
    assert "obs.npy" in names
    assert sum(name.startswith("finals") for name in names) == 1


def test_continuous_actions_and_shared_memory_batches() -> None:
    buffer = make(obs_shape=(2,), action_shape=(2,), continuous=True)
    zero, no = np.zeros((1, 2), dtype=np.float32), np.array([False])
    buffer.add(zero, np.array([[0.5, -1.0]]), np.array([2.0]), no, no, zero + 1)
    batch = buffer.sample(4, np.random.default_rng(0))
    assert batch["actions"].dtype == torch.float32
    assert batch["actions"][0].tolist() == [0.5, -1.0]
    assert batch["dones"].dtype == batch["discounts"].dtype == batch["rewards"].dtype == torch.float32


def test_a_million_atari_steps_fit_in_eight_and_a_half_gigabytes() -> None:
    def size(**layout: Any) -> int:
        specs = replay_memory.replay_specs(1_000_000, obs_shape=(4, 84, 84), obs_dtype="uint8", **layout)
        return sum(spec.nbytes for spec in specs.values())

    priorities, finals = 8 * 1_000_001, 84 * 84 * 1_000_000 // 50  # of episodes of 50 steps
    assert size(frame_stack=4) + priorities + finals < 8.5e9
    assert size() > 28e9


def test_what_cannot_fit_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_memory, "available_memory", lambda: 10**9)
    sentence = r"28\.2 GB = obs \(1000001 x 1 x 4 x 84 x 84 uint8\).*but only 1 GB of memory is free; .*disk\.$"
    with pytest.raises(UserError, match=sentence):
        ReplayBuffer(1_000_000, obs_shape=(4, 84, 84), obs_dtype="uint8")


@pytest.mark.parametrize("free", [-1, 10**9, 5 * 10**9, 28 * 10**9])
def test_the_capacity_that_is_advised_fits(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_memory, "available_memory", lambda: free)
    layout: dict[str, Any] = {"obs_shape": (4, 84, 84), "obs_dtype": "uint8"}
    with pytest.raises(UserError) as refused:
        ReplayBuffer(1_000_000, **layout)
    advised = int(str(refused.value).partition("buffer_capacity to about ")[2].partition(",")[0])
    need = sum(spec.nbytes for spec in replay_memory.replay_specs(advised, **layout).values()) if advised else 0
    assert 0.7 * free <= need <= max(free, 0)


def test_wrong_arguments_are_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="4 environments need room"):
        make(4, capacity=3)
    with pytest.raises(UserError, match="n_step is 0"):
        make(n_step=0)
    with pytest.raises(UserError, match="frame_stack is 3, which does not divide the 4"):
        make(obs_shape=(4, 2, 2), frame_stack=3)
    with pytest.raises(ValueError, match="empty"):
        make().sample(1, np.random.default_rng(0))


def test_available_memory_is_a_plausible_number() -> None:
    free = replay_memory.available_memory()
    assert free is None or 0 < free < 1 << 50


def test_arrays_travel_as_one_piece_of_memory() -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "obs": rng.random((3, 5), np.float32), "flags": np.array([True, False, True]), "indices": np.arange(3),
        "images": rng.integers(0, 255, (3, 2, 7), np.uint8), "apart": rng.random((6, 3), np.float32).T,
        "none": np.ones((0, 4)),
    }  # fmt: skip
    pieces = Lane(list(arrays.values()), torch.device("cpu")).send(list(arrays.values()))
    for array, tensor in zip(arrays.values(), pieces, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_a_lane_is_used_again_and_carries_new_arrays() -> None:
    rng = np.random.default_rng(0)

    def arrays(size: int) -> list[Any]:
        return [rng.random((size, 3), np.float32), rng.random(size) < 0.5, rng.integers(0, 9, size)]

    lane = Lane(arrays(4), torch.device("cpu"))
    pointers = {tensor.data_ptr() for tensor in lane.tensors}
    for _ in range(3):
        given = arrays(4)
        for tensor, array in zip(lane.send(given), given, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype
            assert tensor.data_ptr() in pointers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_buffer_that_reuses_batches_keeps_the_last_ones() -> None:
    world, device = Episodes(2, seed=1), torch.device("cuda")
    buffers = [make(2, device=device, reuses_batches=reuses) for reuses in (False, True)]
    for _ in range(40):
        step = world.step()
        for buffer in buffers:
            buffer.add(**step)
    rngs = [np.random.default_rng(3) for _ in buffers]
    pairs = [[buffer.sample(size, rng) for buffer, rng in zip(buffers, rngs, strict=True)] for size in (8, 9) * 40]
    for plain, reused in pairs[-2 * Sender.TURNS :]:
        for name, tensor in plain.items():
            assert torch.equal(tensor, reused[name]), name


@pytest.mark.parametrize("surprise", ["none", "another step", "gamma", "moved", "another size"])
@pytest.mark.parametrize(
    "layout", [{}, {"n_step": 3}, {"obs_shape": (4, 2, 2), "obs_dtype": "uint8", "frame_stack": 4}]
)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_batch_that_is_drawn_ahead_is_the_one_of_its_turn(num_envs: int, layout: Any, surprise: str) -> None:
    images = layout.get("frame_stack", 0)
    world = Episodes(num_envs, seed=5, shape=(1, 2, 2) if images else (3,), image_stack=images)
    plain, ahead = (make(num_envs, capacity=90, **layout) for _ in range(2))
    rngs = [np.random.default_rng(2) for _ in range(2)]
    kept = 0
    for t in range(200):  # around the ring twice
        steps = [world.step() for _ in range(2 if surprise == "another step" and t % 7 == 0 else 1)]
        if surprise == "moved" and t % 7 == 0 and not images:
            steps[0]["obs"] = steps[0]["obs"] + 1
        for buffer in (plain, ahead):
            for step in steps:
                buffer.add(**step)
            if surprise == "gamma":
                buffer.gamma = 0.9 - 0.001 * t
        size = 5 if surprise == "another size" and t % 7 == 0 else 4
        kept += ahead.ahead is not None and ahead.ahead.batch is not None
        batch, other = plain.sample(size, rngs[0]), ahead.sample(size, rngs[1])
        for name, tensor in batch.items():
            assert torch.equal(other[name], tensor), name
        state = rngs[0].bit_generator.state
        assert rngs[1].bit_generator.state == state
        ahead.draw_ahead(4, rngs[1])
        assert ahead.ahead is None or ahead.ahead.before == state
    assert kept > 50 or surprise == "gamma"
