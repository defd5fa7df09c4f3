"""Read and write files in folders that a stranger may have made.

A pipe, a device or a socket in place of a file must not block a command, and a link in place of a file or a folder must
not make it write anywhere else. Whatever writes into such a folder uses `replacing`, `write_text`, `create_file` or
`refuse_link`.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rl_training.errors import UserError

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
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


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block succeeds and disappears when it does not.

    Until then it has a hidden, unique name. A link at `path` is replaced, and what it points to stays as it is.
    """
    path = Path(path)
    if "\0" in str(path):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    if path.exists():
        _refuse_irregular(path.stat(), path)
    temporary = path.with_name(f".{path.name}.{host_name()}-{os.getpid()}-{secrets.randbits(60)}.tmp")
    try:
        with create_file(temporary, buffering=1 << 20) as file:
            yield file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # a file that cannot be removed now is removed when a run next starts here
            temporary.unlink(missing_ok=True)


def create_file(path: str | os.PathLike[str], *, buffering: int = 0) -> Any:
    """A new file, opened for writing; an existing file or link of that name is an OSError."""
    return open(path, "xb", buffering=buffering, opener=_open_without_links)


def start_file(path: str | os.PathLike[str]) -> Any:
    """As `create_file`, but an existing file or link is removed first."""
    Path(path).unlink(missing_ok=True)
    return create_file(path)


def continue_file(path: str | os.PathLike[str]) -> Any:
    """A file opened for appending, made if it is missing; a link is an OSError."""
    return open(path, "ab", buffering=0, opener=_open_without_links)


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_LINK, 0o666)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def output_written(target: str | os.PathLike[str], field: str) -> Iterator[None]:
    """Turn the errors of writing an output into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{field} {target} cannot be written: {error.strerror or error}.") from None


def open_locked(path: str | os.PathLike[str]) -> int:
    """The descriptor of a lock file, made if it is missing; an OSError if the file is not one that a run made."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | _NO_LINK, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{os.path.basename(path)} is not a regular file, or has a hard link")
    return descriptor


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Raise an OSError if this is a link: a library or a folder cannot be kept from writing through it."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, f"{path} is a link, and nothing is written through links")


def remove_stale_temporaries(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove files that killed writers left in `folder` (no other host may write to it); return what was removed."""
    pattern = re.compile(r"\..+\.(\w+)-(\d{1,9})-\d+\.tmp")
    matches = [(path, pattern.fullmatch(path.name)) for path in Path(folder).glob(".*.tmp")]
    stale = [path for path, match in matches if match and not (match[1] == host_name() and is_alive(int(match[2])))]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def host_name() -> str:
    """This host, as a part of file names."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


def is_alive(process: int) -> bool:
    """Whether a process of this host runs."""
    if os.name == "nt":  # there, os.kill(pid, 0) sends Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _refuse_irregular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
