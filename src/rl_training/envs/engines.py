"""Step several environments, in this process or one process each, and choose how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rl_training.envs.factory import EnvRecipe, make_env
from rl_training.envs.inputs import read_masks
from rl_training.envs.native import find_obstacle, is_cartpole, make_native_engine
from rl_training.envs.pool import is_pool
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.stepper import Engine, ReplayableEpisodes, Step, StepTold, episode_seed
from rl_training.envs.workers import Workers, pickle_registrations, register_missing
from rl_training.errors import EnvironmentFailure, UserError, definition
from rl_training.play import close_all, read_success

REPLAY_SECONDS = 1.0  # allowed per step of an episode that a worker replays, in addition to worker_timeout


class SyncEngine(Engine):
    """Environments stepped one after the other in this process."""

    state_format = "episodes"

    def __init__(self, envs: list[ReplayableEpisodes], spaces: EnvSpaces) -> None:
        self.envs: list[ReplayableEpisodes] = envs
        self.spaces = spaces
        self._told: StepTold | None = None
        self._as_list = spaces.action_kind == "discrete"
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
        now: list[Any] = [None] * count  # observation and info of each environment
        finals: dict[int, Any] = {}  # the last ones of an episode
        rewards = np.empty(count, dtype=np.float32)
        terminated, truncated = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        given = actions.tolist() if self._as_list else actions
        try:
            for i, (env, action) in enumerate(zip(self.envs, given, strict=True)):
                obs, rewards[i], ended, cut, info = env.step(action)
                now[i] = obs, info
                if ended or cut:
                    terminated[i], truncated[i] = ended, cut
                    finals[i], now[i] = now[i], env.reset()
        except (Exception, SystemExit) as error:
            raise self._failure(error) from error
        obs, masks = self._encode_all(now)
        final_obs = final_masks = successes = None
        if finals:
            lasts = [finals.get(i, row) for i, row in enumerate(now)]
            final_obs, final_masks = self._encode_all(lasts, check=False)
            successes = self._read_successes(finals)
        taken = Step(obs, rewards, terminated, truncated, final_obs, masks, None, final_masks, successes)
        if self._told is not None:
            self._told(taken, [finals.get(i, row)[1] for i, row in enumerate(now)])
        return taken

    def watch_steps(self, told: StepTold) -> None:
        """Call `told` after every step, with the infos of the last steps where episodes ended."""
        self._told = told

    def _read_successes(self, finals: Mapping[int, Any]) -> Array | None:
        """`Step.successes` of these ended environments."""
        found = np.full(len(self.envs), np.nan)
        for i, (_, info) in finals.items():
            if (success := read_success(info)) is not None:
                found[i] = success
        return None if np.isnan(found).all() else found

    def _failure(self, error: BaseException) -> EnvironmentFailure:
        self._broken = True
        place = definition(self.envs[0].env.unwrapped, "step") if self.envs else ""
        return EnvironmentFailure.from_error(self.spaces.env_id, error, place)

    def _encode_all(self, pairs: Sequence[tuple[Any, Any]], check: bool = True) -> tuple[Array, Array | None]:
        rows, infos = zip(*pairs, strict=True)
        masks = read_masks(infos, self.spaces, check=check) if self.spaces.has_action_mask else None
        return self.spaces.encode_rows(rows), masks

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


class AsyncEngine(Engine):
    """One worker process per environment, each with a `SyncEngine` of its own."""

    state_format = "episodes"

    def __init__(self, makers: Sequence[Callable[[], ReplayableEpisodes]], spaces: EnvSpaces, timeout: float) -> None:
        given = pickle_registrations(), spaces.to_dict()
        self.workers = Workers([partial(_make_one, maker, *given) for maker in makers], spaces.env_id, timeout)

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations and masks."""
        return _join_starts(self.workers.call("reset"))

    def step(self, actions: Array) -> Step:
        """Step every environment; those that end are reset at once."""
        steps: list[Step] = self.workers.call_each("step", [(actions[i : i + 1],) for i in range(len(actions))])
        if any(step.successes is not None for step in steps):
            unknown = np.full(1, np.nan)
            steps = [step._replace(successes=unknown) if step.successes is None else step for step in steps]
        if any(step.final_obs is not None for step in steps):  # the others' final rows are arbitrary
            steps = [
                step._replace(final_obs=step.obs, final_masks=step.masks) if step.final_obs is None else step
                for step in steps
            ]
        parts: Any = zip(*steps, strict=True)
        joined: list[Any] = [None if part[0] is None else np.concatenate(part) for part in parts]
        return Step(*joined)

    def state_dict(self) -> dict[str, Any]:
        """Each environment's episode seed and actions."""
        return {"episodes": [state["episodes"][0] for state in self.workers.call("state_dict")]}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Replay every current episode, each in its own process; a long one may take longer than a step."""
        longest = max(len(episode["actions"]) for episode in state["episodes"])
        states = [({"episodes": [episode]},) for episode in state["episodes"]]
        return _join_starts(self.workers.call_each("load_state_dict", states, extra=REPLAY_SECONDS * longest))

    def close(self) -> None:
        """End the processes."""
        self.workers.close()


def _make_one(
    make: Callable[[], ReplayableEpisodes], registrations: Mapping[str, bytes], spaces: Mapping[str, Any]
) -> SyncEngine:
    """The engine of one environment, in a worker process."""
    register_missing(registrations)
    return SyncEngine([make()], EnvSpaces.from_dict(spaces))


def _join_starts(starts: list[tuple[Array, Array | None]]) -> tuple[Array, Array | None]:
    rows, masks = zip(*starts, strict=True)
    return np.concatenate(rows), None if masks[0] is None else np.concatenate(masks)


def _make_replayable(recipe: EnvRecipe, seed: int, index: int) -> ReplayableEpisodes:
    return ReplayableEpisodes(make_env(recipe), seed, index)


def choose_vectorization(wanted: str, recipe: EnvRecipe, num_envs: int, has_workers: bool = False) -> str:
    """Resolve `auto`: native for several CartPoles and for environments that only EnvPool has (but not in workers,
    which could not restore them), otherwise sync; every other kind only on request."""
    if wanted == "native" and (obstacle := find_obstacle(recipe)):
        raise UserError(f"vectorization is 'native', but {obstacle}; use auto, sync or async.")
    if wanted != "auto":
        return wanted
    if is_pool(recipe.env_id) and not has_workers:
        return "sync" if find_obstacle(recipe) else "native"
    return "native" if num_envs > 1 and is_cartpole(recipe) else "sync"


def make_engine(
    recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int, vectorization: str, worker_timeout: float = 300.0,
    first: int = 0, device: str = "cpu",
) -> Engine:  # fmt: skip
    """Make the engine of that kind for `num_envs` environments of a run, starting with number `first`."""
    if recipe.made:
        engine: Engine = recipe.made[0].open_engine(spaces, num_envs, episode_seed(seed, first, 0))
        return engine
    if vectorization == "device":
        from rl_training.envs.device import DeviceEngine  # needs torch, which async workers lack
        from rl_training.envs.device_checks import check_functions, find_device_environment

        env, limit = find_device_environment(recipe)
        if device != "cpu":  # on the CPU, `probe` has tested them
            check_functions(env, recipe.env_id, device)
        spread = recipe.simulator.random_ages
        if spread and limit is None:
            what = f"env_kwargs.simulator.random_ages is true, but {recipe.env_id} has no time limit"
            raise UserError(f"{what}; set env_kwargs.max_episode_steps or leave it out.")
        return DeviceEngine(env, limit, spaces, num_envs, episode_seed(seed, first, 0), device, spread)
    if vectorization == "native":
        return make_native_engine(recipe, spaces, num_envs, episode_seed(seed, first, 0) if first else seed)
    makers = [partial(_make_replayable, recipe, seed, index) for index in range(first, first + num_envs)]
    if vectorization == "async":
        return AsyncEngine(makers, spaces, worker_timeout)
    return SyncEngine([maker() for maker in makers], spaces)
