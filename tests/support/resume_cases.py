"""What the tests of runs, resumes and checkpoints share: tiny configs, stopping, and comparing runs bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.algorithms.actor_critic import RewardScale
from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.config.spec import AlgorithmSpec, list_algorithm_specs
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run.build import Session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import TrainResult, resume_training, train

SPECS = {spec.name: spec for spec in list_algorithm_specs()}
# Names that are another name's learner with other defaults: dqn's (rainbow_dqn and r2d2 have all of theirs together),
# and sac's. Quick tests of what a learner, its store and its files do take one name per learner; the others are slow.
OTHER_DEFAULTS = {
    "double_dqn", "dueling_dqn", "prioritized_dqn", "n_step_dqn", "noisy_dqn", "droq", "redq", "simba",
}  # fmt: skip
ONE_PER_LEARNER = [pytest.param(algo, marks=[pytest.mark.slow] * (algo in OTHER_DEFAULTS)) for algo in SPECS]
ONE_PER_LANE = list({spec.lane: spec.name for spec in reversed(SPECS.values())}.values())
CLOCKED = {"time", "steps_per_second", "train_seconds"}  # what two equal runs need not share
# Small values of hyper-parameters, for the algorithms that have them.
TINY = {
    "num_steps": 8, "hidden_sizes": [8], "minibatch_size": 8, "update_epochs": 2, "value_updates": 2,
    "cg_iterations": 3, "line_search_steps": 3, "buffer_capacity": 500, "batch_size": 8, "learning_starts": 16,
    "gradient_updates_per_step": 1, "train_frequency": 4, "target_update_interval": 5, "num_critics": 2,
    "critic_subset_size": 2, "dataset_size": 64, "offline_pretrain_updates": 2, "num_atoms": 11, "num_quantiles": 6,
    "embedding_dim": 8, "heldout_interval": 5, "expert_dataset_size": 64, "discriminator_batch_size": 8,
    "discriminator_hidden_sizes": [8],
    "dataset_kind": "random", "model_hidden_sizes": [8], "num_ensembles": 3, "num_elites": 2, "model_batch_size": 16,
    "model_updates": 6, "model_train_frequency": 40, "rollout_batch_size": 20, "rollout_refresh_interval": 7,
    "synthetic_buffer_capacity": 100, "size": "xxs", "num_bins": 15, "sequence_length": 8, "train_ratio": 16,
    "imagination_horizon": 3, "critic_hidden_sizes": [8], "offline_updates": 2, "num_proposals": 2,
    "memory_size": 8, "burn_in": 2, "sequence_period": 4,
}  # fmt: skip


AXES = {"num_quantiles", "num_atoms", "critic_hidden_sizes"}  # off where the default is None
OF_MEMORY = {"memory_size", "sequence_length", "burn_in", "sequence_period"}  # off where the default is no memory


def known(spec: AlgorithmSpec, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that an algorithm has hyper-parameters for, without axes that are off by default."""
    fields = spec.params.model_fields
    off = {name for name in AXES if name in fields and fields[name].default is None}
    if "memory" in fields and fields["memory"].default == "none":
        off |= OF_MEMORY
    return {name: value for name, value in values.items() if name in fields and name not in off}


def env_of(spec: AlgorithmSpec) -> str:
    """The environment on which the short tests run an algorithm."""
    return "CartPole-v1" if "discrete" in spec.action_kinds else "Pendulum-v1"


def tiny(algo: str, output_dir: Path, *, kwargs: dict[str, Any] | None = None, **fields: Any) -> TrainConfig:
    """A config that trains in a fraction of a second."""
    spec = SPECS[algo]
    small = known(spec, TINY) | {"eval_interval": 0}
    plain = {"env_id": env_of(spec), "total_timesteps": 128, "eval_episodes": 2, "seed": 3, "device": "cpu"}
    said = {"algo": algo, **plain, "output_dir": str(output_dir), **fields, "algo_kwargs": small | (kwargs or {})}
    return load_config(fill_defaults(said, UNSAID))  # whatever an algorithm recommends


def take_steps(session: Session, step: int) -> int:
    """The first half of a turn of the loop: collect and keep; returns the timesteps that it counts as."""
    store = session.store
    return store.add(session.collect(store.request(step)), step)


def reward_scales(result: TrainResult) -> list[RewardScale]:
    """The parts of a learner that scale rewards."""
    return [part for part in result.policy.algorithm.modules() if isinstance(part, RewardScale)]


class FirstReturns(Callback):
    """Remembers with which running returns the learner's reward scale starts the run."""

    def on_start(self, run: Run) -> None:
        parts = run.session.algorithm.modules()
        self.running = [part.running for part in parts if isinstance(part, RewardScale)]


class StopAt(Callback):
    """Stops the run at the first update at or after a step, as a person would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_update(self, run: Run) -> bool | None:
        return False if run.step >= self.step else None


def stop_and_resume(config: TrainConfig, *stops: int, **changes: Any) -> TrainResult:
    """The run stopped at each of the steps and resumed after each; `changes` go to the last resume."""
    result = train(config, callbacks=[StopAt(stops[0])], console=False)
    assert result.metrics["stop_reason"] == "callback", "stopped too late to be resumed"
    for stop in stops[1:]:
        result = resume_training(result.checkpoint_path, callbacks=[StopAt(stop)], console=False)
        assert result.metrics["stop_reason"] == "callback", "stopped too late to be resumed"
    return resume_training(result.checkpoint_path, console=False, **changes)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the last bit, and of the same kind."""
    assert type(one) is type(other), f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        assert list(one) == list(other), f"{where}: {list(one)} and {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {len(one)} and {len(other)} entries"
        for position, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{position}]")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes(), f"{where} differs"
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.tobytes() == other.tobytes(), f"{where} differs"
    elif isinstance(one, float):
        assert struct.pack("<d", one) == struct.pack("<d", other), f"{where}: {one!r} and {other!r}"
    else:
        assert one == other, f"{where}: {one!r} and {other!r}"


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The run's rows without what a clock decides."""
    return [
        {key: value for key, value in row.items() if key not in CLOCKED}
        for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def without(mapping: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The mapping without some keys."""
    return {key: value for key, value in mapping.items() if key not in names}


def assert_same_run(one: TrainResult, other: TrainResult) -> None:
    """Learner, environments, generators, counters, metrics and rows of two finished runs, bit for bit."""
    first, second = load_checkpoint(one.checkpoint_path), load_checkpoint(other.checkpoint_path)
    for part in ("spaces", "algorithm", "source"):
        assert_same(first[part], second[part], part)
    assert_same(first.get("ranks"), second.get("ranks"), "ranks")
    # `best_return` also knows the evaluation with which an early stop ends, as the file `best.ckpt` does.
    free = CLOCKED | {"best_return"}
    assert_same(without(first["run"], free), without(second["run"], free), "run")
    assert_same(without(one.metrics, CLOCKED), without(other.metrics, CLOCKED), "metrics")
    assert_same(rows_of(one.run_dir), rows_of(other.run_dir), "rows")


def edit_checkpoint(source: Path, target: Path, edit: Any) -> Path:
    """A valid file whose tree was changed by `edit(tree)`."""
    tree = load_checkpoint(source)
    edit(tree)
    return save_checkpoint(target, tree, durable=False)
