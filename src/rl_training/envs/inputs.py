"""Read what environments and callers give: action masks, and the observations that `predict` gets.

A mask has one entry per choice; 1 allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gs

from rl_training.envs.spaces import Array, EnvSpaces, in_words
from rl_training.errors import UserError

FEW = 8  # numbers that a sentence shows


def read_masks(infos: Iterable[Any], spaces: EnvSpaces, *, check: bool = False) -> Array | None:
    """The masks `[N, action_dim]` in the infos of N environments, or None if they have none; no mask allows all.

    With `check`, a mask that forbids everything is a UserError.
    """
    if not spaces.has_action_mask:
        return None
    given = (info.get("action_mask") if isinstance(info, Mapping) else None for info in infos)
    everything = np.ones(spaces.action_dim, dtype=bool)
    masks = [everything if mask is None else _flatten(mask, spaces, "info['action_mask']") for mask in given]
    stacked = np.stack(masks).astype(bool)
    if check:
        _check_masks(stacked, spaces, f"info['action_mask'] of {spaces.env_id}")
    return stacked


def _flatten(mask: Any, spaces: EnvSpaces, where: str) -> Array:
    """A mask, given whole or as one part per factor of the action, as `[action_dim]` numbers."""
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, (list, tuple)) else np.ravel(mask)
    if flat.size != spaces.action_dim:
        raise UserError(
            f"{where} of {spaces.env_id} has {flat.size} entries; its action space needs {spaces.action_dim}."
        )
    return flat


def _check_masks(masks: Array, spaces: EnvSpaces, where: str) -> None:
    """Refuse masks [N, action_dim] that leave no legal choice for the action or for one of its factors."""
    legal = np.logical_or.reduceat(masks, spaces.factor_starts, axis=1)
    if not legal.all():
        part = f" in part {legal.all(axis=0).argmin()}" if spaces.action_shape else ""
        raise UserError(f"{where} forbids every action{part}; at least one entry there must be 1.")


def masks_for_prediction(spaces: EnvSpaces, action_mask: Any, count: int, *, is_batch: bool) -> Array | None:
    """The caller's mask (one, or one per row of a batch) as `[count, action_dim]`; None allows all actions."""
    if action_mask is None:
        return None
    if not spaces.has_action_mask:
        raise UserError(f"action_mask is given, but {spaces.env_id} has no action masks; leave it out.")
    if hasattr(action_mask, "tolist"):
        action_mask = action_mask.tolist()
    rows = action_mask if is_batch else [action_mask]
    if not isinstance(rows, (list, tuple)) or len(rows) != count:
        size = len(rows) if isinstance(rows, (list, tuple)) else "no"
        raise UserError(f"action_mask has {size} rows; obs is a batch of {count}, and each row needs a mask.")
    masks = []
    for i, mask in enumerate(rows):
        where = f"action_mask[{i}]" if is_batch else "action_mask"
        has_parts = isinstance(mask, (list, tuple)) and any(np.iterable(part) for part in mask)
        parts = [read_numbers(part, spaces.env_id, where) for part in (mask if has_parts else [mask])]
        masks.append(_flatten(parts, spaces, where))
        if not np.isin(masks[-1], (0, 1)).all():
            raise UserError(f"{where} contains something other than 0 and 1; 1 allows an action and 0 forbids it.")
        _check_masks(masks[-1][None].astype(bool), spaces, where)
    return np.stack(masks).astype(bool)


def encode_for_prediction(spaces: EnvSpaces, observation: Any) -> tuple[Array, bool]:
    """One raw observation or a batch of them, as `([N, *obs_shape], was_a_batch)`."""
    rows, is_batch = _split(spaces, observation)
    if not rows:
        raise UserError(f"obs is an empty batch; {spaces.env_id} wants {in_words(spaces.observation_space)}.")
    space = spaces.observation_space
    flat: list[Any] = rows if isinstance(space, gs.Box) else [gs.flatten(space, row) for row in rows]
    return spaces.encode(np.stack(flat)), is_batch


def _split(spaces: EnvSpaces, observation: Any) -> tuple[list[Any], bool]:
    """The raw observations in `observation`, read as elements of the space, and whether it was a batch."""
    space = spaces.observation_space
    if isinstance(space, gs.Dict):
        is_batch = isinstance(observation, (list, tuple, np.ndarray))
    elif isinstance(space, gs.Tuple):  # JSON has only lists, so one observation and a batch look alike
        try:
            return [read_element(space, observation, spaces.env_id)], False
        except UserError:
            is_batch = isinstance(observation, list) and all(isinstance(row, (list, tuple)) for row in observation)
            if not is_batch:
                raise
    else:
        observation = read_numbers(observation, spaces.env_id)
        is_batch = observation.ndim == len(space.shape or ()) + 1
    rows = list(observation) if is_batch else [observation]
    return [read_element(space, row, spaces.env_id) for row in rows], is_batch


def read_element(space: gs.Space[Any], value: Any, env_id: str, where: str = "obs") -> Any:
    """`value`, perhaps made of plain lists, as an element of `space`, or a UserError that says what does not fit."""
    if isinstance(space, gs.Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            names = ", ".join(map(str, space.spaces))
            raise UserError(f"{where} must be a mapping with exactly the keys {names}, as {env_id} has them.")
        return {name: read_element(part, value[name], env_id, f"{where}.{name}") for name, part in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(space.spaces):
            raise UserError(f"{where} must be a list of {len(space.spaces)} parts, as {env_id} has them.")
        parts = zip(space.spaces, value, strict=True)
        return tuple(read_element(part, entry, env_id, f"{where}[{i}]") for i, (part, entry) in enumerate(parts))
    array = read_numbers(value, env_id, where)
    if array.shape != space.shape:
        raise UserError(f"{where} has the shape {array.shape}; {env_id} wants {space.shape}.")
    with np.errstate(over="ignore"):
        element = array.astype(space.dtype)
    exact = np.isfinite(element) if element.dtype.kind == "f" else element == array
    if not exact.all() or (not isinstance(space, gs.Box) and not space.contains(element)):
        shown = f"{where} is {array.tolist()}, which" if array.size <= FEW else where
        raise UserError(f"{shown} is not in the observation space {in_words(space)} of {env_id}.")
    return element[()]


def read_numbers(value: Any, env_id: str, where: str = "obs") -> Array:
    """`value` as an array of finite numbers, or a UserError."""
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        raise UserError(f"{where} holds rows of different lengths; {env_id} wants rows of one length.") from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{where} holds something that is not a number; {env_id} wants numbers.")
    if not np.isfinite(array).all():
        raise UserError(f"{where} holds a NaN or an infinity; every entry must be a finite number.")
    return array
