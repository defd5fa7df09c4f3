"""What a store is, and what it is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data.experience import Experience, ExperienceLayout, Request
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.errors import UserError


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
            holds_resets=self.holds_resets, logprobs=logprobs,
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
