"""`ManagedAlgorithm`: learn, evaluate, predict, save, load and resume, the same for every algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from rl_training.envs.factory import UserEnv, read_env
from rl_training.errors import UserError
from rl_training.experiment.checkpointing import save_checkpoint
from rl_training.experiment.config import TrainConfig, names_config
from rl_training.runtime.acting import ActingSession
from rl_training.runtime.run import Callback
from rl_training.runtime.workflows import (
    AnyConfig,
    TrainedPolicy,
    TrainResult,
    evaluate_checkpoint,
    load_policy,
    plain_action,
    read_checkpoint,
    read_config,
    resume_training,
    train,
)
from rl_training.validation import validate

Self = TypeVar("Self", bound="ManagedAlgorithm")


class Actor:
    """Acts in one environment and remembers: `reset()` at the start of an episode, then `act(obs)`."""

    def __init__(self, policy: TrainedPolicy, deterministic: bool) -> None:
        self._spaces = policy.spaces
        self._session = ActingSession(policy.algorithm, 1, policy.seed, deterministic=deterministic)
        self.reset()

    def reset(self) -> None:
        """Forget the episode so far; a stochastic policy goes on drawing, so that episodes differ."""
        self._session.forget()
        self._is_first = True

    def act(self, obs: Any, *, action_mask: Any = None) -> Any:
        """The action for the next observation of the episode, among those that `action_mask` allows."""
        spaces = self._spaces
        encoded, is_batch = spaces.encode_for_prediction(obs)
        if is_batch:
            raise UserError(f"obs is a batch of {len(encoded)}; an actor takes one at a time.")
        masks = spaces.masks_for_prediction(action_mask, 1, is_batch=False)
        actions = self._session.act(encoded, masks, np.array([self._is_first]))
        self._is_first = False
        return plain_action(spaces.map_actions(actions)[0])


class ManagedAlgorithm:
    """An algorithm and its config: learn, evaluate, predict, save, load.

    The first argument is an environment (a Gymnasium id, a function or class that makes one, or one that is made) or a
    config (a TrainConfig, a mapping, a file or a preset such as `ppo/cartpole`). A string that names a file or a preset
    is a config, any other an environment. Keywords are fields of TrainConfig and hyper-parameters of the algorithm:
    `PPO("CartPole-v1", num_envs=8, learning_rate=3e-4)`. `env` is the environment of a config that is for another one.
    """

    algo: ClassVar[str] = ""

    def __init__(
        self, config_or_env: AnyConfig | UserEnv | None = None, *, env: UserEnv | None = None, **settings: Any
    ) -> None:
        config: Any = config_or_env
        name = type(self).__name__
        if config is not None and not _is_config(config):
            if env is not None:
                raise UserError(f"{name} got two environments, {config!r} and env={env!r}; give one.")
            config, env = None, config
        if config is None and env is None and "env_id" not in settings:
            raise UserError(f'{name} needs an environment, such as {name}("CartPole-v1").')
        env = read_env(env)
        self.config = read_config(config, env, self.algo, settings)
        self.env: UserEnv = self.config.named if env is None else env
        self._checkpoint: Path | None = None
        self._policy: TrainedPolicy | None = None

    def learn(self, callbacks: Iterable[Callback] | None = None) -> TrainResult:
        """Train as the config says; afterwards `evaluate` and `predict` use the result."""
        return self._adopt(train(self.config, env=self.env, callbacks=callbacks))

    def resume(self, **changes: Any) -> TrainResult:
        """Go on from the newest checkpoint; arguments as `resume_training` takes them, e.g. `total_timesteps`."""
        return self._adopt(resume_training(self._path("resume"), env=self.env, **changes))

    def evaluate(self, num_episodes: int | None = None) -> dict[str, Any]:
        """Metrics of whole episodes in environments of its own."""
        return evaluate_checkpoint(self._path("evaluate"), num_episodes=num_episodes, env=self.env)

    def predict(self, obs: Any, deterministic: bool = True, *, action_mask: Any = None) -> Any:
        """The environment's action for an observation, or actions for a batch.

        Every call is treated as the first step of an episode; to play episodes with a policy that has memory
        (Dreamer) use `actor()`. `action_mask` is as the environment's `info` has it, for a batch one per
        observation; None allows every action.
        """
        return self._loaded().predict(obs, deterministic, action_mask=action_mask)

    def actor(self, deterministic: bool = True) -> Actor:
        """An actor with memory of its episode."""
        return Actor(self._loaded(), deterministic)

    def save(self, path: str | Path, include_replay: bool = False) -> Path:
        """One file with everything: config, spaces, learner, normalisers, and the replay buffer on request."""
        tree = read_checkpoint(self._path("save"))
        if include_replay and not tree["config"]["replay_in_checkpoint"]:
            raise UserError("include_replay is True, but the run kept no replay buffer: replay_in_checkpoint is false.")
        if not include_replay:
            tree["source"].pop("replay", None)
        return save_checkpoint(path, tree)

    @classmethod
    def load(cls: type[Self], path: str | Path, *, env: UserEnv | None = None) -> Self:
        """The algorithm in a file that `save` or a run wrote."""
        managed = cls(validate(TrainConfig, read_checkpoint(path)["config"], str(path)), env=env)
        managed._checkpoint = Path(path)
        managed._policy = load_policy(path)
        return managed

    def _adopt(self, result: TrainResult) -> TrainResult:
        self._checkpoint, self._policy = result.checkpoint_path, result.policy
        return result

    def _path(self, verb: str) -> Path:
        if self._checkpoint is None:
            raise UserError(f"there is nothing to {verb} yet; call learn() or load() first.")
        return self._checkpoint

    def _loaded(self) -> TrainedPolicy:
        if self._policy is None:
            raise UserError("there is no policy yet; call learn() or load() first.")
        return self._policy


def _is_config(given: Any) -> bool:
    return names_config(given) if isinstance(given, str) else isinstance(given, TrainConfig | Mapping | Path)
