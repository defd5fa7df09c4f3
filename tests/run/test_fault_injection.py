"""Every write, open, rename, sync and environment call of a short run fails once, each in a run of its own.

`RL_TRAINING_FAULTS=1` on the slow test prints how many points there are of each kind.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from env_zoo import Constant
from resume_cases import tiny
from rl_training.cli.screen import describe
from rl_training.config.train_config import TrainConfig
from rl_training.errors import UserError
from rl_training.record.checkpoints import load_checkpoint
from rl_training.record.metrics_file import read_metrics
from rl_training.run import folder as run_folder
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BY_PATH = ("open", "mkdir", "unlink", "replace", "link")
BY_DESCRIPTOR = ("write", "fsync", "ftruncate")


class Faults:
    """Counts the calls of a run that can fail, and lets one of them fail, or that one and all after it."""

    def __init__(self, folder: Path, fail_at: int = 0, *, for_good: bool = False) -> None:
        self.folder, self.fail_at, self.for_good = str(folder), fail_at, for_good
        self.count, self.saved, self.failed = 0, -1, ""
        self.calls: list[str] = []

    def __call__(self, kind: str) -> None:
        self.count += 1
        self.calls.append(kind)
        is_env = kind.startswith("env")
        if self.count == self.fail_at or (self.for_good and self.failed and not is_env):
            self.failed = self.failed or kind
            raise RuntimeError("on purpose") if is_env else OSError(errno.ENOSPC, "No space left on device")

    def is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(self.folder)

    @contextmanager
    def injected(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in BY_PATH:
                patch.setattr(os, name, self.counting(getattr(os, name), f"os.{name}", by_path=True))
            for name in BY_DESCRIPTOR:
                patch.setattr(os, name, self.counting(getattr(os, name), f"os.{name}", by_path=False))
            opened = self.opening(builtins.open)
            patch.setattr(builtins, "open", opened)
            patch.setattr(io, "open", opened)  # pathlib's
            for name in ("reset", "step", "close"):
                patch.setattr(Breakable, name, self.counting(getattr(Breakable, name), f"env.{name}", by_path=False))
            patch.setattr(run_folder, "git_state", lambda: None)  # it reads files outside of the folder
            yield

    def counting(self, original: Callable[..., Any], kind: str, *, by_path: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not by_path or self.is_inside(arguments[0]):
                self(kind)
            result = original(*arguments, **options)
            if kind == "os.replace" and str(arguments[1]).endswith("latest.ckpt"):
                self.saved = max(self.saved, load_checkpoint(arguments[1])["run"]["step"])
            return result

        return call

    def opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not self.is_inside(path) or not set(mode) & set("wa+x"):
                return original(path, mode, *arguments, **options)
            self("open")
            return Disk(original(path, mode, *arguments, **options), self)

        return call


class Disk:
    """A file whose writes can fail."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self.file, self.faults = file, faults

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> Any:
        self.faults("write")
        return self.file.write(data)

    def flush(self) -> None:
        self.faults("flush")
        self.file.flush()


class Breakable(Constant):
    """An environment of its own, so that its methods can be replaced."""

    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        return super().step(action)

    def close(self) -> None:
        super().close()


class Watch(Callback):
    """The step of the last whole turn."""

    step = 0

    def on_update(self, run: Run) -> None:
        self.step = run.step


def config_of(algo: str, folder: Path) -> TrainConfig:
    """Three turns, an evaluation and a checkpoint after the second."""
    kwargs = {"num_steps": 4, "hidden_sizes": [2], "eval_interval": 8, "learning_starts": 4, "batch_size": 2}
    known = {name: value for name, value in kwargs.items() if name != ("num_steps" if algo == "dqn" else "batch_size")}
    if algo != "dqn":
        known.pop("learning_starts")
    return tiny(
        algo, folder, env_id="test_fault_injection:Breakable", total_timesteps=12, eval_episodes=1,
        checkpoint_interval=8, checkpoint_keep=1, kwargs=known,
    )  # fmt: skip


class Case:
    """One way to run, from the same start for each point."""

    def __init__(self, name: str, folder: Path) -> None:
        self.algo, self.verb = name.split("-")
        self.folder, self.start = folder, folder / "start"
        if self.verb == "resume":
            config = config_of(self.algo, self.start)
            train(config.model_copy(update={"total_timesteps": 8}), console=False)

    def run(self, number: int, fail_at: int, **options: Any) -> tuple[Faults, Watch, Path, Exception | None]:
        """A run in a folder of its own with that fault; returns what it raised, too."""
        folder, watch = self.folder / str(number), Watch()
        if self.verb == "resume":
            shutil.copytree(self.start, folder)
        faults = Faults(folder, fail_at, **options)
        try:
            with faults.injected():
                if self.verb == "resume":
                    (latest,) = folder.glob("*/checkpoints/latest.ckpt")
                    resume_training(latest, total_timesteps=12, callbacks=[watch], console=False)
                else:
                    train(config_of(self.algo, folder), callbacks=[watch], console=False)
        except Exception as error:
            return faults, watch, folder, error
        return faults, watch, folder, None


def check(case: Case, number: int, fail_at: int, **options: Any) -> None:
    """One point: what was saved is valid and nothing less than it could be, resuming works, a person can read why."""
    faults, watch, folder, error = case.run(number, fail_at, **options)
    where = f"{case.algo} {case.verb}, call {fail_at} ({faults.failed}) {options}: {error!r}"
    assert faults.failed, where
    if error is not None:
        code, sentence = describe(error)
        assert code == (2 if isinstance(error, UserError) else 1), where
        assert sentence == " ".join(sentence.split()), where
        assert sentence.count(". ") <= 1, f"{where}: {sentence}"
    checkpoints = list(folder.glob("*/checkpoints/latest.ckpt"))
    if case.verb == "train" and faults.saved < 0:
        assert error is not None, where  # nothing was ever written, and that was said
        return
    (latest,) = checkpoints
    tree = load_checkpoint(latest)
    assert tree["run"]["step"] >= faults.saved, where
    if error is None or (faults.failed.startswith("env.") and not options):  # else the disk is full by then
        assert tree["run"]["step"] >= watch.step, where
    if error is None:
        assert watch.step == 12, where
        told = json.loads((latest.parents[1] / "manifest.json").read_text())["messages"]
        assert faults.failed not in ("env.reset", "env.step") or "failed in a trial" in " ".join(told), where
        if not options and faults.failed in ("write", "open"):
            assert [row["step"] for row in read_metrics(latest.parents[1] / "metrics.jsonl")][-1] == 12, where
    result = resume_training(latest, total_timesteps=16, console=False)
    assert result.metrics["global_step"] == 16, where
    shutil.rmtree(folder)


CASES = ["a2c-train", "a2c-resume", "dqn-train"]


def points(case: Case) -> Faults:
    """A run without a fault, which counts."""
    faults, _, _, error = case.run(0, 0)
    assert error is None
    assert faults.saved == 12
    return faults


@pytest.mark.parametrize("name", CASES)
def test_some_faults_lose_nothing(tmp_path: Path, name: str) -> None:
    """The middle one of the calls of each kind, and a disk that stays full from the middle on."""
    case = Case(name, tmp_path)
    faults = points(case)
    for kind in sorted(set(faults.calls)):
        numbers = [number for number, call in enumerate(faults.calls, start=1) if call == kind]
        check(case, numbers[0], numbers[len(numbers) // 2])
    check(case, faults.count + 1, faults.count // 2, for_good=True)


@pytest.mark.slow
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_fault_loses_nothing(
    tmp_path: Path, name: str, for_good: bool, record_property: Callable[[str, object], None]
) -> None:
    case = Case(name, tmp_path)
    faults = points(case)
    record_property("points", faults.count)
    if "RL_TRAINING_FAULTS" in os.environ:
        print(f"\n{name}, {'for good' if for_good else 'once'}: {faults.count} points, {dict(Counter(faults.calls))}")
    options = {"for_good": True} if for_good else {}
    for number in range(1, faults.count + 1):
        check(case, number, number, **options)
