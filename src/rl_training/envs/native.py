"""Engines whose environments are stepped by other code, in C++ or as one array; EnvPool's is in `envs/pool.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.factory import EnvRecipe, register_on_demand
from rl_training.envs.pool import PoolEngine, is_pool, open_pool
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.stepper import Engine, Step, episode_seed
from rl_training.envs.wrappers import lost
from rl_training.errors import UserError

MOST_RESETS = 100  # between two seedings: seeding takes as long as 200 steps, a reset as long as 20
MOST_STEPS = 10_000  # between two seedings with sticky actions: a resume replays all of them
KNOWN = ("frameskip", "obs_type", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")


class CartPoleEngine(Engine):
    """Gymnasium's own vectorized CartPole: all environments as one array, next-step autoreset."""

    resets_next_step = True
    state_format = "cartpole"

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.seed = env, seed
        env.action_space = SimpleNamespace(contains=lambda actions: True)  # its check costs a seventh of a step

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

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the arrays and the generator."""
        env = self.env
        env.reset(seed=self.seed)
        env.state, env.steps = np.array(state["state"]), np.array(state["steps"])
        env.prev_done = np.array(state["prev_done"])
        env.np_random.bit_generator.state = state["generator"]
        return env.state.T.astype(np.float32), None

    def close(self) -> None:
        """Close the window, if there is one."""
        self.env.close()


class AtariEngine(Engine):
    """ALE's vector environment: C++ threads, same-step autoreset.

    Observations are those of `wrappers.atari` in the other engines. The emulators do not expose their state. It is a
    function of the seed, the number of resets since seeding, and the actions since the last reset. With sticky actions,
    which draw from the emulator's generator, it is a function of the seed and all actions since seeding. So, to limit
    the replay, each emulator is seeded again (which reloads its game) at the end of a game from time to time.
    """

    state_format = "atari games"

    def __init__(self, recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int) -> None:
        import ale_py

        if tuple(map(int, ale_py.__version__.split(".")[:2])) < (0, 12):
            raise UserError(f"vectorization is 'native', but ale-py is {ale_py.__version__}; it must be 0.12 or newer.")
        from ale_py.vector_env import AtariVectorEnv

        options = recipe.wrappers.atari
        assert options is not None
        given = {**gym.spec(recipe.env_id).kwargs, **recipe.kwargs}
        limits = [limit for limit in (recipe.max_episode_steps, given["max_num_frames_per_episode"]) if limit]
        self.env: Any = AtariVectorEnv(
            given["game"], num_envs, max_num_frames_per_episode=min(limits, default=2**30),
            repeat_action_probability=given["repeat_action_probability"], full_action_space=given["full_action_space"],
            autoreset_mode="SameStep", img_height=options.screen_size, img_width=options.screen_size,
            stack_num=options.frame_stack, frameskip=options.frame_skip, noop_max=options.noop_max + 1,  # exclusive
            episodic_life=False, reward_clipping=False, use_fire_reset=False,
        )  # fmt: skip
        self.spaces, self.seed, self.clip = spaces, seed, recipe.wrappers.clip_range
        self.by_life, self.sticky = options.terminal_on_life_loss, given["repeat_action_probability"] > 0.0
        self._newest = options.frame_stack - 1  # the index of the newest frame
        self._ages = np.zeros(num_envs, dtype=np.int64)  # steps since the episode began
        self._lives = np.zeros(num_envs, dtype=np.int32)
        self._seedings = np.full(num_envs, -1)  # how often each emulator was seeded, minus one
        self._resets = np.zeros(num_envs, dtype=np.int64)  # since seeding; 0 with sticky actions
        self._since = np.zeros(num_envs, dtype=np.int64)  # the row of `_played` where its replay begins
        self._played = bytearray()  # the actions of all emulators, one row per step

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations; every game is loaded again."""
        self._played.clear()
        return self._seed(np.arange(len(self._ages))), None

    def step(self, actions: Array) -> Step:
        """Step every environment; games that are over are reset at once."""
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self._played += actions.astype(np.uint8).tobytes()
        self._ages += 1
        over = terminated | truncated
        done, final_obs = over, None
        if self.by_life:
            life_lost = ~over & lost(self._lives, info["lives"])
            terminated, done = terminated | life_lost, over | life_lost
        self._lives = info["lives"]
        if np.count_nonzero(done):
            final_obs = info["final_obs"] if np.count_nonzero(over) else np.empty_like(obs)
            final_obs[done & ~over] = obs[done & ~over]
            final_obs = self._see(final_obs)
            self._ages[done] = 0
        due = self._count_resets(over)
        obs = self._seed(due) if len(due) else self._see(obs)
        oldest = int(self._since.min())
        del self._played[: oldest * len(done)]
        self._since -= oldest
        rewards = rewards.astype(np.float32)
        if self.clip is not None:
            rewards = rewards.clip(*self.clip)
        return Step(obs, rewards, terminated, truncated, final_obs)

    def _count_resets(self, over: Array) -> Array:
        """Count the resets of these games; return the rows that must be seeded again."""
        if self.sticky:
            return np.flatnonzero(over & (self._steps() - self._since >= MOST_STEPS))
        self._resets[over] += 1
        self._since[over] = self._steps()
        return np.flatnonzero(over & (self._resets > MOST_RESETS))

    def _steps(self) -> int:
        return len(self._played) // len(self._ages)

    def _seed(self, rows: Array) -> Array:
        """Seed and reset these rows; return the observations of all."""
        self._seedings[rows] += 1
        self._resets[rows] = 0
        return self._start(rows)

    def _start(self, rows: Array) -> Array:
        """Seed these rows and repeat their resets since seeding; return the observations of all."""
        seeds = [episode_seed(self.seed, int(row), int(self._seedings[row])) >> 1 for row in rows]  # of 31 bits
        obs, info = self.env.reset(seed=np.array(seeds), options=self._only(rows))
        for count in range(self._resets[rows].max()):
            obs, info = self.env.reset(options=self._only(rows[self._resets[rows] > count]))
        self._since[rows], self._ages[rows], self._lives = self._steps(), 0, info["lives"]
        return self._see(obs)

    def _only(self, rows: Array) -> dict[str, Array]:
        return {"reset_mask": np.isin(np.arange(len(self._ages)), rows)}

    def _see(self, obs: Array) -> Array:
        """Replace frames from before an episode with its first frame, as in Gymnasium's FrameStackObservation."""
        for row in np.flatnonzero(self._ages < self._newest):
            first = self._newest - self._ages[row]
            obs[row, :first] = obs[row, first]
        return self.spaces.encode(obs)

    def state_dict(self) -> dict[str, Any]:
        """The last seeding of each emulator, its resets since then, and the actions that a resume replays."""
        played = np.frombuffer(bytes(self._played), dtype=np.uint8).reshape(-1, len(self._ages))
        counts = {"seedings": self._seedings, "resets": self._resets, "since": self._since}
        return {name: array.copy() for name, array in counts.items()} | {"played": played}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Replay the stored actions; an emulator whose replay starts later than another's first takes any actions."""
        played = np.array(state["played"], dtype=np.int64)
        seedings, resets, since = (np.array(state[name]) for name in ("seedings", "resets", "since"))
        known = played.max(initial=0) < self.env.single_action_space.n and 0 <= resets.min() <= resets.max()
        if not known or resets.max() > MOST_RESETS or since.min() != 0 or since.max() > len(played):
            raise UserError("the checkpoint's Atari episodes hold an action, a reset or a step that does not exist.")
        self._played.clear()
        self._since[:] = 0
        obs = self.env.reset()[0]
        for step in range(len(played) + 1):
            rows = np.flatnonzero(since == step)
            if len(rows):
                self._seedings[rows], self._resets[rows] = seedings[rows], resets[rows]
                obs = self._start(rows)
            if step < len(played):
                obs = self.step(played[step]).obs
        return obs, None

    def close(self) -> None:
        """End the threads, which live as long as the emulators."""
        vars(self.env).pop("ale", None)


def is_cartpole(recipe: EnvRecipe) -> bool:
    """Whether this is the CartPole that Gymnasium has vector code for."""
    entry = getattr(gym.registry.get(recipe.env_id), "vector_entry_point", None) if recipe.is_plain else None
    return entry == "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"


def _is_atari(recipe: EnvRecipe) -> bool:
    if recipe.maker is not None:
        return False
    register_on_demand(recipe.env_id)
    return getattr(gym.registry.get(recipe.env_id), "entry_point", None) == "ale_py.env:AtariEnv"


def find_obstacle(recipe: EnvRecipe) -> str | None:
    """Why there is no engine here for this environment, as half a sentence; None if there is one."""
    if is_cartpole(recipe):
        return None
    if is_pool(recipe.env_id):
        return None if recipe.is_plain else "EnvPool takes no wrappers but normalizing ones"
    if _is_atari(recipe):
        options = recipe.wrappers
        if not options.atari or options.pixels or options.frame_stack > 1:
            return "ALE's vector code needs env_kwargs.wrappers.atari, and its only other wrapper is clip_reward"
        unknown = [name for name in recipe.kwargs if name not in KNOWN]
        return f"ALE's vector code has no env_kwargs.{unknown[0]}" if unknown else None
    try:
        import envpool
    except ImportError:
        return f"{recipe.env_id} has no vector implementation here (EnvPool, the extra 'envpool', is not installed)"
    if recipe.env_id not in envpool.list_all_envs():
        return f"{recipe.env_id} has no vector implementation here or in EnvPool"
    if not recipe.is_plain or recipe.kwargs:
        return "EnvPool takes no env_kwargs but max_episode_steps and normalizing wrappers"
    return None


def make_native_engine(recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int) -> Engine:
    """The engine over `num_envs` environments, for a recipe without an obstacle."""
    if is_cartpole(recipe):
        vector = gym.make_vec(recipe.env_id, num_envs, "vector_entry_point", **recipe.vector_options)
        return CartPoleEngine(vector.unwrapped, seed)
    if _is_atari(recipe):
        return AtariEngine(recipe, spaces, num_envs, seed)
    first_seed = episode_seed(seed, 0, 0) >> 2  # EnvPool counts up from it, in 31 bits
    pool = open_pool(recipe.env_id, recipe.vector_options, num_envs=num_envs, seed=first_seed)
    if is_pool(recipe.env_id):  # the spaces are those of a pool
        return PoolEngine(pool, spaces)
    for name in ("observation_space", "action_space"):
        ours, theirs = getattr(spaces, name), getattr(pool, name)
        if not _agree(ours, theirs):
            raise UserError(
                f"vectorization is 'native', but EnvPool's {recipe.env_id} has the {name} {theirs}, not {ours}; "
                "use auto, sync or async."
            )
    return PoolEngine(pool, spaces)


def _agree(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, gs.Box) and isinstance(theirs, gs.Box):
        return ours.shape == theirs.shape and np.allclose(ours.low, theirs.low) and np.allclose(ours.high, theirs.high)
    return isinstance(ours, gs.Discrete) and bool(ours == theirs)
