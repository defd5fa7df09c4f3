"""TensorBoard's event file, written without its writer."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.record.metrics_file import Appender, tagged_numbers

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class EventFile:
    """A TensorBoard event file of scalars.

    TensorBoard's own `EventFileWriter` has a thread that ends at the first failed write, where an `Appender` waits
    for the disk. Its `RecordWriter` alone takes 0.13 s to import, and 85 µs for a row of 12 metrics instead of 5 µs.
    """

    _numbers = itertools.count()
    _flush_seconds = 5.0

    def __init__(
        self, folder: Path, clock: Callable[[], float], purge_from: int | None, warn: Callable[[str], None]
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        self._clock, self._make_event, self._checksum = clock, Event, _Checksum()
        self._file = Appender(folder / name, warn)
        self._append(Event(file_version="brain.Event:2"))
        if purge_from is not None:  # tells TensorBoard to forget everything after this step
            self._append(Event(step=purge_from, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Add the metrics that are numbers."""
        event = self._make_event(step=step)
        add_value = event.summary.value.add
        for name, value in tagged_numbers(kind, metrics):
            add_value(tag=name, simple_value=value)
        self._append(event)
        if self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write all waiting events."""
        self._file.flush()
        self._due = self._clock() + self._flush_seconds

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        size = len(data).to_bytes(8, "little")
        self._file.write(b"".join((size, self._checksum(size), data, self._checksum(data))))


class _Checksum:
    """The masked CRC32C of a TFRecord, of data of at least 4 bytes.

    A CRC is linear over XOR, so it is the XOR of one table entry per byte: `table[distance from the end, byte]`.
    """

    def __init__(self) -> None:
        self._resize(512)

    def __call__(self, data: bytes) -> bytes:
        if len(data) > len(self._offsets):
            self._resize(1 << len(data).bit_length())
        entries = self._offsets[-len(data) :] + np.frombuffer(data, np.uint8)
        entries[:4] ^= 0xFF  # the register starts as all ones
        crc = int(np.bitwise_xor.reduce(self._table[entries])) ^ 0xFFFFFFFF
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    def _resize(self, size: int) -> None:
        first = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            first = np.where(first & 1, (first >> 1) ^ np.uint32(0x82F63B78), first >> 1)
        rows = [first]
        while len(rows) < size:
            rows.append((rows[-1] >> 8) ^ first[rows[-1] & 0xFF])
        self._table, self._offsets = np.concatenate(rows), np.arange(size)[::-1] * 256
