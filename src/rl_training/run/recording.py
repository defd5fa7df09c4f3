"""Make recorded data from a checkpoint: steps of its policy, or its replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from rl_training.algorithms.base import Algorithm, Array
from rl_training.config.params import read_params
from rl_training.config.replay import ReplayParams
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.threads import torch_settings_restored
from rl_training.config.train_config import TrainConfig
from rl_training.data import TransitionDataset, load_transition_dataset
from rl_training.data.memory import ArraySpec, available_memory, explain_bytes, format_bytes
from rl_training.data.replay_store import make_buffer
from rl_training.envs.episodes import episode_seed
from rl_training.envs.factory import make_env
from rl_training.envs.probe import probe_spaces
from rl_training.envs.recipe import EnvRecipe, read_recipe
from rl_training.envs.spaces import EnvSpaces
from rl_training.envs.user_env import UserEnv
from rl_training.errors import UserError
from rl_training.play import closed_after, play
from rl_training.run.learner import (
    ActingSession,
    PathLike,
    check_same_spaces,
    describe_error,
    load_algorithm,
    read_checkpoint,
    read_spaces,
)
from rl_training.validation import validate

RECORDING_STREAM = 2**31 + 1  # an environment index that neither training nor evaluation has


def record_random(env_id: str, num_steps: int, seed: int) -> TransitionDataset:
    """Random steps, the same ones that `dataset_kind: random` generates for this size and seed."""
    recipe = read_recipe(env_id, {}, env_id)
    check_room(num_steps, probe_spaces(recipe))
    return load_transition_dataset(
        "random", env_id=env_id, size=num_steps, seed=seed, make_env=lambda: make_env(recipe)
    )


@torch_settings_restored()
def record_policy(
    path: PathLike, num_steps: int, *, seed: int | None = None, deterministic: bool = True,
    env: UserEnv | None = None,
) -> TransitionDataset:  # fmt: skip
    """Steps of a checkpoint's policy in its training environment; the same seed (the run's) records the same steps."""
    algorithm, spaces, config = load_algorithm(path, read_checkpoint(path), env if isinstance(env, tuple) else None)
    dataset = play_policy(algorithm, spaces, config, num_steps, seed=seed, deterministic=deterministic, env=env)
    return replace(dataset, metadata=origin(config, path) | dataset.metadata)


def play_policy(
    algorithm: Algorithm, spaces: EnvSpaces, config: TrainConfig, num_steps: int, *, seed: int | None,
    deterministic: bool, env: UserEnv | None = None,
) -> TransitionDataset:  # fmt: skip
    """Record as `record_policy`, with the learner, spaces and config that `load_algorithm` returns."""
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    check_same_spaces(spaces, probe_spaces(recipe))
    check_room(num_steps, spaces)
    torch.set_num_threads(int(config.threads))
    seed = config.seed if seed is None else seed
    arrays = empty_arrays(num_steps, spaces)
    played = make_env(recipe)
    with closed_after([played], spaces.env_id):
        act = ActingSession(algorithm, 1, seed, deterministic=deterministic).in_environments(spaces)
        first = episode_seed(seed, RECORDING_STREAM, 0)
        steps = play([played], act, lambda episode: None if episode else first, spaces.env_id)
        for row, step in enumerate(islice(steps, num_steps)):
            for array, value in zip(arrays.values(), step, strict=False):  # a step begins with the arrays' values
                array[row] = value
    return TransitionDataset(**arrays, metadata={"seed": seed, "deterministic": deterministic})


def empty_arrays(num_steps: int, spaces: EnvSpaces) -> dict[str, Array]:
    """Allocate arrays for all rows in advance, so that nothing is copied later."""
    seen, done = spaces.row_space, spaces.action_space
    return {
        "obs": np.empty((num_steps, *seen.shape), seen.dtype),
        "actions": np.empty((num_steps, *(done.shape or ())), done.dtype),
        "rewards": np.empty(num_steps, np.float32),
        "next_obs": np.empty((num_steps, *seen.shape), seen.dtype),
        "terminated": np.empty(num_steps, bool),
        "truncated": np.empty(num_steps, bool),
    }


def check_room(num_steps: int, spaces: EnvSpaces) -> None:
    """Refuse data that does not fit into memory; the error shows the arithmetic."""
    obs = ArraySpec((num_steps, *spaces.row_space.shape), np.dtype(spaces.row_space.dtype))
    actions = ArraySpec((num_steps, *spaces.action_shape), np.dtype(np.float32))
    specs = {"obs": obs, "next_obs": obs, "actions": actions}
    free = available_memory()
    if free is not None and sum(spec.nbytes for spec in specs.values()) > free:
        raise UserError(
            f"{num_steps} steps need {explain_bytes(specs)}, but only {format_bytes(free)} of memory is free."
        )


def read_replay_buffer(path: PathLike) -> TransitionDataset:
    """The replay buffer inside a checkpoint, with the environment's own observations and actions."""
    dataset, spaces = read_policy_replay(path)
    return dataset.map(obs=spaces.decode, actions=spaces.map_actions)


def read_policy_replay(path: PathLike) -> tuple[TransitionDataset, EnvSpaces]:
    """The replay buffer inside a checkpoint as its policy sees it, and the spaces of its environment."""
    tree = read_checkpoint(path)
    if "replay" not in tree["source"]:
        raise UserError(
            f"{path} holds no replay buffer; the latest checkpoint of a replay algorithm does, unless "
            "replay_in_checkpoint is off."
        )
    config = validate(TrainConfig, tree["config"], str(path))
    params = read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs)
    if not isinstance(params, ReplayParams):
        raise UserError(f"{path} is a checkpoint of {config.algo}, which has no replay buffer of transitions.")
    params = params.model_copy(update={"replay_folder": None})  # that folder is the run's own
    spaces, recipe = read_spaces(path, tree["spaces"]), read_recipe(config.env_id, config.env_kwargs)
    buffer = make_buffer(params, spaces, config.num_envs, frame_stack=recipe.image_frame_stack)
    try:
        buffer.load_state_dict(tree["source"]["replay"])
        dataset = TransitionDataset.from_replay(buffer, **origin(config, path))
    except UserError:
        raise
    except Exception as error:  # an edited file can fail in any way
        raise UserError(f"{path}: its replay buffer cannot be read ({describe_error(error)}).") from None
    return dataset, spaces


def origin(config: TrainConfig, path: PathLike) -> dict[str, Any]:
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
