"""Checksums of an environment's attributes: they detect state that no observation shows.

A checksum covers everything that can be reached from an attribute: containers, objects with `__dict__` or `__slots__`,
closures, other environments, and random generators. It is read from Python's and numpy's own types only: no method,
property or operator of a user's class is called. What cannot be read (a generator, an object of a C library) or is
too large is named instead.
"""

from __future__ import annotations

import _random
import array
import copyreg
import logging
import marshal
import mmap
import random
import subprocess
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rl_training.envs.wrappers import layers

MOST_BYTES = 1 << 27  # of one environment; an attribute may have half of what the attributes before it left
NODE_BYTES = 1 << 10  # a Python object takes about as long to read as this many bytes of an array
UNREAD = {"spec", "_cached_spec", "render_mode"}  # attributes of an environment that no step changes
SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
# Objects that a step does not depend on. Class and module variables are not read; docs/reliability.md says so.
IGNORED = (type, types.ModuleType, np.ufunc, logging.Logger, type(threading.Lock()), type(threading.RLock()))
REPORTERS = (gym.wrappers.RecordEpisodeStatistics, gym.wrappers.PassiveEnvChecker)  # wrappers that change nothing
OUTSIDE = (threading.Thread, subprocess.Popen, BaseProcess, Connection)  # most of their state is elsewhere
# C libraries whose objects a seeded reset rebuilds; the trial at a resume finds what it does not (Box2D's contacts)
REBUILT = {"mujoco", "Box2D", "ale_py", "envpool", "pygame", "glfw", "OpenGL"}
# Packages whose objects in C say what a copy is made from; itertools stops saying it in Python 3.14
COPYABLE = (set(sys.stdlib_module_names) | {"builtins", "numpy", "pandas", "torch"}) - {"itertools"}


class HiddenState(NamedTuple):
    """Checksums of attributes by name (`NormalizeReward.return_rms`), and what is unseen in some: `a generator`."""

    sums: dict[str, int]
    unseen: dict[str, str]


def hidden_state(env: gym.Env[Any, Any]) -> HiddenState:
    """The attributes of the environment and of each wrapper."""
    known, found, left = layers(env), HiddenState({}, {}), MOST_BYTES
    for layer in known:
        for name, value in _attributes(layer).items():
            key = f"{type(layer).__name__}.{name.lstrip('_')}"
            while key in found.sums:  # another wrapper of the same class
                key += "'"
            if name != "env":
                reader = _Reader(known, left // 2)
                found.sums[key] = reader.read(value)
                left -= left // 2 - max(0, reader.left)
                if reader.unseen:
                    found.unseen[key] = reader.unseen
    return found


def checksum(value: Any) -> int:
    """CRC32 of everything that can be reached from a value; equal for equal values, in any process."""
    return _Reader((), MOST_BYTES).read(value)


class _TooLarge(Exception):
    """There is more to read than a reader may read."""


class _Reader:
    """Reads one value within `left` bytes; `unseen` says what it could not read. `known` objects are not entered."""

    def __init__(self, known: Sequence[Any], left: int) -> None:
        self.total, self.left, self.unseen, self.known = 0, left, "", known
        self.met: dict[int, tuple[int, Any]] = {id(each): (place, each) for place, each in enumerate(known)}

    def read(self, value: Any) -> int:
        """The checksum of the value."""
        waiting = [value]
        try:
            while waiting:
                waiting += reversed(self.open(waiting.pop()))
        except _TooLarge:
            self.unseen = self.unseen or "it is too large"
        except Exception as error:  # a thread of the environment changes what is read, for example
            self.unseen = self.unseen or f"reading it raised {type(error).__name__}"
        return self.total

    def spend(self, size: int) -> None:
        """Count bytes."""
        self.left -= size
        if self.left < 0:
            raise _TooLarge

    def add(self, data: Any) -> None:
        """Add bytes."""
        self.spend(memoryview(data).nbytes)
        self.total = zlib.crc32(data, self.total)

    def miss(self, value: Any) -> list[Any]:
        """Note that a value cannot be read."""
        self.unseen = self.unseen or f"a {type(value).__qualname__}"
        return []

    def open(self, value: Any) -> list[Any]:
        """Add what is plain in a value, and return its other parts."""
        cls: Any = type(value)
        if cls in SCALARS or cls is memoryview:
            self.add(value if cls is memoryview else marshal.dumps(value, 2))
            return []
        self.spend(NODE_BYTES)
        if id(value) in self.met:
            self.add(b"again %d" % self.met[id(value)][0])
            return []
        if cls is not tuple:  # equal tuples may be one object in one process and two in another
            self.met[id(value)] = len(self.met), value  # which also keeps its id from being used again
        self.add(cls.__qualname__.encode())
        attributes = _attributes(value)  # first, because this may create an empty __dict__
        parts = [*_kind(cls)[0](self, value), *attributes, *attributes.values()]
        if 8 * len(parts) > self.left:
            raise _TooLarge
        if SCALARS.issuperset(map(type, parts)):
            self.add(marshal.dumps(parts, 2))
            return []
        self.add(b"%d" % len(parts))
        return parts

    def open_set(self, value: Any) -> list[Any]:
        """A sum of each element, in an order of their own, because that of a set differs between processes."""
        found = []
        for item in (set if issubclass(type(value), set) else frozenset).__iter__(value):
            if type(item) in SCALARS:
                found.append(zlib.crc32(marshal.dumps(item, 2)))
                continue
            inner = _Reader([*self.known, value], self.left)
            found.append(inner.read(item))
            self.left, self.unseen = inner.left, self.unseen or inner.unseen
        return sorted(found)

    def open_array(self, value: Any) -> list[Any]:
        """Shape, dtype and numbers."""
        plain = np.ndarray.view(value, np.ndarray)
        if plain.nbytes > self.left:  # avoid a copy
            raise _TooLarge
        kind = f"{plain.dtype.descr if plain.dtype.names else plain.dtype.str}{plain.shape}"
        if plain.dtype.hasobject:
            return [kind, *plain.ravel().tolist()]
        flat = np.ascontiguousarray(plain).reshape(-1)
        return [kind, flat.view(np.uint8).data] if flat.nbytes else [kind]

    def open_tensor(self, value: Any) -> list[Any]:
        """Type, shape and numbers."""
        torch = sys.modules["torch"]
        plain = torch.Tensor.detach(value).cpu()
        flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))  # without the gaps of a view
        return [f"{plain.dtype}{plain.shape}", *self.open_array(flat.view(torch.uint8).numpy())]

    def open_copied(self, value: Any) -> list[Any]:
        """What Python would make a copy of an object in C from, such as the list and the position of its iterator."""
        cls: Any = type(value)
        try:
            reduce = copyreg.dispatch_table.get(cls)
            copied: Any = cls.__reduce_ex__(value, 4) if reduce is None else reduce(value)
        except Exception:
            return [] if _package(cls) == "pandas" else self.miss(value)  # its counters of references have no copy
        if isinstance(copied, str):  # the name of a global
            return []
        _, arguments, *state = copied
        return [arguments, *state[:1], *(list(items) for items in state[1:3] if items is not None)]


@lru_cache(maxsize=4096)
def _kind(cls: Any) -> tuple[Callable[[_Reader, Any], list[Any]], list[tuple[str, Any]], bool, set[str]]:
    """How objects of a class are read; their slots, whether they have a `__dict__`, and the attributes to leave out."""
    slots = [
        (name, member) for base in cls.__mro__ if "__slots__" in vars(base)
        for name, member in vars(base).items() if type(member) is types.MemberDescriptorType
    ]  # fmt: skip
    for closed, reader in CLOSED:
        if issubclass(cls, closed):
            return reader, [], False, set()
    is_rebuilt = not REBUILT.isdisjoint(map(_package, cls.__mro__))
    pointers = len(slots) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    read = next((reader for bases, reader in READERS if issubclass(cls, bases)), None)
    if read is None and (torch := sys.modules.get("torch")) and issubclass(cls, (torch.Tensor, torch.Generator)):
        read = _Reader.open_tensor if issubclass(cls, torch.Tensor) else lambda reader, value: [value.get_state()]
    if read is None and cls.__basicsize__ - object.__basicsize__ > 8 * pointers and not is_rebuilt:  # it has data in C
        read = _Reader.open_copied if _package(cls) in COPYABLE else _Reader.miss
    unread = UNREAD if issubclass(cls, gym.Env) else {"this"} if is_rebuilt else set()  # SWIG's object in C
    return read or (lambda reader, value: []), slots, cls.__dictoffset__ != 0, unread


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in `__slots__` first."""
    cls: Any = type(value)
    _, slots, has_dict, unread = _kind(cls)
    found = {}
    for name, slot in slots:
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    if has_dict:
        found |= object.__getattribute__(value, "__dict__")
    return {name: part for name, part in found.items() if name not in unread} if unread else found


def _package(cls: type) -> str:
    """The package that defines a class; empty if that is not known."""
    module = getattr(cls, "__module__", "")
    return module.partition(".")[0] if type(module) is str else ""


def _cell_parts(reader: _Reader, value: Any) -> list[Any]:
    try:
        return [value.cell_contents]
    except ValueError:  # still empty
        return []


# Objects whose attributes are not read
CLOSED: list[tuple[Any, Callable[[_Reader, Any], list[Any]]]] = [
    (IGNORED, lambda reader, value: []),
    (OUTSIDE, _Reader.miss),
    (REPORTERS, lambda reader, value: [value.env]),
]
READERS: list[tuple[Any, Callable[[_Reader, Any], list[Any]]]] = [
    (np.ndarray, _Reader.open_array),
    (np.random.Generator, lambda reader, value: [value.bit_generator]),
    (np.random.BitGenerator, lambda reader, value: [value.state, value.seed_seq]),
    (np.random.SeedSequence, lambda reader, value: [value.state]),
    (random.SystemRandom, _Reader.miss),
    (random.Random, lambda reader, value: [_random.Random.getstate(value)]),  # without code in Python
    (int, lambda reader, value: [int.__pos__(value)]),
    (float, lambda reader, value: [float.__pos__(value)]),
    (complex, lambda reader, value: [complex.__pos__(value)]),
    (str, lambda reader, value: [str.__str__(value)]),
    ((bytes, bytearray, array.array, mmap.mmap), lambda reader, value: [memoryview(value)]),
    (list, lambda reader, value: list(list.__iter__(value))),
    (tuple, lambda reader, value: list(tuple.__iter__(value))),
    (deque, lambda reader, value: list(deque.__iter__(value))),
    (OrderedDict, lambda reader, value: [*OrderedDict.__iter__(value), *dict.keys(value), *dict.values(value)]),
    (dict, lambda reader, value: [*dict.keys(value), *dict.values(value)]),
    ((set, frozenset), _Reader.open_set),
    (types.FunctionType, lambda reader, value: [
        value.__code__.co_code, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())
    ]),
    (types.CellType, _cell_parts),
    (types.MethodType, lambda reader, value: [value.__func__, value.__self__]),
    ((types.BuiltinFunctionType, types.MethodWrapperType), lambda reader, value: [value.__self__]),
    (weakref.ref, lambda reader, value: [weakref.ref.__call__(value)]),
]  # fmt: skip
