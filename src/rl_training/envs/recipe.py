"""`EnvRecipe`: everything needed to make an environment, from a config and from the user's `env=`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym

from rl_training.envs.entry_points import is_provided, looks_like_entry_point
from rl_training.envs.user_env import Env, MadeEnvironment, UserEnv, read_env
from rl_training.envs.wrappers import WrapperOptions
from rl_training.errors import UserError
from rl_training.validation import validate


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

    @property
    def user_env(self) -> UserEnv:
        """The user's `env=` for this environment, to make another recipe from it."""
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
        return self.maker is None and not wrapped and not looks_like_entry_point(self.env_id)

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
    wrappers = kwargs.pop("wrappers", None)
    options = validate(WrapperOptions, {} if wrappers is None else wrappers, "env_kwargs.wrappers")
    env_id = env_id if maker is not None else _with_version(env_id)
    known = named or is_provided(env_id.partition(":")[0])
    return EnvRecipe(env_id, kwargs, limit, options, maker, named, known)


def _with_version(env_id: str) -> str:
    """Replace `CartPole` with the newest `CartPole-v<n>`, as Gymnasium does, but without its warning."""
    if env_id in gym.registry:
        return env_id
    versions = [name.rpartition("-v") for name in gym.registry]
    known = [int(version) for name, _, version in versions if name == env_id and version.isdigit()]
    return f"{env_id}-v{max(known)}" if known else env_id
