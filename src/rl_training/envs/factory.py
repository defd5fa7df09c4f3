"""Making one environment: by id, by `module:Class`, or by a callable, with Gymnasium's wrappers around it.

A name may come from a file, and a file must not run code, so such a name is called only if it is an Env class (or a
`DeviceEnvironment`). A function is called only if the user named it (`named_by_user`).
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from pydantic import Field

from rl_training.envs.lives import LifeEpisodes
from rl_training.envs.setup_problems import Problem, definition, find_problems
from rl_training.envs.spaces import EnvSpaces, image_layout, leaf_spaces
from rl_training.errors import UnknownKey, UserError, did_you_mean, user_line
from rl_training.validation import StrictModel, validate

Env = gym.Env[Any, Any]
# What the user may give as the environment: an id instead of the config's, a callable that makes it, an instance, or
# names (`module`, `module:name`) whose functions a config may call.
UserEnv = str | Callable[..., Env] | Env | tuple[str, ...]

NAMELESS = "custom"  # the name of an environment that a lambda makes


class MadeEnvironment:
    """An environment instance of the user: training uses it and leaves it open, everything else gets a copy."""

    def __init__(self, env: Env) -> None:
        spec = env.unwrapped.spec
        self.env, self.__name__ = env, type(env.unwrapped).__name__ if spec is None else spec.id
        try:
            self._unused = copy.deepcopy(env)
        except Exception as error:
            raise UserError(
                f"env is an environment that cannot be copied ({_first_line(error)}), and evaluation needs one of its "
                "own; give a function that makes it, such as env=lambda: make_mine()."
            ) from None

    def __call__(self, **kwargs: Any) -> Env:
        """A copy of it as it was given."""
        return copy.deepcopy(self._unused) if not kwargs else self._refuse(kwargs)

    def lend(self, **kwargs: Any) -> Env:
        """The environment itself."""
        return _Lent(self.env) if not kwargs else self._refuse(kwargs)

    def _refuse(self, kwargs: dict[str, Any]) -> Env:
        raise UserError(f"env is one environment, made already, and cannot take {', '.join(kwargs)}; {GIVE_ONE}.")


class _Lent(gym.Wrapper[Any, Any, Any, Any]):
    """The user closes it."""

    def close(self) -> None:
        """Nothing."""


GIVE_ONE = "give a function that makes environments, such as env=lambda: make_mine()"


def read_env(env: Any) -> UserEnv | None:
    """Check what the user gave as an environment; an instance becomes a `MadeEnvironment`."""
    if isinstance(env, gym.vector.VectorEnv):
        raise UserError(f"env is a vector environment; {GIVE_ONE}, and num_envs.")
    if isinstance(env, gym.Env):
        return MadeEnvironment(env)
    if isinstance(env, device_kinds()):  # it holds no state, so all share it
        maker: Any = partial(_itself, env)
        maker.__name__ = type(env).__name__
        return cast(UserEnv, maker)
    if not (env is None or callable(env) or isinstance(env, str | tuple)):
        kind = type(env).__name__
        raise UserError(f"env is of type {kind}; it must be a Gymnasium id, a function, a class or a gymnasium.Env.")
    return env


def device_kinds() -> tuple[Any, ...]:
    """`DeviceEnvironment`, if somebody has imported it: without that, nobody has one."""
    device = sys.modules.get("rl_training.envs.device")
    return () if device is None else (device.DeviceEnvironment,)


def _itself(env: Any) -> Any:
    return env


def name_env(env: UserEnv) -> str:
    """The name of an environment for a config."""
    name = env if isinstance(env, str) else getattr(env, "__name__", "")
    return name if isinstance(env, str | MadeEnvironment) or name.isidentifier() else NAMELESS


class PixelOptions(StrictModel):
    """Rendered frames as observations."""

    resize_shape: tuple[int, int] = Field((84, 84), description="Height and width.")
    frame_stack: int = Field(1, ge=1, le=16, description="Number of frames stacked along the channels.")
    channel_first: bool = Field(True, description="Channels before height and width.")
    grayscale: bool = Field(False, description="One channel instead of three.")


class AtariOptions(StrictModel):
    """Gymnasium's AtariPreprocessing, but a lost life does not end the game; needs frameskip 1 in env_kwargs."""

    noop_max: int = Field(30, ge=0, description="Maximum number of no-op actions after a reset.")
    frame_skip: int = Field(4, ge=1, description="Frames per agent step.")
    screen_size: int = Field(84, ge=16, description="Height and width.")
    terminal_on_life_loss: bool = Field(
        False, description="End the training episode with a life; the game goes on in the next. Never in evaluation."
    )
    frame_stack: int = Field(4, ge=1, le=16, description="Number of frames stacked along the channels.")


class WrapperOptions(StrictModel):
    """`env_kwargs.wrappers`: the wrappers between the environment and the algorithm."""

    pixels: PixelOptions | None = Field(None, description="Learn from rendered frames.")
    atari: AtariOptions | None = Field(None, description="Standard Atari preprocessing.")
    frame_stack: int = Field(1, ge=1, le=64, description="Number of observations stacked.")
    normalize_observation: bool | Literal["auto"] = Field(
        False,
        description="Normalize by a running mean and variance; auto: not for images, one-hot vectors and [0, 1].",
    )
    normalize_reward: bool = Field(
        False, description="Divide rewards by the deviation of the discounted return; rollout learners and GAIL."
    )
    clip_reward: bool | tuple[float, float] = Field(
        False, description="Clip rewards: true for [-1, 1], or [low, high]; not in evaluation."
    )

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The lowest and the highest reward, or None: rewards stay as they are."""
        return (-1.0, 1.0) if self.clip_reward is True else self.clip_reward or None


@dataclass(frozen=True)
class EnvRecipe:
    """Everything needed to make the environment again, here or in another process."""

    env_id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: WrapperOptions = field(default_factory=WrapperOptions)
    maker: Callable[..., Env] | None = None
    named_by_user: bool = False  # else `env_id` may come from a file

    @property
    def user_env(self) -> UserEnv:
        """What the user gave for this environment, for another recipe of it."""
        return self.maker or ((self.env_id,) if self.named_by_user else ())

    @property
    def for_training(self) -> EnvRecipe:
        """The recipe for training, which uses the user's own instance if there is one."""
        return replace(self, maker=self.maker.lend) if isinstance(self.maker, MadeEnvironment) else self

    @property
    def is_plain(self) -> bool:
        """Whether the registered environment is used unchanged, except for its time limit."""
        options = self.wrappers
        wrapped = options.pixels or options.atari or options.frame_stack > 1 or options.clip_reward
        return self.maker is None and not wrapped and not _looks_like_entry_point(self.env_id)

    @property
    def image_frame_stack(self) -> int:
        """How many frames the wrappers stack into one image observation."""
        options = self.wrappers.atari or self.wrappers.pixels
        return options.frame_stack if options is not None else 1


def read_recipe(env_id: str, env_kwargs: Mapping[str, Any], env: UserEnv | None = None) -> EnvRecipe:
    """The recipe from a config's `env_id` and `env_kwargs`, and from what the user gave."""
    env = read_env(env)
    maker = env if callable(env) else None
    env_id, names = (env, (env,)) if isinstance(env, str) else (env_id, env if isinstance(env, tuple) else ())
    named = env_id in names or env_id.partition(":")[0] in names
    kwargs = dict(env_kwargs)
    limit = kwargs.pop("max_episode_steps", None)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"env_kwargs.max_episode_steps is {limit!r}; it must be a whole number of at least 1.")
    wrappers = kwargs.pop("wrappers", None)
    options = validate(WrapperOptions, {} if wrappers is None else wrappers, "env_kwargs.wrappers")
    return EnvRecipe(env_id if maker is not None else _with_version(env_id), kwargs, limit, options, maker, named)


def _with_version(env_id: str) -> str:
    """`CartPole` as the newest `CartPole-v<n>`, which Gymnasium would take too, but with a warning."""
    if env_id in gym.registry:
        return env_id
    versions = [name.rpartition("-v") for name in gym.registry]
    known = [int(version) for name, _, version in versions if name == env_id and version.isdigit()]
    return f"{env_id}-v{max(known)}" if known else env_id


def make_env(recipe: EnvRecipe, *, evaluation: bool = False, render_mode: str | None = None) -> Env:
    """Make one environment with its wrappers; evaluation does not clip rewards or end an episode at a lost life."""
    options = recipe.wrappers
    env = _make_base(recipe, "rgb_array" if options.pixels else render_mode)
    try:
        if options.atari:
            env = _wrap_atari(env, options.atari, evaluation)
        if options.pixels:
            env = _wrap_pixels(env, options.pixels)
        if not isinstance(env.observation_space, gs.Box):
            if options.frame_stack > 1 and any(image_layout(part) for _, part in leaf_spaces(env.observation_space)):
                raise UserError("frame_stack does not stack images inside a Dict or Tuple; stack them in its step")
            env = gym.wrappers.FlattenObservation(env)
        if options.frame_stack > 1:
            env = _stack_frames(env, options.frame_stack)
        if options.clip_range and not evaluation:
            env = gym.wrappers.ClipReward(env, *options.clip_range)
    except Exception as error:
        raise UserError(f"env_kwargs.wrappers do not fit {recipe.env_id}: {_first_line(error)}.") from error
    return env


def _make_base(recipe: EnvRecipe, render_mode: str | None) -> Env:
    kwargs = dict(recipe.kwargs) | ({"render_mode": render_mode} if render_mode else {})
    maker = recipe.maker
    try:
        if maker is None and _looks_like_entry_point(recipe.env_id):
            maker = import_entry_point("env_id", recipe.env_id, gym.Env, recipe.named_by_user, "--env ", "env")
        if maker is None:
            register_on_demand(recipe.env_id)
            spec: Any = copy.deepcopy(gym.registry.get(recipe.env_id, recipe.env_id))
            if not isinstance(spec, str):
                spec.order_enforce = False  # a layer around every step, for an order that is kept here anyway
            return gym.make(spec, recipe.max_episode_steps, disable_env_checker=True, **kwargs)
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
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in recipe.kwargs:
            raise UnknownKey("env_kwargs", unknown[1], f"{recipe.env_id} does not take it.") from error
        if missing := re.search(r"missing .*required .*argument.*: '(\w+)'", str(error)):
            how = f"give it in env_kwargs, such as --set env_kwargs.{missing[1]}=VALUE"
            raise UserError(f"the environment {recipe.env_id} needs the argument {missing[1]!r}; {how}.") from error
        raise UserError(f"the environment {recipe.env_id} cannot be made: {_first_line(error)}.") from error
    if isinstance(env, device_kinds()):
        from rl_training.envs.device import OneEnvironment  # torch
        from rl_training.envs.device_checks import check_attributes

        check_attributes(env, recipe.env_id)
        limit = recipe.max_episode_steps or env.max_episode_steps
        return gym.wrappers.TimeLimit(OneEnvironment(env), limit) if limit else OneEnvironment(env)
    if not isinstance(env, gym.Env):
        raise UserError(f"{recipe.env_id} made a {type(env).__name__}; it must make a gymnasium.Env.")
    return gym.wrappers.TimeLimit(env, recipe.max_episode_steps) if recipe.max_episode_steps else env


def episode_limit(env: Env) -> int | None:
    """Steps after which a wrapper or the emulator truncates an episode, or None."""
    limits = []
    while isinstance(env, gym.Wrapper):
        limits += [env._max_episode_steps] if isinstance(env, gym.wrappers.TimeLimit) else []
        env = env.env
    if (emulator := getattr(env, "ale", None)) is not None:
        limits.append(emulator.getInt("max_num_frames_per_episode"))
    return min((limit for limit in limits if limit), default=None)


def register_on_demand(env_id: str) -> None:
    """Atari and MinAtar are registered by importing their packages, which Gymnasium does not do by itself."""
    extra = "results" if env_id.startswith("MinAtar/") else "atari"
    if env_id in gym.registry or not (env_id.startswith(("MinAtar/", "ALE/")) or "NoFrameskip" in env_id):
        return
    try:
        if extra == "results":
            from rl_training.envs.minatar import register_games

            register_games()
        else:
            import ale_py

            gym.register_envs(ale_py)
    except ImportError:
        raise UserError(f"{env_id} needs the extra {extra!r} (pip install 'rl-training[{extra}]').") from None


def _first_line(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error})"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _looks_like_entry_point(env_id: str) -> bool:
    """`module:Class`, but not Gymnasium's own `module:RegisteredName-v0`."""
    module, _, name = env_id.partition(":")
    return bool(module and name.isidentifier() and all(part.isidentifier() for part in module.split(".")))


def import_entry_point(
    field: str, value: str, kind: type, named_by_user: bool, option: str, argument: str | None = None
) -> Callable[..., Any]:
    """The object that `module:name` in a field names; if the user did not name it, only a class of that kind."""
    module_name, _, name = value.partition(":")
    hint = "" if named_by_user else f"; to use a module in this folder, add --import {module_name}"
    if module_name.endswith(".py"):
        hint = f"; a module is named without .py: {module_name[:-3]}:{name}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{field} {value!r}: the module {module_name!r} cannot be imported ({error}){hint}.") from None
    kinds = (kind, *device_kinds()) if kind is gym.Env else (kind,)
    maker = getattr(module, name, None)
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


def _wrap_atari(env: Env, options: AtariOptions, evaluation: bool) -> Env:
    given = options.model_dump(exclude={"frame_stack", "terminal_on_life_loss"})
    env = gym.wrappers.AtariPreprocessing(env, **given)
    if options.terminal_on_life_loss and not evaluation:
        env = LifeEpisodes(env)
    return gym.wrappers.FrameStackObservation(env, options.frame_stack)


def _wrap_pixels(env: Env, options: PixelOptions) -> Env:
    env = gym.wrappers.AddRenderObservation(env, render_only=True)
    if options.grayscale:
        env = gym.wrappers.GrayscaleObservation(env, keep_dim=True)
    env = gym.wrappers.ResizeObservation(env, options.resize_shape)
    return _stack_frames(env, options.frame_stack, options.channel_first)


def _stack_frames(env: Env, count: int, channel_first: bool | None = None) -> Env:
    """The newest `count` observations as one; images along their channels, which lie as before or as asked."""
    space = env.observation_space
    layout = image_layout(space) if channel_first is None else "channels_last"
    stacked = gym.wrappers.FrameStackObservation(env, count)
    if layout not in ("channels_first", "channels_last"):
        return stacked
    first = layout == "channels_first" if channel_first is None else channel_first

    def fold(frames: Any) -> Any:
        """[stack, H, W, C] or [stack, C, H, W] with the stack folded into the channels."""
        frames = np.moveaxis(frames, -1, 1) if layout == "channels_last" else frames  # [stack, C, H, W]
        image = frames.reshape(-1, *frames.shape[2:])
        return np.ascontiguousarray(image if first else np.moveaxis(image, 0, -1))

    assert isinstance(space, gs.Box)
    low, high = (fold(np.stack([bound] * count)) for bound in (space.low, space.high))
    return gym.wrappers.TransformObservation(stacked, fold, gs.Box(low, high, dtype=space.dtype.type))


def probe_spaces(recipe: EnvRecipe) -> EnvSpaces:
    """Make the environment once, read its spaces, and close it."""
    return probe(recipe).spaces


def check_spaces(env: Any, env_id: str) -> None:
    """A UserError if an environment has no observation space or no action space."""
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gs.Space):
            wanted = f"set self.{name} to a gymnasium space in __init__"
            raise UserError(f"the {name} of {env_id} is {space!r}; {wanted}.")


class Probe(NamedTuple):
    """The spaces of an environment, its known problems, and where the user defines its `step`."""

    spaces: EnvSpaces
    problems: list[Problem]
    step: str


def probe(recipe: EnvRecipe, vectorization: str = "auto") -> Probe:
    """Make the environment once, test its tensor functions if it has any, read its spaces, and close it."""
    options = recipe.wrappers
    normalize = options.normalize_observation
    if options.pixels or options.atari or options.frame_stack > 1:
        env = make_env(recipe)
    else:  # as it is, so that prediction reads raw observations (a dict stays a dict)
        env = _make_base(recipe, None)
    try:
        check_spaces(env, recipe.env_id)
        if vectorization == "device" or device_kinds():
            from rl_training.envs.device_checks import check_used_functions  # torch

            check_used_functions(env, recipe, vectorization)
        observation, info = _first_reset(env, recipe.env_id)
        spaces = EnvSpaces.from_gym(
            recipe.env_id,
            env.observation_space,
            env.action_space,
            has_action_mask="action_mask" in info and not isinstance(env.action_space, gs.Box),
            normalize_observations=_has_measurements(env.observation_space) if normalize == "auto" else normalize,
            normalize_rewards=options.normalize_reward,
        )
        problems = list(find_problems(env, info))
        reset, step = (definition(env.unwrapped, method) for method in ("reset", "step"))
    finally:
        with suppress(Exception, SystemExit):  # a run that closes it says so
            env.close()
    if spaces.normalize_observations and len(spaces.vector_columns) == 0:
        raise UserError(
            f"env_kwargs.wrappers.normalize_observation is for vectors; the images of {recipe.env_id} "
            "are scaled to [0, 1] anyway."
        )
    if isinstance(env.observation_space, gs.Box) and np.shape(observation) != env.observation_space.shape:
        raise UserError(
            f"{recipe.env_id} returned an observation of shape {np.shape(observation)}{reset}; "
            f"its observation space says {env.observation_space.shape}."
        )
    return Probe(spaces, problems, step)


def _has_measurements(space: gs.Space[Any]) -> bool:
    """Whether a vector needs normalization: it is not one-hot and not within [0, 1]."""
    if isinstance(space, (gs.Dict, gs.Tuple)):
        return any(map(_has_measurements, space.spaces.values() if isinstance(space, gs.Dict) else space.spaces))
    if not isinstance(space, gs.Box) or image_layout(space) is not None:
        return False
    return bool((space.low < 0).any() or (space.high > 1).any())


def _first_reset(env: Env, env_id: str) -> tuple[Any, dict[str, Any]]:
    place = definition(env.unwrapped, "reset")
    try:
        given = env.reset(seed=0)
    except (Exception, SystemExit) as error:
        if "unexpected keyword argument 'seed'" in str(error):
            wanted = "write reset(self, *, seed=None, options=None)"
            raise UserError(f"{env_id}: reset{place} takes no seed; {wanted}.") from error
        line = user_line(traceback.format_exception(error))
        raise UserError(f"the environment {env_id} fails in reset: {_first_line(error)}{line}.") from error
    if not isinstance(given, tuple) or len(given) != 2:
        raise UserError(f"{env_id}: reset{place} returned only an observation; it must return (observation, info).")
    return given[0], given[1] or {}
