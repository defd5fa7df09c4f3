"""The sum tree (golden numbers O14) and proportional prioritized replay."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from on_gpu import OnGPU
from rl_training.data import PrioritizedReplayBuffer
from rl_training.data.prioritized import SumTree

torch.set_num_threads(1)


def tree_of(values: list[float]) -> SumTree:
    tree = SumTree(len(values))
    tree.set(np.arange(len(values)), np.array(values))
    return tree


def test_sum_tree_finds_what_dopamine_finds() -> None:
    tree = tree_of([0.5, 1.0, 0.5, 0.5])
    assert tree.bounds()[-1] == 2.5
    assert tree.find(np.array([1.5, 1.0]), tree.bounds()).tolist() == [2, 1]
    tree.set(np.array([0]), np.array([0.25]))
    assert tree.find(np.array([0.249, 0.5, 1.25]), tree.bounds()).tolist() == [0, 1, 2]


def test_sum_tree_finds_what_openai_baselines_finds() -> None:
    tree = tree_of([0.5, 1.0, 1.0, 3.0])
    assert tree.find(np.array([0.0, 0.55, 0.99, 1.51, 3.0, 5.5]), tree.bounds()).tolist() == [0, 1, 1, 2, 3, 3]


def test_sum_tree_agrees_with_a_cumulative_sum_and_never_finds_a_zero() -> None:
    rng = np.random.default_rng(0)
    tree, leaves = SumTree(1000), np.zeros(1000)
    for _ in range(50):
        index = rng.integers(0, 1000, 64)
        values = rng.random(64) ** 8 * (rng.random(64) < 0.5)
        tree.set(index, values)
        for i, value in zip(index, values, strict=True):
            leaves[i] = value
        np.testing.assert_array_equal(tree.leaves[:1000], leaves)
        points = rng.random(500) * leaves.sum()
        found = tree.find(np.append(points, tree.bounds()[-1]), tree.bounds())
        assert (leaves[found] > 0).all()
        exact = np.cumsum(leaves).searchsorted(points, side="right")
        off = found[:-1] != exact  # rounding may decide only points that lie on a boundary
        assert np.allclose(np.cumsum(leaves)[np.minimum(found[:-1], exact)][off], points[off])
    again = SumTree(1000)
    again.leaves[:] = tree.leaves
    again.rebuild()
    assert again._sums.tobytes() == tree._sums.tobytes()


def filled(steps: int = 40, num_envs: int = 2, capacity: int = 40, **kwargs: float) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(capacity, num_envs, obs_shape=(2,), **kwargs)
    add_steps(buffer, steps)
    return buffer


def add_steps(buffer: PrioritizedReplayBuffer, steps: int, start: int = 0) -> None:
    n = buffer.num_envs
    for t in range(start, start + steps):
        obs = np.full((n, 2), t, dtype=np.float32)
        done = np.full(n, t % 5 == 4)
        buffer.add(obs, np.zeros(n, np.int64), np.full(n, t), done, np.zeros(n, bool), obs + 1, final_obs=obs + 0.5)


def test_frequencies_follow_priorities_and_weights_correct_them() -> None:
    buffer = filled(alpha=0.7, eps=0.01)
    rows = buffer._rows_of(np.arange(len(buffer)))
    errors = np.linspace(-3.0, 3.0, len(rows))
    buffer.update_priorities(torch.from_numpy(rows), torch.from_numpy(errors))
    wanted = (np.abs(errors) + 0.01) ** 0.7
    wanted /= wanted.sum()
    batch = buffer.sample(200_000, np.random.default_rng(0), beta=0.6)
    counts = np.bincount(batch["indices"].numpy(), minlength=buffer._length)[rows]
    np.testing.assert_allclose(counts / counts.sum(), wanted, atol=2e-4)
    weights = (len(rows) * wanted) ** -0.6
    lookup = dict(zip(rows.tolist(), weights / weights.max(), strict=True))
    np.testing.assert_allclose(batch["weights"].numpy(), [lookup[i] for i in batch["indices"].tolist()], rtol=1e-5)
    assert batch["weights"].dtype == torch.float32


def test_sampling_is_stratified() -> None:
    """With equal priorities, one draw per stratum takes every row exactly once."""
    buffer = filled(capacity=64, steps=32)
    assert sorted(buffer.sample(64, np.random.default_rng(3))["indices"].tolist()) == list(range(64))


def test_new_rows_get_the_largest_priority_so_far_which_starts_at_one() -> None:
    buffer = filled(steps=3, capacity=40, alpha=1.0, eps=0.0)
    assert buffer.priorities.tree.leaves[:6].tolist() == [1.0] * 6
    buffer.update_priorities(np.array([0, 1]), np.array([5.0, 0.5]))
    add_steps(buffer, 1, start=3)
    assert buffer.priorities.tree.leaves[:8].tolist() == [5.0, 0.5, 1, 1, 1, 1, 5, 5]


def test_overwritten_rows_have_priority_zero_even_if_an_update_comes_late() -> None:
    buffer = filled(steps=30)
    rows = buffer._rows_of(np.arange(2))  # the oldest
    add_steps(buffer, 1, start=30)
    buffer.update_priorities(rows, np.array([100.0, 100.0]))
    assert buffer.priorities.tree.leaves[rows].tolist() == [0.0, 0.0]
    assert np.count_nonzero(buffer.priorities.tree.leaves) == len(buffer) == 40


def test_rings_out_of_step_keep_one_priority_per_row() -> None:
    buffer = PrioritizedReplayBuffer(20, 2, obs_shape=(1,), n_step=3)
    obs = np.zeros((2, 1), np.float32)
    for t in range(30):
        valid, cut = np.array([True, t % 4 != 3]), np.array([False, t % 4 == 2])
        buffer.add(obs, np.zeros(2, np.int64), np.zeros(2), np.zeros(2, bool), cut, obs, valid=valid)
    assert np.count_nonzero(buffer.priorities.tree.leaves) == len(buffer) == 20
    drawn = set(buffer.sample(4000, np.random.default_rng(0))["indices"].tolist())
    assert drawn == set(buffer._rows_of(np.arange(20)).tolist())


@pytest.mark.parametrize("steps", [9, 47])
def test_a_restored_buffer_samples_bit_for_bit(steps: int) -> None:
    buffer = filled(steps=steps)
    rng = np.random.default_rng(0)
    for _ in range(30):
        batch = buffer.sample(8, rng)
        buffer.update_priorities(batch["indices"], torch.from_numpy(rng.normal(size=8)))
    other = PrioritizedReplayBuffer(40, 2, obs_shape=(2,))
    other.load_state_dict(buffer.state_dict())
    rngs = [np.random.default_rng(7), np.random.default_rng(7)]
    for t in range(steps, steps + 30):
        batches = []
        for one, generator in zip((buffer, other), rngs, strict=True):
            add_steps(one, 1, start=t)
            batches.append(one.sample(16, generator))
            one.update_priorities(batches[-1]["indices"], batches[-1]["rewards"] / (t + 1))
        assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])
    assert buffer.priorities.max_priority == other.priorities.max_priority


@pytest.mark.parametrize("use", ["add", "sample", "state_dict", "update"])
def test_errors_on_a_gpu_are_read_when_the_buffer_is_used_next_with_the_same_draws(use: str) -> None:
    buffers, rngs, seen = (filled(), filled()), (np.random.default_rng(1), np.random.default_rng(1)), []
    for buffer, rng in zip(buffers, rngs, strict=True):
        found: list[Any] = []
        for t in range(40, 60):
            batch = buffer.sample(8, rng)
            errors, before = batch["rewards"] + 0.1 * t, OnGPU.reads
            buffer.update_priorities(batch["indices"], errors if buffer is buffers[0] else errors.as_subclass(OnGPU))
            assert OnGPU.reads == before  # an update under way goes on alone
            if use == "add":
                add_steps(buffer, 1, start=t)
            elif use == "state_dict":
                buffer.load_state_dict(copy.deepcopy(buffer.state_dict()))
            elif use == "update":
                buffer.update_priorities(np.array([0]), np.array([0.5]))
            found += [*batch.values(), buffer.sample(4, rng)["weights"]]
        seen.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    assert OnGPU.reads
    buffers[1].update_priorities(np.arange(8), torch.full((8,), 1e6).as_subclass(OnGPU))
    buffers[1].load_state_dict(filled().state_dict())
    buffers[1].sample(1, rngs[1])
    assert buffers[1].priorities.max_priority == 1.0  # the errors were of what was there before


def test_priorities_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        filled().update_priorities(np.array([0, 1]), np.array([1.0, np.nan]))


def test_the_largest_priority_is_not_forgotten() -> None:
    """New rows get it even after later updates that were all smaller."""
    buffer = filled(steps=3, capacity=40, alpha=0.5, eps=0.0)
    for error in (9.0, 4.0, 0.25):
        buffer.update_priorities(np.array([0]), np.array([error]))
    add_steps(buffer, 1, start=3)
    assert buffer.priorities.tree.leaves[[0, 6, 7]].tolist() == [0.5, 3.0, 3.0]
