"""Checksums of an environment's attributes: they detect state that no observation shows.

A checksum covers everything that can be reached from an attribute: containers, objects with `__dict__` or `__slots__`,
closures, other environments, and random generators. It is read from Python's and numpy's own types only: no method,
property or operator of a user's class is called. What cannot be read (a generator, an object of a C library) or is
too large is named instead.
"""

from __future__ import annotations

import _random
import array
import functools
import logging
import marshal
import mmap
import random
import re
import subprocess
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

MOST_BYTES = 1 << 27  # of one environment; an attribute may have half of what the attributes before it left
TOO_LARGE = "it is too large"
NODE_BYTES = 1 << 10  # a Python object takes about as long to read as this many bytes of an array
REPORTERS = (gym.wrappers.RecordEpisodeStatistics, gym.wrappers.PassiveEnvChecker)  # wrappers that change nothing
UNREAD = ("spec", "_cached_spec", "render_mode")  # attributes of an environment that no step changes
SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
BUFFERS = (bytearray, memoryview, array.array, mmap.mmap)
# Objects that a step does not depend on. Class and module variables are not read; docs/reliability.md says so.
IGNORED = (type, types.ModuleType, np.ufunc, logging.Logger, type(threading.Lock()), type(threading.RLock()))
OUTSIDE = (threading.Thread, subprocess.Popen, BaseProcess, Connection)  # most of their state is elsewhere
# C libraries whose objects a seeded reset rebuilds; the trial at a resume finds what it does not (Box2D's contacts)
REBUILT = {"mujoco", "Box2D", "ale_py", "pygame", "glfw", "OpenGL"}
COPYABLE = (set(sys.stdlib_module_names) | {"builtins", "pandas", "torch"}) - {"itertools"}  # it stops in Python 3.14

# The attributes of a class itself, whatever its metaclass says
_names_of, _bases_of, _name_of, _module_of = (
    type.__dict__[name].__get__ for name in ("__dict__", "__mro__", "__qualname__", "__module__")
)
_size_of, _dict_at, _weak_at = (
    type.__dict__[name].__get__ for name in ("__basicsize__", "__dictoffset__", "__weakrefoffset__")
)


class HiddenState(NamedTuple):
    """Checksums of attributes by name (`NormalizeReward.return_rms`), and what is unseen in some: `a generator`."""

    sums: dict[str, int]
    unseen: dict[str, str]


def hidden_state(env: gym.Env[Any, Any]) -> HiddenState:
    """The attributes of the environment and of each wrapper."""
    layers: list[Any] = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    found, left = HiddenState({}, {}), MOST_BYTES
    kinds: dict[int, _Kind] = {}
    for layer in layers:
        for name, value in _Kind(type(layer)).attributes(layer).items():
            key = f"{type(layer).__name__}.{name.lstrip('_')}"
            while key in found.sums:  # another wrapper of the same class
                key += "'"
            if name != "env":
                reader = _Reader(layers, left // 2, kinds)
                found.sums[key] = reader.read(value)
                left -= left // 2 - max(0, reader.left)
                if reader.unseen:
                    found.unseen[key] = reader.unseen
    return found


def checksum(value: Any) -> int:
    """CRC32 of everything that can be reached from a value; equal for equal values, in any process."""
    return _Reader((), MOST_BYTES, {}).read(value)


class _Kind:
    """How objects of a class are read, and where they keep their attributes."""

    def __init__(self, kind: type) -> None:
        self.kind, self.name = kind, _name_of(kind).encode()
        self.slots: list[tuple[str, Any]] = []
        self.dict: Any = None
        for base in _bases_of(kind):
            for name, member in list(_names_of(base).items()):
                if name == "__dict__" and type(member) is types.GetSetDescriptorType:
                    self.dict = self.dict or member
                elif type(member) is types.MemberDescriptorType and "__slots__" in _names_of(base):
                    self.slots.append((name, member))
        self.package = _package(kind)
        is_rebuilt = not REBUILT.isdisjoint(map(_package, _bases_of(kind)))
        own = len(self.slots) + (_dict_at(kind) > 0) + (_weak_at(kind) > 0)
        has_data_in_c = _size_of(kind) - object.__basicsize__ > own * 8 and not is_rebuilt
        readers = (reader for bases, reader in READERS if issubclass(kind, bases))
        self.read = next(readers, None) or _torch_reader(kind) or (_Reader.open_copied if has_data_in_c else None)
        self.ends_here = issubclass(kind, (*IGNORED, *OUTSIDE))
        self.unread = UNREAD if issubclass(kind, gym.Env) else ("this",) if is_rebuilt else ()  # SWIG's object in C

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes of an object, those in `__slots__` first."""
        if self.dict is None and not self.slots:
            return {}
        found = {}
        for name, slot in self.slots:
            try:
                found[name] = slot.__get__(value)
            except AttributeError:  # not set
                continue
        found |= {} if self.dict is None else self.dict.__get__(value)
        if issubclass(self.kind, REPORTERS):
            return {"env": found["env"]}
        return {name: part for name, part in found.items() if name not in self.unread} if self.unread else found


class _Reader:
    """Reads one value within `left` bytes; `unseen` says what it could not read. `known` objects are not entered."""

    def __init__(self, known: Sequence[Any], left: int, kinds: dict[int, _Kind]) -> None:
        self.total, self.left, self.unseen = 0, left, ""
        self.known, self.kinds = known, kinds  # the kinds by the id of their class, because a metaclass may have a hash
        self.met: dict[int, tuple[int, Any]] = {id(each): (place, each) for place, each in enumerate(known)}

    def read(self, value: Any) -> int:
        """The checksum of the value."""
        waiting = [value]
        try:
            while waiting and self.left > 0:
                waiting += reversed(self.open(waiting.pop()))
        except Exception as error:  # a thread of the environment changes what is read, for example
            self.unseen = self.unseen or f"reading it raised {type(error).__name__}"
        if waiting:
            self.unseen = self.unseen or TOO_LARGE
        return self.total

    def add(self, data: Any) -> None:
        """Add bytes, as far as they fit."""
        if len(data) > self.left:
            data, self.unseen = data[: max(0, self.left)], self.unseen or TOO_LARGE
        self.total = zlib.crc32(data, self.total)
        self.left -= len(data)

    def miss(self, value: Any) -> list[Any]:
        """Note that a value cannot be read."""
        self.unseen = self.unseen or f"a {_name_of(type(value))}"
        return []

    def open(self, value: Any) -> list[Any]:
        """Add what is plain in a value, and return its parts."""
        cls = type(value)
        self.left -= NODE_BYTES
        if cls in SCALARS:
            self.add(marshal.dumps(value, 2))
            return []
        if id(value) in self.met:
            self.add(b"again %d" % self.met[id(value)][0])
            return []
        if cls is not tuple:  # equal tuples may be one object in one process and two in another
            self.met[id(value)] = len(self.met), value  # which also keeps its id from being used again
        if (kind := self.kinds.get(id(cls))) is None:
            kind = self.kinds[id(cls)] = _Kind(cls)
        self.add(kind.name)
        if kind.ends_here:
            return self.miss(value) if issubclass(cls, OUTSIDE) else []
        attributes = kind.attributes(value)  # first, because this may create an empty __dict__
        parts = [] if kind.read is None else kind.read(self, value)
        return parts + self.open_dict(attributes) if attributes else parts

    def open_copied(self, value: Any) -> list[Any]:
        """What Python would make a copy of an object in C from, such as the list and the position of its iterator."""
        package = self.kinds[id(type(value))].package
        if package not in COPYABLE:
            return self.miss(value)
        try:
            copied = object.__reduce_ex__(value, 2)
        except Exception:
            return [] if package == "pandas" else self.miss(value)  # its counters of references have no copy
        if isinstance(copied, str):  # the name of a global
            return []
        _, arguments, *state = copied
        return [arguments, *state[:1], *(list(items) for items in state[1:] if items is not None)]

    def open_items(self, items: Iterable[Any], count: int) -> list[Any]:
        """Add plain items in one go, and return any others."""
        self.add(b"%d" % count)
        listed = list(islice(items, max(0, self.left // 8)))
        if len(listed) < count:
            self.left, self.unseen = 0, self.unseen or TOO_LARGE
        if not SCALARS.issuperset(map(type, listed)):
            return listed
        self.add(marshal.dumps(listed, 2))
        return []

    def open_dict(self, value: Any) -> list[Any]:
        """Keys, then values."""
        keys, values = (self.open_items(part, dict.__len__(value)) for part in (dict.keys(value), dict.values(value)))
        return keys + values

    def open_set(self, value: Any) -> list[Any]:
        """The elements in an order of their own, because that of a set differs between processes."""
        items = list((set if issubclass(type(value), set) else frozenset).__iter__(value))
        if SCALARS.issuperset(map(type, items)):
            self.add(b"".join(sorted(marshal.dumps(item, 2) for item in items)))
            return []
        found = []
        for item in items:
            inner = _Reader([*self.known, value], self.left, self.kinds)
            found.append(inner.read(item))
            self.left, self.unseen = inner.left, self.unseen or inner.unseen
        self.add(marshal.dumps(sorted(found), 2))
        return []

    def open_array(self, value: Any) -> list[Any]:
        """Shape, dtype and numbers."""
        plain = np.ndarray.view(value, np.ndarray)
        self.add(f"{plain.dtype.descr if plain.dtype.names else plain.dtype.str}{plain.shape}".encode())
        if plain.dtype.hasobject:
            return self.open_items(plain.ravel().tolist(), plain.size)
        if plain.nbytes > self.left:  # avoid a copy of all of it
            plain = plain.flat[: max(0, self.left // plain.itemsize) + 1]
        self.add(np.ascontiguousarray(plain).reshape(-1).view(np.uint8) if plain.nbytes else b"")
        return []

    def open_buffer(self, value: Any) -> list[Any]:
        """The bytes of a buffer."""
        return self.open_array(np.frombuffer(value, np.uint8) if memoryview(value).nbytes else np.zeros(0))


def _package(kind: type) -> str:
    """The package that defines a class; empty if that is not known."""
    try:
        module = _module_of(kind)
    except AttributeError:
        return ""
    return module.partition(".")[0] if type(module) is str else ""


def _function_parts(reader: _Reader, value: Any) -> list[Any]:
    return [value.__code__.co_code, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())]


def _cell_parts(reader: _Reader, value: Any) -> list[Any]:
    try:
        return [value.cell_contents]
    except ValueError:  # still empty
        return []


def _torch_reader(kind: type) -> Any:
    """How to read tensors and generators of torch, if it is imported."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(kind, (torch.Tensor, torch.Generator)):
        return None
    if issubclass(kind, torch.Generator):
        return lambda reader, value: reader.open_array(torch.Generator.get_state(value).numpy())
    base = torch.Tensor.detach
    return lambda reader, value: [
        f"{value.dtype}", reader.open_array(base(value).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    ]


READERS: list[tuple[Any, Callable[[_Reader, Any], list[Any]]]] = [
    (np.ndarray, _Reader.open_array),
    (np.generic, lambda reader, value: [np.generic.tobytes(value)]),
    (np.dtype, lambda reader, value: [np.dtype.__str__(value)]),
    (np.random.Generator, lambda reader, value: [value.bit_generator]),
    (np.random.BitGenerator, lambda reader, value: [value.state, value.seed_seq]),
    (np.random.RandomState, lambda reader, value: [np.random.RandomState.get_state(value, legacy=False)]),
    (np.random.SeedSequence, lambda reader, value: [value.state]),
    (random.SystemRandom, _Reader.miss),
    (random.Random, lambda reader, value: [_random.Random.getstate(value)]),  # without code in Python
    (int, lambda reader, value: [int.__repr__(value)]),
    (float, lambda reader, value: [float.__repr__(value)]),
    (complex, lambda reader, value: [complex.__repr__(value)]),
    (str, lambda reader, value: [str.encode(value, errors="surrogatepass")]),
    (bytes, lambda reader, value: reader.open_buffer(value)),
    (BUFFERS, _Reader.open_buffer),
    (list, lambda reader, value: reader.open_items(list.__iter__(value), list.__len__(value))),
    (tuple, lambda reader, value: reader.open_items(tuple.__iter__(value), tuple.__len__(value))),
    (deque, lambda reader, value: reader.open_items(deque.__iter__(value), deque.__len__(value))),
    (OrderedDict, lambda reader, value: [list(OrderedDict.__iter__(value)), *reader.open_dict(value)]),
    (dict, _Reader.open_dict),
    ((set, frozenset), _Reader.open_set),
    (types.FunctionType, _function_parts),
    (types.CellType, _cell_parts),
    (types.MethodType, lambda reader, value: [value.__func__, value.__self__]),
    ((types.BuiltinFunctionType, types.MethodWrapperType), lambda reader, value: [value.__self__]),
    (functools.partial, lambda reader, value: [value.func, value.args, value.keywords]),
    (re.Pattern, lambda reader, value: [value.pattern, value.flags]),
    (weakref.ref, lambda reader, value: [weakref.ref.__call__(value)]),
]
