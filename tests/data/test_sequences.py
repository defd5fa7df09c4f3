"""`SequenceReplayBuffer`: which sequences can be sampled, the state before each, n-step returns, and priorities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.data.sequences import SequenceReplayBuffer, n_step_returns
from rl_training.errors import UserError

N, LENGTH, PERIOD = 2, 7, 3


class Walks:
    """Environments in which observation, action, reward, mask and state of a step are told by two numbers."""

    def __init__(self, seed: int = 0, next_step_resets: bool = False) -> None:
        self.rng, self.next_step = np.random.default_rng(seed), next_step_resets
        self.count = 0.0
        self.obs = self.numbers()
        self.done = np.zeros(N, bool)
        self.arrivals: list[list[dict[str, Any]]] = [[self.first(self.obs[env])] for env in range(N)]

    def numbers(self) -> np.ndarray:
        self.count += 1
        return np.array([[self.count, env] for env in range(N)], np.float32)

    def first(self, obs: np.ndarray) -> dict[str, Any]:
        return {"obs": obs, "actions": 0, "rewards": 0.0, "terminated": False, "truncated": False, "is_first": True}

    def step(self) -> dict[str, Any]:
        resets = self.done & self.next_step
        kinds = self.rng.random(N)
        terminated, truncated = (kinds < 0.15) & ~resets, (kinds >= 0.15) & (kinds < 0.3) & ~resets
        self.done = terminated | truncated
        actions, rewards = self.rng.integers(1, 5, N), self.rng.normal(size=N).astype(np.float32)
        obs, final, following = self.obs, self.numbers(), self.numbers()
        for env in range(N):
            if resets[env]:
                self.arrivals[env].append(self.first(following[env]))
                continue
            columns = {"actions": actions, "rewards": rewards, "terminated": terminated, "truncated": truncated}
            row = {name: column[env] for name, column in columns.items()}
            self.arrivals[env].append({**row, "obs": final[env], "is_first": False})
            if not self.done[env] or self.next_step:
                following[env] = final[env]
            else:
                self.arrivals[env].append(self.first(following[env]))
        self.obs = following
        return {
            "obs": obs, "actions": actions, "rewards": rewards, "terminated": terminated, "truncated": truncated,
            "next_obs": following, "masks": legal(obs), "next_masks": legal(following), "final_masks": legal(final),
            "states": final[:, :1] + 0.5, **({"valid": ~resets} if self.next_step else {"final_obs": final}),
        }  # fmt: skip


def legal(obs: np.ndarray) -> np.ndarray:
    """Two of five actions, by the number of the observation."""
    return (obs[:, :1] + np.arange(5)) % 3 == 0


def make(capacity: int = 60, **options: Any) -> SequenceReplayBuffer:
    sizes: dict[str, Any] = {"obs_shape": (2,), "mask_size": 5, "state_size": 1}
    return SequenceReplayBuffer(capacity, N, sequence_length=LENGTH, period=PERIOD, **sizes | options)


def fill(buffer: SequenceReplayBuffer, steps: int, walks: Walks | None = None) -> Walks:
    walks = walks or Walks()
    for _ in range(steps):
        buffer.add(**walks.step())
    return walks


@pytest.mark.parametrize("next_step_resets", [False, True])
@pytest.mark.parametrize("steps", [12, 90])
def test_every_sequence_begins_at_a_multiple_of_the_period_with_the_state_there(
    steps: int, next_step_resets: bool
) -> None:
    buffer = make()
    walks = fill(buffer, steps, Walks(next_step_resets=next_step_resets))
    batch = {name: column.numpy() for name, column in buffer.sample(200, np.random.default_rng(0)).items()}
    seen = set()
    for b in range(200):
        env = int(batch["obs"][0, b, 1])
        rows = walks.arrivals[env]
        start = next(i for i, row in enumerate(rows) if row["obs"][0] == batch["obs"][0, b, 0])
        seen.add((env, start))
        for name, found in (("obs", batch["obs"]), ("is_first", batch["starts"])):
            np.testing.assert_array_equal(found[:, b], [row[name] for row in rows[start : start + LENGTH]])
        np.testing.assert_array_equal(batch["actions"][:, b], [r["actions"] for r in rows[start + 1 : start + LENGTH]])
        after = rows[start]["obs"][0] if not rows[start]["is_first"] else -0.5
        assert batch["states"][b, 0] == after + 0.5
    whole = {
        (env, start)
        for env, rows in enumerate(walks.arrivals)
        for start in range(0, len(rows) - LENGTH + 1, PERIOD)
        if start >= len(rows) - buffer.rows_per_env
    }
    assert seen == whole
    assert buffer.num_windows() == len(whole)


def plain_return(rows: dict[str, np.ndarray], t: int, b: int, n: int, gamma: float) -> tuple[float, float, int]:
    """Reward sum, discount and next row of the step from row t, one step after the other."""
    total, power = 0.0, 1.0
    for k in range(t + 1, min(t + n, len(rows["rewards"]) - 1) + 1):
        total += power * rows["rewards"][k, b]
        power *= gamma
        if rows["terminated"][k, b]:
            return total, 0.0, k
        if rows["truncated"][k, b]:
            return total, power, k
    return total, power, min(t + n, len(rows["rewards"]) - 1)


@pytest.mark.parametrize("n_step", [1, 3, 20])
def test_returns_end_with_the_episode_and_bootstrap_from_its_final_observation(n_step: int) -> None:
    buffer = make(600)
    fill(buffer, 250)
    count = buffer.num_windows()
    names = np.arange(buffer.rows_per_env)[:, None] * N + np.arange(N)
    rows = {name: column[names] for name, column in buffer.columns.items()}
    found = n_step_returns(rows, n_step, 0.9)
    ends = 0
    for t in range(len(names) - 1):
        for b in range(N):
            assert found["taken"][t, b] == (not rows["is_first"][t + 1, b])
            if not found["taken"][t, b]:
                continue
            total, discount, following = plain_return(rows, t, b, n_step, 0.9)
            np.testing.assert_allclose(found["rewards"][t, b], total, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found["discounts"][t, b], discount, rtol=1e-5)
            assert found["next"][t, b] == following
            ends += rows["truncated"][following, b]
    assert ends > 10
    assert count


def test_masks_are_those_of_the_next_observation_of_each_step() -> None:
    buffer = make(n_step=2)
    fill(buffer, 40)
    batch = {name: column.numpy() for name, column in buffer.sample(50, np.random.default_rng(0)).items()}
    for b in range(50):
        following = batch["obs"][batch["next"][:, b], b]
        np.testing.assert_array_equal(batch["next_action_masks"][:, b], legal(following))


def test_priorities_are_of_sequences_and_new_ones_get_the_largest() -> None:
    buffer = make(alpha=1.0, eps=0.0)
    walks = fill(buffer, 12)
    batch = buffer.sample(64, np.random.default_rng(0), beta=0.6)
    assert batch["weights"].tolist() == [1.0] * 64
    place = batch["indices"][:1]
    buffer.update_priorities(place, torch.tensor([1e6]))
    batch = buffer.sample(64, np.random.default_rng(0), beta=1.0)
    assert (batch["indices"] == place).float().mean() > 0.9
    before = buffer.num_windows()
    fill(buffer, 3, walks)
    new = np.flatnonzero(buffer.priorities.tree.leaves == 1e6)
    assert len(new) == 1 + buffer.num_windows() - before


def test_without_priorities_sequences_are_drawn_evenly() -> None:
    buffer = make()
    fill(buffer, 30)
    count = buffer.num_windows()
    batch = buffer.sample(count, np.random.default_rng(0))
    assert len(set(batch["indices"].tolist())) == count
    assert "weights" not in batch


@pytest.mark.parametrize("steps", [12, 70])
def test_a_restored_buffer_goes_on_bit_for_bit(steps: int, tmp_path: Path) -> None:
    buffer, other = make(alpha=0.9), make(alpha=0.9, folder=tmp_path)
    walks = fill(buffer, steps)
    batch = buffer.sample(8, np.random.default_rng(1), beta=0.5)
    buffer.update_priorities(batch["indices"], torch.rand(8))
    other.load_state_dict(buffer.state_dict())
    rngs = [np.random.default_rng(1), np.random.default_rng(1)]
    for _ in range(40):
        step, batches = walks.step(), []
        for one, rng in zip((buffer, other), rngs, strict=True):
            one.add(**step)
            batches.append(one.sample(4, rng, beta=0.5))
            one.update_priorities(batches[-1]["indices"], batches[-1]["rewards"].abs().amax(0))
        assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    other.close()


def test_too_small_a_buffer_and_another_layout_are_refused() -> None:
    with pytest.raises(UserError, match=r"buffer_capacity is 17; a sequence has 7 rows .* at least 18"):
        make(17)
    make(18)
    with pytest.raises(ValueError, match="no environment has 7 rows yet"):
        make().sample(1, np.random.default_rng(0))
    with pytest.raises(UserError, match="state_size 1, this one 2"):
        make(state_size=2).load_state_dict(make().state_dict())
