"""Action masks: which actions an environment allows, one entry per choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.errors import UserError


def read_action_mask(info: Any, spaces: EnvSpaces) -> Array:
    """The mask of legal actions `[action_dim]` in an environment's info; all are legal if it has no mask or info."""
    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None:
        return np.ones(spaces.action_dim, dtype=bool)
    return flatten_mask(mask, spaces, "info['action_mask']").astype(bool)


def read_masks(infos: Iterable[Any], spaces: EnvSpaces) -> Array | None:
    """The masks `[N, action_dim]` of several environments, or None if they have none."""
    return np.stack([read_action_mask(info, spaces) for info in infos]) if spaces.has_action_mask else None


def stack_masks(infos: Iterable[Any], spaces: EnvSpaces) -> Array:
    """The masks `[N, action_dim]` of several environments, or a UserError if one forbids everything."""
    masks = np.stack([read_action_mask(info, spaces) for info in infos])
    check_masks(masks, spaces, f"info['action_mask'] of {spaces.env_id}")
    return masks


def flatten_mask(mask: Any, spaces: EnvSpaces, where: str) -> Array:
    """A mask, given whole or as one part per factor of the action, as `[action_dim]` numbers."""
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, (list, tuple)) else np.ravel(mask)
    if flat.size != spaces.action_dim:
        raise UserError(
            f"{where} of {spaces.env_id} has {flat.size} entries; its action space needs {spaces.action_dim}."
        )
    return flat


def check_masks(masks: Array, spaces: EnvSpaces, where: str) -> None:
    """Refuse masks [N, action_dim] that leave no legal choice for the action or for one of its factors."""
    legal = np.logical_or.reduceat(masks, spaces.factor_starts, axis=1)
    if not legal.all():
        part = f" in part {legal.all(axis=0).argmin()}" if spaces.action_shape else ""
        raise UserError(f"{where} forbids every action{part}; at least one entry there must be 1.")
