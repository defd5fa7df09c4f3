"""Import the objects behind names such as `module:Class` in a config or on the command line.

A name may come from a file, and a file must not run code. Importing a module runs it, so a module that only a file
names is not imported (`check_module`), and what it holds is used only if it is a class of the wanted kind. A function
is used only if the user named it (`named_by_user`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from rl_training.envs.user_env import device_kinds
from rl_training.errors import UserError, did_you_mean


def looks_like_entry_point(env_id: str) -> bool:
    """Whether this is `module:Class`, and not Gymnasium's own `module:RegisteredName-v0`."""
    module, _, name = env_id.partition(":")
    return bool(module and name.isidentifier() and all(part.isidentifier() for part in module.split(".")))


def is_provided(module: str) -> bool:
    """Whether a file may name this module: it is loaded, ours, or in Gymnasium's registry, and no `__main__`."""
    if module.rpartition(".")[2] == "__main__":
        return False
    entries = (str(spec.entry_point) for spec in gym.registry.values())
    registered = any(entry.startswith((f"{module}:", f"{module}.")) for entry in entries)
    return registered or module in sys.modules or module.startswith("rl_training.")


def check_module(field: str, value: str, argument: str | None = None) -> None:
    """Refuse `module:name` from a file if its module would have to be imported for it."""
    module = value.partition(":")[0]
    if not is_provided(module):
        raise UserError(
            f"{field} {value!r} comes from a file, and a file does not decide which modules are imported; if you trust "
            f"it, add --import {module} (in Python: import {module} first, or give {argument or field}={value!r})."
        )


def import_entry_point(
    field: str, value: str, kind: type, named_by_user: bool, option: str, argument: str | None = None
) -> Callable[..., Any]:
    """Import the object that `module:name` in a field names; if the user did not name it, only a class of that kind."""
    module_name, _, name = value.partition(":")
    hint = f"; a module is named without .py: {module_name[:-3]}:{name}" if module_name.endswith(".py") else ""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{field} {value!r}: the module {module_name!r} cannot be imported ({error}){hint}.") from None
    kinds = (kind, *device_kinds()) if kind is gym.Env else (kind,)
    maker: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(maker):
        own = [one for one, held in vars(module).items() if isinstance(held, type) and issubclass(held, kinds)]
        noun = "environment" if kind is gym.Env else "network"
        near = did_you_mean(name, own) if own else f"it defines no {noun}."
        raise UserError(f"{field} {value!r}: {module_name} has no class or function {name!r}; {near}")
    if not named_by_user and not (isinstance(maker, type) and issubclass(maker, kinds)):
        wanted = "gymnasium.Env" if kind is gym.Env else "torch.nn.Module"
        raise UserError(
            f"{field} {value!r} comes from a file and is not a {wanted} class, so it is not called; if you trust "
            f"it, name it yourself: {option}{value} or --import {module_name}, in Python {argument or field}={value!r}."
        )
    return maker
