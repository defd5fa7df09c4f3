"""The model stores: a dynamics model is fitted to real transitions, and batches are mostly rollouts through it.

The real transitions are a growing replay buffer in MBPO and a dataset in MOPO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Array, Batch, UpdateResult, read_metrics
from rl_training.algorithms.mbpo import MBPO
from rl_training.data.memory import ArraySpec, allocate, check_same_layout, fits_on_gpu, format_bytes
from rl_training.data.recorded_store import describe_origin, find_data_of
from rl_training.data.replay_store import ReplayStore
from rl_training.data.store import Experience, Store, StoreContext
from rl_training.envs.outcomes import Outcomes, never
from rl_training.errors import UserError

CHUNK = 2_048  # states rolled out together, so that the activations of one step stay in the cache
GPU_CHUNK = 65_536  # the same on a GPU, which small chunks leave idle; activations of seven members: 0.4 GB a layer
KEYS = ("obs", "actions", "rewards", "next_obs", "dones")  # of a policy batch


class SyntheticBuffer:
    """A ring of `capacity` single transitions: obs, actions, rewards, next_obs and dones (terminated, as float32).

    Rows are independent, because the rows of a model rollout are not kept in order. They are on `device` if they fit.
    """

    def __init__(self, capacity: int, *, obs_dim: int, action_dim: int, device: str = "cpu") -> None:
        shapes = dict(zip(KEYS, ((obs_dim,), (action_dim,), (), (obs_dim,), ()), strict=True))
        specs = {name: ArraySpec((capacity, *shape), np.dtype(np.float32)) for name, shape in shapes.items()}
        self.nbytes = sum(spec.nbytes for spec in specs.values())
        self.on_gpu = fits_on_gpu(self.nbytes, device)
        if self.on_gpu:
            self._columns = {name: torch.zeros(spec.shape, device=device) for name, spec in specs.items()}
        else:
            arrays = allocate(specs, None, f"a synthetic buffer of {capacity} transitions")
            self._columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.capacity, self._size, self._head = capacity, 0, 0
        self._kept = 0  # of the `_size` rows that are filled, the newest

    def __len__(self) -> int:
        return self._kept

    def add(self, transitions: Mapping[str, Tensor]) -> None:
        """Store rows [B, ...] under the names of `sample`, with `terminated` for dones; the newest are kept."""
        rows = {**transitions, "dones": transitions["terminated"]}
        count = len(rows["rewards"])
        skipped = max(0, count - self.capacity)
        places = torch.arange(self._head + skipped, self._head + count) % self.capacity
        places = places.to(self._columns["rewards"].device)
        # all of them before the first is written: after an error the ring is saved, so it must be whole
        moved = {name: rows[name][skipped:].to(column) for name, column in self._columns.items()}
        for name, column in self._columns.items():
            column.index_copy_(0, places, moved[name])
        self._head = (self._head + count) % self.capacity
        self._size, self._kept = (min(held + count, self.capacity) for held in (self._size, self._kept))

    def forget(self, keep: int) -> None:
        """Drop all rows but the newest `keep`; more that are added later do not bring them back."""
        self._kept = min(self._kept, keep)

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Rows drawn uniformly with replacement, [batch_size, ...]."""
        drawn = rng.integers(0, self._kept, batch_size)
        if self._kept < self._size:
            drawn = (self._head - 1 - drawn) % self.capacity
        rows = torch.from_numpy(drawn).to(self._columns["rewards"].device)
        return {name: column.index_select(0, rows) for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything as arrays; those on the host are views of the filled part."""
        arrays = {name: column[: self._size].cpu().numpy() for name, column in self._columns.items()}
        numbers = {"size": self._size, "head": self._head, "kept": self._kept}
        return {"layout": self._layout(), "arrays": arrays, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`, also of a buffer on another device; another layout is refused."""
        check_same_layout(state["layout"], self._layout(), "synthetic buffer")
        for name, column in self._columns.items():
            column[: len(state["arrays"][name])] = torch.tensor(state["arrays"][name])
        self._size, self._head = int(state["size"]), int(state["head"])
        self._kept = int(state.get("kept", self._size))

    def _layout(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "shapes": [list(column.shape[1:]) for column in self._columns.values()]}


class ModelStore(Store):
    """Shared by both stores: fit the model, imagine rollouts, and mix imagined transitions into batches."""

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.outcomes = Outcomes(context.recipe, context.spaces, context.seed, context.device)
        self.synthetic_batch_size = round(self.params.synthetic_batch_ratio * self.params.batch_size)
        sizes = {"obs_dim": self.spaces.obs_dim, "action_dim": self.spaces.action_dim}
        capacity = self.params.synthetic_buffer_capacity or self.params.rows_of(self.params.synthetic_rounds)
        self.imagined = SyntheticBuffer(capacity, **sizes, device=self.device)
        self.updates_since_round = 0
        self.rollout_horizon: float = self.params.rollout_horizon
        self._last_result: UpdateResult | None = None

    def describe_imagined(self) -> str:
        """The buffer's size, and how ends and rewards of imagined steps are determined."""
        where = " on the GPU" if self.imagined.on_gpu else ""
        size = f"{self.imagined.capacity:,} imagined ones: {format_bytes(self.imagined.nbytes)}{where}"
        ends = "learned by the model" if self.outcomes.ends is None else "by a known function"
        rewards = "" if self.outcomes.rewards is None else ", rewards by a known function"
        return "\n".join([f"{size}, ends {ends}{rewards}", *(f"warning: {note}" for note in self.outcomes.notes)])

    def fit(self, algorithm: MBPO, transitions: Mapping[str, Array]) -> Iterator[tuple[str, Batch]]:
        """Yield model batches [E, B, ...] until the held-out error stops falling.

        The learner decides how to fit; this method keeps the metrics.
        """
        names = [name for name in KEYS if name != "dones"] + (["terminated"] if self.outcomes.ends is None else [])
        tensors = {name: torch.from_numpy(transitions[name]).to(self.device, torch.float32) for name in names}
        for batch in algorithm.fit(tensors, self.rng, self.params.model_updates, self.params.model_batch_size):
            yield "model", batch
        if self._last_result is not None:
            self.metrics |= read_metrics(self._last_result.metrics)
        self.metrics |= read_metrics(algorithm.fit_metrics)

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """Keep the result, for the metrics of a fit."""
        self._last_result = result

    @property
    def round_due(self) -> bool:
        """Whether new rollouts are due."""
        return not len(self.imagined) or self.updates_since_round >= self.params.rollout_refresh_interval

    def imagine(self, algorithm: MBPO, states: Tensor, horizon: float) -> None:
        """Roll out the current policy through the model from real states [N, O]; a row that terminates is dropped."""
        for obs in states.to(self.device, torch.float32).split(CHUNK if self.device == "cpu" else GPU_CHUNK):
            for _ in range(int(horizon)):
                step = algorithm.imagine(obs, self.outcomes.ends, self.outcomes.rewards)
                self.imagined.add(step)
                # counting terminated rows makes the host wait for a GPU
                obs = step["next_obs"] if self.outcomes.ends is never else step["next_obs"][~step["terminated"]]
                if not len(obs):
                    break
        if self.params.synthetic_rounds is not None:
            self.imagined.forget(self.params.synthetic_rounds * self.params.rollout_batch_size * int(horizon))
        self.updates_since_round = 0
        self.metrics["synthetic_size"] = float(len(self.imagined))

    def draw_real(self, count: int) -> dict[str, Any]:
        """Real transitions."""
        raise NotImplementedError

    def sample(self) -> dict[str, Any]:
        """A batch of real rows, then imagined ones."""
        real = self.draw_real(self.params.batch_size - self.synthetic_batch_size)
        return self.mix(real) if self.synthetic_batch_size else real

    def mix(self, real: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Real rows first, then imagined ones."""
        imagined = self.imagined.sample(self.synthetic_batch_size, self.rng)
        return {name: torch.cat([real[name], imagined[name].to(self.device)]) for name in KEYS}

    def close(self) -> None:
        """Remove files, and close the environment that knows ends and rewards."""
        super().close()
        self.outcomes.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of a store; `replay` includes the imagined transitions."""
        state = super().state_dict()
        replay = state.get("replay", {}) | {"synthetic": self.imagined.state_dict()}
        rollouts = {"updates_since_round": self.updates_since_round, "metrics": dict(self.metrics)}
        return state | {"rollouts": rollouts, "replay": replay}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; missing imagined transitions are imagined again."""
        self.updates_since_round = int(state["rollouts"]["updates_since_round"])
        self.metrics = {str(name): float(value) for name, value in state["rollouts"]["metrics"].items()}
        if "replay" in state:
            self.imagined.load_state_dict(state["replay"]["synthetic"])
        return super().load_state_dict(state)


class ModelReplayStore(ModelStore, ReplayStore):
    """The store of MBPO: replay, a fit every `model_train_frequency` steps, and partly imagined batches."""

    counters = ("credit", "steps_since_fit")

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.steps_since_fit: int = self.params.model_train_frequency

    def describe(self) -> str:
        """Both buffers, and how imagined terminations are determined."""
        return f"{super().describe()}; {self.describe_imagined()}"

    def add(self, experience: Experience, step: int) -> int:
        """As replay does."""
        self.steps_since_fit += experience.transitions
        return super().add(experience, step)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Fit the model and imagine rollouts when that is due, and yield the policy's batches."""
        assert isinstance(algorithm, MBPO)
        turn_due = self.is_filled and len(self.buffer) and self.credit >= self.params.train_frequency
        if turn_due and self.synthetic_batch_size:
            fits = self.steps_since_fit >= self.params.model_train_frequency
            if fits:
                yield from self.fit(algorithm, self.buffer.transitions())
                self.steps_since_fit = 0
            if fits or self.round_due:
                self.imagine(algorithm, self.draw_real(self.params.rollout_batch_size)["obs"], self.rollout_horizon)
        for due in super().batches(algorithm, step):
            self.updates_since_round += 1
            yield due

    def draw_real(self, count: int) -> dict[str, Any]:
        """Real transitions from the replay buffer."""
        return self.buffer.sample(count, self.rng)


class ModelDatasetStore(ModelStore):
    """The store of MOPO: one fit to a dataset, then partly imagined batches. A policy update counts as one step."""

    counters = ("fitted",)
    recorded = {"dataset": "dataset"}

    def __init__(self, context: StoreContext) -> None:
        if context.params.dataset_kind is None:
            raise UserError(
                "mopo learns from recorded data alone; set dataset_kind to npz or checkpoint (with dataset_path), "
                "minari (with dataset_id) or random."
            )
        super().__init__(context)
        self.layout = context.layout(0)
        self.dataset = find_data_of(context)
        self.fitted = False

    def describe(self) -> str:
        """The data, the buffer, and how imagined terminations are determined."""
        origin = describe_origin(self.params, self.dataset, self.spaces.env_id)
        return f"dataset of {len(self.dataset):,} transitions from {origin}; {self.describe_imagined()}"

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Fit the model once, imagine rollouts when that is due, and yield one policy batch."""
        assert isinstance(algorithm, MBPO)
        if self.synthetic_batch_size:
            if not self.fitted:
                yield from self.fit(algorithm, self.dataset.arrays())
                self.fitted = True
            if self.round_due:
                rows = self.rng.integers(0, len(self.dataset), self.params.rollout_batch_size)
                self.imagine(algorithm, torch.from_numpy(self.dataset.obs[rows]), self.rollout_horizon)
        self.updates_since_round += 1
        yield "policy", self.sample()

    def draw_real(self, count: int) -> dict[str, Any]:
        """Transitions of the dataset."""
        return self.dataset.minibatch(self.rng, count, device=self.device)

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        lost = "the checkpoint has no imagined transitions; they are made again before learning continues."
        return super().load_state_dict(state) + ([] if "replay" in state else [lost])
