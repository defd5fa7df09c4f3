"""A learner in environments of its own: evaluation with whole episodes, and recorded data for other learners.

Every episode has its own seed, so results do not depend on how many environments run side by side.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rl_training.algorithms.base import Algorithm
from rl_training.config.choices import torch_settings_restored
from rl_training.config.params import read_params
from rl_training.config.replay_params import ReplayParams
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.memory import ArraySpec, available_memory, explain_bytes, format_bytes
from rl_training.data.replay_store import make_buffer
from rl_training.envs.factory import EnvRecipe, UserEnv, episode_limit, make_env, read_recipe
from rl_training.envs.probe import probe_spaces
from rl_training.envs.rendering import drawing_explained, without_screen
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.stepper import Engine, episode_seed
from rl_training.envs.wrappers import Env
from rl_training.errors import EnvironmentFailure, UserError, install
from rl_training.play import closed_after, play, read_success
from rl_training.run import learner
from rl_training.safe_files import output_written, refuse_link
from rl_training.validation import validate

CAN_BE_LEFT = True  # a signal may interrupt this code (run/interruption.py)

EVALUATION_STREAM, RECORDING_STREAM = 2**31, 2**31 + 1  # environment indices that no training environment has
MOST_SIDE_BY_SIDE = 20
MOST_STEPS = 10_000  # for environments without a limit
Watch = Callable[[int, int], None]  # called after every step with the episode and its length so far
NEEDS = f"needs the extra 'video' ({install('video')})"


@dataclass(frozen=True)
class EvaluationResult:
    """Returns and lengths of the episodes, in the order of their seeds."""

    returns: list[float]
    lengths: list[int]
    cut: int = 0  # episodes that were cut because they took too long
    successes: tuple[bool, ...] = ()  # of the episodes that ended with an `info["is_success"]`

    def metrics(self) -> dict[str, Any]:
        """Mean, standard deviation and count as metrics, and the share of successes if the environment tells."""
        share = {"eval_success_rate": float(np.mean(self.successes))} if self.successes else {}
        return {
            "eval_return_mean": float(np.mean(self.returns)),
            "eval_return_std": float(np.std(self.returns)),
            "eval_length_mean": float(np.mean(self.lengths)),
            "eval_episodes": len(self.returns),
            **share,
        }


class Evaluator:
    """Evaluates in new environments every time, so that a result depends only on weights and seed.

    Some environments carry state over between episodes, so reusing them would change a resumed run. `check` runs before
    every step and may raise. `warn` receives an exception of an environment's `close`; without `warn` it is raised.
    An episode is cut, with a warning, after `max_steps` (default: the environment's limit, or 10,000).

    A `Simulator` cannot be made anew: its held-out rows are played, in `engine` if training has one. `has_moved` says
    whether that has left the training rows in other states, because the simulator cannot restore them.
    """

    def __init__(
        self, recipe: EnvRecipe, spaces: EnvSpaces, seed: int, *, max_steps: int | None = None,
        check: Callable[[], None] | None = None, warn: Callable[[str], None] | None = None,
        engine: Engine | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.has_moved = engine, False
        self.recipe, self.spaces, self.seed, self.max_steps = recipe, spaces, seed, max_steps
        self.check, self.warn, self._has_warned = check, warn, False

    def evaluate(
        self, algorithm: Algorithm, episodes: int, *, deterministic: bool = True, window: bool = False,
        videos: Path | None = None, watch: Watch | None = None,
    ) -> EvaluationResult:  # fmt: skip
        """Run that many episodes; the seed of episode i depends only on the run's seed and i.

        They can be shown in a window or recorded as videos; then they run one after the other. `watch` gets the number
        of the episode and its steps so far.
        """
        if self.recipe.made:
            if videos is not None or window:
                raise UserError(f"{self.recipe.env_id} is a Simulator, of which no video or window is made.")
            return self._play_simulator(algorithm, episodes, deterministic)
        if videos is not None:
            with output_written(videos, "the folder of videos"):
                for path in videos.glob("*"):
                    refuse_link(path)
            if find_spec("moviepy") is None:  # otherwise Gymnasium leaves an empty folder
                raise UserError(f"a video {NEEDS}.")
        shown = "rgb_array" if videos is not None else "human" if window else None
        envs: list[Env] = []
        with ExitStack() as held:
            if videos is not None:
                held.enter_context(without_screen())
                held.enter_context(drawing_explained())
            waits = videos is not None  # until a video is written
            held.enter_context(closed_after(envs, self.spaces.env_id, self.warn, waits=waits))
            for _ in range(1 if shown else min(episodes, MOST_SIDE_BY_SIDE)):
                envs.append(make_env(self.recipe, evaluation=True, render_mode=shown))
            limit = self.max_steps or episode_limit(envs[0]) or MOST_STEPS
            try:
                if videos is not None:
                    envs[0] = gym.wrappers.RecordVideo(envs[0], str(videos), lambda _: True, disable_logger=True)
                result = self._play(envs, algorithm, episodes, deterministic, limit, watch)
            except gym.error.DependencyNotInstalled as error:
                if shown is None:
                    raise
                raise UserError(f"a {'window' if videos is None else 'video'} {NEEDS}: {error}.") from None
        return self._warn_of_cuts(result, episodes, limit)

    def _warn_of_cuts(self, result: EvaluationResult, episodes: int, limit: int) -> EvaluationResult:
        if result.cut and not self._has_warned:
            self._has_warned = True
            self._tell(f"evaluation episodes that did not end within {limit:,} steps and were cut there: {result.cut} "
                       f"of {episodes} (eval_max_steps sets that limit)")  # fmt: skip
        return result

    def _play_simulator(self, algorithm: Algorithm, episodes: int, deterministic: bool) -> EvaluationResult:
        """Play the held-out rows of the engine in training, or an engine of its own, all of whose rows are free."""
        view = self.recipe.made[0]
        limit = self.max_steps or view.simulator.max_episode_steps or MOST_STEPS
        engine: Any = self.engine
        if engine is None:
            engine = view.open_engine(self.spaces, max(0, view.simulator.num_envs - episodes), self.seed)
        actor = learner.ActingSession(algorithm, engine.rows, self.seed, deterministic=deterministic)
        before = engine.state_dict() if engine.state_format and len(engine.obs) else None
        logged = dict(engine.logged)
        try:
            result = play_held_out(engine, actor, self.check, episodes, limit)
        finally:
            if before is not None:
                engine.load_state_dict(before)
            engine.logged, self.has_moved = logged, before is None
            if self.engine is None:
                engine.close()
        return self._warn_of_cuts(result, episodes, limit)

    def _tell(self, text: str) -> None:
        if self.warn is None:
            warnings.warn(text, stacklevel=5)
        else:
            self.warn(f"warning: {text}")

    def _play(
        self, envs: list[Env], algorithm: Algorithm, episodes: int, deterministic: bool, limit: int,
        watch: Watch | None = None,
    ) -> EvaluationResult:  # fmt: skip
        actor = learner.ActingSession(algorithm, len(envs), self.seed, deterministic=deterministic)
        act = actor.in_environments(self.spaces, self.check)
        seed_of = partial(episode_seed, self.seed, EVALUATION_STREAM)
        returns, lengths, cut = [0.0] * episodes, [0] * episodes, 0
        successes: list[bool] = []
        for step in play(envs, act, seed_of, self.spaces.env_id, episodes, limit):
            returns[step.episode] += step.reward
            lengths[step.episode] += 1
            if watch is not None:
                watch(step.episode, lengths[step.episode])
            ended = step.terminated or step.truncated
            cut += lengths[step.episode] == limit and not ended
            if (ended or lengths[step.episode] == limit) and (success := read_success(step.info)) is not None:
                successes.append(success)
        return EvaluationResult(returns, lengths, cut, tuple(successes))


def play_held_out(
    engine: Any, actor: learner.ActingSession, check: Callable[[], None] | None, episodes: int, limit: int
) -> EvaluationResult:
    """Play a simulator's held-out rows, each its share of the episodes, all of which begin now.

    The policy acts in the other rows too, but they are not counted. A row in which an episode is cut plays no more.
    """
    held = engine.rows - engine.num_envs
    left = np.array([episodes // held + (row < episodes % held) for row in range(held)])
    returns, lengths, cut = np.zeros(held), np.zeros(held, dtype=np.int64), 0
    found: list[tuple[int, int, float, int]] = []  # number of the row's episodes before, row, return, length
    is_first, numbers = np.ones(engine.rows, dtype=bool), np.zeros(held, dtype=np.int64)
    engine.reset()
    while left.any():
        if check is not None:
            check()
        actions = engine.spaces.map_actions(actor.act(engine.obs.cpu().numpy(), None, is_first))
        moved = engine.advance(torch.from_numpy(np.ascontiguousarray(actions)).to(engine.device), engine.rows)
        rewards, terminated, truncated = (part.cpu().numpy() for part in moved[2:])
        is_first = terminated | truncated
        returns, lengths, ended = returns + rewards[-held:], lengths + 1, is_first[-held:]
        is_cut = ~ended & (lengths >= limit) & (left > 0)
        for row in np.flatnonzero((ended & (left > 0)) | is_cut):
            found.append((int(numbers[row]), int(row), float(returns[row]), int(lengths[row])))
        cut, left = cut + int(is_cut.sum()), np.where(is_cut, 0, np.maximum(left - ended, 0))
        numbers += ended
        returns[ended], lengths[ended] = 0.0, 0
    if not all(math.isfinite(episode[2]) for episode in found):
        raise EnvironmentFailure.not_finite(engine.spaces.env_id, "a reward")
    return EvaluationResult([episode[2] for episode in sorted(found)], [episode[3] for episode in sorted(found)], cut)


# recorded data -------------------------------------------------------------------------------------------------------


def record_random(env_id: str, num_steps: int, seed: int) -> TransitionDataset:
    """Random steps, the same ones that `dataset_kind: random` generates for this size and seed."""
    recipe = read_recipe(env_id, {}, env_id)
    rows_in_memory(num_steps, probe_spaces(recipe))
    return load_transition_dataset(
        "random", env_id=env_id, size=num_steps, seed=seed, make_env=lambda: make_env(recipe)
    )


@torch_settings_restored()
def record_policy(
    path: learner.PathLike, num_steps: int, *, seed: int | None = None, deterministic: bool = True,
    env: UserEnv | None = None,
) -> TransitionDataset:  # fmt: skip
    """Steps of a checkpoint's policy in its training environment; the same seed (the run's) records the same steps."""
    names = env if isinstance(env, tuple) else None
    algorithm, spaces, config = learner.load_algorithm(path, learner.read_checkpoint(path), names)
    dataset = play_policy(algorithm, spaces, config, num_steps, seed=seed, deterministic=deterministic, env=env)
    return replace(dataset, metadata=origin(config, path) | dataset.metadata)


def play_policy(
    algorithm: Algorithm, spaces: EnvSpaces, config: TrainConfig, num_steps: int, *, seed: int | None,
    deterministic: bool, env: UserEnv | None = None,
) -> TransitionDataset:  # fmt: skip
    """Record as `record_policy`, with the learner, spaces and config that `load_algorithm` returns."""
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    learner.check_same_spaces(spaces, probe_spaces(recipe))
    torch.set_num_threads(int(config.threads))
    seed = config.seed if seed is None else seed
    # allocated in advance, so that nothing is copied later
    arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in rows_in_memory(num_steps, spaces).items()}
    played = make_env(recipe)
    with closed_after([played], spaces.env_id):
        act = learner.ActingSession(algorithm, 1, seed, deterministic=deterministic).in_environments(spaces)
        first = episode_seed(seed, RECORDING_STREAM, 0)
        steps = play([played], act, lambda episode: None if episode else first, spaces.env_id)
        for row, step in enumerate(islice(steps, num_steps)):
            for array, value in zip(arrays.values(), step, strict=False):  # a step begins with the arrays' values
                array[row] = value
    return TransitionDataset(**arrays, metadata={"seed": seed, "deterministic": deterministic})


def rows_in_memory(num_steps: int, spaces: EnvSpaces) -> dict[str, ArraySpec]:
    """The arrays of that many rows; more than fits into memory is refused, with the arithmetic."""
    obs = ArraySpec((num_steps, *spaces.row_space.shape), np.dtype(spaces.row_space.dtype))
    actions = ArraySpec((num_steps, *(spaces.action_space.shape or ())), np.dtype(spaces.action_space.dtype))
    rewards, flags = (ArraySpec((num_steps,), np.dtype(kind)) for kind in (np.float32, bool))
    specs = {"obs": obs, "actions": actions, "rewards": rewards, "next_obs": obs}
    specs |= {"terminated": flags, "truncated": flags}
    free = available_memory()
    if free is not None and sum(spec.nbytes for spec in specs.values()) > free:
        raise UserError(
            f"{num_steps} steps need {explain_bytes(specs)}, but only {format_bytes(free)} of memory is free."
        )
    return specs


def read_replay_buffer(path: learner.PathLike) -> TransitionDataset:
    """The replay buffer inside a checkpoint, with the environment's own observations and actions."""
    dataset, spaces = read_policy_replay(path)
    return dataset.map(obs=spaces.decode, actions=spaces.map_actions)


def read_policy_replay(path: learner.PathLike) -> tuple[TransitionDataset, EnvSpaces]:
    """The replay buffer inside a checkpoint as its policy sees it, and the spaces of its environment."""
    tree = learner.read_checkpoint(path)
    if "replay" not in tree["source"]:
        raise UserError(
            f"{path} holds no replay buffer; the latest checkpoint of a replay algorithm does, unless "
            "replay_in_checkpoint is off."
        )
    config = validate(TrainConfig, tree["config"], str(path))
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    if not isinstance(params, ReplayParams) or params.facts.state_size:
        raise UserError(f"{path} is a checkpoint of {config.algo}, which has no replay buffer of transitions.")
    params = params.model_copy(update={"replay_folder": None})  # that folder is the run's own
    spaces, recipe = learner.read_spaces(path, tree["spaces"]), read_recipe(config.env_id, config.env_kwargs)
    buffer = make_buffer(params, spaces, config.num_envs, frame_stack=recipe.image_frame_stack)
    try:
        buffer.load_state_dict(tree["source"]["replay"])
        dataset = TransitionDataset.from_replay(buffer, **origin(config, path))
    except UserError:
        raise
    except Exception as error:  # an edited file can fail in any way
        raise UserError(f"{path}: its replay buffer cannot be read ({learner.describe_error(error)}).") from None
    return dataset, spaces


def origin(config: TrainConfig, path: learner.PathLike) -> dict[str, Any]:
    """Where data of a checkpoint comes from, for a data set's metadata."""
    kwargs = config.model_dump(mode="json")["env_kwargs"]
    named = {"env_id": config.env_id, "policy": config.algo, "checkpoint": str(path)}
    return named | ({"env_kwargs": kwargs} if kwargs else {})


def recipe_of(dataset: TransitionDataset, env_id: str | None) -> EnvRecipe | None:
    """The environment with that id, or the one that the data names, with its arguments if the data has them."""
    own, kwargs = dataset.metadata.get("env_id"), dataset.metadata.get("env_kwargs")
    name = env_id or own
    if not isinstance(name, str):
        return None
    return read_recipe(name, kwargs if isinstance(kwargs, Mapping) and name == own else {}, env_id)


def spaces_of(recipe: EnvRecipe) -> dict[str, Any]:
    """The spaces of this environment's rows; observations that are not a Box are flattened."""
    spaces = probe_spaces(recipe)
    return {"observation_space": spaces.row_space, "action_space": spaces.action_space}
