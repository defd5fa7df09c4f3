"""`DeviceRing`: replay in the memory of a device, written and sampled without the host reading a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.actor_critic import select_rows
from rl_training.data.memory import ArraySpec, allocate_on, check_same_layout, format_bytes, replay_specs
from rl_training.errors import UserError

CHANGES_BUFFERS = True  # an error in here may leave a buffer half changed (run/interruption.py)

SPARE_STEPS = 64  # for which the pool of final observations has room beyond those it holds


class DeviceRing:
    """The newest `capacity` transitions of `num_envs` environments, which step together, as tensors on one device.

    It stores and returns what `ReplayBuffer` does, and its saved state is the same. Columns are [slots, N, ...], flat:
    a row's index is `slot * num_envs + env`. The slot at `count % slots` holds the current observations, and the rows
    before it can be sampled. Final observations are in a pool that works as a queue: episode end number i is at
    `i % room`, so that ends of overwritten rows make room for new ones.

    `insert`, `sample` and `gather` are functions of tensors: nothing in them depends on a value. `add` calls `insert`
    and counts on the host how many ends there can be; about every `SPARE_STEPS` steps it reads how many there are, and
    enlarges the pool if it could overflow.
    """

    kind = "replay ring"
    ahead: None = None  # no batch is drawn ahead

    def __init__(
        self, capacity: int, num_envs: int = 1, *, obs_shape: Sequence[int], n_step: int = 1, gamma: float = 0.99,
        device: str | torch.device = "cpu", **layout: Any,
    ) -> None:  # fmt: skip
        """`layout`: obs_dtype, action_shape, continuous."""
        if n_step < 1:
            raise UserError(f"n_step is {n_step}; it must be at least 1.")
        specs = replay_specs(capacity, num_envs, obs_shape=obs_shape, **layout)
        specs["ends"] = ArraySpec(specs.pop("final_slots").shape, np.dtype(np.int64))  # numbers of episode ends
        self._slots = specs["obs"].shape[0]
        self.rows_per_env, self.num_envs, self.n_step = self._slots - 1, num_envs, n_step
        self.capacity, self._length = self.rows_per_env * num_envs, self._slots * num_envs
        self.obs_shape, self.device = tuple(obs_shape), torch.device(device)
        self._specs, self._what = specs, f"a {self.kind} of {capacity} steps"
        # the pool's last entry takes what is written for rows that did not end
        self._room = num_envs * max(2, min(SPARE_STEPS, self.rows_per_env))
        arrays = allocate_on(self.device, specs | {"finals": self._pool_spec(self._room)}, self._what)
        self.finals = arrays.pop("finals")
        self._arrays = arrays
        self.columns = {name: array.view(self._length, *array.shape[2:]) for name, array in arrays.items()}
        self.count = torch.zeros(1, dtype=torch.int64, device=self.device)  # steps inserted
        self.ended = torch.zeros(1, dtype=torch.int64, device=self.device)  # episodes ended
        self._steps = self._most_ends = 0  # on the host: the same count, and the most ends that rows can have
        self._window = torch.arange(n_step, device=self.device)
        self._powers = torch.zeros(n_step + 1, device=self.device)
        self.gamma = gamma

    def _pool_spec(self, room: int) -> ArraySpec:
        return ArraySpec((room + 1, *self.obs_shape), self._specs["obs"].dtype)

    def __len__(self) -> int:
        return min(self._steps, self.rows_per_env) * self.num_envs

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are now."""
        return sum(tensor.nbytes for tensor in (*self.columns.values(), self.finals))

    def describe_size(self) -> str:
        """`7.19 GB in the memory of cuda:0`."""
        return f"{format_bytes(self.nbytes)} in the memory of {self.device}"

    def close(self) -> None:
        """There are no files."""

    @property
    def gamma(self) -> float:
        """Discount per step; rewards are stored undiscounted, so that a new value applies to every row."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = value
        self._powers.copy_(torch.from_numpy((value ** np.arange(self.n_step + 1)).astype(np.float32)))

    # writing --------------------------------------------------------------------------------------------------------

    def add(
        self, obs: Tensor, actions: Tensor, rewards: Tensor, terminated: Tensor, truncated: Tensor, next_obs: Tensor,
        final_obs: Tensor, valid: None = None,
    ) -> None:  # fmt: skip
        """Store one step of all environments, everything [N, ...], as `ReplayBuffer.add` does.

        `final_obs` counts where an episode ended. `valid` is None: environments on a device reset in the same step.
        """
        self._make_room()
        self.insert(obs, actions, rewards, terminated, truncated, next_obs, final_obs)
        self._steps += 1

    def insert(
        self, obs: Tensor, actions: Tensor, rewards: Tensor, terminated: Tensor, truncated: Tensor, next_obs: Tensor,
        final_obs: Tensor,
    ) -> None:  # fmt: skip
        """The part of `add` on the device.

        Where `obs` is not the last `next_obs`, the environment was moved: its open episode is truncated there.
        """
        before, here, after = ((self.count + offset) % self._slots for offset in (-1, 0, 1))
        arrays = self._arrays
        shown = arrays["obs"].index_select(0, here)[0]
        moved = (shown != obs).view(self.num_envs, -1).any(1) & (self.count > 0)
        was_terminated, was_truncated, old_ends = (
            arrays[name].index_select(0, before)[0] for name in ("terminated", "truncated", "ends")
        )
        cut = moved & ~(was_terminated | was_truncated)
        marks = torch.cat([cut, terminated | truncated])
        numbers = self.ended + marks.cumsum(0) - 1
        places = torch.where(marks, numbers % self._room, self._room)
        self.finals.index_copy_(0, places, torch.cat([shown, final_obs]))
        of_cut, of_ends = numbers.chunk(2)
        self._put(before, truncated=was_truncated | cut, ends=torch.where(cut, of_cut, old_ends))
        self._put(
            here, obs=obs, actions=actions, rewards=rewards, terminated=terminated, truncated=truncated, ends=of_ends
        )
        never = torch.zeros_like(terminated)  # the row that is dropped, when the ring is full
        self._put(after, obs=next_obs, terminated=never, truncated=never)
        self.ended += marks.sum()
        self.count += 1

    def _put(self, slot: Tensor, **values: Tensor) -> None:
        """Write [N, ...] at a slot [1]."""
        for name, value in values.items():
            array = self._arrays[name]
            array.index_copy_(0, slot, value.to(array.dtype).view(1, *array.shape[1:]))

    def _make_room(self) -> None:
        """Make sure that the ends of one more step fit into the pool."""
        needed = min(self._most_ends, len(self)) + self.num_envs
        if needed > self._room and self._room < self.capacity:
            held = int((self.columns["terminated"] | self.columns["truncated"]).sum())
            spare = self.num_envs * SPARE_STEPS
            if held + spare // 2 > self._room:
                self._enlarge(min(self.capacity, held + held // 2 + spare), held)
            self._most_ends = held + self.num_envs  # the newest rows may still be cut
        self._most_ends += self.num_envs

    def _enlarge(self, room: int, held: int) -> None:
        finals = allocate_on(self.device, {"finals": self._pool_spec(room)}, self._what)["finals"]
        numbers = self.ended - held + torch.arange(held, device=self.device)
        finals[numbers % room] = self.finals[numbers % self._room]
        self.finals, self._room = finals, room

    # reading --------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
        """`batch_size` transitions, uniformly and with replacement, as `gather` returns them."""
        if not self._steps:
            raise ValueError("cannot sample from an empty replay ring")
        return self.gather(self.draw(batch_size, generator))

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """Indices [B] of random rows."""
        sizes = self.count.clamp(max=self.rows_per_env)
        draws = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=self.device)
        ranks = (draws * (sizes * self.num_envs)).long()  # 53 random bits: never the whole size
        return (ranks + (self.count - sizes) % self._slots * self.num_envs) % self._length

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        """The transitions at row indices [B], with the keys of `ReplayBuffer.gather` (no masks, no indices)."""
        rewards, last, powers = self._look_ahead(rows)
        columns = self.columns
        ends = select_rows({name: columns[name] for name in ("terminated", "truncated", "ends")}, last)
        terminated, truncated = ends["terminated"], ends["truncated"]
        ended = (terminated | truncated).view(-1, *[1] * len(self.obs_shape))
        following = select_rows({"obs": columns["obs"]}, (last + self.num_envs) % self._length)["obs"]
        finals = select_rows({"obs": self.finals}, ends["ends"] % self._room)["obs"]
        return {
            **select_rows({name: columns[name] for name in ("obs", "actions")}, rows),
            "rewards": rewards, "next_obs": torch.where(ended, finals, following), "terminated": terminated,
            "truncated": truncated, "dones": terminated.float(), "discounts": powers.masked_fill(terminated, 0.0),
        }  # fmt: skip

    def _look_ahead(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Discounted reward sums [B], the last row of each window [B], and gamma ** length [B]."""
        columns, n = self.columns, self.num_envs
        if self.n_step == 1:
            return columns["rewards"].take(rows), rows, self._powers[1].expand(len(rows))
        window = (rows.unsqueeze(1) + self._window * n) % self._length
        room = (self.count - rows // n) % self._slots  # rows beyond the newest one are stale
        open_so_far = ~(columns["terminated"].take(window) | columns["truncated"].take(window))
        lengths = torch.minimum(1 + open_so_far[:, :-1].cumprod(1).sum(1), room)
        rewards = columns["rewards"].take(window) * self._powers[:-1]
        inside = self._window < lengths.unsqueeze(1)
        rewards = torch.where(inside, rewards, 0.0).sum(1)
        return rewards, (rows + (lengths - 1) * n) % self._length, self._powers.take(lengths)

    def extremes(self) -> list[float]:
        """Smallest and largest reward, and return from any row of an episode that has ended; read by the host."""
        first = self._steps - len(self) // self.num_envs
        slots = torch.arange(first, self._steps, device=self.device) % self._slots
        rows = {name: self._arrays[name].index_select(0, slots) for name in ("rewards", "terminated", "truncated")}
        done, rewards = rows["terminated"] | rows["truncated"], rows["rewards"].double()
        has_ended = done.flip(0).cumsum(0).flip(0) > 0  # in this row or a later one
        returns, weights, steps = rewards, self.gamma * (~done).double(), 1
        while steps < len(slots):  # sums of so many rewards, joined to sums of twice as many
            returns = torch.cat([returns[:-steps] + weights[:-steps] * returns[steps:], returns[-steps:]])
            weights = torch.cat([weights[:-steps] * weights[steps:], weights[-steps:]])
            steps *= 2
        returns = torch.where(has_ended, returns, rewards)
        found = torch.stack([rewards.min(), rewards.max(), returns.min(), returns.max()])
        return [float(value) for value in found.tolist()]

    # resuming -------------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        """As that of a `ReplayBuffer`."""
        obs, actions = self._specs["obs"], self._specs["actions"]
        return {
            "capacity": self.capacity, "num_envs": self.num_envs, "obs_shape": list(self.obs_shape),
            "obs_dtype": str(obs.dtype), "action_shape": list(actions.shape[2:]), "action_dtype": str(actions.dtype),
            "frame_stack": 1, "masks": False,
        }  # fmt: skip

    def _ended_rows(self) -> Tensor:
        """The rows in which an episode ended, oldest first."""
        first = self._steps - len(self) // self.num_envs
        rows = (torch.arange(len(self), device=self.device) + first * self.num_envs) % self._length
        done = self.columns["terminated"] | self.columns["truncated"]
        return rows[done[rows]]

    def state_dict(self) -> dict[str, Any]:
        """Everything, in the form of `ReplayBuffer.state_dict`: write it before the next `add`."""
        filled = min(self._steps + 1, self._slots)
        arrays = {name: array[:filled].cpu().numpy() for name, array in self._arrays.items() if name != "ends"}
        rows = self._ended_rows()
        final_slots = np.full((self._slots, self.num_envs), -1, dtype=np.int32)
        final_slots.reshape(-1)[rows.cpu().numpy()] = np.arange(len(rows))
        finals = self.finals[self.columns["ends"][rows] % self._room].cpu().numpy()
        size = np.full(self.num_envs, len(self) // self.num_envs, dtype=np.int64)
        return {
            "layout": self._layout(), "arrays": arrays | {"final_slots": final_slots[:filled]},
            "heads": np.full(self.num_envs, self._steps % self._slots, dtype=np.int64), "sizes": size,
            "finals": {"obs": finals, "masks": None, "free": np.zeros(0, dtype=np.int64)}, "lockstep": True,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; a state of another layout is refused."""
        check_same_layout(state["layout"], self._layout(), self.kind)
        for name, array in self._arrays.items():
            if name != "ends":
                stored = torch.from_numpy(np.asarray(state["arrays"][name]))
                array[: len(stored)] = stored.to(self.device)
        head, size = int(state["heads"][0]), int(state["sizes"][0])
        self._steps = head if size < self.rows_per_env else head + self._slots
        rows = self._ended_rows()
        held = len(rows)
        if held + self.num_envs > self._room and self._room < self.capacity:
            self._enlarge(min(self.capacity, held + held // 2 + self.num_envs * SPARE_STEPS), 0)
        slots = np.asarray(state["arrays"]["final_slots"]).reshape(-1)[rows.cpu().numpy()]
        self.finals[:held] = torch.from_numpy(np.asarray(state["finals"]["obs"])[slots]).to(self.device)
        self.columns["ends"][rows] = torch.arange(held, device=self.device)
        self.count.fill_(self._steps)
        self.ended.fill_(held)
        self._most_ends = held + self.num_envs
