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
from rl_training.data.experience import Experience, Request
from rl_training.data.memory import format_bytes
from rl_training.data.prior_store import check_same_data, describe_origin, find_data_of
from rl_training.data.replay_store import ReplayStore
from rl_training.data.store import StoreContext
from rl_training.data.synthetic import SyntheticBuffer
from rl_training.envs.recipe import known_termination, never
from rl_training.errors import UserError

CHUNK = 2_048  # states rolled out together, so that the activations of one step stay in the cache
GPU_CHUNK = 65_536  # the same on a GPU, which small chunks leave idle; activations of seven members: 0.4 GB a layer
KEYS = ("obs", "actions", "rewards", "next_obs", "dones")  # of a policy batch


class ModelRollouts:
    """Shared by both stores: fit the model, imagine rollouts, and mix imagined transitions into batches."""

    def __init__(self, context: StoreContext, rng: np.random.Generator) -> None:
        self.params, self.device, self.rng = context.params, context.device, rng
        self.terminates = known_termination(context.recipe)
        self.synthetic_batch_size = round(self.params.synthetic_batch_ratio * self.params.batch_size)
        sizes = {"obs_dim": context.spaces.obs_dim, "action_dim": context.spaces.action_dim}
        self.buffer = SyntheticBuffer(self.params.synthetic_buffer_capacity, **sizes, device=self.device)
        self.updates_since_round = 0
        self.metrics: dict[str, float] = {}  # of the last fit and round
        self._last_result: UpdateResult | None = None

    def describe(self) -> str:
        """The buffer's size, and how terminations of imagined episodes are determined."""
        where = " on the GPU" if self.buffer.on_gpu else ""
        size = f"{self.buffer.capacity:,} imagined ones: {format_bytes(self.buffer.nbytes)}{where}"
        return f"{size}, ends {'learned by the model' if self.terminates is None else 'by a known function'}"

    # the model ------------------------------------------------------------------------------------------------------

    def fit(self, algorithm: MBPO, transitions: Mapping[str, Array]) -> Iterator[tuple[str, Batch]]:
        """Yield model batches [E, B, ...] until the held-out error stops falling.

        The learner decides how to fit; this method keeps the metrics.
        """
        limits = self.params.model_updates, self.params.model_batch_size
        for batch in algorithm.fit(self._as_tensors(transitions), self.rng, *limits):
            yield "model", batch
        if self._last_result is not None:
            self.metrics |= read_metrics(self._last_result.metrics)
        self.metrics |= read_metrics(algorithm.fit_metrics)

    def _as_tensors(self, transitions: Mapping[str, Array]) -> dict[str, Tensor]:
        names = [name for name in KEYS if name != "dones"] + (["terminated"] if self.terminates is None else [])
        return {name: torch.from_numpy(transitions[name]).to(self.device, torch.float32) for name in names}

    def feedback(self, result: UpdateResult) -> None:
        """Keep the last result, for the metrics of a fit."""
        self._last_result = result

    # rollouts -------------------------------------------------------------------------------------------------------

    @property
    def round_due(self) -> bool:
        """Whether new rollouts are due."""
        return not len(self.buffer) or self.updates_since_round >= self.params.rollout_refresh_interval

    def imagine(self, algorithm: MBPO, states: Tensor, horizon: float) -> None:
        """Roll out the current policy through the model from real states [N, O]; a row that terminates is dropped."""
        for obs in states.to(self.device, torch.float32).split(CHUNK if self.device == "cpu" else GPU_CHUNK):
            for _ in range(int(horizon)):
                step = algorithm.imagine(obs, self.terminates)
                self.buffer.add(step)
                # counting terminated rows makes the host wait for a GPU
                obs = step["next_obs"] if self.terminates is never else step["next_obs"][~step["terminated"]]
                if not len(obs):
                    break
        self.updates_since_round = 0
        self.metrics["synthetic_size"] = float(len(self.buffer))

    def mix(self, real: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Real rows first, then imagined ones."""
        imagined = self.buffer.sample(self.synthetic_batch_size, self.rng)
        return {name: torch.cat([real[name], imagined[name].to(self.device)]) for name in KEYS}

    def state_dict(self) -> dict[str, Any]:
        """Counters and metrics; the store saves the buffer."""
        return {"updates_since_round": self.updates_since_round, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.updates_since_round = int(state["updates_since_round"])
        self.metrics.clear()
        self.metrics.update({str(name): float(value) for name, value in state["metrics"].items()})


class ModelReplayStore(ReplayStore):
    """The store of MBPO: replay, a fit every `model_train_frequency` steps, and partly imagined batches."""

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self.rollouts = ModelRollouts(context, self.rng)
        self.metrics = self.rollouts.metrics
        self.rollout_horizon: float = self.params.rollout_horizon
        self.steps_since_fit: int = self.params.model_train_frequency

    def describe(self) -> str:
        """Both buffers, and how imagined terminations are determined."""
        return f"{super().describe()}; {self.rollouts.describe()}"

    def add(self, experience: Experience, step: int) -> int:
        """As replay does."""
        self.steps_since_fit += experience.transitions
        return super().add(experience, step)

    @property
    def turn_due(self) -> bool:
        """Whether `batches` will have policy batches."""
        least = min(self.params.learning_starts, self.buffer.capacity)
        return len(self.buffer) >= max(1, least) and bool(self.credit >= self.params.train_frequency)

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Fit the model and imagine rollouts when that is due, and yield the policy's batches."""
        assert isinstance(algorithm, MBPO)
        rollouts = self.rollouts
        if self.turn_due and rollouts.synthetic_batch_size:
            fits = self.steps_since_fit >= self.params.model_train_frequency
            if fits:
                yield from rollouts.fit(algorithm, self.buffer.transitions())
                self.steps_since_fit = 0
            if fits or rollouts.round_due:
                states = self.buffer.sample(self.params.rollout_batch_size, self.rng)["obs"]
                rollouts.imagine(algorithm, states, self.rollout_horizon)
        for due in super().batches(algorithm, step):
            rollouts.updates_since_round += 1
            yield due

    def sample(self) -> dict[str, Any]:
        """A batch whose last rows are imagined."""
        imagined = self.rollouts.synthetic_batch_size
        if not imagined:
            return super().sample()
        return self.rollouts.mix(self.buffer.sample(self.params.batch_size - imagined, self.rng))

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """For the model's metrics."""
        self.rollouts.feedback(result)

    def state_dict(self) -> dict[str, Any]:
        """The state of a replay store; `replay` includes the imagined transitions."""
        state = super().state_dict()
        state["replay"] |= {"synthetic": self.rollouts.buffer.state_dict()}
        return state | {"steps_since_fit": self.steps_since_fit, "rollouts": self.rollouts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        self.steps_since_fit = int(state["steps_since_fit"])
        self.rollouts.load_state_dict(state["rollouts"])
        if "replay" in state:
            self.rollouts.buffer.load_state_dict(state["replay"]["synthetic"])
        return super().load_state_dict(state)


class ModelDatasetStore:
    """The store of MOPO: one fit to a dataset, then partly imagined batches. A policy update counts as one step."""

    def __init__(self, context: StoreContext) -> None:
        self.params, self.rng = context.params, context.rng
        if self.params.dataset_kind is None:
            raise UserError(
                "mopo learns from recorded data alone; set dataset_kind to npz or checkpoint (with dataset_path), "
                "minari (with dataset_id) or random."
            )
        self.layout = context.layout(0)
        self.dataset = find_data_of(context)
        self.origin = describe_origin(self.params, self.dataset, context.spaces.env_id)
        self.rollouts = ModelRollouts(context, self.rng)
        self.metrics = self.rollouts.metrics
        self.rollout_horizon: float = self.params.rollout_horizon
        self.fitted = False

    def describe(self) -> str:
        """The data, the buffer, and how imagined terminations are determined."""
        return f"dataset of {len(self.dataset):,} transitions from {self.origin}; {self.rollouts.describe()}"

    def request(self, step: int) -> Request:
        """Request nothing."""
        return Request()

    def add(self, experience: Experience, step: int) -> int:
        """Count one step for the policy update that follows."""
        return 1

    def batches(self, algorithm: Algorithm, step: int) -> Iterator[tuple[str, Batch]]:
        """Fit the model once, imagine rollouts when that is due, and yield one policy batch."""
        assert isinstance(algorithm, MBPO)
        rollouts = self.rollouts
        if rollouts.synthetic_batch_size:
            if not self.fitted:
                yield from rollouts.fit(algorithm, self.dataset.arrays())
                self.fitted = True
            if rollouts.round_due:
                rows = self.rng.integers(0, len(self.dataset), self.params.rollout_batch_size)
                rollouts.imagine(algorithm, torch.from_numpy(self.dataset.obs[rows]), self.rollout_horizon)
        rollouts.updates_since_round += 1
        yield "policy", self.sample()

    def sample(self) -> dict[str, Any]:
        """A batch whose last rows are imagined."""
        imagined = self.rollouts.synthetic_batch_size
        real = self.dataset.minibatch(self.rng, self.params.batch_size - imagined, device=self.rollouts.device)
        return self.rollouts.mix(real) if imagined else real

    def feedback(self, batch: Batch, result: UpdateResult) -> None:
        """For the model's metrics."""
        self.rollouts.feedback(result)

    def state_dict(self) -> dict[str, Any]:
        """Generator, counters, hash of the data, and under `replay` the imagined transitions."""
        return {
            "rng": self.rng.bit_generator.state, "fitted": self.fitted, "dataset_sha256": self.dataset.sha256,
            "rollouts": self.rollouts.state_dict(), "replay": {"synthetic": self.rollouts.buffer.state_dict()},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`; other data is refused, and missing imagined transitions are imagined again."""
        check_same_data(state["dataset_sha256"], self.dataset, "dataset")
        self.rng.bit_generator.state = state["rng"]
        self.fitted = bool(state["fitted"])
        self.rollouts.load_state_dict(state["rollouts"])
        if "replay" not in state:
            return ["the checkpoint has no imagined transitions; they are made again before learning continues."]
        self.rollouts.buffer.load_state_dict(state["replay"]["synthetic"])
        return []

    def close(self) -> None:
        """Nothing to close."""
