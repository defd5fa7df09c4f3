"""`EnvSpaces`: what an algorithm must know of an environment, as plain data that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

from rl_training.errors import UserError

Array = NDArray[Any]


@dataclass(frozen=True)
class EnvSpaces:
    """Observations and actions of one environment.

    Observations reach an algorithm as `[N, *obs_shape]` of `obs_dtype`: a float32 vector, or a uint8 image with
    channels first whose largest value is `image_scale`. Actions leave it as whole numbers `[N]` (discrete) or `[N, K]`
    (multi_discrete, multi_binary), or as floats in [-1, 1] `[N, D]` (continuous); `map_actions` makes them the environment's.
    """

    env_id: str
    obs_kind: str  # "vector" or "image"
    obs_shape: tuple[int, ...]
    obs_dtype: str
    image_layout: str  # "none", "channels_first", "channels_last" or "plane": how the raw image lies
    image_scale: float
    action_kind: str  # "discrete", "continuous", "multi_discrete" or "multi_binary"
    action_sizes: tuple[int, ...]  # choices per factor; for continuous actions one 1 per dimension
    raw_observation: dict[str, Any]
    raw_action: dict[str, Any]
    has_action_mask: bool = False
    normalize_observations: bool = False
    normalize_rewards: bool = False

    @classmethod
    def from_gym(
        cls, env_id: str, observation: gs.Space[Any], action: gs.Space[Any], **flags: bool
    ) -> EnvSpaces:
        """The spaces of an environment, or a UserError that says why they are not supported."""
        kind, shape, dtype, layout, scale = _read_observation(env_id, observation)
        action_kind, sizes = _read_action(env_id, action)
        return cls(
            env_id, kind, shape, dtype, layout, scale, action_kind, sizes,
            describe_space(observation), describe_space(action), **flags,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EnvSpaces:
        """The inverse of `to_dict`."""
        values = dict(data)
        for name in ("obs_shape", "action_sizes"):
            values[name] = tuple(values[name])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    @property
    def obs_dim(self) -> int:
        """Entries of one observation."""
        return int(np.prod(self.obs_shape))

    @property
    def action_dim(self) -> int:
        """Outputs that a policy head needs: one per choice, or one per continuous dimension."""
        return sum(self.action_sizes)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action in a batch."""
        return () if self.action_kind == "discrete" else (len(self.action_sizes),)

    @cached_property
    def observation_space(self) -> gs.Space[Any]:
        """The environment's own observation space."""
        return build_space(self.raw_observation)

    @cached_property
    def action_space(self) -> gs.Space[Any]:
        """The environment's own action space."""
        return build_space(self.raw_action)

    def map_actions(self, actions: Array) -> Array:
        """Actions of a policy `[N, ...]` as actions of the environment; the only place where they are scaled."""
        space = self.action_space
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            scaled = low + (np.clip(actions, -1.0, 1.0) + 1.0) * (0.5 * (high - low))
            return scaled.reshape(len(actions), *space.shape).astype(space.dtype, copy=False)
        if isinstance(space, gs.Discrete):
            return actions + space.start if space.start else actions
        if isinstance(space, gs.MultiDiscrete):
            return actions.reshape(len(actions), *space.shape) + space.start
        return actions.reshape(len(actions), *space.shape).astype(space.dtype)  # type: ignore[misc]

    def unmap_actions(self, actions: Array) -> Array:
        """The inverse of `map_actions`, for data that others recorded."""
        space = self.action_space
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            flat = actions.reshape(len(actions), -1).astype(np.float32)
            return np.clip(2.0 * (flat - low) / (high - low) - 1.0, -1.0, 1.0)
        if isinstance(space, gs.Discrete):
            return np.asarray(actions, dtype=np.int64).reshape(len(actions)) - int(space.start)
        start = space.start if isinstance(space, gs.MultiDiscrete) else 0
        return (np.asarray(actions, dtype=np.int64) - start).reshape(len(actions), -1)

    @cached_property
    def _action_bounds(self) -> tuple[Array, Array]:
        space = self.action_space
        assert isinstance(space, gs.Box)
        return space.low.ravel().astype(np.float32), space.high.ravel().astype(np.float32)

    def encode(self, observations: Array) -> Array:
        """Stacked observations `[N, ...]` as the algorithm sees them."""
        if self.obs_kind == "vector":
            return np.asarray(observations, dtype=np.float32).reshape(len(observations), -1)
        images = np.asarray(observations).astype(np.uint8, copy=False)
        if self.image_layout == "channels_last":
            return np.ascontiguousarray(np.moveaxis(images, -1, 1))
        return images[:, None] if self.image_layout == "plane" else images

    def flatten(self, observation: Any) -> Array:
        """One raw observation (a number, a dict, ...) as one array."""
        space = self.observation_space
        return np.asarray(observation) if isinstance(space, gs.Box) else np.asarray(gs.flatten(space, observation))

    def encode_for_prediction(self, observation: Any) -> tuple[Array, bool]:
        """One raw observation or a batch of them, as `([N, *obs_shape], was_a_batch)`."""
        space = self.observation_space
        try:
            if isinstance(space, gs.Box):
                array = np.asarray(observation, dtype=np.float64 if space.dtype.kind == "f" else None)
                is_batch = array.ndim == len(space.shape) + 1
                rows = list(array) if is_batch else [array]
            else:
                is_batch = isinstance(observation, (list, np.ndarray)) and np.ndim(observation) > len(space.shape or ())
                rows = list(observation) if is_batch else [observation]
            rows = [self._check_raw(row) for row in rows]
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"obs is not a valid observation of {self.env_id}, which wants {space}.") from None
        if not rows:
            raise UserError(f"obs is an empty batch; {self.env_id} wants {space}.")
        return self.encode(np.stack(rows)), is_batch

    def _check_raw(self, row: Any) -> Array:
        space = self.observation_space
        if isinstance(space, gs.Box):
            if row.dtype.kind not in "bif" + "u":
                raise UserError(f"obs holds {row.dtype} values; {self.env_id} wants numbers of shape {space.shape}.")
            if row.shape != space.shape:
                raise UserError(f"obs has the shape {row.shape}; {self.env_id} wants {space.shape}.")
            if not np.isfinite(row.astype(np.float64)).all():
                raise UserError("obs holds a NaN or an infinity; every entry must be a finite number.")
            return row.astype(space.dtype)  # type: ignore[no-any-return]
        if isinstance(space, gs.Discrete):
            row = np.int64(row) if float(row) == int(row) else row
        if isinstance(space, gs.Dict):
            row = {name: np.asarray(row[name], dtype=part.dtype) for name, part in space.spaces.items()}
        if isinstance(space, gs.Tuple):
            row = tuple(np.asarray(value, dtype=part.dtype) for value, part in zip(row, space.spaces, strict=True))
        if isinstance(space, (gs.MultiDiscrete, gs.MultiBinary)):
            row = np.asarray(row, dtype=space.dtype)
        if not space.contains(row):
            raise UserError(f"obs {str(row)[:60]} is not in the observation space {space} of {self.env_id}.")
        return self.flatten(row)


def _read_observation(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...], str, str, float]:
    if isinstance(space, gs.Box) and space.dtype in (np.uint8, np.bool_) and len(space.shape) in (2, 3):
        scale = 255.0 if space.dtype == np.uint8 and np.max(space.high) > 1 else 1.0
        if len(space.shape) == 2:
            return "image", (1, *space.shape), "uint8", "plane", scale
        first, middle, last = space.shape
        if first < last and first < middle:
            return "image", (first, middle, last), "uint8", "channels_first", scale
        return "image", (last, first, middle), "uint8", "channels_last", scale
    try:
        size = int(gs.flatdim(space))
    except (NotImplementedError, ValueError, TypeError):
        size = 0
    if size < 1:
        raise UserError(
            f"the observation space {space} of {env_id} is not supported; "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them are."
        )
    return "vector", (size,), "float32", "none", 1.0


def _read_action(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...]]:
    if isinstance(space, gs.Discrete):
        return "discrete", (int(space.n),)
    if isinstance(space, gs.MultiDiscrete):
        return "multi_discrete", tuple(int(n) for n in np.ravel(space.nvec))
    if isinstance(space, gs.MultiBinary):
        return "multi_binary", (2,) * int(np.prod(space.shape))
    if isinstance(space, gs.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return "continuous", (1,) * int(np.prod(space.shape))
    reason = "has infinite bounds; rescale it with gymnasium.wrappers.RescaleAction" if isinstance(space, gs.Box) else (
        "is not supported; Discrete, Box with finite bounds, MultiDiscrete and MultiBinary are"
    )
    raise UserError(f"the action space {space} of {env_id} {reason}.")


def describe_space(space: gs.Space[Any]) -> dict[str, Any]:
    """A Gymnasium space as plain data."""
    if isinstance(space, gs.Box):
        return {"type": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, gs.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gs.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    if isinstance(space, gs.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, gs.Dict):
        return {"type": "Dict", "parts": {name: describe_space(part) for name, part in space.spaces.items()}}
    if isinstance(space, gs.Tuple):
        return {"type": "Tuple", "parts": [describe_space(part) for part in space.spaces]}
    raise UserError(f"the space {space} is not supported.")


def build_space(data: Mapping[str, Any]) -> gs.Space[Any]:
    """The inverse of `describe_space`."""
    match data["type"]:
        case "Box":
            return gs.Box(np.asarray(data["low"]), np.asarray(data["high"]), dtype=np.dtype(data["dtype"]).type)
        case "Discrete":
            return gs.Discrete(data["n"], start=data["start"])
        case "MultiDiscrete":
            return gs.MultiDiscrete(np.asarray(data["nvec"]), start=np.asarray(data["start"]))
        case "MultiBinary":
            return gs.MultiBinary(list(data["shape"]))
        case "Dict":
            return gs.Dict({name: build_space(part) for name, part in data["parts"].items()})
        case _:
            return gs.Tuple([build_space(part) for part in data["parts"]])


def read_action_mask(info: Mapping[str, Any], spaces: EnvSpaces) -> Array:
    """The mask of legal actions `[action_dim]` in an environment's info; all legal where it gives none."""
    mask = info.get("action_mask")
    if mask is None:
        return np.ones(spaces.action_dim, dtype=bool)
    flat = np.asarray(np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple) else np.ravel(mask))
    if flat.size != spaces.action_dim:
        raise UserError(
            f"info['action_mask'] of {spaces.env_id} has {flat.size} entries; its action space needs {spaces.action_dim}."
        )
    return flat.astype(bool)
