"""Observations in a device's memory too: batches, checkpoints and runs are the same as without."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_replay_buffer import Episodes

from on_gpu import OnGPU
from resume_cases import assert_same, stop_and_resume, tiny
from rl_training.collect.local import Behaviour
from rl_training.config.train_config import TrainConfig
from rl_training.data import PrioritizedReplayBuffer, RecurrentReplayBuffer, ReplayBuffer, memory, replay_store
from rl_training.data.replay_store import ReplayStore
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.run.build import open_session
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import TrainResult, resume_training, train

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
IMAGES: dict[str, Any] = {"obs_shape": (4, 2, 2), "obs_dtype": "uint8", "frame_stack": 4}
KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "uniform": (ReplayBuffer, {"obs_shape": (3,)}),
    "n steps": (ReplayBuffer, {"obs_shape": (3,), "n_step": 3}),
    "prioritized": (PrioritizedReplayBuffer, {"obs_shape": (3,), "n_step": 2}),
    "frame stacks": (ReplayBuffer, IMAGES),
    "frame stacks, n steps, priorities": (PrioritizedReplayBuffer, IMAGES | {"n_step": 3}),
    "masks": (ReplayBuffer, {"obs_shape": (3,), "mask_size": 5}),
    "windows": (RecurrentReplayBuffer, {"obs_shape": (3,), "sequence_length": 6}),
}


class Pair:
    """Two buffers that are filled and sampled alike, one without a copy on a device and one with."""

    def __init__(self, kind: str, num_envs: int, device: str) -> None:
        make, layout = KINDS[kind]
        self.plain = make(60, num_envs, **layout)
        self.copied = make(60, num_envs, device=device, on_device=True, **layout)
        self.num_envs, self.has_masks = num_envs, "mask_size" in layout
        images = layout.get("frame_stack", 0)
        self.world = Episodes(num_envs, seed=4, shape=(1, 2, 2) if images else (3,), image_stack=images)
        self.rngs = [np.random.default_rng(8) for _ in range(2)]

    def add(self, steps: int, *, next_step_resets: bool = False) -> None:
        """Random steps, sampled after some of them."""
        for t in range(steps):
            step = self.world.step(next_step_resets=next_step_resets)
            if self.has_masks:
                names = ("masks", "next_masks", "final_masks")
                step |= {name: self.world.rng.random((self.num_envs, 5)) < 0.5 for name in names}
            for buffer in (self.plain, self.copied):
                buffer.add(**step)
            if t > 10 and t % 3 == 0:
                self.compare()

    def compare(self) -> None:
        """One batch of each is the same, to the bit."""
        batch, other = self.plain.sample(16, self.rngs[0]), self.copied.sample(16, self.rngs[1])
        assert batch.keys() == other.keys()
        for name, tensor in batch.items():
            assert other[name].device.type == ("cpu" if name == "indices" else self.copied.device.type)
            assert other[name].dtype == tensor.dtype, name
            assert torch.equal(other[name].cpu(), tensor), name
        if isinstance(self.plain, PrioritizedReplayBuffer):
            errors = self.world.rng.random(16)
            for buffer, sampled in ((self.plain, batch), (self.copied, other)):
                buffer.update_priorities(sampled["indices"], errors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("next_step_resets", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_with_a_copy_on_a_device(
    kind: str, num_envs: int, next_step_resets: bool, device: str
) -> None:
    pair = Pair(kind, num_envs, device)
    pair.add(100, next_step_resets=next_step_resets)
    state, other = pair.plain.state_dict(), pair.copied.state_dict()
    assert str(state) == str(other)  # a checkpoint says nothing of the copy
    again = Pair(kind, num_envs, device)
    again.plain.load_state_dict(other)
    again.copied.load_state_dict(state)
    again.world, again.rngs = pair.world, pair.rngs
    again.add(30, next_step_resets=next_step_resets)


def test_rows_that_nobody_samples_go_over_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_WAITING", 10)
    pair = Pair("uniform", 3, "cpu")
    copied: Any = pair.copied
    for t in range(19):  # 3 rows before the first step, 3 with every one
        step = pair.world.step()
        copied.add(**step)
        waiting = sum(map(len, copied.copy._written))
        assert waiting < 10
        seen = copied.copy.tensor[copied.copy.tensor.any(1)]
        assert len(seen) == 3 * (t + 2) - waiting


def test_memory_is_used_where_it_fits_and_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    session = open_session(tiny("dqn", tmp_path, threads=1))
    params, spaces = session.params.model_copy(update={"batch_size": 32}), session.spaces
    session.close()
    wide: Any = type("Spaces", (), {"obs_shape": (4, 84, 84), "obs_dtype": "uint8"})
    need = params.buffer_capacity * 84 * 84  # type: ignore[attr-defined]

    def goes(replay_memory: str, of: Any, device: str = "cuda") -> bool:
        chosen: Any = params.model_copy(update={"replay_memory": replay_memory})
        return replay_store.goes_to_device(chosen, of, device, frame_stack=4 if of is wide else 1)

    free = 4 * need
    assert goes("auto", wide)
    assert not goes("auto", spaces)  # a few floats: the host gathers them faster
    params = params.model_copy(update={"batch_size": 8})
    assert not goes("auto", wide)
    params = params.model_copy(update={"batch_size": 32})
    assert goes("device", spaces)
    assert not goes("host", wide)
    assert not goes("device", wide, "cpu")  # its memory is the host's
    free = need + 1
    assert not goes("auto", wide)
    assert goes("device", wide)
    free = need - 1
    with pytest.raises(UserError, match=r"replay_memory is 'device', .* but only .* is free on cuda; .* 'host'"):
        goes("device", wide)


@pytest.mark.skipif(len(DEVICES) == 1, reason="needs a GPU")
@pytest.mark.parametrize("algo", ["rainbow_dqn", "sac", "dreamer"])
def test_a_run_learns_the_same_wherever_its_batches_are_gathered(algo: str, tmp_path: Path) -> None:
    states = []
    for where in ("host", "device"):
        config = tiny(algo, tmp_path / where, device="cuda", eval_episodes=0, kwargs={"replay_memory": where})
        state = load_checkpoint(train(config, console=False).checkpoint_path)
        states.append([state["algorithm"], state["source"]])
    assert_same(*states)


class BreakAt(Callback):
    """An environment fails, or a signal comes, while the turn after a step is collected."""

    def __init__(self, step: int, failure: Exception | None = None) -> None:
        self.step, self.failure = step, failure

    def on_update(self, run: Run) -> None:
        stepper: Any = run.session.collector.stepper  # type: ignore[attr-defined]
        step = stepper.step

        def break_once(*arguments: Any) -> Any:
            stepper.step, self.step = step, 10**9
            if self.failure is not None:
                raise self.failure
            os.kill(os.getpid(), signal.SIGTERM)
            return step(*arguments)

        if run.step >= self.step:
            stepper.step = break_once


class Relabel(Callback):
    """Changes stored rewards in place."""

    def on_update(self, run: Run) -> None:
        buffer: Any = run.session.store.buffer  # type: ignore[attr-defined]
        buffer.columns["rewards"] *= -1


SEVERAL = {"train_frequency": 2, "learning_starts": 17, "gradient_updates_per_step": 3}  # 17 is inside of a turn
AHEAD: list[tuple[str, dict[str, Any]]] = [
    ("dqn", {"num_envs": 3, "vectorization": "sync", "kwargs": SEVERAL | {"buffer_capacity": 45}}),
    ("dqn", {"kwargs": {"train_frequency": 1, "gamma_schedule": {"start": 0.9, "end": 0.99}}}),
    ("n_step_dqn", {"eval_episodes": 1, "kwargs": {"train_frequency": 1, "buffer_capacity": 40, "eval_interval": 20}}),
    ("sac", {"num_envs": 3, "kwargs": SEVERAL | {"buffer_capacity": 45}}),
]
ONE_BY_ONE = ["rainbow_dqn", "rlpd", "mbpo"]  # what is drawn depends on the last update, or there are other draws


@pytest.fixture
def drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stores that are made take the CPU for another device; whether a batch was gathered too, for each drawn ahead."""
    monkeypatch.setattr(Behaviour, "numpy_policy", None)  # as on a GPU, where acting draws in torch
    make, draw = ReplayStore.__init__, ReplayBuffer.draw_ahead
    drawn: list[bool] = []

    def draw_ahead(self: ReplayBuffer, *arguments: Any) -> None:
        draw(self, *arguments)
        drawn.append(self.ahead is not None and self.ahead.batch is not None)

    def make_store(self: ReplayStore, context: Any) -> None:
        make(self, replace(context, device="cpu:0"))

    monkeypatch.setattr(ReplayBuffer, "draw_ahead", draw_ahead)
    monkeypatch.setattr(ReplayStore, "__init__", make_store)
    return drawn


def brief(algo: str, folder: Path, fields: dict[str, Any]) -> TrainConfig:
    return tiny(algo, folder, threads=1, total_timesteps=64, **{"eval_episodes": 0} | fields)


def fail_and_resume(config: TrainConfig) -> TrainResult:
    with pytest.raises(EnvironmentFailure, match="on purpose"):
        train(config, callbacks=[BreakAt(45, EnvironmentFailure("on purpose"))], console=False)
    return resume_training(next(Path(config.output_dir).rglob("latest.ckpt")), console=False)


def end_and_resume(config: TrainConfig) -> TrainResult:
    ended = train(config, callbacks=[BreakAt(45)], console=False, raise_on_signal=False)
    assert ended.metrics["stop_reason"] == "SIGTERM"
    return resume_training(ended.checkpoint_path, console=False)


def assert_same_states(*pairs: tuple[TrainResult, TrainResult]) -> None:
    for pair in pairs:
        one, other = (load_checkpoint(result.checkpoint_path) for result in pair)
        assert_same([one["algorithm"], one["source"]], [other["algorithm"], other["source"]])


@pytest.mark.filterwarnings("ignore:.*middle of a turn")
@pytest.mark.parametrize(("algo", "fields"), AHEAD)
def test_runs_that_draw_batches_ahead_are_the_same(
    algo: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn_ahead: list[bool]
) -> None:
    def config(name: str) -> TrainConfig:
        return brief(algo, tmp_path / name, fields)

    def relabel(name: str) -> TrainResult:
        return train(config(name), callbacks=[Relabel()], console=False)

    whole, failed, relabelled = train(config("1"), console=False), fail_and_resume(config("2")), relabel("3")
    parts, ended = stop_and_resume(config("4"), 17, 28), end_and_resume(config("5"))
    assert 0 < sum(drawn_ahead) < len(drawn_ahead)
    count = len(drawn_ahead)
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(ReplayStore, "draws_ahead", never, raising=False)
    plain = train(config("6"), console=False)
    assert_same_states((plain, whole), (plain, parts), (plain, ended))
    assert_same_states((fail_and_resume(config("7")), failed), (relabel("8"), relabelled))
    assert len(drawn_ahead) == count


LATE: list[tuple[str, dict[str, Any]]] = [
    ("rainbow_dqn", {"kwargs": {"train_frequency": 1, "n_step": 3, "buffer_capacity": 40}}),
    ("prioritized_dqn", {"num_envs": 3, "vectorization": "sync", "kwargs": SEVERAL | {"buffer_capacity": 45}}),
    ("prioritized_dqn", {"eval_episodes": 1, "kwargs": {"train_frequency": 1, "eval_interval": 20}}),
]


@pytest.mark.filterwarnings("ignore:.*middle of a turn")
@pytest.mark.parametrize(("algo", "fields"), LATE)
def test_runs_whose_errors_are_read_late_are_the_same(
    algo: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> TrainConfig:
        return brief(algo, tmp_path / name, fields)

    plain, failed = train(config("1"), console=False), fail_and_resume(config("2"))
    update, reads = PrioritizedReplayBuffer.update_priorities, OnGPU.reads
    monkeypatch.setattr(
        PrioritizedReplayBuffer, "update_priorities",
        lambda self, indices, errors: update(self, indices, errors.as_subclass(OnGPU)),
    )  # fmt: skip
    late, parts = train(config("3"), console=False), stop_and_resume(config("4"), 17, 28)
    ended = end_and_resume(config("5"))
    assert_same_states((plain, late), (plain, parts), (plain, ended), (failed, fail_and_resume(config("6"))))
    assert OnGPU.reads > reads


@pytest.mark.parametrize("algo", ONE_BY_ONE)
def test_runs_whose_draws_depend_on_the_last_update_draw_nothing_ahead(
    algo: str, tmp_path: Path, drawn_ahead: list[bool]
) -> None:
    train(tiny(algo, tmp_path, threads=1, eval_episodes=0, kwargs={"train_frequency": 1}), console=False)
    assert not drawn_ahead


def test_a_resume_may_gather_elsewhere(tmp_path: Path) -> None:
    changes = {"algo_kwargs": {"replay_memory": "host"}}  # without `force`
    resumed = stop_and_resume(tiny("dqn", tmp_path, eval_episodes=0), 60, changes=changes)
    assert resumed.metrics["stop_reason"] == "total_timesteps"
