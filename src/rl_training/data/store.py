"""What stores and collectors exchange: a `Request`, the `Experience` that answers it, and the `Store` that keeps it.

The steps of an `Experience` are in preallocated arrays [T, N, ...]; numpy writes and torch reads in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data.memory import Array
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError

Call = TypeVar("Call")


class Timed(Protocol):
    """Replaces a call by one that also adds its time to a part of a turn, such as `learn`."""

    def __call__(self, call: Call, part: str, /) -> Call: ...


def untimed(call: Call, part: str) -> Call:
    """The call itself: nothing is measured."""
    return call


@dataclass(frozen=True)
class ExperienceLayout:
    """The sizes of an `Experience`."""

    max_steps: int
    num_envs: int
    obs_shape: tuple[int, ...]
    obs_dtype: str
    action_shape: tuple[int, ...] = ()
    continuous: bool = False
    mask_size: int = 0  # 0: no masks
    holds_resets: bool = False  # the engine resets in the next step, so that row holds the final observation
    logprobs: bool = False  # of the behaviour policy, with values if it acts with the learner's weights
    state_size: int = 0  # of the behaviour's memory

    def arrays(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every array."""
        lead, more = (self.max_steps, self.num_envs), (self.max_steps + 1, self.num_envs)
        found: dict[str, tuple[tuple[int, ...], Any]] = {
            "obs": ((*more, *self.obs_shape), self.obs_dtype),
            "actions": ((*lead, *self.action_shape), np.float32 if self.continuous else np.int64),
            "rewards": (lead, np.float32), "terminated": (lead, bool), "truncated": (lead, bool),
        }  # fmt: skip
        if self.holds_resets:
            found["valid"] = (lead, bool)
        else:
            found["final_obs"] = ((*lead, *self.obs_shape), self.obs_dtype)
        if self.mask_size:
            found |= {"masks": ((*more, self.mask_size), bool), "final_masks": ((*lead, self.mask_size), bool)}
        if self.logprobs:
            found |= {"logprobs": (lead, np.float32), "values": (lead, np.float32)}
        if self.state_size:
            found |= {"states": ((*more, self.state_size), np.float32), "starts": (more, bool)}
        return found


class Experience:
    """`steps` rows of N environments, followed by one more row of `obs`, `masks`, `states` and `starts`.

    `final_obs` and `final_masks` are used only in rows where an episode ended; `valid` (if `has_resets`) is false in
    rows that only reset; `values` are used if `has_values`. `states[t]` is the memory of the behaviour before it read
    `obs[t]`; where `starts[t]` is true, an episode starts, and the behaviour read zeros instead. `episodes` are in the
    order of the rows that end them. `version` is the number of updates behind the weights that acted (the oldest, if
    workers differ). `parts` is set if the columns are not the environments in order: pairs of environment indices and
    their columns, with an environment's older steps first. The arrays may be tensors.
    """

    def __init__(self, layout: ExperienceLayout, arrays: Mapping[str, Any] | None = None) -> None:
        self.layout = layout
        if arrays is None:
            arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.arrays().items()}
        self.arrays = arrays
        self.obs, self.actions, self.rewards = arrays["obs"], arrays["actions"], arrays["rewards"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]
        self.final_obs, self.valid = arrays.get("final_obs"), arrays.get("valid")
        self.masks, self.final_masks = arrays.get("masks"), arrays.get("final_masks")
        self.logprobs, self.values = arrays.get("logprobs"), arrays.get("values")
        self.states, self.starts = arrays.get("states"), arrays.get("starts")
        self.totals: Any = None  # of the episodes that ended, where they are counted on a device
        self.clear()

    def clear(self) -> None:
        """Empty it, to be filled again."""
        self.steps = self.transitions = self.version = 0
        self.episodes: list[Any] = []
        self.parts: list[tuple[Array, Experience]] = []
        self.has_values = self.has_resets = False

    def columns(self, start: int, stop: int) -> Experience:
        """The environments from `start` to `stop`, in the same memory."""
        return Experience(self.layout, {name: array[:, start:stop] for name, array in self.arrays.items()})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Step by step, the arguments of a replay buffer's `add`."""
        for envs, part in self.parts:
            part.steps, part.has_resets = self.steps, self.has_resets
            yield from ({**row, "envs": envs} for row in part.rows())
        for t in range(0 if self.parts else self.steps):
            row = {
                "obs": self.obs[t], "actions": self.actions[t], "rewards": self.rewards[t],
                "terminated": self.terminated[t], "truncated": self.truncated[t], "next_obs": self.obs[t + 1],
                "final_obs": None if self.final_obs is None else self.final_obs[t],
                "valid": self.valid[t] if self.has_resets and self.valid is not None else None,
            }  # fmt: skip
            if self.states is not None:
                row["states"] = self.states[t + 1]
            if self.masks is not None and self.final_masks is not None:
                final_masks = None if self.final_obs is None else self.final_masks[t]
                row |= {"masks": self.masks[t], "next_masks": self.masks[t + 1], "final_masks": final_masks}
            yield row

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Request(NamedTuple):
    """How much to collect: the minimum numbers of rows and of real transitions.

    The first `random` transitions have random actions, each repeated for `hold` rows on average.
    """

    steps: int = 0
    transitions: int = 0
    random: int = 0
    hold: float = 1.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is requested."""
        return not self.steps and not self.transitions


@dataclass(frozen=True)
class StoreContext:
    """The arguments of a store."""

    params: Any
    spaces: EnvSpaces
    num_envs: int
    seed: int
    device: str
    recipe: EnvRecipe
    rng: np.random.Generator  # shared with acting in one process
    recordings: Any = None  # the module `run/evaluation.py`, which reads data out of checkpoints
    holds_resets: bool = False  # whether the engine resets in the step after an end

    def layout(self, max_steps: int, *, masks: bool = True, logprobs: bool = False) -> ExperienceLayout:
        """The layout of experience from these environments."""
        spaces = self.spaces
        return ExperienceLayout(
            max_steps, self.num_envs, tuple(spaces.obs_shape), spaces.obs_dtype, tuple(spaces.action_shape),
            continuous=spaces.action_kind == "continuous",
            mask_size=spaces.action_dim if masks and spaces.has_action_mask else 0,
            holds_resets=self.holds_resets, logprobs=logprobs, state_size=self.params.facts.state_size,
        )  # fmt: skip


class Store:
    """Keeps experience and turns it into batches.

    A subclass sets `layout`, and defines `describe` and `batches`. Without further methods, no environment is stepped,
    and every turn counts as one timestep.
    """

    layout: ExperienceLayout  # of the experience that it accepts
    counters: ClassVar[tuple[str, ...]] = ()  # numbers that a checkpoint keeps
    recorded: ClassVar[dict[str, str]] = {}  # data sets of which a checkpoint keeps the hash, and their names in errors

    def __init__(self, context: StoreContext) -> None:
        self.params, self.spaces, self.rng, self.device = context.params, context.spaces, context.rng, context.device
        self.metrics: dict[str, float] = {}  # for the log

    def describe(self) -> str:
        """One line about what it keeps in memory, printed when a run starts; further lines are `warning: ...`."""
        raise NotImplementedError

    def request(self, step: int) -> Request:
        """The experience needed for the turn that begins at `step`."""
        return Request()

    def add(self, experience: Experience, step: int) -> int:
        """Keep the experience collected from `step` on; return the number of real transitions in it."""
        return 1

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The batches for the updates that are due now, each with its phase."""
        raise NotImplementedError

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Learn from the result of an update on this batch."""

    def state_dict(self) -> dict[str, Any]:
        """Generator, counters and the hashes of recorded data."""
        sets = {name: getattr(self, name) for name in self.recorded}
        hashes = {f"{name}_sha256": None if data is None else data.sha256 for name, data in sets.items()}
        return {"rng": self.rng.bit_generator.state, **{name: getattr(self, name) for name in self.counters}, **hashes}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a saved state; return one sentence for each thing that could not be restored exactly.

        Other recorded data than the checkpoint was trained with is refused.
        """
        for name, what in self.recorded.items():
            data = getattr(self, name)
            if state[f"{name}_sha256"] != (None if data is None else data.sha256):
                raise UserError(f"the {what} is not what the checkpoint was trained with (its hash differs).")
        self.rng.bit_generator.state = state["rng"]
        for name in self.counters:
            setattr(self, name, type(getattr(self, name))(state[name]))
        return []

    def close(self) -> None:
        """Remove files that the checkpoint has the contents of."""
