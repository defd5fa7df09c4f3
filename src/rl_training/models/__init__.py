"""Networks. Every class is importable from here; modules are imported on first use."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in pkgutil.iter_modules(__path__):
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), name, None)
        if isinstance(found, type) and found.__module__ == f"{__name__}.{module.name}":
            return found
    raise AttributeError(f"module {__name__!r} has no class {name!r}")
