"""Mapped replay: a folder for each buffer, room that is reserved, nothing left, and resumes larger than memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from resume_cases import StopAt, assert_same_run, tiny
from rl_training.cli.main import app
from rl_training.config.train_config import TrainConfig
from rl_training.data import ReplayBuffer, memory
from rl_training.data.memory import MappedFolder
from rl_training.errors import UserError
from rl_training.record import checkpoints as checkpointing
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import resume_training, train


def make(folder: Path | None, capacity: int = 50, obs_dim: int = 3) -> ReplayBuffer:
    return ReplayBuffer(capacity, 1, obs_shape=(obs_dim,), folder=folder)


def fill(buffer: ReplayBuffer, steps: int, offset: float = 0.0) -> None:
    shape, no = (1, *buffer.obs_shape), np.array([False])
    for t in range(steps):
        obs = np.full(shape, t + offset, dtype=np.float32)
        buffer.add(obs, np.array([0]), np.array([t], dtype=np.float32), no, no, obs + 1)


def dqn(output: Path, folder: Path, **fields: Any) -> TrainConfig:
    return tiny("dqn", output, kwargs={"replay_folder": str(folder)}, **fields)


def test_two_buffers_in_one_folder_do_not_touch_each_other_or_other_files(tmp_path: Path) -> None:
    (tmp_path / "obs.npy").write_text("mine")
    one, other = make(tmp_path), make(tmp_path)
    fill(one, 20)
    fill(other, 20, offset=100.0)
    assert one.transitions()["obs"][:, 0].tolist() == list(range(20))
    assert other.transitions()["obs"][:, 0].tolist() == list(range(100, 120))
    one.close()
    one.close()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    fill(other, 5, offset=200.0)
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["obs.npy"]
    assert (tmp_path / "obs.npy").read_text() == "mine"


def test_a_run_inside_another_runs_folder_changes_neither(tmp_path: Path) -> None:
    class TrainsAnother(Callback):
        result: Any = None

        def on_update(self, run: Run) -> None:
            if self.result is None and run.step >= 64:
                self.result = train(dqn(tmp_path / "runs", tmp_path / "shared", seed=4), console=False)

    inner = TrainsAnother()
    outer = train(dqn(tmp_path / "runs", tmp_path / "shared"), callbacks=[inner], console=False)
    for result, seed in ((outer, 3), (inner.result, 4)):
        assert_same_run(result, train(tiny("dqn", tmp_path / "plain", seed=seed), console=False))
    assert list((tmp_path / "shared").iterdir()) == []


HOLDS = """
import sys
from rl_training.data.memory import MappedFolder
folder = MappedFolder(sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    dead, live = (Path(holder.stdout.readline().decode().strip()) for holder in holders)  # type: ignore[union-attr]
    holders[0].kill()
    holders[0].wait()
    assert dead.exists()
    own = MappedFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([live, own.path])
    own.close()
    holders[1].communicate(timeout=60)
    assert list(tmp_path.iterdir()) == [], "a process that ends by itself leaves nothing"


def test_every_byte_is_reserved_before_it_is_used(tmp_path: Path) -> None:
    buffer = make(tmp_path, capacity=100_000)
    files = list(tmp_path.glob("*/*.npy"))
    assert len(files) >= 7
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in files)
    assert f" reserved in {buffer.folder.path}" in buffer.describe_size()  # type: ignore[union-attr]


def test_a_full_disk_is_a_sentence_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"buffer of 500 steps needs .* cannot be reserved in .* \(No space left"):
        train(dqn(tmp_path / "runs", tmp_path / "replay"), console=False)
    assert list((tmp_path / "replay").iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_a_disk_that_is_full_at_the_last_array_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(path: Path) -> None:
        if path.name.startswith("finals"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "_reserve", reserve)
    said = r"of 500 steps needs .* = finals_16 .* cannot be reserved in .* \(No space left"
    with pytest.raises(UserError, match=said):
        make(tmp_path, capacity=500)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"replay_folder is .*file/x', where no files can be made: Not a directory"):
        make(tmp_path / "file" / "x")


def test_a_resume_writes_to_the_runs_own_folder_unless_it_is_told_where(tmp_path: Path) -> None:
    named = tmp_path / "named"
    straight = train(dqn(tmp_path / "runs", named), console=False)
    halfway = train(dqn(tmp_path / "runs", named), callbacks=[StopAt(64)], console=False)
    assert "reserved in" in json.loads((halfway.run_dir / "manifest.json").read_text())["messages"][0]
    named.rmdir()

    class Looks(Callback):
        def on_start(self, run: Run) -> None:
            self.place = run.session.store.buffer.folder.path.parent  # type: ignore[attr-defined]

    looks = Looks()
    before = halfway.checkpoint_path.read_bytes()
    resumed = resume_training(halfway.checkpoint_path, callbacks=[looks], console=False)
    assert looks.place == resumed.run_dir
    assert not named.exists()
    assert_same_run(straight, resumed)
    said = json.loads((resumed.run_dir / "manifest.json").read_text())["messages"]
    assert f"mapped to files in {resumed.run_dir}; --set replay_folder={named} puts" in " ".join(said)
    assert [path for path in resumed.run_dir.iterdir() if path.name.startswith("replay")] == []

    halfway.checkpoint_path.write_bytes(before)
    resume_training(halfway.checkpoint_path, output_dir=tmp_path / "chosen", callbacks=[looks], console=False)
    assert looks.place == tmp_path / "chosen"

    options = ["--checkpoint", str(halfway.checkpoint_path), "--set", f"replay_folder={named}"]
    result = CliRunner().invoke(app, ["resume", *options])
    assert result.exit_code == 0, result.output
    assert f"reserved in {named}/replay-" in " ".join(
        json.loads((resumed.run_dir / "manifest.json").read_text())["messages"]
    )
    assert list(named.iterdir()) == []


def test_large_files_are_mapped_and_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"large": np.arange(1 << 18, dtype=np.int64), "small": np.arange(3), "bytes": b"x" * 9}
    path = save_checkpoint(tmp_path / "a.ckpt", tree, durable=False)
    monkeypatch.setattr(checkpointing, "MAPPED_BYTES", 1)
    found = load_checkpoint(path)
    assert found["bytes"] == tree["bytes"]
    assert np.array_equal(found["large"], tree["large"])
    assert [found[name].flags.writeable for name in ("large", "small")] == [False, True]
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(path)


BOUNDED = """
import re, resource, sys
from pathlib import Path
import numpy as np
from rl_training.data import ReplayBuffer
from rl_training.record import checkpoints as checkpointing

checkpointing.MAPPED_BYTES = 1 << 20
data = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
limit = data + 48 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
buffer = ReplayBuffer(3000, 1, obs_shape=(10_000,), folder=sys.argv[2])
buffer.load_state_dict(checkpointing.load_checkpoint(sys.argv[1])["replay"])
print(len(buffer), float(buffer.sample(64, np.random.default_rng(0))["obs"].sum()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_mapped_buffer_larger_than_memory_is_resumed(tmp_path: Path) -> None:
    buffer = make(tmp_path, capacity=3000, obs_dim=10_000)
    fill(buffer, 3000)
    path = save_checkpoint(tmp_path / "big.ckpt", {"replay": buffer.state_dict()}, durable=False)
    assert path.stat().st_size > 2 * 48 * 2**20
    command = [sys.executable, "-c", BOUNDED, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = float(buffer.sample(64, np.random.default_rng(0))["obs"].sum())
    assert done.stdout.split() == ["3000", str(wanted)]
