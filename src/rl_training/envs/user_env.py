"""The user's `env=`: an id, a callable, an instance, or names that a config may call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import gymnasium as gym

from rl_training.errors import UserError, first_line

Env = gym.Env[Any, Any]
# What the user may give as the environment: an id instead of the config's, a callable that makes it, an instance, or
# names (`module`, `module:name`) whose functions a config may call.
UserEnv = str | Callable[..., Env] | Env | tuple[str, ...]

NAMELESS = "custom"  # the name of an environment that a lambda makes
GIVE_ONE = "give a function that makes environments, such as env=lambda: make_mine()"


class MadeEnvironment:
    """An environment instance from the user: training uses it and leaves it open; everything else gets a copy."""

    def __init__(self, env: Env) -> None:
        spec = env.unwrapped.spec
        self.env, self.__name__ = env, type(env.unwrapped).__name__ if spec is None else spec.id
        try:
            self._unused = copy.deepcopy(env)
        except Exception as error:
            what = f"env is an environment that cannot be copied ({first_line(error)})"
            raise UserError(f"{what}, and evaluation needs one of its own; {GIVE_ONE}.") from None

    def __call__(self, **kwargs: Any) -> Env:
        """A copy of the instance in its initial state."""
        return copy.deepcopy(self._unused) if not kwargs else self._refuse(kwargs)

    def lend(self, **kwargs: Any) -> Env:
        """The instance itself."""
        return _Lent(self.env) if not kwargs else self._refuse(kwargs)

    def _refuse(self, kwargs: dict[str, Any]) -> Env:
        raise UserError(f"env is an environment instance and cannot take {', '.join(kwargs)}; {GIVE_ONE}.")


class _Lent(gym.Wrapper[Any, Any, Any, Any]):
    """A lent environment, which only the user closes."""

    def close(self) -> None:
        """Nothing."""


def read_env(env: Any) -> UserEnv | None:
    """Check what the user gave as an environment; an instance becomes a `MadeEnvironment`."""
    if isinstance(env, gym.vector.VectorEnv):
        raise UserError(f"env is a vector environment; {GIVE_ONE}, and num_envs.")
    if isinstance(env, gym.Env):
        return MadeEnvironment(env)
    if isinstance(env, device_kinds()):  # it has no state, so everything can share it
        maker: Any = partial(_itself, env)
        maker.__name__ = type(env).__name__
        return cast(UserEnv, maker)
    if not (env is None or callable(env) or isinstance(env, str | tuple)):
        kind = type(env).__name__
        raise UserError(f"env is of type {kind}; it must be a Gymnasium id, a function, a class or a gymnasium.Env.")
    return cast("UserEnv | None", env)


def device_kinds() -> tuple[Any, ...]:
    """`DeviceEnvironment` if its module has been imported; otherwise no instance can exist."""
    device = sys.modules.get("rl_training.envs.device")
    return () if device is None else (device.DeviceEnvironment,)


def _itself(env: Any) -> Any:
    return env


def name_env(env: UserEnv) -> str:
    """The name of an environment for a config."""
    name = env if isinstance(env, str) else getattr(env, "__name__", "")
    return name if isinstance(env, str | MadeEnvironment) or name.isidentifier() else NAMELESS
