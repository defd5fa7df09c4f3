"""The stores with a replay buffer: steps go into it, batches are samples of transitions, or windows for Dreamer.

`SupportWatch` compares stored returns with the support of a categorical distribution, and widens it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data import PrioritizedReplayBuffer, RecurrentReplayBuffer, ReplayBuffer
from rl_training.data.device_ring import DeviceRing
from rl_training.data.hindsight import HindsightReplayBuffer
from rl_training.data.memory import fits_on_gpu, format_bytes
from rl_training.data.sequences import SequenceReplayBuffer
from rl_training.data.store import Experience, Request, Store, StoreContext
from rl_training.envs.goals import Goals
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError

EDGE = 0.05  # of the support, on both sides
LONGEST = 10_000  # rewards of an episode that are kept until it ends
WIDE_BATCH = 500_000  # bytes of observations from which a GPU gathers a batch faster than the host sends it


def discounted_returns(rewards: Sequence[float], gamma: float) -> Iterator[float]:
    """The returns from every step of an episode, the last one first."""
    total = 0.0
    for earned in reversed(rewards):
        total = earned + gamma * total
        yield total


class SupportWatch:
    """Compares stored rewards, and the returns of stored episodes, with the support.

    An end that may move is moved beyond what lies outside; for one that may not, there is one warning. The width at
    least doubles, so that this happens a few times in a run at most. `widen` then moves the learner's atoms.
    """

    def __init__(self, params: Any, num_envs: int) -> None:
        self.ends: list[float] = [params.v_min, params.v_max]
        self.moves = [params.widen_support in (name, "both") for name in ("v_min", "v_max")]
        self._rewards: list[list[float]] = [[] for _ in range(num_envs)]  # of the current episodes
        self._reached: list[float] | None = list(self.ends)  # where the learner's ends are, if known
        self._warned = False

    def look(self, experience: Experience, gamma: float) -> None:
        """Compare the rewards of new experience and the returns of episodes that ended in it."""
        if self._warned and not any(self.moves):
            return  # there is nothing left to say
        for row in experience.rows():
            envs = row.get("envs", range(len(self._rewards)))
            ended, valid = row["terminated"] | row["truncated"], row["valid"]
            for i, (env, reward) in enumerate(zip(envs, row["rewards"].tolist(), strict=True)):
                if valid is not None and not valid[i]:
                    continue
                earned = self._rewards[env]
                earned.append(reward)
                self._meet(reward, "reward")
                if ended[i] or len(earned) == LONGEST:
                    returns = list(discounted_returns(earned, gamma))
                    self._meet(min(returns), "return")
                    self._meet(max(returns), "return")
                    earned.clear()

    def compare(self, extremes: Sequence[float]) -> None:
        """Compare the smallest and the largest reward and return that were stored, in this order."""
        for value, what in zip(extremes, ("reward", "reward", "return", "return"), strict=True):
            if math.isfinite(value):  # a run with other rewards ends soon
                self._meet(value, what)

    def _meet(self, value: float, what: str) -> None:
        low, high = self.ends
        slack = 1e-6 * (high - low)
        if low - slack <= value <= high + slack:
            return
        above = value > high
        name, near, far = ("v_max", high, low) if above else ("v_min", low, high)
        if self.moves[above]:
            further = max if above else min
            self.ends[above] = further(value + EDGE * (value - far), far + 2.0 * (near - far))
        elif not self._warned:
            self._warned = True
            where = f"{'above' if above else 'below'} {name} ({near:g})"
            warnings.warn(
                f"a {what} of {value:.4g} was stored, {where}: values there are clipped; widen the support, or leave "
                f"{name} out.", stacklevel=2,
            )  # fmt: skip

    def widen(self, algorithm: Any) -> dict[str, float]:
        """Move the learner's atoms to the ends, those of all ranks together; return the ends as metrics."""
        if not any(self.moves):
            return {}
        if algorithm.ranks is not None:
            low, high = self.ends
            self.ends = [-algorithm.ranks.largest(-low), algorithm.ranks.largest(high)]
        if self.ends != self._reached:
            algorithm.widen_support(*self.ends)
            self._reached = list(self.ends)
        return dict(zip(("v_min", "v_max"), self.ends, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The ends and the rewards of the current episodes; nothing if no end may move."""
        if not any(self.moves):
            return {}
        return {"support": {"ends": list(self.ends), "rewards": [np.array(earned) for earned in self._rewards]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; with another number of environments, new episodes start without rewards."""
        if not any(self.moves):
            return
        low, high = map(float, state["support"]["ends"])
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"its support is from {low} to {high}")
        self.ends, self._reached = [low, high], None
        rewards = [earned.tolist() for earned in state["support"]["rewards"]]
        if len(rewards) == len(self._rewards):
            self._rewards = rewards


class BufferStore(Store):
    """Shared by the stores with a buffer: the `credit` for updates, and the buffer in the saved state.

    A subclass makes the `buffer` and defines the unit of its credit.
    """

    buffer: Any
    credit: float
    counters: ClassVar[tuple[str, ...]] = ("credit",)

    def random_steps(self, step: int) -> int:
        """The number of transitions from `step` on that use random actions."""
        return max(0, int(self.params.learning_starts) - step)

    def keep(self, experience: Experience, step: int) -> int:
        """Put experience into the buffer; return how many of its transitions count toward updates."""
        for row in experience.rows():
            self.buffer.add(**row)
        learned: int = step + experience.transitions - self.params.learning_starts
        return max(0, min(experience.transitions, learned))

    @property
    def is_filled(self) -> bool:
        """Whether the buffer has what learning needs; not after a resume without it, until it is filled again."""
        return bool(len(self.buffer) >= min(self.params.learning_starts, self.buffer.capacity))

    def state_dict(self) -> dict[str, Any]:
        """The state of a store, and under `replay` the buffer."""
        return super().state_dict() | {"replay": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; a checkpoint may lack its buffer."""
        super().load_state_dict(state)
        if "replay" not in state:
            return ["the checkpoint has no replay buffer; it is filled again before learning continues."]
        self.buffer.load_state_dict(state["replay"])
        return []

    def close(self) -> None:
        """Remove the buffer's files."""
        self.buffer.close()


class ReplayStore(BufferStore):
    """Keeps transitions, and samples `gradient_updates_per_step` batches per training turn.

    One training turn is due per `train_frequency` environment steps, so more environments do not mean fewer updates.
    """

    buffer: ReplayBuffer
    on_device: ClassVar[bool] = False  # whether experience and samples never leave the device

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.prioritized_beta: float = self.params.prioritized_beta_start
        self.goals = Goals(context.recipe, context.spaces, context.seed) if self.params.relabels else None
        self.credit = 0  # environment steps that no training turn has used yet
        self.buffer = self.make_buffer(context)
        rows = -(-self.params.train_frequency // context.num_envs)
        self.layout = context.layout(rows * (2 if context.holds_resets else 1))  # never two rows of resets in a row
        self.support = SupportWatch(self.params, context.num_envs) if self.params.facts.has_support else None
        self.fresh: Experience | None = None  # which the learner has not observed yet
        # Acting on a GPU does not draw from `rng`, and a turn is one step of every environment.
        plain = type(self).sample is ReplayStore.sample and not self.params.prioritized and self.goals is None
        self.draws_ahead = plain and context.device != "cpu" and self.params.train_frequency <= context.num_envs
        self._has_sampled = False

    def make_buffer(self, context: StoreContext) -> Any:
        """The buffer of transitions."""
        return make_buffer(
            self.params, self.spaces, context.num_envs, context.device, context.recipe.image_frame_stack, self.goals
        )

    @property
    def gamma(self) -> float:
        """The buffer's discount; a schedule changes it together with the learner's."""
        return self.buffer.gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self.buffer.gamma = value

    def describe(self) -> str:
        """The buffer's size, for the start of a run."""
        kind = "prioritized replay" if self.params.prioritized else "replay"
        support = "" if self.support is None else ", returns from {:g} to {:g}".format(*self.support.ends)
        goals, notes = "", [] if self.goals is None else self.goals.notes
        if self.goals is not None:
            goals = f", {self.params.her_ratio:g} of every batch with other goals ({self.params.her_strategy})"
        line = f"{kind} of {self.buffer.capacity:,} transitions: {self.buffer.describe_size()}{support}{goals}"
        return "\n".join([line, *(f"warning: {note}" for note in notes)])

    def request(self, step: int) -> Request:
        """Request about `train_frequency` environment steps, with random actions until `learning_starts`.

        From here on only the step changes stored rows, so the batch after it is drawn now, while a GPU is still busy.
        """
        params = self.params
        if self.draws_ahead and self._has_sampled and self.buffer.ahead is None:
            self.buffer.draw_ahead(params.batch_size, self.rng)
        return Request(0, params.train_frequency, random=self.random_steps(step), hold=params.random_action_hold)

    def add(self, experience: Experience, step: int) -> int:
        """Add to the buffer; every step from `learning_starts` on adds one credit."""
        self.credit += self.keep(experience, step)
        self.fresh = experience
        if self.support is not None:
            self.support.look(experience, self.gamma)
        return experience.transitions

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield `gradient_updates_per_step` samples for each training turn that is due."""
        if self.support is not None:
            self.metrics |= self.support.widen(algorithm)
        if self.fresh is not None and algorithm.observes:
            for row in self.fresh.rows():
                algorithm.observe(row)
        self.fresh = None
        if not self.is_filled:
            self.credit = 0
        while self.credit >= self.params.train_frequency and len(self.buffer):
            self.credit -= self.params.train_frequency
            for _ in range(self.params.gradient_updates_per_step):
                yield "policy", self.sample()
            self._has_sampled = True

    def state_dict(self) -> dict[str, Any]:
        """The state before the batch of the next turn was drawn."""
        ahead, support = self.buffer.ahead, {} if self.support is None else self.support.state_dict()
        return super().state_dict() | support | ({} if ahead is None else {"rng": ahead.before})

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; refused if the replay was on the other side."""
        if ("sampler" in state) != self.on_device:
            memory, there = ("host", "host") if self.on_device else ("auto", "device, next to its environments")
            raise UserError(f"the checkpoint's run kept its replay on the {there}; resume with replay_memory {memory}.")
        if self.support is not None:
            self.support.load_state_dict(state)
        return super().load_state_dict(state)

    def sample(self) -> dict[str, Any]:
        """One batch."""
        more = {"beta": self.prioritized_beta} if self.params.prioritized else {}
        if self.goals is not None:
            more = {"ratio": self.params.her_ratio}
        return self.buffer.sample(self.params.batch_size, self.rng, **more)

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Update priorities from the errors of an update."""
        if isinstance(self.buffer, PrioritizedReplayBuffer) and result.priorities is not None:
            self.buffer.update_priorities(batch["indices"], result.priorities)

    def close(self) -> None:
        """Remove the buffer's files, and close the environment that knows the rewards of other goals."""
        super().close()
        if self.goals is not None:
            self.goals.close()


class DeviceReplayStore(ReplayStore):
    """A `ReplayStore` whose buffer is a `DeviceRing` and whose samples are drawn on the device, by its own generator.

    A support that may widen is compared with all stored rows each time there are an eighth more, because that is the
    only time that the host reads them.
    """

    buffer: DeviceRing  # type: ignore[assignment]  # with the same methods
    counters = ("credit", "next_look")
    on_device = True

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.draws_ahead = False
        self.generator = torch.Generator(context.device)
        seed = np.random.SeedSequence([context.seed, 2]).generate_state(1, np.uint64)  # 1 seeds the host's draws
        self.generator.manual_seed(int(seed[0]))
        self.next_look = 0  # the step at which the support is compared next
        if self.support is not None:
            self.support = SupportWatch(self.params, 0)  # the rewards of current episodes are in the ring

    def make_buffer(self, context: StoreContext) -> DeviceRing:
        """The ring."""
        params, spaces = self.params, self.spaces
        return DeviceRing(
            params.buffer_capacity, context.num_envs, obs_shape=spaces.obs_shape, obs_dtype=spaces.obs_dtype,
            action_shape=spaces.action_shape, continuous=spaces.action_kind == "continuous", n_step=params.n_step,
            gamma=params.gamma, device=context.device,
        )  # fmt: skip

    def add(self, experience: Experience, step: int) -> int:
        """Add to the ring; every step from `learning_starts` on adds one credit."""
        self.credit += self.keep(experience, step)
        self.fresh = experience
        if self.support is not None and step >= self.next_look:
            self.support.compare(self.buffer.extremes())
            self.next_look = step + len(self.buffer) // 8
        return experience.transitions

    def sample(self) -> dict[str, Any]:
        """One batch."""
        return self.buffer.sample(self.params.batch_size, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """The state of a store, and the generator of samples."""
        sampler = {"generator": self.generator.get_state().numpy(), "device": self.generator.device.type}
        return super().state_dict() | {"sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; the generator is not restored on another kind of device."""
        sentences = super().load_state_dict(state)
        sampler = state["sampler"]
        if sampler["device"] != self.generator.device.type:
            return [*sentences, "samples are drawn on another kind of device now, so this resume is not exact."]
        self.generator.set_state(torch.from_numpy(np.array(sampler["generator"])))
        return sentences


class SequenceReplayStore(ReplayStore):
    """A `ReplayStore` of sequences with the memory's state before each, for networks with memory."""

    buffer: SequenceReplayBuffer  # type: ignore[assignment]  # with the same methods

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.draws_ahead = False

    def make_buffer(self, context: StoreContext) -> SequenceReplayBuffer:
        """The buffer; a sequence has one row more than steps, for the value after the last one."""
        params, spaces = self.params, self.spaces
        return SequenceReplayBuffer(
            params.buffer_capacity, context.num_envs, sequence_length=params.burn_in + params.sequence_length + 1,
            period=params.sequence_period or -(-params.sequence_length // 2), state_size=params.facts.state_size,
            n_step=params.n_step, gamma=params.gamma, alpha=params.prioritized_alpha if params.prioritized else 0.0,
            eps=params.prioritized_eps, mask_size=spaces.action_dim if spaces.has_action_mask else 0,
            **describe_rows(params, spaces, context.device),
        )  # fmt: skip

    def describe(self) -> str:
        """The buffer's size, for the start of a run."""
        buffer, kind = self.buffer, "prioritized sequences" if self.params.prioritized else "sequences"
        return f"replay of {buffer.capacity:,} steps in {kind} of {buffer.sequence_length}: {buffer.describe_size()}"

    @property
    def is_filled(self) -> bool:
        """As the base class, with at least one whole sequence."""
        return super().is_filled and self.buffer.num_windows() > 0

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Update priorities from the errors of an update."""
        if self.params.prioritized and result.priorities is not None:
            self.buffer.update_priorities(batch["indices"], result.priorities)


class SequenceStore(BufferStore):
    """Keeps steps, and samples windows [B, L].

    Every environment step since `learning_starts` makes `train_ratio` replayed steps due. An update replays
    `batch_size * sequence_length` steps, and runs when that many are due.
    """

    buffer: RecurrentReplayBuffer

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.credit = 0.0  # steps to replay that are due
        self.train_ratio: float = self.params.train_ratio
        self.layout = context.layout(1, masks=False)
        self.buffer = RecurrentReplayBuffer(
            self.params.buffer_capacity, context.num_envs, sequence_length=self.params.sequence_length,
            **describe_rows(self.params, self.spaces, context.device),
        )  # fmt: skip

    def describe(self) -> str:
        """The buffer's size, for the start of a run."""
        return f"sequence replay of {self.buffer.capacity:,} steps: {self.buffer.describe_size()}"

    def request(self, step: int) -> Request:
        """Request one step of every environment, with random actions until `learning_starts`."""
        return Request(steps=1, random=self.random_steps(step))

    def add(self, experience: Experience, step: int) -> int:
        """Add to the buffer; every step from `learning_starts` on makes `train_ratio` replayed steps due."""
        self.credit += self.train_ratio * self.keep(experience, step)
        return experience.transitions

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Yield a batch for each update that is due."""
        replayed = self.params.batch_size * self.params.sequence_length
        if not self.is_filled or not self.buffer.num_windows():
            self.credit = 0.0
        while self.credit >= replayed:
            self.credit -= replayed
            yield "policy", self.buffer.sample(self.params.batch_size, self.rng)


def make_buffer(
    params: Any, spaces: EnvSpaces, num_envs: int, device: str = "cpu", frame_stack: int = 1,
    goals: Goals | None = None, plain: Callable[..., ReplayBuffer] = ReplayBuffer,
) -> ReplayBuffer:  # fmt: skip
    """Make the buffer of transitions for these hyper-parameters: with `goals`, samples may get other goals; `plain`
    makes one without priorities and goals.
    """
    rows = describe_rows(params, spaces, device, frame_stack) | {
        "n_step": params.n_step, "gamma": params.gamma, "frame_stack": frame_stack, "reuses_batches": True,
        "mask_size": spaces.action_dim if spaces.has_action_mask else 0,
    }  # fmt: skip
    if goals is not None:
        rows |= {"on_device": False, "goals": goals, "strategy": params.her_strategy}
        return HindsightReplayBuffer(params.buffer_capacity, num_envs, **rows)
    if not params.prioritized:
        return plain(params.buffer_capacity, num_envs, **rows)
    rows |= {"alpha": params.prioritized_alpha, "eps": params.prioritized_eps}
    return PrioritizedReplayBuffer(params.buffer_capacity, num_envs, **rows)


def describe_rows(params: Any, spaces: EnvSpaces, device: str, frame_stack: int = 1) -> dict[str, Any]:
    """The arguments that every buffer takes: what a row is, and where rows are kept."""
    return {
        "obs_shape": spaces.obs_shape, "obs_dtype": spaces.obs_dtype, "action_shape": spaces.action_shape,
        "continuous": spaces.action_kind == "continuous", "folder": params.replay_folder, "device": device,
        "on_device": goes_to_device(params, spaces, device, frame_stack),
    }  # fmt: skip


def goes_to_device(params: Any, spaces: EnvSpaces, device: str, frame_stack: int = 1) -> bool:
    """Whether a buffer keeps a copy of its observations in the device's memory; refused if it cannot fit."""
    if params.replay_memory == "host" or not device.startswith("cuda"):
        return False
    row = math.prod(spaces.obs_shape) * np.dtype(spaces.obs_dtype).itemsize
    need = params.buffer_capacity * row // frame_stack
    if params.replay_memory == "auto":
        return params.facts.rows * row >= WIDE_BATCH and fits_on_gpu(need, device)
    free = torch.cuda.mem_get_info(device)[0]
    if need > free:
        sizes = f"needs {format_bytes(need)}, but only {format_bytes(free)} is free on {device}"
        raise UserError(f"replay_memory is 'device', which {sizes}; lower buffer_capacity, or use 'auto' or 'host'.")
    return True
