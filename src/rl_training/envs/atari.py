"""ALE's own vector environment as an engine: Atari emulators stepped by threads in C++, and brought back by replay."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.engines import Step
from rl_training.envs.episodes import episode_seed
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.errors import UserError

SEED_EVERY = 10_000  # steps; loading a game anew takes as long as 200 of them, and a resume replays what came since
KNOWN = ("frameskip", "obs_type", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")


class AtariEngine:
    """Same-step autoreset; observations are those of `wrappers.atari` in the other engines.

    The emulators cannot be asked for their state. So each is seeded again, which loads its game anew, at the first end
    of an episode after SEED_EVERY steps; its state is a function of that seed and the actions since.
    """

    resets_next_step = False
    state_format = "atari"

    def __init__(self, env: Any, spaces: EnvSpaces, seed: int, clip: tuple[float, float] | None) -> None:
        self.env, self.spaces, self.seed, self.clip = env, spaces, seed, clip
        count = env.num_envs
        self._newest = env.single_observation_space.shape[0] - 1  # the place of the newest frame
        self._ages = np.zeros(count, dtype=np.int64)  # steps since the last reset
        self._seedings = np.full(count, -1)  # how often each was seeded, less one
        self._seeded_at = np.zeros(count, dtype=np.int64)  # rows of `_played`
        self._played = bytearray()  # the actions of every step since the oldest seeding

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations, every game loaded anew."""
        self._played.clear()
        return self._seed(np.arange(len(self._ages))), None

    def step(self, actions: Array) -> Step:
        """Step every environment; those that end are reset at once."""
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self._played += actions.astype(np.uint8).tobytes()
        self._ages += 1
        done = terminated | truncated
        final_obs = None
        if np.count_nonzero(done):
            final_obs = self._see(info["final_obs"])
            self._ages[done] = 0
        due = np.flatnonzero(done & (self._steps() - self._seeded_at >= SEED_EVERY))
        obs = self._seed(due) if len(due) else self._see(obs)
        oldest = int(self._seeded_at.min())
        del self._played[: oldest * len(done)]
        self._seeded_at -= oldest
        rewards = rewards.astype(np.float32)
        if self.clip is not None:
            rewards = rewards.clip(*self.clip)
        return Step(obs, rewards, terminated, truncated, final_obs)

    def _steps(self) -> int:
        return len(self._played) // len(self._ages)

    def _seed(self, rows: Array) -> Array:
        """Seed and reset these rows; returns the observations of all."""
        self._seedings[rows] += 1
        self._seeded_at[rows], self._ages[rows] = self._steps(), 0
        seeds = [episode_seed(self.seed, int(row), int(self._seedings[row])) >> 1 for row in rows]  # of 31 bits
        chosen = np.isin(np.arange(len(self._ages)), rows)
        return self._see(self.env.reset(seed=np.array(seeds), options={"reset_mask": chosen})[0])

    def _see(self, obs: Array) -> Array:
        """Frames from before an episode are copies of its first, as in Gymnasium's FrameStackObservation, not black."""
        for row in np.flatnonzero(self._ages < self._newest):
            first = self._newest - self._ages[row]
            obs[row, :first] = obs[row, first]
        return self.spaces.encode(obs)

    def state_dict(self) -> dict[str, Any]:
        """Which seeding each emulator had, at which step, and the actions since the oldest."""
        played = np.frombuffer(bytes(self._played), dtype=np.uint8).reshape(-1, len(self._ages))
        return {"seedings": self._seedings.copy(), "seeded_at": self._seeded_at.copy(), "played": played}

    brief_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Play again what was played; an emulator that was seeded later than another does so until then too."""
        played, seeded_at = np.array(state["played"], dtype=np.int64), np.array(state["seeded_at"])
        known = played.max(initial=0) < self.env.single_action_space.n
        if not known or seeded_at.min() != 0 or seeded_at.max() > len(played):
            raise UserError("the checkpoint's Atari episodes hold an action or a step that does not exist.")
        self._played.clear()
        self._seeded_at, self._seedings = seeded_at, np.array(state["seedings"]) - 1
        obs = self.env.reset()[0]
        for step in range(len(played) + 1):
            rows = np.flatnonzero(seeded_at == step)
            if len(rows):
                obs = self._seed(rows)
            if step < len(played):
                obs = self.step(played[step]).obs
        return obs, None

    def close(self) -> None:
        """End the threads, which live as long as the emulators."""
        vars(self.env).pop("ale", None)


def find_obstacle(recipe: EnvRecipe) -> str | None:
    """Why ALE's vector environment cannot step this, as half a sentence; None: it can."""
    options = recipe.wrappers
    if not options.atari or options.pixels or options.frame_stack > 1:
        return "of env_kwargs.wrappers ALE's vector code needs atari and has besides only clip_reward"
    unknown = [name for name in recipe.kwargs if name not in KNOWN]
    return f"ALE's vector code has no env_kwargs.{unknown[0]}" if unknown else None


def make_native_engine(recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int) -> AtariEngine:
    """The engine over `num_envs` emulators, with the wrappers of the recipe done in C++."""
    import ale_py

    if tuple(map(int, ale_py.__version__.split(".")[:2])) < (0, 12):
        raise UserError(f"vectorization is 'native', but ale-py is {ale_py.__version__}; it must be 0.12 or newer.")
    from ale_py.vector_env import AtariVectorEnv

    options = recipe.wrappers.atari
    assert options is not None
    given = {**gym.spec(recipe.env_id).kwargs, **recipe.kwargs}
    limits = [limit for limit in (recipe.max_episode_steps, given["max_num_frames_per_episode"]) if limit]
    env = AtariVectorEnv(
        given["game"], num_envs, max_num_frames_per_episode=min(limits, default=2**30),
        repeat_action_probability=given["repeat_action_probability"], full_action_space=given["full_action_space"],
        autoreset_mode="SameStep", img_height=options.screen_size, img_width=options.screen_size,
        stack_num=options.frame_stack, frameskip=options.frame_skip, noop_max=options.noop_max + 1,  # it leaves out max
        episodic_life=options.terminal_on_life_loss, reward_clipping=False, use_fire_reset=False,
    )  # fmt: skip
    return AtariEngine(env, spaces, seed, recipe.wrappers.clip_range)
