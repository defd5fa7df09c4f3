"""Environments as functions of tensors: many of them at once, on a CPU or a GPU, and the engine that steps them."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from rl_training.envs.engines import Step
from rl_training.envs.factory import EnvRecipe, check_spaces, episode_limit, make_env
from rl_training.envs.hidden_state import checksum
from rl_training.envs.spaces import Array, EnvSpaces, image_layout
from rl_training.errors import UserError, user_line

State = Any  # a tensor [N, ...], or a tuple, list or dict of them
NO_LIMIT = 2**31 - 1
ROWS = 17  # of a test, a size that few others have
PLAIN_WRAPPERS = (  # the time limit and the flattening are done here
    gym.wrappers.TimeLimit, gym.wrappers.FlattenObservation, gym.wrappers.OrderEnforcing,
    gym.wrappers.PassiveEnvChecker,
)  # fmt: skip


class DeviceEnvironment:
    """N environments as three functions of tensors, for `vectorization: device`.

    The functions store nothing, draw no random numbers, and never branch on values. `noise` is uniform in [0, 1), with
    `reset_noise` or `step_noise` numbers per environment. Make new tensors from given ones (`torch.zeros_like`,
    `state.new_full`), so that they are on the right device. A tensor made from a list (`new_tensor`) is copied from the
    host, which a CUDA graph cannot do: the rollout would run without a graph.
    """

    observation_space: gs.Space[Any]
    action_space: gs.Space[Any]
    max_episode_steps: int | None = None
    reset_noise: int = 1
    step_noise: int = 0

    def reset(self, noise: Tensor) -> State:
        """Return the first states of N episodes, from noise [N, reset_noise]."""
        raise NotImplementedError

    def step(self, state: State, actions: Tensor, noise: Tensor) -> tuple[State, Tensor, Tensor]:
        """Return the next state, rewards [N] and `terminated` [N]; noise is [N, step_noise].

        Actions are elements of the action space, [N, ...]. The time limit is handled elsewhere.
        """
        raise NotImplementedError

    def observe(self, state: State) -> Tensor:
        """Return the observations [N, ...] of a state."""
        raise NotImplementedError


class OneEnvironment(gym.Env[Any, Any]):
    """One row of a `DeviceEnvironment` as a Gymnasium environment on the CPU, for evaluation and other engines."""

    def __init__(self, device_environment: DeviceEnvironment) -> None:
        self.device_environment = device_environment
        self.observation_space = device_environment.observation_space
        self.action_space = device_environment.action_space
        self._state: State = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._state = self.device_environment.reset(self._draw(self.device_environment.reset_noise))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step once; a wrapper applies the time limit."""
        actions, noise = torch.as_tensor(np.asarray(action))[None], self._draw(self.device_environment.step_noise)
        self._state, rewards, terminated = self.device_environment.step(self._state, actions, noise)
        return self._observe(), float(rewards[0]), bool(terminated[0]), False, {}

    def _draw(self, count: int) -> Tensor:
        return torch.from_numpy(self.np_random.random((1, count), dtype=np.float32))

    def _observe(self) -> Array:
        return self.device_environment.observe(self._state)[0].numpy().astype(self.observation_space.dtype)


class Advance(NamedTuple):
    """The result of one step of N environments; `final_obs` are the observations before a reset."""

    state: State
    ages: Tensor
    obs: Tensor
    final_obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


def advance(
    env: DeviceEnvironment, limit: int, state: State, ages: Tensor, actions: Tensor, noise: Tensor, begun: State
) -> Advance:
    """Step every row and count it in `ages` [N]; a row that ends, by itself or by the limit, restarts at `begun`."""
    moved, rewards, terminated = env.step(state, actions, noise)
    ages = ages + 1
    truncated = ages >= limit
    done = terminated | truncated

    def renew(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(done.view(-1, *[1] * (old.dim() - 1)), new, old)

    state = tree_map(renew, begun, moved)
    final_obs = env.observe(moved)
    return Advance(state, ages.masked_fill(done, 0), env.observe(state), final_obs, rewards, terminated, truncated)


class DeviceEngine:
    """Steps a `DeviceEnvironment` with numpy arrays; same-step autoreset.

    `DeviceCollector` uses its state, noise and functions without leaving the device.
    """

    resets_next_step = False
    state_format = "device"

    def __init__(
        self, env: DeviceEnvironment, limit: int | None, spaces: EnvSpaces, num_envs: int, seed: int, device: str
    ) -> None:
        self.env, self.spaces, self.num_envs, self.limit = env, spaces, num_envs, limit or NO_LIMIT
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.state: State = None
        self.ages = torch.zeros(num_envs, dtype=torch.int32, device=self.device)

    def draw(self, steps: int) -> tuple[Tensor, Tensor]:
        """The noise of `steps` steps, [steps, N, ...]: for resets, and for the steps themselves."""
        sizes = self.env.reset_noise, self.env.step_noise
        drawn = (
            torch.rand(steps, self.num_envs, size, generator=self.generator, device=self.device) for size in sizes
        )
        return next(drawn), next(drawn)

    def place(self, state: State, ages: Tensor) -> None:
        """Copy a state into the memory of the last one, which a captured graph reads and writes."""
        if self.state is None:
            self.state = tree_map(torch.clone, state)
        else:
            tree_map(Tensor.copy_, self.state, state)
        self.ages.copy_(ages)

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations."""
        self.place(self.env.reset(self.draw(1)[0][0]), torch.zeros_like(self.ages))
        return self.look(), None

    def look(self) -> Array:
        """The current observations."""
        return self._encode(self.env.observe(self.state)).copy()

    def step(self, actions: Array) -> Step:
        """Step every environment; reset those that end."""
        for_reset, for_step = self.draw(1)
        given, begun = torch.from_numpy(actions).to(self.device), self.env.reset(for_reset[0])
        after = advance(self.env, self.limit, self.state, self.ages, given, for_step[0], begun)
        self.place(after.state, after.ages)
        rewards, terminated, truncated = (part.cpu().numpy() for part in after[4:])
        final_obs = self._encode(after.final_obs) if (terminated | truncated).any() else None
        return Step(self._encode(after.obs), rewards.astype(np.float32), terminated, truncated, final_obs)

    def _encode(self, obs: Tensor) -> Array:
        return self.spaces.encode(obs.cpu().numpy())

    def state_dict(self) -> dict[str, Any]:
        """The environments' tensors, the step counts of the current episodes, and the generator."""
        return {
            "state": [part.clone() for part in tree_flatten(self.state)[0]], "ages": self.ages.clone(),
            "generator": self.generator.get_state().numpy(), "device": self.device.type,
        }  # fmt: skip

    brief_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore them; the generator is not restored on another kind of device."""
        self.reset()
        parts, tree = tree_flatten(self.state)
        stored = state["state"]
        if [(part.shape, part.dtype) for part in stored] != [(part.shape, part.dtype) for part in parts]:
            raise UserError(f"the checkpoint's state of {self.spaces.env_id} has other tensors than the environment.")
        self.place(tree_unflatten(stored, tree), state["ages"])
        if state["device"] == self.device.type:
            self.generator.set_state(torch.from_numpy(np.array(state["generator"])))
        return self.look(), None

    def close(self) -> None:
        """Nothing to close."""


def encode(spaces: EnvSpaces, obs: Tensor) -> Tensor:
    """`spaces.encode` for tensors."""
    if spaces.obs_kind == "vector":
        return obs.reshape(len(obs), -1).float()
    if spaces.image_layout == "channels_last":
        return obs.movedim(-1, 1)
    return obs.unsqueeze(1) if spaces.image_layout == "plane" else obs


def map_actions(spaces: EnvSpaces, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`spaces.map_actions` for tensors on a device."""
    space: Any = spaces.action_space
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    if isinstance(space, gs.Box):
        low, high = (torch.from_numpy(bound).to(device) for bound in spaces._action_bounds)
        half = 0.5 * (high - low)

        def scale(actions: Tensor) -> Tensor:
            scaled = (actions + 1.0) * half + low
            inside = (scaled if dtype.is_floating_point else scaled.round()).clamp(low, high)
            return inside.view(-1, *space.shape).to(dtype)

        return scale
    if isinstance(space, gs.Discrete):
        start = int(space.start)
        return (lambda actions: actions + start) if start else (lambda actions: actions)
    first = torch.as_tensor(getattr(space, "start", np.zeros(space.shape, np.int64)), device=device)
    return lambda actions: (actions.view(-1, *space.shape) + first).to(dtype)


def find_device_environment(recipe: EnvRecipe, device: str = "cpu") -> tuple[DeviceEnvironment, int | None]:
    """The environment of a recipe as functions of tensors, and its time limit; a UserError if it has none.

    They are tested on the device.
    """
    from rl_training.envs.classic_control import KNOWN

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
    if found is None and (make := KNOWN.get(f"{type(plain).__module__}:{type(plain).__name__}")) is not None:
        found = make(plain)
    if found is None:
        raise UserError(f"{where} {recipe.env_id} is not a DeviceEnvironment (docs/device_environments.md); use auto.")
    if not isinstance(found, DeviceEnvironment):
        what = "it must be an instance of a DeviceEnvironment class"
        raise UserError(f"{recipe.env_id}: device_environment is {found!r}; {what}.")
    check_functions(found, recipe.env_id, device)
    for name, wanted, given in (
        ("action_space", plain.action_space, found.action_space),
        ("observation_space.shape", plain.observation_space.shape, found.observation_space.shape),
    ):
        if given != wanted:
            raise UserError(f"{recipe.env_id}: {name} is {wanted}, but that of its device_environment is {given}.")
    return found, limit


def check_functions(env: DeviceEnvironment, env_id: str, device: str = "cpu") -> None:
    """Test the attributes, and the functions on a few rows; a UserError says what does not fit."""
    check_spaces(env, env_id)
    for name, least in (("reset_noise", 0), ("step_noise", 0), ("max_episode_steps", 1)):
        value = getattr(env, name)
        if (type(value) is not int or value < least) and not (least and value is None):
            raise UserError(f"{env_id}: {name} is {value!r}; it must be a whole number of at least {least}.")
    if not isinstance(env.observation_space, gs.Box):
        raise UserError(f"{env_id}: observation_space is {env.observation_space}; it must be a Box.")
    EnvSpaces.from_gym(env_id, env.observation_space, env.action_space)
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    actions = torch.from_numpy(np.stack([space.sample() for _ in range(ROWS)])).to(device)
    drawn = torch.rand(ROWS, env.reset_noise + env.step_noise, generator=torch.Generator().manual_seed(0))
    drawn[0], drawn[1] = 0.0, 1.0 - 2.0**-24  # the ends, where `noise < 0.01` differs
    reset_noise, step_noise = drawn.to(device).split([env.reset_noise, env.step_noise], -1)
    state = _call(env, env_id, "reset", reset_noise)
    given = _call(env, env_id, "step", state, actions, step_noise)
    if not isinstance(given, tuple) or len(given) != 3:
        found = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise UserError(f"{env_id}: step returned {found}; it must return the next state, rewards and terminated.")
    moved, rewards, terminated = given
    obs = _call(env, env_id, "observe", moved)
    kinds = [
        {"": type(tree).__name__} | {keystr(at): _kind(part) for at, part in tree_flatten_with_path(tree)[0]}
        for tree in (state, moved)
    ]
    for at in kinds[0] | kinds[1]:
        was, now = (kind.get(at, "missing") for kind in kinds)
        if was != now:
            raise UserError(f"{env_id}: state{at} is {was} after reset and {now} after step; both must be the same.")
    seen = {"rewards": (rewards, ()), "terminated": (terminated, ()), "observe": (obs, env.observation_space.shape)}
    for name, (part, shape) in seen.items():
        wanted = (ROWS, *shape)
        if not isinstance(part, Tensor) or part.shape != wanted:
            found = f"the shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"the type {type(part).__name__}"
            raise UserError(f"{env_id}: {name} of {ROWS} environments has {found}, not the shape {wanted}.")
    parts = [(f"state{keystr(at)}", part) for at, part in tree_flatten_with_path(moved)[0]]
    if short := [(name, part) for name, part in parts if part.shape[:1] != (ROWS,)]:
        found = f"{short[0][0]} of {ROWS} environments has the shape {tuple(short[0][1].shape)}"
        raise UserError(f"{env_id}: {found}, not ({ROWS}, ...).")
    parts += [(name, part) for name, (part, _) in seen.items()]
    if odd := [(name, part.device.type) for name, part in parts if part.device.type != torch.device(device).type]:
        found = f"{odd[0][0]} is on {odd[0][1]}, but the device is {device}"
        raise UserError(f"{env_id}: {found}; make it like a given tensor (torch.zeros_like).")
    if terminated.dtype != torch.bool:
        raise UserError(f"{env_id}: terminated is of {terminated.dtype}; it must be of torch.bool.")
    if image_layout(env.observation_space) is not None and obs.dtype not in (torch.uint8, torch.bool):
        raise UserError(f"{env_id}: observe gives an image of {obs.dtype}; it must be of torch.uint8.")
    if obs.is_floating_point() and (wanted_dtype := env.observation_space.dtype).kind != "f":
        raise UserError(f"{env_id}: observe gives {obs.dtype}; its observation space says {wanted_dtype}.")
    if device == "cpu" and env.reset_noise and _is_same(state, tree_map(lambda x: x[:1].expand_as(x), state)):
        how = "use it, or set reset_noise = 0 if all episodes start alike"
        raise UserError(f"{env_id}: reset returns the same state for all noise; {how}.")


def _call(env: DeviceEnvironment, env_id: str, name: str, *given: Any) -> Any:
    """Call a function twice; on a CPU, say if it is not a function of what it is given."""
    if getattr(type(env), name) is getattr(DeviceEnvironment, name):
        raise UserError(f"{env_id} has no {name}; a DeviceEnvironment must define reset, step and observe.")
    copies = tree_map(torch.clone, given)
    try:
        result = getattr(env, name)(*given)
        held, before = dict(vars(env)), _marks(env)
        again = getattr(env, name)(*tree_map(torch.clone, copies))
    except Exception as error:
        what = f"{type(error).__name__}: {error}".rstrip(".") + user_line(traceback.format_exception(error))
        raise UserError(f"the environment {env_id} fails in {name} with {what}.") from error
    if odd := [part for part in tree_flatten(result)[0] if not isinstance(part, Tensor)]:
        raise UserError(f"{env_id}: {name} returned a value of type {type(odd[0]).__name__}; it must return tensors.")
    if any(part.device.type != "cpu" for part in tree_flatten((given, result))[0]):
        return result
    if not _is_same(given, copies):
        raise UserError(f"{env_id}: {name} changes a tensor that it is given; it must return new tensors.")
    if changed := [key for key in held if before[key] != _marks(env).get(key)]:
        raise UserError(f"{env_id}: {name} changes self.{changed[0]}; what changes must be part of the state.")
    if not _is_same(result, again):
        raise UserError(f"{env_id}: {name} gives two results for the same input; random numbers must come from noise.")
    return result


def _is_same(one: State, two: State) -> bool:
    """Whether two trees hold the same numbers, NaN included."""
    left, right = tree_flatten(one)[0], tree_flatten(two)[0]
    return len(left) == len(right) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(left, right, strict=True)
    )


def _marks(env: DeviceEnvironment) -> dict[str, Any]:
    """What shows that an attribute is another one, or was changed in place."""
    return {
        name: (id(value), value._version) if isinstance(value, Tensor) else checksum(value)
        for name, value in vars(env).items()
    }


def _kind(part: Tensor) -> str:
    return f"{list(part.shape)} of {part.dtype}"
