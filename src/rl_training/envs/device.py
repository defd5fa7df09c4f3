"""Environments as functions of tensors, many at once on a CPU or a GPU, and the engine that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rl_training.envs.spaces import Array, EnvSpaces, groups_of
from rl_training.envs.stepper import Engine, Step
from rl_training.errors import EnvironmentFailure, UserError

State = Any  # a tensor [N, ...], or a tuple, list or dict of them
Observed = Tensor | Mapping[str, Tensor]  # observations [N, ...], or groups of them
NO_LIMIT = 2**31 - 1


class DeviceEnvironment:
    """N environments as three functions of tensors, for `vectorization: device`.

    If the observation space is a Dict of Boxes, observations are mappings of its names to tensors; the setting
    `critic_obs` names those that only the critic sees.

    The functions store nothing, draw no random numbers, and never branch on values. `noise` is uniform in [0, 1), with
    `reset_noise` or `step_noise` numbers per environment. Make new tensors from given ones (`torch.zeros_like`,
    `state.new_full`), so that they are on the right device. A tensor made from a list (`new_tensor`) is copied from the
    host, which a CUDA graph cannot do: the rollout would run without a graph.
    """

    observation_space: gs.Box | gs.Dict
    action_space: gs.Space[Any]
    max_episode_steps: int | None = None
    reset_noise: int = 1
    step_noise: int = 0
    capture_mode: str = "thread_local"  # torch's `capture_error_mode`: "relaxed" where another library launches kernels

    def reset(self, noise: Tensor) -> State:
        """Return the first states of N episodes, from noise [N, reset_noise]."""
        raise NotImplementedError

    def step(self, state: State, actions: Tensor, noise: Tensor) -> tuple[State, Tensor, Tensor]:
        """Return the next state, rewards [N] and `terminated` [N]; noise is [N, step_noise].

        Actions are elements of the action space, [N, ...]. The time limit is handled elsewhere.
        """
        raise NotImplementedError

    def observe(self, state: State) -> Observed:
        """Return the observations [N, ...] of a state."""
        raise NotImplementedError

    def fault(self, state: State) -> str:
        """Return what makes a state wrong, in words, or nothing; this may read the state on the host."""
        return ""

    def why_inexact(self, device: torch.device) -> str:
        """Return why the same seed can give other numbers on this device, in words, or nothing."""
        return ""


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

    def _observe(self) -> Any:
        seen, groups = self.device_environment.observe(self._state), groups_of(self.observation_space)
        if isinstance(seen, Tensor):
            return seen[0].numpy().astype(groups[""].dtype)
        return {name: seen[name][0].numpy().astype(part.dtype) for name, part in groups.items()}


class Advance(NamedTuple):
    """The result of one step of N environments; `final_obs` are the observations before a reset."""

    state: State
    ages: Tensor
    obs: Observed
    final_obs: Observed
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


def advance(
    env: DeviceEnvironment, limit: int, state: State, ages: Tensor, actions: Tensor, noise: Tensor, begun: State
) -> Advance:
    """Step every row and count it in `ages` [N]; a row that terminates or reaches the limit restarts at `begun`."""
    moved, rewards, terminated = env.step(state, actions, noise)
    ages = ages + 1
    truncated = ages >= limit
    done = terminated | truncated

    def renew(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(done.view(-1, *[1] * (old.dim() - 1)), new, old)

    state = tree_map(renew, begun, moved)
    final_obs = env.observe(moved)
    return Advance(state, ages.masked_fill(done, 0), env.observe(state), final_obs, rewards, terminated, truncated)


class DeviceEngine(Engine):
    """Steps a `DeviceEnvironment` with numpy arrays; same-step autoreset.

    `DeviceCollector` uses its state, noise and functions without leaving the device.
    """

    state_format = "device"

    def __init__(
        self, env: DeviceEnvironment, limit: int | None, spaces: EnvSpaces, num_envs: int, seed: int, device: str,
        random_ages: bool = False,
    ) -> None:  # fmt: skip
        self.env, self.spaces, self.num_envs, self.limit = env, spaces, num_envs, limit or NO_LIMIT
        self.random_ages = random_ages
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.inexact = env.why_inexact(self.device)
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
        """Copy a state into the memory that a captured graph reads and writes."""
        if self.state is None:
            self.state = tree_map(torch.clone, state)
        else:
            tree_map(Tensor.copy_, self.state, state)
        self.ages.copy_(ages)

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations; with `random_ages`, the first episodes begin in the middle of the time limit."""
        state, ages = self.env.reset(self.draw(1)[0][0]), torch.zeros_like(self.ages)
        if self.random_ages:
            ages.random_(self.limit, generator=self.generator)
        self.place(state, ages)
        return self.look(), None

    def check(self) -> None:
        """Raise an EnvironmentFailure if the current state is wrong."""
        if fault := self.env.fault(self.state):
            raise EnvironmentFailure(f"{self.spaces.env_id}: {fault}.")

    def look(self) -> Array:
        """The current observations."""
        obs: Array = self._encode(self.env.observe(self.state)).copy()
        return obs

    def step(self, actions: Array) -> Step:
        """Step every environment; reset those that end."""
        for_reset, for_step = self.draw(1)
        given, begun = torch.from_numpy(actions).to(self.device), self.env.reset(for_reset[0])
        after = advance(self.env, self.limit, self.state, self.ages, given, for_step[0], begun)
        self.place(after.state, after.ages)
        self.check()
        rewards, terminated, truncated = (part.cpu().numpy() for part in after[4:])
        final_obs = self._encode(after.final_obs) if (terminated | truncated).any() else None
        return Step(self._encode(after.obs), rewards.astype(np.float32), terminated, truncated, final_obs)

    def _encode(self, obs: Observed) -> Array:
        flat = obs if isinstance(obs, Tensor) else encode(self.spaces, obs)
        return self.spaces.encode(flat.cpu().numpy())

    def state_dict(self) -> dict[str, Any]:
        """The environments' tensors, the step counts of the current episodes, and the generator."""
        return {
            "state": [part.clone() for part in tree_flatten(self.state)[0]], "ages": self.ages.clone(),
            "generator": self.generator.get_state().numpy(), "device": self.device.type,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the state; the generator is not restored on another kind of device."""
        self.reset()
        parts, tree = tree_flatten(self.state)
        stored = state["state"]
        if [(part.shape, part.dtype) for part in stored] != [(part.shape, part.dtype) for part in parts]:
            raise UserError(f"the checkpoint's state of {self.spaces.env_id} has other tensors than the environment.")
        self.place(tree_unflatten(stored, tree), state["ages"])
        if state["device"] == self.device.type:
            self.generator.set_state(torch.from_numpy(np.array(state["generator"])))
        return self.look(), None


def space_of(obs: Observed) -> gs.Box | gs.Dict:
    """The space of observations [N, ...] without limits."""
    if isinstance(obs, Tensor):
        return gs.Box(-np.inf, np.inf, tuple(obs.shape[1:]), np.float32)
    return gs.Dict([(name, space_of(part)) for name, part in obs.items()])  # pairs keep their order


def encode(spaces: EnvSpaces, obs: Observed) -> Tensor:
    """`spaces.encode` for tensors; groups of observations are joined in the order of their space."""
    if not isinstance(obs, Tensor):
        parts: Any = spaces.observation_space
        return torch.cat([obs[name].reshape(len(obs[name]), -1).float() for name in parts], -1)
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
    start = torch.as_tensor(getattr(space, "start", 0), device=device)
    if isinstance(space, gs.Discrete) and start == 0:
        return lambda actions: actions
    return lambda actions: (actions.view(-1, *space.shape) + start).to(dtype)
