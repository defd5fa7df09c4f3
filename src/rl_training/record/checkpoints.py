"""One-file checkpoints without pickles: reading one never runs code, and a damaged file is refused, never half loaded.

    header   8 bytes magic, u32 format version, 4 zero bytes
    data     the bytes of every array, each start aligned to 64
    index    ASCII JSON: the tree; an object with the single key "" encodes what JSON cannot: [kind, ...]
    trailer  u64 index length, u32 CRC32 of everything before it, 8 bytes end magic

Header and trailer stay the same in every future format, so that an old program can tell "newer" from "damaged".
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from rl_training.errors import UserError, near_name
from rl_training.safe_files import open_regular, remove_stale_temporaries, replacing

FORMAT_VERSION = 1
MAPPED_BYTES = 1 << 30  # a file of this size or more is memory-mapped: its replay may not fit into memory
_LARGE_ARRAY = 1 << 20  # bytes; in a mapped file, an array this large stays there, read-only
_MAGIC, _END_MAGIC = b"\x89RLT\r\n\x1a\n", b"\nRLTend\n"
_HEADER, _TRAILER = struct.Struct("<8sI4x"), struct.Struct("<QI8s")
# Neither objects (they need a pickle) nor records; numpy never parses any other name from a file.
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUMm][1-9]\d{0,8}(\[\w+\])?")
_DTYPE_NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
_TORCH_DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)}


def save_checkpoint(path: str | os.PathLike[str], tree: Mapping[str, Any], *, durable: bool = True) -> Path:
    """Write `tree` to `path` atomically: after a crash the file is the old one or the new one, complete.

    Leaves: None, bool, int, float, str, bytes, torch tensors (come back on the CPU, without gradient), numpy arrays and
    scalars. Keys: str or int. Tuples come back as lists; tensors that share memory come back separate.
    `durable=False` skips the wait for the disk.
    """
    path = Path(path)
    if not isinstance(tree, Mapping):
        raise TypeError(f"a checkpoint is a dict, not a {type(tree).__qualname__}")
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the name of the checkpoint file to write.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        _Writer(file).write(tree)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if durable:
        _sync_folder(path.parent)
    return path


def _sync_folder(folder: Path) -> None:
    # Some file systems (and Windows) refuse this; the file's own bytes are on the disk already.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Writer:
    """Streams the arrays to the file while it walks the tree, so that nothing large is copied."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._offset, self._crc = file, 0, 0

    def write(self, tree: Mapping[str, Any]) -> None:
        self._append(_HEADER.pack(_MAGIC, FORMAT_VERSION))
        index = json.dumps(self._encode(tree, ()), separators=(",", ":"), allow_nan=False).encode("ascii")
        self._append(index)
        self._append(struct.pack("<Q", len(index)))
        self._file.write(struct.pack("<I8s", self._crc, _END_MAGIC))

    def _append(self, data: Any) -> None:
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._offset += len(data)

    def _refer(self, kind: str, dtype: str, shape: Sequence[int], data: Any) -> dict[str, list[Any]]:
        self._append(bytes(-self._offset % 64))
        start = self._offset
        self._append(data)
        return {"": [kind, dtype, list(shape), start]}

    def _encode(self, value: Any, where: tuple[Any, ...]) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, where)
        if isinstance(value, bytes | bytearray):
            return self._refer("bytes", "|u1", [len(value)], value)
        if isinstance(value, np.ndarray | np.generic):  # before float: np.float64 is one
            return self._encode_numpy(value, where)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"": ["float", repr(value)]}
        if isinstance(value, list | tuple):
            return [self._encode(item, (*where, position)) for position, item in enumerate(value)]
        if isinstance(value, Mapping):
            return self._encode_mapping(value, where)
        _refuse(where, f"is a {type(value).__qualname__}")

    def _encode_mapping(self, value: Mapping[Any, Any], where: tuple[Any, ...]) -> Any:
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                _refuse(where, f"has the key {key!r} of type {type(key).__qualname__}")
        pairs = [(key, self._encode(item, (*where, key))) for key, item in value.items()]
        # JSON turns int keys into strings (optimizers have them), and "" is the mark of a special object.
        plain = all(isinstance(key, str) and key for key in value)
        return dict(pairs) if plain else {"": ["items", pairs]}

    def _encode_tensor(self, tensor: torch.Tensor, where: tuple[Any, ...]) -> Any:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _TORCH_DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            _refuse(where, f"is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return self._refer("torch", dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy())

    def _encode_numpy(self, value: np.ndarray | np.generic, where: tuple[Any, ...]) -> Any:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            _refuse(where, f"is a numpy array of {value.dtype}")
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar"
        return self._refer(kind, value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def _refuse(where: tuple[Any, ...], what: str) -> NoReturn:
    raise TypeError(f"{'.'.join(map(str, where)) or 'the checkpoint'} {what}, which a checkpoint cannot hold")


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tree in `path`, verified to the last bit; its arrays are writable and share the one buffer that was read.

    If the file has `MAPPED_BYTES` or more, large numpy arrays stay in the file, read-only, and the rest is copied.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give a file such as the checkpoints/latest.ckpt of a run.")
    try:
        with open_regular(path) as file:  # not a pipe, which would wait for a writer
            size = os.fstat(file.fileno()).st_size
            _check_ends(path, file, size)
            if size >= MAPPED_BYTES:
                buffer = np.asarray(np.memmap(file, np.uint8, "r"))
            else:
                buffer = np.fromfile(file, np.uint8)
    except FileNotFoundError:
        near = near_name(path.name, os.listdir(path.parent) if path.parent.is_dir() else ())
        hint = "give the path of a checkpoint file." if near is None else f"did you mean {path.with_name(near)}?"
        raise UserError(f"{path} does not exist; {hint}") from None
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file system allows
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); check the path and its permissions.") from None
    return _parse(path, buffer)


def pack_tree(tree: Mapping[str, Any]) -> bytes:
    """The bytes that `save_checkpoint` would write, for another process."""
    file = io.BytesIO()
    _Writer(file).write(tree)
    return file.getvalue()


def unpack_tree(data: bytes) -> dict[str, Any]:
    """The inverse of `pack_tree`."""
    return _parse("the tree in memory", np.frombuffer(bytearray(data), np.uint8))


def _parse(path: str | Path, buffer: NDArray[np.uint8]) -> dict[str, Any]:
    size, data = len(buffer), buffer.data
    version = _HEADER.unpack_from(data)[1]
    index_length, crc, _ = _TRAILER.unpack_from(data, size - _TRAILER.size)
    if zlib.crc32(data[: size - _TRAILER.size + 8]) != crc:
        raise _damaged(path, "its checksum does not match its contents")
    if version > FORMAT_VERSION:
        newer = f"format {version}, this one reads up to {FORMAT_VERSION}"
        raise UserError(f"{path} was written by a newer rl-training ({newer}); update rl-training to open it.")
    try:
        return _Reader(buffer, size - _TRAILER.size - index_length).read()
    except Exception:  # forged contents with a correct checksum can fail in any way
        raise _damaged(path, "its index makes no sense") from None


def _check_ends(path: Path, file: BinaryIO, size: int) -> None:
    """Refuse a foreign or truncated file before reading all of it."""
    head = file.read(_HEADER.size)
    if not head:
        raise _damaged(path, "it is empty")
    if not head.startswith(_MAGIC) and not _MAGIC.startswith(head):
        unsafe = "a PyTorch or pickle file, which could run code and is not opened"
        what = unsafe if head[0] in b"\x80P" else "another format"
        raise UserError(f"{path} is not an rl-training checkpoint ({what}); give a .ckpt file that a run wrote.")
    if not _is_whole(file, size):
        raise _damaged(path, "its end is missing, it was cut short")
    file.seek(0)


def _is_whole(file: BinaryIO, size: int) -> bool:
    """Whether a file has the end that a checkpoint has, and is long enough for one."""
    file.seek(max(0, size - len(_END_MAGIC)))
    return size >= _HEADER.size + _TRAILER.size and file.read(len(_END_MAGIC)) == _END_MAGIC


def _damaged(path: str | Path, reason: str) -> UserError:
    older = _newest_other(Path(path))
    advice = "use another checkpoint of the run" if older is None else f"the newest other one there is {older.name}"
    if older is not None and Path(path).name == "latest.ckpt":
        advice += ", which resume takes, or train --continue if you copy it over this one"
    return UserError(f"{path} is damaged ({reason}); {advice}.")


def _newest_other(path: Path) -> Path | None:
    """The newest checkpoint next to this one whose header and end are whole; its contents are not read."""
    found: list[tuple[int, Path]] = []
    for other in path.parent.glob("*.ckpt") if path.parent.name == "checkpoints" else ():
        with contextlib.suppress(OSError), open_regular(other) as file:
            status = os.fstat(file.fileno())
            if other != path and _is_whole(file, status.st_size):
                found.append((status.st_mtime_ns, other))
    return max(found)[1] if found else None


class _Reader:
    """Rebuilds the tree over the buffer; may raise any exception if `_Writer` did not write the index."""

    def __init__(self, buffer: NDArray[np.uint8], index_start: int) -> None:
        self._buffer, self._index_start, self._previous_end = buffer, index_start, _HEADER.size

    def read(self) -> dict[str, Any]:
        if self._index_start < _HEADER.size:
            raise ValueError("index longer than the file")
        index = self._buffer[self._index_start : -_TRAILER.size].tobytes().decode("ascii")
        tree = self._decode(json.loads(index, object_pairs_hook=_unique))
        if not isinstance(tree, dict):
            raise ValueError("not a dict")
        return tree

    def _decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "" not in node:
            return {key: self._decode(item) for key, item in node.items()}
        ((kind, *arguments),) = node.values()
        if kind == "items":
            return _unique([(key, self._decode(item)) for key, item in arguments[0]])
        return float(arguments[0]) if kind == "float" else self._decode_array(kind, *arguments)

    def _decode_array(self, kind: str, name: str, shape: list[int], start: int) -> Any:
        if kind not in ("torch", "numpy", "scalar", "bytes") or not (kind == "torch" or _NUMPY_DTYPE.fullmatch(name)):
            raise ValueError("not a kind or a dtype")
        dtype: Any = _TORCH_DTYPES[name] if kind == "torch" else np.dtype(name)
        if not all(type(number) is int and number >= 0 for number in [start, *shape]):
            raise ValueError("not a shape")
        size = math.prod(shape) * dtype.itemsize
        # The writer puts arrays one after the other, so one that starts inside another is not ours.
        if start < self._previous_end or start + size > self._index_start:
            raise ValueError("not within the data")
        self._previous_end = start + size
        raw = self._buffer[start : start + size]
        if not raw.flags.writeable and (kind == "torch" or size < _LARGE_ARRAY):
            raw = raw.copy()
        if kind == "torch":
            return torch.from_numpy(raw).view(dtype).reshape(shape)
        if kind == "bytes":
            return raw.tobytes()
        array = raw.view(dtype).reshape(shape)
        return array[()] if kind == "scalar" else array


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key twice")
    return result


class CheckpointFolder:
    """A run's `checkpoints/`: `latest.ckpt`, `best.ckpt` and the `keep` most recently written `step_<n>.ckpt`."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep
        self.latest, self.best = self.path("latest"), self.path("best")
        self._written: list[Path] = []  # step files of this process, in order whatever the clock says
        remove_stale_temporaries(self.folder)

    @property
    def steps(self) -> list[Path]:
        """The step files in the order of writing: a run resumed from an earlier step counts from there."""
        named = [path for path in self.folder.glob("step_*.ckpt") if re.fullmatch(r"step_\d+", path.stem)]
        earlier = [path for path in named if path not in self._written]
        earlier.sort(key=lambda path: (path.stat().st_mtime_ns, int(path.stem[5:])))
        return earlier + [path for path in self._written if path in named]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.ckpt"

    def save(self, name: str, tree: Mapping[str, Any]) -> Path:
        """Write `<name>.ckpt` (latest, best or step_<n>), and delete the oldest step files beyond `keep`."""
        written = save_checkpoint(self.path(name), tree)
        if name.startswith("step_"):
            self._written = [path for path in self._written if path != written] + [written]
        steps = self.steps
        for path in steps[: max(0, len(steps) - self.keep)]:
            with contextlib.suppress(OSError):  # failing to delete an old file is not failing to save
                path.unlink(missing_ok=True)
        return written
