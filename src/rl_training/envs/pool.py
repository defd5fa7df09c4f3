"""EnvPool as an engine: environments in C++ threads, with next-step autoreset; their state cannot be saved."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.engines import Step
from rl_training.envs.episodes import episode_seed
from rl_training.envs.recipe import EnvRecipe
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.errors import UserError


class PoolEngine:
    """A row that ended resets in the next step; a resume starts new episodes."""

    resets_next_step = True
    state_format = ""

    def __init__(self, pool: Any, spaces: EnvSpaces) -> None:
        self.pool, self.spaces = pool, spaces
        self._dtype = pool.action_space.dtype
        self._ended = np.zeros(0, dtype=bool)

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations."""
        obs, info = self.pool.reset()
        self._ended = np.zeros(len(info["env_id"]), dtype=bool)
        return self.spaces.encode(obs), None

    def step(self, actions: Array) -> Step:
        """Step every environment; a row that ended in the last step resets in this one and is not valid."""
        resets = self._ended
        obs, rewards, terminated, truncated, _ = self.pool.step(actions.astype(self._dtype))
        self._ended = terminated | truncated
        valid = ~resets if np.count_nonzero(resets) else None
        return Step(self.spaces.encode(obs), rewards.astype(np.float32), terminated, truncated, valid=valid)

    def state_dict(self) -> dict[str, Any]:
        """No state: see `Engine.state_format`."""
        return {}

    brief_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Start new episodes."""
        return self.reset()

    def close(self) -> None:
        """End the threads."""
        self.pool.close()


def find_obstacle(recipe: EnvRecipe) -> str | None:
    """Why EnvPool cannot step this environment, as half a sentence; None if it can."""
    try:
        import envpool
    except ImportError:
        return f"{recipe.env_id} has no vector implementation here (EnvPool, the extra 'envpool', is not installed)"
    if recipe.env_id not in envpool.list_all_envs():
        return f"{recipe.env_id} has no vector implementation here or in EnvPool"
    if not recipe.is_plain or recipe.kwargs:
        return "EnvPool takes no env_kwargs but max_episode_steps and normalizing wrappers"
    return None


def make_native_engine(recipe: EnvRecipe, spaces: EnvSpaces, num_envs: int, seed: int) -> PoolEngine:
    """The engine over EnvPool's environment of that id, which must have the spaces of Gymnasium's."""
    import envpool

    limit: dict[str, Any] = {"max_episode_steps": recipe.max_episode_steps} if recipe.max_episode_steps else {}
    first_seed = episode_seed(seed, 0, 0) >> 2  # EnvPool counts up from it, in 31 bits
    pool = envpool.make(recipe.env_id, env_type="gymnasium", num_envs=num_envs, seed=first_seed, **limit)
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
