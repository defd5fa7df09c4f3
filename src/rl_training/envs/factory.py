"""`EnvRecipe`: what an environment is made from, an id, `module:Class` or a callable; and how one is made.

A name such as `module:Class` may come from a file, and a file must not run code. Importing a module runs it, so a
module that only a file names is not imported (`check_module`), and what it holds is used only if it is a class of the
wanted kind. A function is used only if the user named it (`named_by_user`).
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gymnasium as gym
from pydantic import Field

from rl_training.envs.pool import PoolEnvironment, is_pool
from rl_training.envs.rendering import drawing_explained, follow_robot, hear_mujoco
from rl_training.envs.wrappers import Env, WrapperOptions, layers, wrap
from rl_training.errors import UnknownKey, UserError, did_you_mean, first_line, install
from rl_training.validation import StrictModel, validate

# What the user may give as the environment: an id instead of the config's, a callable that makes it, an instance, or
# names (`module`, `module:name`) whose functions a config may call.
UserEnv = str | Callable[..., Env] | Env | tuple[str, ...]

NAMELESS = "custom"  # the name of an environment that a lambda makes
GIVE_ONE = "give a function that makes environments, such as env=lambda: make_mine()"


class SimulatorSettings(StrictModel):
    """`env_kwargs.simulator`: settings of a `Simulator`; `random_ages` also of environments on the device."""

    action_limit: float | None = Field(
        None, gt=0, le=1e6, description="Actions are from minus this to this, for a simulator without limits."
    )
    random_ages: bool = Field(
        False, description="Begin the first episodes at random step counts, so that time-outs do not come together."
    )
    eval_rows: int | None = Field(
        None, ge=1, description="Rows held out for evaluation; null: at most one per episode and one of 32."
    )


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
    if isinstance(env, (*device_kinds(), *simulator_kinds())):  # everything shares it: it has no state, or is but one
        maker: Any = lambda: env  # noqa: E731
        maker.__name__, maker.is_lent = type(env).__name__, True
        return cast(UserEnv, maker)
    if not (env is None or callable(env) or isinstance(env, str | tuple)):
        kind = type(env).__name__
        raise UserError(f"env is of type {kind}; it must be a Gymnasium id, a function, a class or a gymnasium.Env.")
    return cast("UserEnv | None", env)


def device_kinds() -> tuple[Any, ...]:
    """`DeviceEnvironment` if its module has been imported; otherwise no instance can exist."""
    device = sys.modules.get("rl_training.envs.device")
    return () if device is None else (device.DeviceEnvironment,)


def simulator_kinds() -> tuple[Any, ...]:
    """`Simulator` if its module has been imported; otherwise no instance can exist."""
    module = sys.modules.get("rl_training.envs.simulator")
    return () if module is None else (module.Simulator,)


def name_env(env: UserEnv) -> str:
    """The name of an environment for a config."""
    name = env if isinstance(env, str) else getattr(env, "__name__", "")
    return name if isinstance(env, str | MadeEnvironment) or name.isidentifier() else NAMELESS


def looks_like_entry_point(env_id: str) -> bool:
    """Whether this is `module:Class`, and not Gymnasium's own `module:RegisteredName-v0` or EnvPool's `envpool:ID`."""
    module, _, name = env_id.partition(":")
    is_dotted = all(part.isidentifier() for part in module.split("."))
    return bool(module and name.isidentifier() and is_dotted) and not is_pool(env_id)


def is_provided(module: str) -> bool:
    """Whether a file may name this module: it is loaded, ours, or in Gymnasium's registry, and no `__main__`."""
    if module.rpartition(".")[2] == "__main__":
        return False
    entries = (str(spec.entry_point) for spec in gym.registry.values())
    registered = any(entry.startswith((f"{module}:", f"{module}.")) for entry in entries)
    return registered or module in sys.modules or module.startswith("rl_training.")


@dataclass(frozen=True)
class EnvRecipe:
    """Everything needed to make the environment again, here or in another process."""

    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: WrapperOptions = field(default_factory=WrapperOptions)
    maker: Callable[..., Env] | None = None
    named_by_user: bool = False  # if not, `env_id` may come from a file
    may_import: bool = False  # its module was known where the recipe was read; a worker has to import it
    simulator: SimulatorSettings = field(default_factory=SimulatorSettings)
    made: list[Any] = field(default_factory=list, compare=False, repr=False)  # the view of a simulator, once it is made

    @property
    def user_env(self) -> UserEnv:
        """The user's `env=` for this environment, to make another recipe from it."""
        return self.maker or ((self.env_id,) if self.named_by_user else ())

    @property
    def for_training(self) -> EnvRecipe:
        """The recipe for training, which uses the user's own instance if there is one."""
        return replace(self, maker=self.maker.lend) if isinstance(self.maker, MadeEnvironment) else self

    def check_simulator(self, vectorization: str) -> None:
        """Refuse settings of a simulator where there is none; `random_ages` is for environments on the device too."""
        given = self.simulator.model_dump(exclude_defaults=True)
        if self.made or not given or (vectorization == "device" and set(given) == {"random_ages"}):
            return
        which = f"which {self.env_id} is not"
        raise UserError(
            f"env_kwargs.simulator is for a Simulator (docs/simulators.md), {which}; "
            "with vectorization 'device' only random_ages may be given."
        )

    @property
    def is_plain(self) -> bool:
        """Whether the registered environment is used unchanged, except for its time limit."""
        options = self.wrappers
        wrapped = options.pixels or options.atari or options.frame_stack > 1 or options.clip_reward
        return self.maker is None and not wrapped and not looks_like_entry_point(self.env_id)

    @property
    def vector_options(self) -> dict[str, Any]:
        """The arguments of what makes several of them at once."""
        limit = {"max_episode_steps": self.max_episode_steps} if self.max_episode_steps else {}
        return {**self.kwargs, **limit}

    @property
    def image_frame_stack(self) -> int:
        """How many frames the wrappers stack into one image observation."""
        options = self.wrappers.atari or self.wrappers.pixels
        return options.frame_stack if options is not None else 1


def read_recipe(env_id: str, env_kwargs: Mapping[str, Any], env: UserEnv | None = None) -> EnvRecipe:
    """Make the recipe from a config's `env_id` and `env_kwargs`, and from the user's `env=`."""
    env = read_env(env)
    maker = env if callable(env) else None
    env_id, names = (env, (env,)) if isinstance(env, str) else (env_id, env if isinstance(env, tuple) else ())
    named = env_id in names or env_id.partition(":")[0] in names
    kwargs = dict(env_kwargs)
    limit = kwargs.pop("max_episode_steps", None)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"env_kwargs.max_episode_steps is {limit!r}; it must be a whole number of at least 1.")
    # any other value is an argument of the environment
    own = kwargs.pop("simulator") if isinstance(kwargs.get("simulator"), Mapping) else {}
    settings = validate(SimulatorSettings, own, "env_kwargs.simulator")
    wrappers = kwargs.pop("wrappers", None)
    options = validate(WrapperOptions, {} if wrappers is None else wrappers, "env_kwargs.wrappers")
    env_id = env_id if maker is not None else _with_version(env_id)
    known = named or is_provided(env_id.partition(":")[0])
    return EnvRecipe(env_id, kwargs, limit, options, maker, named, known, settings)


def _with_version(env_id: str) -> str:
    """Replace `CartPole` with the newest `CartPole-v<n>`, as Gymnasium does, but without its warning."""
    if env_id in gym.registry:
        return env_id
    versions = [name.rpartition("-v") for name in gym.registry]
    known = [int(version) for name, _, version in versions if name == env_id and version.isdigit()]
    return f"{env_id}-v{max(known)}" if known else env_id


def make_env(recipe: EnvRecipe, *, evaluation: bool = False, render_mode: str | None = None) -> Env:
    """Make one environment with its wrappers, for training or for evaluation."""
    with drawing_explained():
        env = make_unwrapped(recipe, "rgb_array" if recipe.wrappers.pixels else render_mode)
    try:
        return wrap(env, recipe.wrappers, evaluation=evaluation)
    except Exception as error:
        raise UserError(f"env_kwargs.wrappers do not fit {recipe.env_id}: {first_line(error)}.") from error


def make_unwrapped(recipe: EnvRecipe, render_mode: str | None = None) -> Env:
    """Make one environment without the wrappers of the config, except for its time limit."""
    if recipe.made:
        return cast(Env, recipe.made[0])  # there is but one simulator
    kwargs, known = dict(recipe.kwargs), gym.registry.get(recipe.env_id)
    if render_mode:
        kwargs = follow_robot(known, kwargs) | {"render_mode": render_mode}
    hear_mujoco(known)
    maker = recipe.maker
    if maker is None and ":" in recipe.env_id and not recipe.may_import and not is_pool(recipe.env_id):
        check_module("env_id", recipe.env_id, "env")
    try:
        if maker is None and looks_like_entry_point(recipe.env_id):
            maker = import_entry_point("env_id", recipe.env_id, gym.Env, recipe.named_by_user, "--env ", "env")
        if maker is None:
            return _make_by_id(recipe, render_mode, kwargs)
        env: Any = maker(**kwargs)
    except UserError:
        raise
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound, gym.error.VersionNotFound):
        hint = did_you_mean(recipe.env_id, gym.registry)
        raise UserError(
            f"env_id {recipe.env_id!r} is not registered with Gymnasium; "
            f"{hint if hint.startswith('did') else 'no registered name is near.'} "
            "(your own: --env module:Class, or --import the module that registers it; in Python the class itself)"
        ) from None
    except (Exception, SystemExit) as error:
        raise explain(error, recipe) from error
    if isinstance(env, simulator_kinds()):
        from rl_training.envs.simulator import SimulatorView  # torch

        view = SimulatorView(env, recipe)
        recipe.made.append(view)
        return view
    limit = recipe.max_episode_steps
    if isinstance(env, device_kinds()):
        from rl_training.envs.device import OneEnvironment  # torch
        from rl_training.envs.device_checks import check_attributes

        check_attributes(env, recipe.env_id)
        limit, env = limit or env.max_episode_steps, OneEnvironment(env)
    if not isinstance(env, gym.Env):
        raise UserError(f"{recipe.env_id} made a {type(env).__name__}; it must make a gymnasium.Env.")
    return gym.wrappers.TimeLimit(env, limit) if limit else env


def _make_by_id(recipe: EnvRecipe, render_mode: str | None, kwargs: Mapping[str, Any]) -> Env:
    """Make an environment of EnvPool's own, or one that is registered with Gymnasium."""
    if is_pool(recipe.env_id):
        return PoolEnvironment(recipe.env_id, recipe.vector_options, render_mode)
    register_on_demand(recipe.env_id)
    spec: Any = copy.deepcopy(gym.registry.get(recipe.env_id, recipe.env_id))
    if not isinstance(spec, str):
        spec.order_enforce = False  # saves a wrapper call per step; this package calls reset before step anyway
    return gym.make(spec, recipe.max_episode_steps, disable_env_checker=True, **kwargs)


def explain(error: BaseException, recipe: EnvRecipe) -> UserError:
    """What is wrong, in the user's words, if the code of an environment raised while it was made."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown and unknown[1] in recipe.kwargs:
        return UnknownKey("env_kwargs", unknown[1], f"{recipe.env_id} does not take it.")
    if missing := re.search(r"missing .*required .*argument.*: '(\w+)'", str(error)):
        how = f"give it in env_kwargs, such as --set env_kwargs.{missing[1]}=VALUE"
        return UserError(f"the environment {recipe.env_id} needs the argument {missing[1]!r}; {how}.")
    return UserError(f"the environment {recipe.env_id} cannot be made: {first_line(error)}.")


def episode_limit(env: Env) -> int | None:
    """Steps after which a wrapper or the emulator truncates an episode, or None."""
    limits = [layer._max_episode_steps for layer in layers(env) if isinstance(layer, gym.wrappers.TimeLimit)]
    if (emulator := getattr(env.unwrapped, "ale", None)) is not None:
        limits.append(emulator.getInt("max_num_frames_per_episode"))
    return min((limit for limit in limits if limit), default=None)


def register_on_demand(env_id: str) -> None:
    """Register Atari and MinAtar by importing their packages, which Gymnasium does not do by itself."""
    if env_id in gym.registry or not (env_id.startswith(("MinAtar/", "ALE/")) or "NoFrameskip" in env_id):
        return
    is_minatar = env_id.startswith("MinAtar/")
    extra, module = ("results", "rl_training.envs.minatar") if is_minatar else ("atari", "ale_py")
    try:
        importlib.import_module(module)
    except ImportError:
        raise UserError(f"{env_id} needs the extra {extra!r} ({install(extra)}).") from None


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
    kinds = (kind, *device_kinds(), *simulator_kinds()) if kind is gym.Env else (kind,)
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
