"""The checkpoint file: exact round trips, refusal of everything damaged or foreign, atomic replacement."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_training import safe_files
from rl_training.errors import UserError
from rl_training.record import checkpoints as checkpointing
from rl_training.record.checkpoints import (
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from rl_training.safe_files import remove_stale_temporaries

DEAD_PROCESS = 999_999_999


def assert_same(loaded: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):
        assert isinstance(loaded, torch.Tensor)
        assert loaded.dtype == saved.dtype
        assert loaded.shape == saved.shape
        plain = saved.detach().resolve_conj().contiguous().reshape(-1)
        assert loaded.contiguous().reshape(-1).view(torch.uint8).equal(plain.view(torch.uint8))
    elif isinstance(saved, np.ndarray | np.generic):
        assert type(loaded) is type(saved)
        assert loaded.dtype == saved.dtype
        assert loaded.shape == saved.shape
        assert loaded.tobytes() == saved.tobytes()
    elif isinstance(saved, dict):
        assert list(loaded) == list(saved)
        for key in saved:
            assert_same(loaded[key], saved[key])
    elif isinstance(saved, list | tuple):
        assert type(loaded) is list
        assert len(loaded) == len(saved)
        for one, other in zip(loaded, saved, strict=True):
            assert_same(one, other)
    elif isinstance(saved, float):
        assert struct.pack("<d", loaded) == struct.pack("<d", saved)
    else:
        assert type(loaded) is type(saved)
        assert loaded == saved


def round_trip(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    return load_checkpoint(save_checkpoint(path, tree, durable=False))


TENSORS = {
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "half": torch.randn(3).half(),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "uint64": torch.tensor([2**63], dtype=torch.uint64),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "not finite": torch.tensor([math.nan, math.inf, -0.0]),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "slice": torch.arange(10)[1::3],
    "expanded": torch.ones(1).expand(4),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}
ARRAYS = {
    "float64": np.random.default_rng(0).normal(size=(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "bool": np.array([True]),
    "empty": np.zeros((3, 0), np.float32),
    "zero-dim": np.array(2, np.int16),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "text": np.array(["a", "long"]),
    "time": np.array(["2026-03-12"], "datetime64[D]"),
    "scalar float32": np.float32(0.1),
    "scalar float64": np.float64(0.1),
    "scalar bool": np.bool_(True),
    "scalar uint64": np.uint64(2**64 - 1),
}
PLAIN = {
    "none": None,
    "true": True,
    "small": -1,
    "128 bits": 2**128 - 1,
    "float": 0.1 + 0.2,
    "tiny": 5e-324,
    "minus zero": -0.0,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "text": 'é " \\ \n \0 \ud800',
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "tuple": (1, (2.0, "x")),
    "empty": [{}, [], ()],
    "awkward keys": {"": 1, "a.b": {"": {"": []}}, "\n": 2},
    "int keys": {0: {"exp_avg": torch.ones(2)}, "0": 1, -5: None},
}


@pytest.mark.parametrize("leaf", [*TENSORS.values(), *ARRAYS.values(), *PLAIN.values()])
def test_every_kind_of_leaf_comes_back_exactly(tmp_path: Path, leaf: Any) -> None:
    tree = {"before": b"x", "leaf": leaf, "nested": {"list": [leaf, 1]}}
    assert_same(round_trip(tmp_path / "a.ckpt", tree), tree)


def random_tree(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(9 if depth else 6)
    if kind == 0:
        shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
        return torch.randint(-9, 9, shape).to(draw.choice([torch.float32, torch.bool, torch.int64, torch.bfloat16]))
    if kind == 1:
        return np.full([draw.randrange(4) for _ in range(draw.randrange(3))], draw.randrange(100)).astype(
            draw.choice(["f4", "u1", "?", "c16", "i8"])
        )
    if kind == 2:
        return draw.choice([None, True, False, "", "text", math.inf, draw.random(), draw.gauss(0, 1e200)])
    if kind == 3:
        return draw.getrandbits(draw.randrange(1, 200)) * draw.choice([1, -1])
    if kind == 4:
        return draw.randbytes(draw.randrange(200))
    if kind == 5:
        return np.random.default_rng(draw.randrange(9)).bit_generator.state
    if kind == 6:
        return tuple(random_tree(draw, depth - 1) for _ in range(draw.randrange(4)))
    return {draw.choice("abcdef") * draw.randrange(3): random_tree(draw, depth - 1) for _ in range(draw.randrange(5))}


@pytest.mark.parametrize("seed", range(25))
def test_random_trees_come_back_exactly(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    tree = {f"k{number}": random_tree(draw, 4) for number in range(6)}
    assert_same(round_trip(tmp_path / "a.ckpt", tree), tree)


def test_generators_and_optimizers_continue_from_a_checkpoint(tmp_path: Path) -> None:
    numpy_generator, torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    tree = round_trip(
        tmp_path / "a.ckpt",
        {
            "numpy": numpy_generator.bit_generator.state,
            "torch": torch_generator.get_state(),
            "optimizer": optimizer.state_dict(),
        },
    )
    numpy_copy, torch_copy = np.random.default_rng(), torch.Generator()
    numpy_copy.bit_generator.state = tree["numpy"]
    torch_copy.set_state(tree["torch"])
    other = torch.optim.Adam([weight])
    other.load_state_dict(tree["optimizer"])
    assert numpy_copy.random() == numpy_generator.random()
    assert torch.rand(2, generator=torch_copy).equal(torch.rand(2, generator=torch_generator))
    assert_same(other.state_dict(), round_trip(tmp_path / "b.ckpt", optimizer.state_dict()))


def test_loaded_arrays_are_writable_and_do_not_touch_each_other(tmp_path: Path) -> None:
    shared = torch.zeros(3)
    tree = round_trip(tmp_path / "a.ckpt", {"a": shared, "b": shared, "c": np.zeros(3)})
    tree["a"] += 1
    tree["c"][:] = 2
    assert tree["b"].tolist() == [0, 0, 0]
    assert_same(load_checkpoint(tmp_path / "a.ckpt")["a"], shared)


class Foo:
    pass


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"source": {"stepper": {"x": Foo()}}}, "source.stepper.x is a Foo"),
        ({"a": [1, {"b": {1, 2}}]}, "a.1.b is a set"),
        ({"a": {"p": Path("x")}}, "a.p is a "),
        ({"a": {1.5: 0}}, "a has the key 1.5 of type float"),
        ({"a": {True: 0}}, "a has the key True of type bool"),
        ({"a": np.array([object()])}, "a is a numpy array of object"),
        ({"a": np.zeros(2, "i4,f4")}, "a is a numpy array of "),
        ({"a": torch.eye(2).to_sparse()}, "a is a torch.sparse_coo tensor"),
        ({"a": torch.empty(2, device="meta")}, "on meta"),
        ([1], "a checkpoint is a dict, not a list"),
    ],
)
def test_an_unsupported_leaf_is_named_by_its_path(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        save_checkpoint(tmp_path / "a.ckpt", tree)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


# ---- wrong files -----------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_checkpoint(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert error.value.__cause__ is None
    return message


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    draw = random.Random(7)
    tree = {"weights": torch.randn(20), "state": [random_tree(draw, 3) for _ in range(5)], "text": "x" * 50}
    return save_checkpoint(tmp_path_factory.mktemp("good") / "a.ckpt", tree).read_bytes()


def test_every_flipped_bit_is_noticed(tmp_path: Path, good_bytes: bytes) -> None:
    draw, path = random.Random(1), tmp_path / "a.ckpt"
    ends = [*range(16), *range(len(good_bytes) - 20, len(good_bytes))]
    for position in ends + draw.choices(range(len(good_bytes)), k=200):
        damaged = bytearray(good_bytes)
        damaged[position] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        refusal(path)


def test_every_truncation_is_noticed(tmp_path: Path, good_bytes: bytes) -> None:
    path = tmp_path / "a.ckpt"
    lengths = [*range(40), *random.Random(2).choices(range(len(good_bytes)), k=100), len(good_bytes) - 1]
    for length in lengths:
        path.write_bytes(good_bytes[:length])
        assert "damaged" in refusal(path)
    path.write_bytes(good_bytes + b"x")
    refusal(path)


def test_a_damaged_checkpoint_of_a_run_names_the_newest_other_one(tmp_path: Path, good_bytes: bytes) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for age, (name, content) in enumerate({
        "step_30": good_bytes[:-1], "step_20": good_bytes, "step_10": good_bytes, "best": b"", "latest": good_bytes[:9],
    }.items()):  # fmt: skip
        (folder / f"{name}.ckpt").write_bytes(content)
        os.utime(folder / f"{name}.ckpt", (1000 - age, 1000 - age))
    os.mkfifo(folder / "odd.ckpt")
    said = refusal(folder / "latest.ckpt")
    assert "is damaged (its end is missing, it was cut short); the newest other one there is step_20.ckpt, " in said
    assert said.endswith("step_20.ckpt, which resume takes, or train --continue if you copy it over this one.")
    for name in ("step_20", "step_10"):
        (folder / f"{name}.ckpt").unlink()
    assert refusal(folder / "latest.ckpt").endswith("; use another checkpoint of the run.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged (it is empty)"),
        (b"hello world, this is a text of some length", "is not an rl-training checkpoint (another format)"),
        (b"x", "is not an rl-training checkpoint"),
    ],
)
def test_a_foreign_or_empty_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    assert message in refusal(tmp_path / "a.ckpt")


def test_a_missing_file_a_folder_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere.ckpt")
    assert "is a directory" in refusal(tmp_path)
    with pytest.raises(UserError, match="is a directory"):
        save_checkpoint(tmp_path, {})
    (tmp_path / "file").write_text("")
    assert "cannot be read (Not a directory)" in refusal(tmp_path / "file" / "a.ckpt")


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("write", [lambda tree, path: path.write_bytes(pickle.dumps(tree)), torch.save])
def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path, write: Any) -> None:
    write({"a": Exploit(tmp_path / "created")}, tmp_path / "a.ckpt")
    assert "PyTorch or pickle" in refusal(tmp_path / "a.ckpt")
    assert not (tmp_path / "created").exists()


def forge(path: Path, index: bytes, *, data: bytes = bytes(112), version: int = 1, length: int | None = None) -> Path:
    """A file with right magic and checksum and any contents; its data are bytes 16 to 128."""
    body = b"\x89RLT\r\n\x1a\n" + struct.pack("<I4x", version) + data + index
    body += struct.pack("<Q", len(index) if length is None else length)
    path.write_bytes(body + struct.pack("<I", zlib.crc32(body)) + b"\nRLTend\n")
    return path


def test_a_forged_file_with_a_right_index_loads(tmp_path: Path) -> None:
    tree = load_checkpoint(forge(tmp_path / "a.ckpt", b'{"a":{"":["torch","float32",[4,4],64]}}'))
    assert_same(tree, {"a": torch.zeros(4, 4)})


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    message = refusal(forge(tmp_path / "a.ckpt", b"anything", version=7))
    assert "was written by a newer rl-training (format 7, this one reads up to 1)" in message


ARRAY_GARBAGE: list[list[Any]] = [
    ["torch", "float32", [4, 5], 64],
    ["torch", "float32", [4], 0],
    ["torch", "float32", [4], -64],
    ["torch", "float32", [-4], 64],
    ["torch", "float32", [2**40, 2**40], 64],
    ["torch", "float32", [1.0], 64],
    ["torch", "float32", [True], 64],
    ["torch", "float32", "44", 64],
    ["torch", "float32", None, 64],
    ["torch", "float32", [4], "64"],
    ["torch", "float32", [4]],
    ["torch", "float32", [4], 64, 1],
    ["torch", "load", [4], 64],
    ["numpy", "O", [4], 64],
    ["numpy", "i4,f4", [4], 64],
    ["numpy", "__import__('os')", [4], 64],
    ["numpy", "f4", [1] * 100, 64],
    ["scalar", "<f4", [2, 100], 64],
    ["bytes", "|u1", [1000], 64],
    ["pickle", "|u1", [10], 64],
    ["float", "one"],
    ["float"],
    ["items", [["a", 1], ["a", 2]]],
    ["items", [["a"]]],
    ["items", [[[], 1]]],
    ["items", 3],
    [],
    [[]],
]


@pytest.mark.parametrize("garbage", ARRAY_GARBAGE, ids=str)
def test_a_nonsense_reference_is_refused(tmp_path: Path, garbage: list[Any]) -> None:
    index = json.dumps({"fine": 1, "a": [{"": garbage}]}).encode()
    assert "its index makes no sense" in refusal(forge(tmp_path / "a.ckpt", index))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{",
        b"[1]",
        b"3",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":2}}',
        b'{"":["items",[]],"x":1}',
        b'{"":5}',
        b'{"a":\xff}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"a":{"":["torch","int8",[8],64]},"b":{"":["torch","int8",[8],64]}}',  # two arrays on the same bytes
    ],
    ids=range(12),
)
def test_a_nonsense_index_is_refused(tmp_path: Path, index: bytes) -> None:
    assert "its index makes no sense" in refusal(forge(tmp_path / "a.ckpt", index))


@pytest.mark.parametrize("length", [0, 3, 200, 10**9, 2**64 - 1])
def test_a_wrong_index_length_is_refused(tmp_path: Path, length: int) -> None:
    refusal(forge(tmp_path / "a.ckpt", b'{"a":1}', length=length))


# ---- atomic writing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replace", "fsync"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    path = save_checkpoint(tmp_path / "a.ckpt", {"a": 1})
    monkeypatch.setattr(checkpointing.os, name, fail)
    with pytest.raises(type(failure)):
        save_checkpoint(path, {"a": torch.zeros(100)})
    assert load_checkpoint(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_saving_makes_the_folder_and_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.ckpt"
    assert save_checkpoint(str(path), {"a": 1}) == path
    save_checkpoint(path, {"a": 2})
    assert load_checkpoint(str(path)) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]


def test_durable_waits_for_the_file_and_then_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = {"fsync": os.fsync, "replace": os.replace}
    for name in real:
        monkeypatch.setattr(checkpointing.os, name, lambda *a, name=name: (calls.append(name), real[name](*a)))
    save_checkpoint(tmp_path / "a.ckpt", {})
    assert calls == ["fsync", "replace", "fsync"]
    save_checkpoint(tmp_path / "a.ckpt", {}, durable=False)
    assert calls[3:] == ["replace"]


def test_two_threads_may_write_the_same_file(tmp_path: Path) -> None:
    def write(value: int) -> None:
        for _ in range(20):
            save_checkpoint(tmp_path / "a.ckpt", {"a": torch.full((1000,), value)}, durable=False)

    threads = [threading.Thread(target=write, args=(value,)) for value in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert load_checkpoint(tmp_path / "a.ckpt")["a"].unique().numel() == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_stale_temporaries_of_dead_processes_only_are_removed(tmp_path: Path) -> None:
    host = safe_files.host_name()
    stale = [tmp_path / f".a.other0host-{os.getpid()}-5.tmp", tmp_path / f".latest.ckpt.{host}-{DEAD_PROCESS}-5.tmp"]
    others = [f".latest.ckpt.{host}-{os.getpid()}-5.tmp", ".b.tmp", "a.ckpt"]
    for path in [*stale, *(tmp_path / name for name in others)]:
        path.write_text("")
    assert sorted(remove_stale_temporaries(tmp_path)) == stale
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    assert remove_stale_temporaries(tmp_path / "nowhere") == []


# ---- the folder of a run ---------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_keeps_the_newest_step_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in (9, 10, 100):
        assert folder.save(f"step_{step}", {"step": step}) == folder.path(f"step_{step}")
    folder.save("latest", {"step": 100})
    folder.save("best", {"step": 9})
    assert names(folder.folder) == ["best.ckpt", "latest.ckpt", "step_10.ckpt", "step_100.ckpt"]
    assert folder.steps == [folder.path("step_10"), folder.path("step_100")]
    assert load_checkpoint(folder.best) == {"step": 9}
    assert load_checkpoint(folder.latest) == {"step": 100}


def test_a_run_resumed_from_further_back_keeps_what_it_writes(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for order, step in enumerate((800, 900, 500)):
        path = folder.path(f"step_{step}")
        save_checkpoint(path, {}, durable=False)
        os.utime(path, ns=(order * 10**9, order * 10**9))
    folder.save("step_600", {})
    assert names(tmp_path) == ["step_500.ckpt", "step_600.ckpt"]


def test_a_clock_that_was_set_back_deletes_nothing_new(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (100, 200):
        folder.save(f"step_{step}", {})
        os.utime(folder.path(f"step_{step}"), (4e9, 4e9))  # in 2096
    later = CheckpointFolder(tmp_path, keep=2)  # another process, after the clock was set back
    later.save("step_300", {})
    assert names(tmp_path) == ["step_200.ckpt", "step_300.ckpt"]
    later.save("step_400", {})
    later.save("step_300", {})
    assert later.steps == [later.path("step_400"), later.path("step_300")]


@pytest.mark.parametrize("keep", [0, 1, 4])
def test_keep_counts(tmp_path: Path, keep: int) -> None:
    folder = CheckpointFolder(tmp_path, keep=keep)
    for step in range(4):
        folder.save("latest", {"step": step})
        folder.save(f"step_{step}", {"step": step})
    assert len(folder.steps) == keep
    assert load_checkpoint(folder.latest) == {"step": 3}


def test_a_new_folder_object_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    (tmp_path / f".latest.ckpt.{safe_files.host_name()}-{DEAD_PROCESS}-1.tmp").write_text("")
    CheckpointFolder(tmp_path)
    assert names(tmp_path) == []
