"""Checksums of an environment's attributes: they detect state that no observation shows."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

DEEPEST = 4  # attributes of attributes
MOST_PARTS = 500  # of one attribute
MOST_BYTES = 1 << 20  # of one array
REPORTERS = (gym.wrappers.RecordEpisodeStatistics, gym.wrappers.PassiveEnvChecker)  # wrappers that change nothing
UNREAD = ("env", "spec", "_cached_spec", "render_mode")  # other wrappers, and attributes that no step changes


def hidden_state(env: gym.Env[Any, Any]) -> dict[str, int]:
    """A checksum per attribute of the environment and of each wrapper, by name (`NormalizeReward.return_rms`).

    Numbers, text, numpy arrays and random generators count, also inside lists, dicts and plain objects. Objects
    implemented in C (a simulator), torch tensors, and class attributes are ignored.
    """
    sums: dict[str, int] = {}
    layer: Any = env
    while layer is not None:
        if not isinstance(layer, REPORTERS):
            for name, value in list(vars(layer).items()):
                key = f"{type(layer).__name__}.{name.lstrip('_')}"
                while key in sums:  # another wrapper of the same class
                    key += "'"
                if name not in UNREAD:
                    sums[key] = checksum(value)
        layer = layer.env if isinstance(layer, gym.Wrapper) else None
    return sums


def checksum(value: Any) -> int:
    """CRC32 of a value's plain parts; equal for equal values, in any process."""
    total = 0
    for number, part in enumerate(_parts(value, DEEPEST)):
        total = zlib.crc32(part, total)
        if number == MOST_PARTS:
            break
    return total


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, np.ndarray | np.generic):
        if not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            yield f"{value.dtype.str}{value.shape}".encode()
            yield value.tobytes()
    elif isinstance(value, np.random.Generator):
        yield from _parts(value.bit_generator.state, DEEPEST)
    elif isinstance(value, np.random.RandomState):
        yield from _parts(value.get_state(legacy=False), DEEPEST)
    elif isinstance(value, random.Random):
        yield from _parts(value.getstate(), DEEPEST)
    elif depth and not isinstance(value, type | FunctionType | ModuleType | gym.Env):
        items: Any = value if isinstance(value, list | tuple | deque) else ()
        named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for item in list(items):
            yield from _parts(item, depth - 1)
        for name, item in list(named.items()):
            yield repr(name).encode() if isinstance(name, str | int) else b""
            yield from _parts(item, depth - 1)
