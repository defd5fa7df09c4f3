"""`SequenceReplayBuffer`: overlapping sequences with the memory's state before each of them, for Q-learning (R2D2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.data.memory import Array, Sender, rows_per_env
from rl_training.data.prioritized import Priorities
from rl_training.data.rings import RecurrentReplayBuffer
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)


class SequenceReplayBuffer(RecurrentReplayBuffer):
    """The newest rows of `num_envs` environments, sampled as sequences that begin at every `period`-th row of a ring.

    A sequence can be sampled when all of its `sequence_length` rows are there, until its first one is overwritten. A
    place is its number: `index * num_envs + env`. `states` [places, S] are what the acting policy remembered before it
    read the first row, and zeros where that row begins an episode.

    A sequence may cross the ends of episodes. The final observation is a row, at which no action was taken: with its
    place in the sequence, the values after a truncation are those that the policy's memory would have had there.
    """

    kind = "sequence replay buffer"
    ahead: None = None  # batches are drawn when they are used

    def __init__(
        self, capacity: int, num_envs: int = 1, *, sequence_length: int, period: int, state_size: int,
        n_step: int = 1, gamma: float = 0.99, alpha: float = 0.0, eps: float = 1e-6, **rows: Any,
    ) -> None:  # fmt: skip
        """`rows` are the other arguments of `RecurrentReplayBuffer`. With `alpha` 0, sequences are drawn uniformly."""
        count = rows_per_env(capacity, num_envs) // period
        if count * period < sequence_length:
            raise UserError(
                f"buffer_capacity is {capacity}; a sequence has {sequence_length} rows and each of the {num_envs} "
                f"environments keeps a multiple of {period} rows, so it must be at least "
                f"{-(-sequence_length // period) * period * num_envs}."
            )
        super().__init__(count * period * num_envs, num_envs, sequence_length=sequence_length, **rows)
        self.period, self.n_step, self.gamma = period, n_step, gamma
        self.states = np.zeros((count * num_envs, state_size), np.float32)
        self.priorities = Priorities(count * num_envs, alpha, eps)
        self._send = Sender(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are now."""
        return super().nbytes + self.states.nbytes + self.priorities.tree.nbytes

    def _append(self, envs: Array, *, states: Array | None = None, **values: Any) -> None:
        """Write a row; `states` [N, S] are what was remembered before it: zeros (None) for the first of an episode."""
        slots = self._heads[envs]
        super()._append(envs, **values)
        begins = np.flatnonzero(slots % self.period == 0)
        if len(begins):
            places = self._places(slots[begins], envs[begins])
            self.states[places] = 0.0 if states is None else states[begins]
            self.priorities.drop(places)
        firsts = slots + 1 - self.sequence_length
        whole = np.flatnonzero((firsts % self.period == 0) & (self._sizes[envs] >= self.sequence_length))
        if len(whole):
            self.priorities.add(self._places(firsts[whole] % self._slots, envs[whole]))

    def _places(self, slots: Array, envs: Array) -> Array:
        places: Array = slots // self.period * self.num_envs + envs
        return places

    def num_windows(self) -> int:
        """How many different sequences can be sampled now."""
        return int(np.count_nonzero(self.priorities.tree.leaves))

    def sample(self, batch_size: int, rng: np.random.Generator, *, beta: float | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """`batch_size` sequences, time first: obs [L, B, ...], starts [L, B] where episodes begin, states [B, S], the
        steps [L - 1, B] of `n_step_returns`, with masks next_action_masks [L - 1, B, A], indices [B] for
        `update_priorities`, and with a `beta` weights [B]."""
        count = self.num_windows()
        if not count:
            raise ValueError(f"no environment has {self.sequence_length} rows yet")
        places, weights = self.priorities.draw(batch_size, rng, count, beta or 0.0)
        first, envs = places // self.num_envs * self.period, places % self.num_envs
        rows = (first + np.arange(self.sequence_length)[:, None]) % self._slots * self.num_envs + envs
        found = {name: array.take(rows, axis=0) for name, array in self.columns.items() if name not in ("obs", "masks")}
        batch = n_step_returns(found, self.n_step, self.gamma)
        batch |= {"starts": found["is_first"], "states": self.states[places]}
        if "masks" in self.columns:
            batch["next_action_masks"] = self.columns["masks"][np.take_along_axis(rows, batch["next"], 0)]
        if beta is not None:
            batch["weights"] = weights
        if self.copy is None:
            tensors = self._send({"obs": self.columns["obs"].take(rows, axis=0), **batch})
        else:
            tensors = self.copy.gather({"obs": rows}, batch)
        return {**tensors, "indices": torch.from_numpy(places)}

    def update_priorities(self, indices: Tensor | Array, errors: Tensor | Array) -> None:
        """Set the priorities of sampled sequences [B]."""
        self.priorities.update(indices, errors)

    # resuming -------------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        own = {"sequence_length": self.sequence_length, "period": self.period, "state_size": self.states.shape[1]}
        return super()._layout() | own | {"masks": "masks" in self.columns}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as views of the filled part: write them before the next `add`."""
        state = super().state_dict()
        filled = -(-len(state["arrays"]["rewards"]) // self.period) * self.num_envs
        return {**state, "states": self.states[:filled], **self.priorities.state_dict(filled)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        super().load_state_dict(state)
        self.states[: len(state["states"])] = state["states"]
        self.priorities.load_state_dict(state)


def n_step_returns(rows: Mapping[str, Array], n_step: int, gamma: float) -> dict[str, Array]:
    """The steps from each of the first L - 1 rows, all [L - 1, B], of arrivals [L, B].

    actions; rewards, the discounted sum of n rewards; next, the row after them; discounts, gamma to the number of
    rewards, 0 where the last step terminated; taken, 1 where a step was taken, and 0 at the final observation of an
    episode. The sum ends earlier at the end of an episode or of the sequence.
    """
    ended = rows["terminated"] | rows["truncated"]
    taken = ~rows["is_first"][1:]
    powers = (gamma ** np.arange(n_step + 1)).astype(np.float32)
    rewards, lengths = np.zeros_like(rows["rewards"][1:]), np.zeros(taken.shape, np.int64)
    goes_on = taken.copy()
    for step in range(1, min(n_step, len(taken)) + 1):
        goes_on[len(taken) + 1 - step :] = False  # beyond the sequence
        reached = goes_on[: len(taken) + 1 - step]
        lengths += goes_on
        rewards[: len(reached)] += np.where(reached, powers[step - 1] * rows["rewards"][step:], np.float32(0.0))
        reached &= ~ended[step:]
    following = np.arange(len(taken))[:, None] + lengths
    terminated = np.take_along_axis(rows["terminated"], following, 0)
    return {
        "actions": rows["actions"][1:], "rewards": rewards, "next": following,
        "discounts": np.where(terminated, np.float32(0.0), powers[lengths]), "taken": taken.astype(np.float32),
    }  # fmt: skip
