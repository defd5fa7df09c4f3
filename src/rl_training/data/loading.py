"""Recorded data of every kind: npz, Minari (read and written with its own code, the `offline` extra), random play."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.data.datasets import REQUIRED, TransitionDataset, refuse_too_large
from rl_training.data.memory import Array
from rl_training.errors import UserError, did_you_mean, first_line, install, kind_and_line
from rl_training.play import closed_after, play
from rl_training.safe_files import read_regular

# What each kind needs. Reading a checkpoint takes its config and spaces, which are unknown here.
NEEDED = {"random": "env_id", "npz": "dataset_path", "minari": "dataset_id"}
_FOLDER = "MINARI_DATASETS_PATH"
_MISSING = f"Minari data sets need the packages minari and h5py; run: {install('offline')}."
Packaged = files("rl_training").joinpath("assets/datasets")


def load_transition_dataset(
    kind: str, *, path: str | Path | None = None, dataset_id: str | None = None, env_id: str | None = None,
    size: int | None = None, seed: int = 0, env_kwargs: Mapping[str, Any] | None = None,
    make_env: Callable[[], Any] | None = None, prefix: str = "",
) -> TransitionDataset:  # fmt: skip
    """The data set of the given kind, with actions in the environment's own range.

    `npz` reads `path`, or the packaged set of that name; `minari` reads `dataset_id` from Minari's folder, or from
    `path` if given; `random` acts at random for `size` steps (default 10,000) in `env_id`, or in what `make_env()`
    returns. For the others `size` keeps the first rows. `prefix` precedes `dataset_size` in error messages.
    """
    if size is not None and size < 1:
        raise UserError(f"{prefix}dataset_size is {size}; it must be at least 1.")
    if kind == "checkpoint":
        raise UserError(
            "dataset_kind is 'checkpoint', which only a run reads; `rl-training dataset collect --checkpoint P "
            "--from-replay` writes such a replay to an npz file, which can be loaded here."
        )
    if kind not in NEEDED:
        raise UserError(f"unknown dataset_kind {kind!r}: {did_you_mean(kind, NEEDED)}")
    given: Any = {"random": env_id or (make_env and "environment"), "npz": path, "minari": dataset_id}[kind]
    if given is None:
        raise UserError(f"dataset_kind is {kind!r}, which needs {NEEDED[kind]}.")
    if kind == "random":
        return make_random_dataset(given, size or 10_000, seed, make_env or (lambda: open_env(given, env_kwargs)))
    dataset = TransitionDataset.from_npz(find_npz(given)) if kind == "npz" else read_minari(given, path, size=size)
    if size is not None and size > len(dataset):
        raise UserError(f"{prefix}dataset_size is {size}, but {given} has only {len(dataset)} rows.")
    return dataset if size is None else dataset.take(slice(size))


def find_npz(path: str | Path) -> str | Path:
    """The path of a file, or of the packaged data set where only its name is given and no such file exists."""
    packaged = {} if os.path.isfile(path) else {entry.name: entry for entry in Packaged.iterdir()}
    return Path(str(packaged.get(str(path), path)))


def export_random_transition_dataset(env_id: str, path: str | Path, num_steps: int, seed: int = 0) -> Path:
    """Act at random in `env_id` for `num_steps` and write the transitions to an npz file; returns its path."""
    return load_transition_dataset("random", env_id=env_id, size=num_steps, seed=seed).save_npz(path)


def open_env(env_id: str, env_kwargs: Mapping[str, Any] | None = None) -> Any:
    """One Gymnasium environment, or a `UserError` that says why not."""
    try:
        return gym.make(env_id, **(env_kwargs or {}))
    except Exception as error:  # an id or arguments from a file can fail in any way
        raise UserError(f"{env_id} cannot be made: {first_line(error)}.") from None


def make_random_dataset(env_id: str, num_steps: int, seed: int, make_env: Callable[[], Any]) -> TransitionDataset:
    """`num_steps` of uniformly random legal actions; the same seed makes the same data."""
    env = make_env()
    with closed_after([env], env_id):
        env.action_space.seed(seed)
        steps = play(
            [env], lambda _, infos, __: [_random_action(env.action_space, infos[0], env_id)],
            lambda episode: None if episode else seed, env_id,
        )  # fmt: skip
        rows = [
            (_encode(env, obs), np.array(action), reward, _encode(env, next_obs), terminated, truncated)
            for obs, action, reward, next_obs, terminated, truncated, *_ in islice(steps, num_steps)
        ]
    arrays = {name: np.stack(column) for name, column in zip(REQUIRED, zip(*rows, strict=True), strict=True)}
    return TransitionDataset.from_arrays(arrays, env_id, env_id=env_id, policy="random", seed=seed)


def _random_action(space: Any, info: Any, env_id: str) -> Any:
    """An action drawn uniformly from those that the mask allows; the mask has any dtype, whole or in parts."""
    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None or isinstance(space, spaces.Box):
        return space.sample()
    is_binary = isinstance(space, spaces.MultiBinary)
    sizes: Any = np.full(space.shape, 2) if is_binary else getattr(space, "nvec", getattr(space, "n", None))
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, list | tuple) else np.ravel(mask)
    if flat.size != np.sum(sizes):
        raise UserError(f"info['action_mask'] of {env_id} has {flat.size} entries; {space} needs {np.sum(sizes)}.")
    legal = [np.flatnonzero(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]
    if not all(part.size for part in legal):
        raise UserError(f"info['action_mask'] of {env_id} forbids every action; one at least must be legal.")
    drawn = np.array([space.np_random.choice(part) for part in legal])  # as Gymnasium draws from an int8 mask
    return (drawn.reshape(space.shape) + getattr(space, "start", 0)).astype(space.dtype)


def _encode(env: Any, obs: Any) -> Any:
    """A copy of a Box observation, any other as Gymnasium flattens it."""
    space = env.observation_space
    return np.array(obs if isinstance(space, spaces.Box) else spaces.flatten(space, obs))


# Minari ---------------------------------------------------------------------------------------------------------------


def _minari() -> Any:
    try:
        import minari
    except ImportError:
        raise UserError(_MISSING) from None
    return minari


@contextlib.contextmanager
def _datasets_in(folder: str | Path | None) -> Iterator[None]:
    """Make Minari use `folder`, which it reads only from its environment variable."""
    before = os.environ.get(_FOLDER)
    try:
        if folder is not None:
            os.environ[_FOLDER] = str(folder)
        yield
    finally:
        os.environ.pop(_FOLDER, None)
        if before is not None:
            os.environ[_FOLDER] = before


def read_minari(dataset_id: str, folder: str | Path | None = None, *, size: int | None = None) -> TransitionDataset:
    """A Minari data set from the local folder, episode after episode, up to the episode that holds row `size`.

    Observations of spaces other than Box are flattened as Gymnasium does; an episode without an end mark is truncated.
    """
    minari = _minari()
    try:
        with _datasets_in(folder):
            _check_metadata(dataset_id)
            source = minari.load_dataset(dataset_id)
        return _read_episodes(source, dataset_id, size)
    except UserError:
        raise
    except ImportError:  # the storage format's package
        raise UserError(_MISSING) from None
    except FileNotFoundError:
        raise UserError(f"{dataset_id} is not a local Minari data set; run: minari download {dataset_id}") from None
    except Exception as error:  # damaged data can fail in any way
        raise UserError(f"{dataset_id} cannot be read by Minari: {kind_and_line(error)}.") from None


def _check_metadata(dataset_id: str) -> None:
    """Refuse metadata without spaces, for which Minari would make the environment that the file describes."""
    from minari.storage import get_dataset_path

    folder = Path(get_dataset_path(dataset_id)) / "data"
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    if odd := [path for path in folder.rglob("*") if path.exists() and not path.is_file() and not path.is_dir()]:
        raise UserError(f"the Minari data set {dataset_id} holds {odd[0].name}, which is not a file; remove it.")
    metadata = json.loads(read_regular(folder / "metadata.json"))
    if missing := [name for name in ("observation_space", "action_space") if not isinstance(metadata.get(name), str)]:
        raise UserError(f"the Minari data set {dataset_id} has no {missing[0]} in its metadata.json; it must have one.")
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if metadata["total_episodes"] > held:  # Minari makes a number for each before it reads them
        raise UserError(f"Minari data set {dataset_id} claims {metadata['total_episodes']} episodes in {held} bytes.")


def _read_episodes(source: Any, dataset_id: str, size: int | None) -> TransitionDataset:
    if isinstance(space := source.action_space, spaces.Dict | spaces.Tuple):
        raise UserError(f"the action space {space} of the Minari data set is not supported; plain spaces are.")
    file = Path(source.storage.data_path) / "main_data.hdf5"
    if file.is_file():
        width = 0 if isinstance(source.observation_space, spaces.Box) else spaces.flatdim(source.observation_space)
        claimed, steps = _claimed_bytes(file, dataset_id), max(1, source.total_steps)
        refuse_too_large(file, claimed + 8 * width * steps, share=min(1.0, (size or steps) / steps))
    parts, rows = [], 0
    for episode in source.iterate_episodes():
        parts.append(_read_episode(episode, source.observation_space))
        rows += len(episode)
        if size is not None and rows >= size:
            break
    if not rows:
        raise UserError(f"{dataset_id} holds no transitions.")
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    env = getattr(source, "env_spec", None)
    metadata = {"dataset_id": dataset_id, "env_id": None if env is None else env.id}
    return TransitionDataset.from_arrays(arrays, dataset_id, **metadata)


def _claimed_bytes(file: Path, dataset_id: str) -> int:
    """Bytes of all arrays in an HDF5 file, by their shapes; a file whose values lie in other files is refused."""
    import h5py

    sizes: list[int] = []
    elsewhere: list[str] = []

    def look(name: str, part: Any) -> None:
        if isinstance(part, h5py.Dataset):
            sizes.append(part.nbytes)
            elsewhere.extend([name] if part.external or part.is_virtual else [])

    with h5py.File(file) as opened:
        opened.visititems_links(lambda n, link: elsewhere.append(n) if isinstance(link, h5py.ExternalLink) else None)
        opened.visititems(look)
    if elsewhere:
        raise UserError(f"the Minari data set {dataset_id} has {elsewhere[0]} in another file, which is not opened.")
    return sum(sizes)


def _read_episode(episode: Any, observation_space: Any) -> dict[str, Array]:
    observations = _flatten(episode.observations, observation_space, len(episode) + 1)
    truncated = np.array(episode.truncations, dtype=bool)
    truncated[-1:] |= not episode.terminations[-1:].any()
    return {
        "obs": observations[:-1], "next_obs": observations[1:], "actions": np.asarray(episode.actions),
        "rewards": np.asarray(episode.rewards), "terminated": np.asarray(episode.terminations), "truncated": truncated,
    }  # fmt: skip


def _flatten(values: Any, space: Any, count: int) -> Array:
    if isinstance(space, spaces.Box):
        return np.asarray(values)
    return np.stack([np.asarray(spaces.flatten(space, _row(values, t))) for t in range(count)])


def _row(values: Any, t: int) -> Any:
    """Step t of Minari's columns, which nest as the space does."""
    if isinstance(values, dict):
        return {name: _row(part, t) for name, part in values.items()}
    return tuple(_row(part, t) for part in values) if isinstance(values, tuple) else values[t]


def write_minari(
    dataset: TransitionDataset, dataset_id: str, folder: str | Path | None = None, *, env_id: str | None = None,
    observation_space: Any = None, action_space: Any = None,
) -> None:  # fmt: skip
    """Store a data set under a Minari id such as `cartpole/random-v0`, with the spaces of its environment.

    The environment is `env_id`, or the one the data set names; with both spaces given none is needed.
    """
    minari = _minari()
    from minari.data_collector import EpisodeBuffer

    starts = [0, *(dataset.episode_ends[:-1] + 1)]
    episodes = [
        EpisodeBuffer(id=number, **_write_episode(dataset, slice(start, end + 1)))
        for number, (start, end) in enumerate(zip(starts, dataset.episode_ends, strict=True))
    ]
    options = {"observation_space": observation_space, "action_space": action_space}
    if observation_space is None or action_space is None:
        options = _environment_of(dataset, env_id)
    if "jpeg_encoding" in inspect.signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False  # images come back bit for bit
    with _datasets_in(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice to name an author and the like
        try:
            minari.create_dataset_from_buffers(
                dataset_id, buffer=episodes, algorithm_name=dataset.metadata.get("policy"), **options
            )
        except ImportError:
            raise UserError(_MISSING) from None
        except (ValueError, FileExistsError) as error:
            raise UserError(f"Minari refuses {dataset_id}: {str(error).splitlines()[0]}") from None
        except TypeError:  # raised for a name that it cannot parse
            raise UserError(f"{dataset_id} is not a Minari id; one is like cartpole/random-v0.") from None


def _environment_of(dataset: TransitionDataset, env_id: str | None) -> dict[str, Any]:
    name = env_id or dataset.metadata.get("env_id")
    if name is None:
        raise UserError("a Minari data set needs the environment it comes from; give env_id.")
    if env_id is None and ":" in str(name):  # Gymnasium would import the module that the file names
        reason = "and a data set does not decide which modules are imported"
        raise UserError(f"the data set names the environment {name!r}, {reason}; give env_id.")
    with contextlib.closing(open_env(name)) as env:
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            space = spaces.flatten_space(space)  # what the rows hold
        return {"env": env.spec, "observation_space": space, "action_space": env.action_space}


def _write_episode(dataset: TransitionDataset, rows: slice) -> dict[str, Any]:
    observations = np.concatenate([dataset.obs[rows], dataset.next_obs[rows][-1:]])
    truncated = dataset.truncated[rows].copy()
    truncated[-1] |= not dataset.terminated[rows][-1]
    return {
        "observations": observations, "actions": dataset.actions[rows], "rewards": dataset.rewards[rows],
        "terminations": dataset.terminated[rows], "truncations": truncated,
    }  # fmt: skip
