"""`DeviceRing` against the host's `ReplayBuffer`, row by row, on random episodes; resuming, room, and what it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recorded_steps import Reads
from resume_cases import assert_same
from rl_training.data import ReplayBuffer
from rl_training.data import memory as replay_memory
from rl_training.data.device_ring import DeviceRing
from rl_training.errors import UserError

GAMMA = 0.9
EXACT = ("obs", "actions", "next_obs", "terminated", "truncated", "dones", "discounts")


class Episodes:
    """Steps of N random episodes, whose observations are all different; `moved` environments begin again in silence."""

    def __init__(
        self, num_envs: int, seed: int = 0, *, shape: tuple[int, ...] = (3,), pixels: bool = False,
        continuous: bool = False, ends: float = 0.25,
    ) -> None:  # fmt: skip
        self.rng, self.num_envs, self.shape, self.pixels = np.random.default_rng(seed), num_envs, shape, pixels
        self.continuous, self.ends = continuous, ends
        self.obs = self.look()

    def look(self) -> Any:
        size = (self.num_envs, *self.shape)
        pixels = self.rng.integers(0, 256, size, dtype=np.uint8)
        return pixels if self.pixels else self.rng.normal(size=size).astype(np.float32)

    def step(self, moved: Any = ()) -> dict[str, Any]:
        rng, n = self.rng, self.num_envs
        self.obs = self.obs.copy()
        self.obs[list(moved)] = self.look()[list(moved)]
        kinds = rng.random(n)
        terminated, truncated = kinds < self.ends / 2, (kinds >= self.ends / 2) & (kinds < self.ends)
        actions = rng.normal(size=(n, 2)).astype(np.float32) if self.continuous else rng.integers(0, 5, n)
        step = {"obs": self.obs, "actions": actions, "rewards": rng.normal(size=n).astype(np.float32),
                "terminated": terminated, "truncated": truncated, "final_obs": self.look()}  # fmt: skip
        begun, done = self.look(), (terminated | truncated).reshape(-1, *[1] * len(self.shape))
        self.obs = step["next_obs"] = np.where(done, begun, step["final_obs"])
        return step


def as_tensors(step: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in step.items()}


def make(kind: Any, world: Episodes, capacity: int = 60, **kwargs: Any) -> Any:
    dtype = "uint8" if world.pixels else "float32"
    actions: dict[str, Any] = {"action_shape": (2,), "continuous": True} if world.continuous else {}
    rows = {"obs_shape": world.shape, "obs_dtype": dtype, "gamma": GAMMA, **actions, **kwargs}
    return kind(capacity, world.num_envs, **rows)


def assert_equal_rows(ring: DeviceRing, buffer: ReplayBuffer) -> None:
    """Every row of the one is the same row of the other; sums of several rewards may be rounded in another order."""
    assert len(ring) == len(buffer)
    rows = buffer._rows_of(np.arange(len(buffer)))
    wanted, found = buffer.gather(rows), ring.gather(torch.from_numpy(rows))
    assert found.keys() == wanted.keys() - {"indices"}
    for name in EXACT if ring.n_step > 1 else (*EXACT, "rewards"):
        assert_same(found[name], wanted[name], name)
    torch.testing.assert_close(found["rewards"], wanted["rewards"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 4, 7])
@pytest.mark.parametrize("ends", [0.0, 0.25, 1.0])
def test_every_row_equals_the_hosts(n_step: int, num_envs: int, ends: float) -> None:
    world = Episodes(num_envs, seed=n_step, ends=ends, continuous=num_envs == 4)
    ring, buffer = (make(kind, world, n_step=n_step) for kind in (DeviceRing, ReplayBuffer))
    for t in range(150):  # the ring turns over at least twice
        step = world.step(moved=range(0, num_envs, 2) if t % 31 == 30 else ())
        buffer.add(**step)
        ring.add(**as_tensors(step))
        if t % 7 == 0 or t < 5:
            assert_equal_rows(ring, buffer)
        if t == 100:
            ring.gamma = buffer.gamma = 0.5
    assert_equal_rows(ring, buffer)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rings_of_few_rows_equal_the_hosts(rows: int) -> None:
    world = Episodes(4, ends=0.6)
    ring, buffer = (make(kind, world, capacity=4 * rows, n_step=3) for kind in (DeviceRing, ReplayBuffer))
    for t in range(80):
        step = world.step(moved=range(4) if t % 3 == 2 else ())
        buffer.add(**step)
        ring.add(**as_tensors(step))
        assert_equal_rows(ring, buffer)


def test_images_keep_their_bytes() -> None:
    world = Episodes(3, shape=(1, 4, 4), pixels=True)
    ring, buffer = (make(kind, world, n_step=3) for kind in (DeviceRing, ReplayBuffer))
    for _ in range(50):
        step = world.step()
        buffer.add(**step)
        ring.add(**as_tensors(step))
    assert_equal_rows(ring, buffer)
    assert ring.columns["obs"].dtype == torch.uint8


@pytest.mark.parametrize("ends", [0.02, 0.5, 1.0])
def test_final_observations_have_room_whatever_the_number_of_episodes(ends: float) -> None:
    """The pool starts with room for 64 ends per environment, and grows only if there are more."""
    world = Episodes(4, ends=ends)
    ring, buffer = (make(kind, world, capacity=1200) for kind in (DeviceRing, ReplayBuffer))
    for t in range(700):
        step = world.step()
        buffer.add(**step)
        ring.add(**as_tensors(step))
        if t % 50 == 0:
            assert_equal_rows(ring, buffer)
        if t == 400:
            world.ends = 1.0  # episodes become short
    assert_equal_rows(ring, buffer)
    assert ring._room == ring.capacity
    world.ends, ring = 0.02, make(DeviceRing, world, capacity=1200)
    for _ in range(700):
        ring.add(**as_tensors(world.step()))
    assert ring._room == 64 * 4


def test_the_host_reads_once_in_many_steps_and_never_in_insert_or_sample() -> None:
    world, generator = Episodes(8, ends=0.1), torch.Generator().manual_seed(0)
    ring = make(DeviceRing, world, capacity=8 * 500, n_step=3)
    steps = [as_tensors(world.step()) for _ in range(400)]
    with Reads() as reads:
        for step in steps:
            ring.insert(**step)
            ring._steps += 1
            ring.sample(16, generator)
        assert reads.count == 0
        for step in steps:
            ring.add(**step)
        assert 0 < reads.count < 12


def test_insert_and_sample_touch_the_same_memory_every_time() -> None:
    """A captured graph has fixed addresses."""
    world, generator = Episodes(4, ends=0.02), torch.Generator().manual_seed(0)
    ring = make(DeviceRing, world, capacity=400, n_step=3)

    def places() -> list[int]:
        kept = [*ring.columns.values(), ring.finals, ring.count, ring.ended, ring._powers, ring._window]
        return [tensor.data_ptr() for tensor in kept]

    before = places()
    for _ in range(150):
        ring.add(**as_tensors(world.step()))
        ring.sample(8, generator)
    ring.gamma = 0.8
    ring.load_state_dict(ring.state_dict())
    assert places() == before


def test_time_outs_bootstrap_from_the_final_observation() -> None:
    """Golden numbers: environment 0 is truncated in its second step, environment 1 terminates there."""
    ring = DeviceRing(8, 2, obs_shape=(1,), n_step=3, gamma=0.5)
    flags = torch.tensor([False, False]), torch.tensor([True, False]), torch.tensor([False, True])
    for t, obs in enumerate(([1.0, 10.0], [2.0, 20.0], [3.0, 30.0])):
        column = torch.tensor(obs).unsqueeze(1)
        after = torch.tensor([[2.0, 20.0], [3.0, 30.0], [4.0, 40.0]][t]).unsqueeze(1)
        ends = (flags[2], flags[1]) if t == 1 else (flags[0], flags[0])
        ring.add(
            column, torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 4.0]) * (t + 1), *ends, after,
            final_obs=torch.tensor([[-1.0], [-2.0]]) if t == 1 else after,
        )  # fmt: skip
    batch = ring.gather(torch.arange(6))  # step by step, both environments
    assert batch["rewards"].tolist() == [2.0, 8.0, 2.0, 8.0, 3.0, 12.0]
    assert batch["next_obs"].squeeze(1).tolist() == [-1.0, -2.0, -1.0, -2.0, 4.0, 40.0]
    assert batch["discounts"].tolist() == [0.25, 0.0, 0.5, 0.0, 0.5, 0.5]
    assert batch["terminated"].tolist() == [False, True, False, True, False, False]
    assert batch["truncated"].tolist() == [True, False, True, False, False, False]


def test_samples_are_uniform_over_the_stored_rows_and_decided_by_the_generator() -> None:
    world = Episodes(3)
    ring = make(DeviceRing, world, capacity=30)
    with pytest.raises(ValueError, match="empty"):
        ring.sample(1, torch.Generator())
    for steps in (4, 13):  # not full, and turned over
        for _ in range(steps):
            ring.add(**as_tensors(world.step()))
        rows = ring.draw(60_000, torch.Generator().manual_seed(1))
        assert torch.equal(rows, ring.draw(60_000, torch.Generator().manual_seed(1)))
        shown, counts = rows.unique(return_counts=True)
        assert len(shown) == len(ring)
        assert (counts / len(rows) * len(ring) - 1).abs().max() < 0.1
        head = int(ring.count) % ring._slots
        assert not (shown // 3 == head).any(), "the slot of the current observations"


@pytest.mark.parametrize("stop", [3, 40, 77])
def test_a_loaded_ring_goes_on_exactly(stop: int) -> None:
    world = Episodes(4, ends=0.5)
    ring = make(DeviceRing, world, n_step=3)
    for t in range(stop):
        ring.add(**as_tensors(world.step(moved=[1] if t % 10 == 9 else ())))
    other = make(DeviceRing, world, n_step=3)
    other.load_state_dict(ring.state_dict())
    assert_same(other.state_dict(), ring.state_dict())
    for t in range(60):
        step = as_tensors(world.step(moved=[2] if t in (0, 20) else ()))
        ring.add(**step)
        other.add(**step)
    assert_same(other.state_dict(), ring.state_dict())
    draws = [one.sample(500, torch.Generator().manual_seed(3)) for one in (ring, other)]
    assert_same(*draws)


def test_a_host_buffer_reads_its_state_and_the_other_way_round() -> None:
    """So a checkpoint of such a run is a data set like any other."""
    world = Episodes(4, ends=0.5)
    ring, buffer = (make(kind, world, n_step=3) for kind in (DeviceRing, ReplayBuffer))
    for _ in range(77):
        step = world.step()
        ring.add(**as_tensors(step))
        buffer.add(**step)
    host, device = make(ReplayBuffer, world, n_step=3), make(DeviceRing, world, n_step=3)
    host.load_state_dict(ring.state_dict())
    device.load_state_dict(buffer.state_dict())
    for _ in range(30):
        step = world.step()
        host.add(**step)
        buffer.add(**step)
        device.add(**as_tensors(step))
        assert_equal_rows(device, host)
    assert_same(host.transitions(), buffer.transitions())
    with pytest.raises(UserError, match="the stored replay ring has num_envs 4, this one 5"):
        make(DeviceRing, Episodes(5)).load_state_dict(ring.state_dict())


def test_the_size_is_told_and_checked_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = DeviceRing(1000, 10, obs_shape=(3,))
    # 101 slots of 10 rows: 12 + 8 + 4 + 1 + 1 + 8 bytes; 641 final observations
    assert ring.nbytes == 1010 * 34 + 641 * 12
    assert ring.describe_size() == "42 kB in the memory of cpu"
    monkeypatch.setattr(replay_memory, "available_memory", lambda: 10_000)
    said = r"a replay ring of 1000 steps needs 42 kB = obs \(101 x 10 x 3 float32\).* only 10 kB on cpu is free; lower "
    with pytest.raises(UserError, match=said + "buffer_capacity to about 210, or set replay_memory to host"):
        DeviceRing(1000, 10, obs_shape=(3,))
    with pytest.raises(UserError, match="n_step is 0"):
        DeviceRing(10, obs_shape=(3,), n_step=0)


def test_extremes_are_those_of_rewards_and_of_the_returns_of_ended_episodes() -> None:
    world = Episodes(3, ends=0.3)
    ring, steps = make(DeviceRing, world, capacity=90), []
    for _ in range(50):
        steps.append(world.step())
        ring.add(**as_tensors(steps[-1]))
    returns, kept = [], steps[-30:]
    for env in range(3):
        total = None
        for step in reversed(kept):
            if step["terminated"][env] or step["truncated"][env]:
                total = 0.0
            if total is not None:
                total = float(step["rewards"][env]) + GAMMA * total
                returns.append(total)
    rewards = np.concatenate([step["rewards"] for step in kept])
    wanted = [rewards.min(), rewards.max(), min(*returns, *rewards), max(*returns, *rewards)]
    assert ring.extremes() == pytest.approx(wanted)
