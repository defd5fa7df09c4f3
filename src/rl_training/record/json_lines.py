"""What a command says as JSON lines, for machines that read its output: with RL_TRAINING_LOG=json."""

from __future__ import annotations

import json
import math
import os
from datetime import datetime, timezone
from typing import Any

from rl_training.errors import UserError

VARIABLE = "RL_TRAINING_LOG"


def wants_json() -> bool:
    """Whether the environment variable asks for it."""
    return os.environ.get(VARIABLE, "").lower() == "json"


def check_log_format() -> None:
    """Refuse a value of the environment variable that means nothing."""
    if (value := os.environ.get(VARIABLE, "")).lower() not in ("", "text", "json"):
        raise UserError(f"{VARIABLE} is {value!r}; it must be json or text.")


def json_line(event: str, **facts: Any) -> str:
    """One line: the time, the event and these facts; numbers that JSON does not have are null."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **{name: plain(value) for name, value in facts.items()}})


def plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
