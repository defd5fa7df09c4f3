"""Open files that a stranger may have made: a pipe, a device or a socket in place of a file must not block a command."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, or a link to one, opened for reading; anything else is an OSError."""
    _refuse_irregular(os.stat(path), path)  # first, because opening alone has an effect on some devices
    descriptor = os.open(path, _FLAGS)
    try:
        _refuse_irregular(os.fstat(descriptor), path)  # again, in case another file took its place
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file, or of a link to one; anything else is an OSError."""
    with open_regular(path) as file:
        return file.read()


def _refuse_irregular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
