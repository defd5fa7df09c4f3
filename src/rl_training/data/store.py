"""What a store is, and what it is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_training.algorithms.base import Algorithm, Batch, UpdateResult
from rl_training.data.experience import Experience, ExperienceLayout, Request
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import EnvSpaces


class Store(Protocol):
    """Keeps experience and turns it into batches."""

    layout: ExperienceLayout  # of the experience that it accepts
    metrics: dict[str, float]  # for the log

    def describe(self) -> str:
        """One line about what it keeps in memory, printed when a run starts; further lines are `warning: ...`."""

    def request(self, step: int) -> Request:
        """The experience needed for the turn that begins at `step`."""

    def add(self, experience: Experience, step: int) -> int:
        """Keep the experience collected from `step` on; return the number of real transitions in it."""

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """The batches for the updates that are due now, each with its phase."""

    def feedback(self, batch: Batch, result: UpdateResult) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a saved state; return one sentence for each thing that could not be restored exactly."""

    def close(self) -> None: ...



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
