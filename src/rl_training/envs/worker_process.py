"""The code of a worker process: one object, whose methods the parent calls by name over a socket.

The parent (`envs/workers.py`) starts this file in a new interpreter. It imports only the standard library; the object
that it is asked to make imports whatever else the worker needs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

SIZE = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def send(line: socket.socket, message: bytes) -> None:
    """Send one whole message."""
    line.sendall(SIZE.pack(len(message)) + message)


def receive(line: socket.socket) -> memoryview:
    """Receive one whole message, the only one in transit; raise EOFError if the other side is gone."""
    data, size = bytearray(), SIZE.size
    while len(data) < size:
        more = line.recv(max(4096, min(size - len(data), 1 << 20)))  # a large buffer costs more than a small message
        if not more:
            raise EOFError
        data += more
        size = SIZE.size + SIZE.unpack_from(data)[0] if len(data) >= SIZE.size else SIZE.size
    return memoryview(data)[SIZE.size :]


def leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C and a process group's SIGTERM, which the parent handles.

    This uses a handler that does nothing instead of SIG_IGN, because a program that the environment starts would
    inherit SIG_IGN and could not be terminated. The parent blocked both signals before it started this process.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def die_with_the_parent(parent: int) -> None:
    """Make Linux kill this process when the parent's thread ends; elsewhere it ends when the socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as text, because it might not survive pickling."""
    try:
        message = str(error)
    except Exception:
        message = "no message"
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "module": type(error).__module__, "message": message, "trace": trace}


def attempt(action: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Run an action; return its result, or its exception as text. sys.exit() in it does not end this process."""
    try:
        return True, action(*arguments)
    except BaseException as error:
        return False, describe(error)


def reply(action: Callable[..., Any], *arguments: Any) -> bytes:
    """`attempt` as a message."""
    succeeded, result = attempt(lambda: pickle.dumps((True, action(*arguments))))
    return result if succeeded else pickle.dumps((False, result))


def serve(line: socket.socket) -> None:
    """Make the object that the first message names, call its methods until the parent is gone, then close it."""
    served: list[Any] = []
    sys.path[:], maker = pickle.loads(receive(line))
    send(line, reply(lambda: served.append(pickle.loads(maker)())))
    method = ""
    try:
        while True:
            method, arguments = pickle.loads(receive(line))
            send(line, reply(getattr(served[0], method), *arguments))
    except (EOFError, OSError):
        if served and method != "close":
            reply(served[0].close)


if __name__ == "__main__":
    os.setpgid(0, 0)  # so that programs that the environment starts can be ended with it
    leave_signals_to_the_parent()
    if sys.argv[2] != "0":
        die_with_the_parent(int(sys.argv[2]))
    if sys.stderr is not None:
        faulthandler.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(0)  # even if a thread of the environment is still running
