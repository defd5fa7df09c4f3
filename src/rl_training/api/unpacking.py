"""A hint for `action, _ = model.predict(obs)`, the line of Stable-Baselines3, where Python itself says nothing."""

from __future__ import annotations

import dis
import warnings
from itertools import islice
from types import CodeType, FrameType

from rl_training.stable_baselines3 import ACTION_ALONE

_seen: dict[tuple[int, int], CodeType] = {}  # by call; the code is kept, so that no other one gets its id


def warn_if_unpacked(caller: FrameType) -> None:
    """Warn once for each call whose result the caller unpacks into two names, the second one `_...` or `state...`.

    `throttle, steering = model.predict(obs)` is fine, so the names decide.
    """
    call = id(caller.f_code), caller.f_lasti
    if call in _seen:
        return
    _seen[call] = caller.f_code
    after = (one for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    first = next(after, None)
    if first is None or (first.opname, first.argval) != ("UNPACK_SEQUENCE", 2):
        return
    names: list[str] = []
    for one in islice(after, 4):
        if one.opname.startswith("STORE"):
            names += one.argval if isinstance(one.argval, tuple) else [one.argval]  # Python 3.13 stores two at once
    if len(names) > 1 and names[1].startswith(("_", "state")):
        warnings.warn(ACTION_ALONE, stacklevel=3)
