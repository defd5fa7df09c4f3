"""Find the tensor functions of an environment, and check the rules of docs/device_environments.md."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map

from rl_training.envs.device import DeviceEnvironment, OneEnvironment, State
from rl_training.envs.factory import EnvRecipe, episode_limit, make_env
from rl_training.envs.hidden_state import checksum
from rl_training.envs.probe import check_spaces
from rl_training.envs.spaces import EnvSpaces, check_groups, groups_of, image_layout
from rl_training.errors import UserError, user_line

ROWS = 17  # of a test; a number that is unlikely to be another dimension
PLAIN_WRAPPERS = (  # the engine handles the time limit and the flattening itself
    gym.wrappers.TimeLimit, gym.wrappers.FlattenObservation, gym.wrappers.OrderEnforcing,
    gym.wrappers.PassiveEnvChecker,
)  # fmt: skip


def find_device_environment(recipe: EnvRecipe) -> tuple[DeviceEnvironment, int | None]:
    """The environment of a recipe as functions of tensors, and its time limit; a UserError if it has none."""
    from rl_training.envs.classic_control import KNOWN
    from rl_training.envs.mujoco_tasks import TASKS

    where = "vectorization is 'device', but"
    options = recipe.wrappers.model_dump(exclude_defaults=True)
    if odd := [name for name in options if name not in ("normalize_observation", "normalize_reward")]:
        setting = f"env_kwargs.wrappers.{odd[0]} is {options[odd[0]]!r}"
        raise UserError(f"{where} {setting}; its only wrappers are normalize_observation and normalize_reward.")
    env = make_env(recipe)
    limit, layer, plain = episode_limit(env), env, env.unwrapped
    env.close()
    while isinstance(layer, PLAIN_WRAPPERS):
        layer = layer.env
    if layer is not plain:
        name = type(layer).__name__
        raise UserError(f"{where} {recipe.env_id} is wrapped in {name}, which is not a function of tensors; use auto.")
    found = getattr(plain, "device_environment", None)
    if found is None and (make := (KNOWN | TASKS).get(f"{type(plain).__module__}:{type(plain).__name__}")) is not None:
        found = make(plain)
    if found is None:
        raise UserError(f"{where} {recipe.env_id} is not a DeviceEnvironment (docs/device_environments.md); use auto.")
    if not isinstance(found, DeviceEnvironment):
        what = "it must be an instance of a DeviceEnvironment class"
        raise UserError(f"{recipe.env_id}: device_environment is {found!r}; {what}.")
    check_attributes(found, recipe.env_id)
    for name, wanted, given in (
        ("action_space", plain.action_space, found.action_space),
        ("observation_space.shape", *(_shape_of(one.observation_space) for one in (plain, found))),
    ):
        if given != wanted:
            raise UserError(f"{recipe.env_id}: {name} is {wanted}, but that of its device_environment is {given}.")
    return found, limit


def _shape_of(space: Any) -> Any:
    """The shape of a space, or those of a Dict's parts."""
    parts = {name: part.shape if isinstance(part, gs.Box) else part for name, part in groups_of(space).items()}
    return parts if isinstance(space, gs.Dict) else space.shape


def check_attributes(env: DeviceEnvironment, env_id: str) -> None:
    """Raise a UserError if a space or a number of an environment is missing or wrong."""
    check_spaces(env, env_id)
    for name, least in (("reset_noise", 0), ("step_noise", 0), ("max_episode_steps", 1)):
        value = getattr(env, name)
        if (type(value) is not int or value < least) and not (least and value is None):
            raise UserError(f"{env_id}: {name} is {value!r}; it must be a whole number of at least {least}.")
    check_groups(env_id, env.observation_space)
    EnvSpaces.from_gym(env_id, env.observation_space, env.action_space)


def check_used_functions(env: gym.Env[Any, Any], recipe: EnvRecipe, vectorization: str) -> None:
    """Test the functions that a run will call: the user's own class always, others only on the device."""
    if vectorization == "device":
        check_functions(find_device_environment(recipe)[0], recipe.env_id)
    elif isinstance(env.unwrapped, OneEnvironment):
        check_functions(env.unwrapped.device_environment, recipe.env_id)


def check_functions(env: DeviceEnvironment, env_id: str, device: str = "cpu") -> None:
    """Call the functions for a few rows; a UserError names the first rule that is broken."""
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    actions = torch.from_numpy(np.stack([space.sample() for _ in range(ROWS)])).to(device)
    drawn = torch.rand(ROWS, env.reset_noise + env.step_noise, generator=torch.Generator().manual_seed(0))
    drawn[0], drawn[1] = 0.0, 1.0 - 2.0**-24  # both ends, so that conditions such as `noise < 0.01` occur
    reset_noise, step_noise = drawn.to(device).split([env.reset_noise, env.step_noise], -1)
    first = _call(env, env_id, "reset", reset_noise)
    given = _call(env, env_id, "step", first, actions, step_noise)
    if not isinstance(given, tuple) or len(given) != 3:
        found = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise UserError(f"{env_id}: step returned {found}; it must return the next state, rewards and terminated.")
    state, rewards, terminated = given
    seen, groups = _call(env, env_id, "observe", state), groups_of(env.observation_space)
    if "" not in groups and not (isinstance(seen, dict) and set(groups) <= set(seen)):
        raise UserError(f"{env_id}: observe must return a dict with the tensors {' and '.join(groups)}.")
    rows = {"reward" if hasattr(env, "reward") else "rewards": rewards, "terminated": terminated}
    rows |= {"observe": seen} if "" in groups else {_named(name): seen[name] for name in groups}
    faults = chain(_faults_of_state(env, first, state, device), _faults_of_tensors(env, state, rows, device))
    if fault := next(faults, None):
        raise UserError(f"{env_id}: {fault}.")


def _named(group: str) -> str:
    return f"observe[{group!r}]" if group else "observe"


def _faults_of_state(env: DeviceEnvironment, first: State, state: State, device: str) -> Iterator[str]:
    """The rules that a state and the next one break."""
    was, now = (
        {"": type(tree).__name__}
        | {keystr(at): f"{list(part.shape)} of {part.dtype}" for at, part in tree_flatten_with_path(tree)[0]}
        for tree in (first, state)
    )
    for at in was | now:
        if was.get(at) != now.get(at):
            kinds = f"{was.get(at, 'missing')} after reset and {now.get(at, 'missing')} after step"
            yield f"state{at} is {kinds}; both must be the same"
    all_alike = tree_map(lambda x: x[:1].expand_as(x) if x.dim() else x, first)
    if device == "cpu" and env.reset_noise and _sums(first) == _sums(all_alike):
        how = "use it, or set reset_noise = 0 if all episodes start alike"
        yield f"reset returns the same state for all noise; {how}"


def _faults_of_tensors(env: DeviceEnvironment, state: State, rows: dict[str, Any], device: str) -> Iterator[str]:
    """The rules that a state, rewards, terminated and observations break by their shape, device or type."""
    spaces = {_named(group): space for group, space in groups_of(env.observation_space).items()}
    for name, part in rows.items():
        wanted = (ROWS, *(spaces[name].shape if name in spaces else ()))
        if not isinstance(part, Tensor) or part.shape != wanted:
            found = f"the shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"the type {type(part).__name__}"
            yield f"{name} of {ROWS} environments has {found}, not the shape {wanted}"
            return
    tensors = {f"state{keystr(at)}": part for at, part in tree_flatten_with_path(state)[0]} | rows
    for name, part in tensors.items():
        if part.shape[:1] != (ROWS,):
            yield f"{name} of {ROWS} environments has the shape {tuple(part.shape)}, not ({ROWS}, ...)"
        if (found := part.device.type) != torch.device(device).type:
            where = f"{name} is on {found}, but the device is {device}"
            yield f"{where}; make it like a given tensor (torch.zeros_like)"
    if (terminated := rows["terminated"].dtype) != torch.bool:
        yield f"terminated is of {terminated}; it must be of torch.bool"
    for name, space in spaces.items():
        obs = rows[name].dtype
        if image_layout(space) is not None and obs not in (torch.uint8, torch.bool):
            yield f"{name} gives an image of {obs}; it must be of torch.uint8"
        if obs.is_floating_point and space.dtype.kind != "f":
            yield f"{name} gives {obs}; its observation space says {space.dtype}"


def _call(env: DeviceEnvironment, env_id: str, name: str, *given: Any) -> Any:
    """Call a function twice; on a CPU, report if its result does not depend on its arguments alone."""
    if getattr(type(env), name) is getattr(DeviceEnvironment, name):
        raise UserError(f"{env_id} has no {name}; a DeviceEnvironment must define reset, step and observe.")
    copies = tree_map(torch.clone, given)
    try:
        result = getattr(env, name)(*given)
        before = {key: checksum(value) for key, value in vars(env).items()}
        again = getattr(env, name)(*tree_map(torch.clone, copies))
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".rstrip(".") + user_line(traceback.format_exception(error))
        raise UserError(f"the environment {env_id} fails in {name} with {what}.") from error
    if odd := [part for part in tree_flatten(result)[0] if not isinstance(part, Tensor)]:
        raise UserError(f"{env_id}: {name} returned a value of type {type(odd[0]).__name__}; it must return tensors.")
    if any(part.device.type != "cpu" for part in tree_flatten((given, result))[0]):
        return result
    if _sums(given) != _sums(copies):
        raise UserError(f"{env_id}: {name} changes a tensor that it is given; it must return new tensors.")
    if changed := [key for key in before if before[key] != checksum(vars(env).get(key))]:
        raise UserError(f"{env_id}: {name} changes self.{changed[0]}; what changes must be part of the state.")
    if _sums(result) != _sums(again):
        raise UserError(f"{env_id}: {name} gives two results for the same input; random numbers must come from noise.")
    return result


def _sums(tree: State) -> list[int]:
    return [checksum(part) for part in tree_flatten(tree)[0]]
