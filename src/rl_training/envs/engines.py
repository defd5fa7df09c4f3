"""Engines: four ways to step several environments, behind one interface that `envs/stepper.py` reads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np

from rl_training.envs.action_masks import read_action_mask, stack_masks
from rl_training.envs.episodes import ReplayableEpisodes, episode_seed
from rl_training.envs.factory import make_env, register_on_demand
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.remote import RemoteEnvironment, SharedRows, pickle_registrations
from rl_training.envs.setup_problems import definition
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.workers import Workers
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.play import close_all

REPLAY_SECONDS = 1.0  # allowed per step of an episode that a worker replays, in addition to worker_timeout
STEP = pickle.dumps(("step", ()))


class Step(NamedTuple):
    """One step of N environments, rows in order.

    `final_obs` holds the true last observation in the rows that ended (same-step autoreset) and arbitrary values in the
    others; it is None if no row ended. `final_masks` are the legal actions there. `valid` is None, or false in the rows
    in which an engine with next-step autoreset only reset.
    """

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    final_obs: Array | None = None
    masks: Array | None = None
    valid: Array | None = None
    final_masks: Array | None = None


class Engine(Protocol):
    """Steps N environments with actions in the environment's own form."""

    resets_next_step: bool  # the row after an end holds the final observation, and its step only resets
    state_format: str  # engines with the same format read each other's states; empty: it cannot be saved

    def reset(self) -> tuple[Array, Array | None]: ...

    def step(self, actions: Array) -> Step: ...

    def state_dict(self) -> dict[str, Any]: ...

    def brief_state(self) -> dict[str, Any]:
        """The state without the parts that grow with an episode, for a caller that records the actions."""

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the environments; return their current observations and masks."""

    def close(self) -> None: ...


class SyncEngine:
    """Environments stepped one after the other in this process."""

    resets_next_step = False
    state_format = "episodes"

    def __init__(self, envs: list[ReplayableEpisodes], spaces: EnvSpaces) -> None:
        self.envs, self.spaces = envs, spaces
        self._as_list = spaces.action_kind == "discrete"
        self._has_mask = spaces.has_action_mask
        self._broken = False

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations and masks."""
        try:
            starts = [env.reset() for env in self.envs]
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        return self._encode_all(starts)

    def step(self, actions: Array) -> Step:
        """Step every environment; those that end are reset at once."""
        count = len(self.envs)
        rows: list[Any] = [None] * count
        infos: list[Any] = [None] * count
        rewards = np.empty(count, dtype=np.float32)
        terminated = np.zeros(count, dtype=bool)
        truncated = np.zeros(count, dtype=bool)
        finals: dict[int, Any] = {}
        final_infos: list[Any] = []
        given = actions.tolist() if self._as_list else actions
        try:
            for i, (env, action) in enumerate(zip(self.envs, given, strict=True)):
                rows[i], rewards[i], ended, cut, infos[i] = env.step(action)
                if ended or cut:
                    terminated[i], truncated[i] = ended, cut
                    finals[i] = rows[i]
                    final_infos.append(infos[i])
                    rows[i], infos[i] = env.reset()
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        obs = self.spaces.encode_rows(rows)
        masks = stack_masks(infos, self.spaces) if self._has_mask else None
        final_obs = final_masks = None
        if finals:
            final_obs, done = obs.copy(), list(finals)
            final_obs[done] = self.spaces.encode_rows(list(finals.values()))
            if masks is not None:
                final_masks = masks.copy()
                final_masks[done] = [read_action_mask(info, self.spaces) for info in final_infos]
        return Step(obs, rewards, terminated, truncated, final_obs, masks, final_masks=final_masks)

    def _failure(self, error: BaseException) -> EnvironmentFailure:
        self._broken = True
        place = definition(self.envs[0].env.unwrapped, "step") if self.envs else ""
        return EnvironmentFailure.from_error(self.spaces.env_id, error, place)

    def _encode_all(self, starts: list[tuple[Any, dict[str, Any]]]) -> tuple[Array, Array | None]:
        rows, infos = zip(*starts, strict=True)
        return self.spaces.encode_rows(rows), stack_masks(infos, self.spaces) if self._has_mask else None

    def state_dict(self) -> dict[str, Any]:
        """Each environment's episode seed and actions."""
        return {"episodes": [env.episode_state() for env in self.envs]}

    def brief_state(self) -> dict[str, Any]:
        """Each environment's episode seed."""
        return {"episodes": [env.brief_state() for env in self.envs]}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Replay every current episode."""
        try:
            pairs = zip(self.envs, state["episodes"], strict=True)
            return self._encode_all([env.restore_episode(episode) for env, episode in pairs])
        except SystemExit as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close every environment and raise any error in closing, unless a failure was already raised."""
        envs, self.envs = self.envs, []
        error = close_all(envs)
        if error is not None and not self._broken:
            raise self._failure(error) from error


class AsyncEngine:
    """One worker process per environment; actions, observations, rewards, ends and masks go through shared memory."""

    resets_next_step = False
    state_format = "episodes"

    def __init__(self, makers: Sequence[Callable[[], ReplayableEpisodes]], spaces: EnvSpaces, timeout: float) -> None:
        self.spaces = spaces
        count = len(makers)
        self.rows = SharedRows(spaces, count)
        given = pickle_registrations(), spaces.to_dict(), count, self.rows.descriptor
        try:
            remotes = [partial(RemoteEnvironment, maker, index, *given) for index, maker in enumerate(makers)]
            self.workers = Workers(remotes, spaces.env_id, timeout, [self.rows.descriptor])
        finally:
            os.close(self.rows.descriptor)

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations and masks."""
        self.workers.call("reset")
        return self._read(self.rows.obs), self._masks()

    def step(self, actions: Array) -> Step:
        """Step every environment; those that end are reset at once."""
        rows = self.rows
        rows.actions[:] = actions
        self.workers.call_pickled(STEP)
        obs, masks = self._read(rows.obs), self._masks()
        terminated, truncated = rows.terminated.copy(), rows.truncated.copy()
        final_obs = final_masks = None
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            final_obs = obs.copy()
            final_obs[ended] = self.spaces.encode(rows.final_obs[ended])
            if masks is not None:
                final_masks = masks.copy()
                final_masks[ended] = rows.final_masks[ended]
        return Step(obs, rows.rewards.copy(), terminated, truncated, final_obs, masks, final_masks=final_masks)

    def _read(self, rows: Array) -> Array:
        return self.spaces.encode(rows.copy())

    def _masks(self) -> Array | None:
        return self.rows.masks.copy() if self.spaces.has_action_mask else None

    def state_dict(self) -> dict[str, Any]:
        """Each environment's episode seed and actions."""
        return {"episodes": self.workers.call("episode_state")}

    brief_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Replay every current episode, each in its own process; a long one may take longer than a step."""
        longest = max(len(episode["actions"]) for episode in state["episodes"])
        self.workers.call("restore_episode", state["episodes"], extra=REPLAY_SECONDS * longest)
        return self._read(self.rows.obs), self._masks()

    def close(self) -> None:
        """End the processes."""
        self.workers.close()


class _Anything(gym.Space[Any]):
    """A space that contains everything."""

    def contains(self, x: Any) -> bool:
        """Always true."""
        return True


class CartPoleEngine:
    """Gymnasium's own vectorized CartPole: all environments as one array, next-step autoreset."""

    resets_next_step = True
    state_format = "cartpole"

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.seed = env, seed
        env.action_space = _Anything()  # its own check of the actions costs a seventh of a step

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations."""
        return self.env.reset(seed=self.seed)[0], None

    def step(self, actions: Array) -> Step:
        """Step every environment; a row that ended in the last step resets in this one and is not valid."""
        resets = self.env.prev_done
        obs, rewards, terminated, truncated, _ = self.env.step(actions)
        return Step(obs, rewards, terminated, truncated, valid=~resets if np.count_nonzero(resets) else None)

    def state_dict(self) -> dict[str, Any]:
        """The arrays and the generator, which are the whole state."""
        env = self.env
        generator = env.np_random.bit_generator.state
        return {"state": env.state, "steps": env.steps.copy(), "prev_done": env.prev_done, "generator": generator}

    brief_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the arrays and the generator."""
        env = self.env
        env.reset(seed=self.seed)
        env.state, env.steps = np.array(state["state"]), np.array(state["steps"])
        env.prev_done = np.array(state["prev_done"])
        env.np_random.bit_generator.state = state["generator"]
        return env.state.T.astype(np.float32), None

    def close(self) -> None:
        """Nothing to close."""
        self.env.close()


def _make_replayable(recipe: EnvRecipe, seed: int, index: int) -> ReplayableEpisodes:
    return ReplayableEpisodes(make_env(recipe), seed, index)


def is_cartpole(recipe: EnvRecipe) -> bool:
    """Whether this is the CartPole that Gymnasium has vector code for."""
    spec = gym.registry.get(recipe.env_id)
    entry = getattr(spec, "vector_entry_point", None) if recipe.is_plain and spec is not None else None
    return entry == "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


def _vector_code(recipe: EnvRecipe) -> ModuleType:
    """The module that makes the native engine for an environment other than CartPole, if it can step it."""
    from rl_training.envs import atari, pool

    if recipe.maker is not None:
        return pool
    register_on_demand(recipe.env_id)
    spec = gym.registry.get(recipe.env_id)
    return atari if spec is not None and spec.entry_point == "ale_py.env:AtariEnv" else pool


def choose_vectorization(wanted: str, recipe: EnvRecipe, num_envs: int) -> str:
    """Resolve `auto`: native for several CartPoles, otherwise sync; every other kind only on request."""
    obstacle = _vector_code(recipe).find_obstacle(recipe) if wanted == "native" and not is_cartpole(recipe) else None
    if obstacle:
        raise UserError(f"vectorization is 'native', but {obstacle}; use auto, sync or async.")
    if wanted != "auto":
        return wanted
    return "native" if num_envs > 1 and is_cartpole(recipe) else "sync"


def make_engine(
    recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int, vectorization: str, worker_timeout: float = 300.0,
    first: int = 0, device: str = "cpu",
) -> Engine:  # fmt: skip
    """Make the engine of that kind for `num_envs` environments of a run, starting with number `first`."""
    if vectorization == "device":
        from rl_training.envs.device import DeviceEngine  # needs torch, which async workers lack
        from rl_training.envs.device_checks import check_functions, find_device_environment

        found = find_device_environment(recipe)
        if device != "cpu":  # on the CPU, `probe` has tested them
            check_functions(found[0], recipe.env_id, device)
        return DeviceEngine(*found, spaces, num_envs, episode_seed(seed, first, 0), device)
    if vectorization == "native":
        own_seed = episode_seed(seed, first, 0) if first else seed
        if not is_cartpole(recipe):
            engine: Engine = _vector_code(recipe).make_native_engine(recipe, spaces, num_envs, own_seed)
            return engine
        limit: dict[str, Any] = {"max_episode_steps": recipe.max_episode_steps} if recipe.max_episode_steps else {}
        vector = gym.make_vec(recipe.env_id, num_envs, "vector_entry_point", **limit, **recipe.kwargs)
        return CartPoleEngine(vector.unwrapped, own_seed)
    makers = [partial(_make_replayable, recipe, seed, index) for index in range(first, first + num_envs)]
    if vectorization == "async":
        return AsyncEngine(makers, spaces, worker_timeout)
    return SyncEngine([maker() for maker in makers], spaces)
