"""`EnvSpaces`: what an algorithm needs to know about an environment, as plain data; and Gymnasium's spaces, read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

from rl_training.errors import EnvironmentFailure, UserError, did_you_mean
from rl_training.play import random_actions

MOST_FACTORS = 2**20  # of an action; a few bytes can describe a MultiBinary of any size
SMALLEST_SIDE = 3  # of an image; anything smaller is too small for a convolution and is read as a vector


# What each space is made from, by the names of its attributes and arguments
ARGUMENTS = {
    "Box": ("low", "high", "dtype"), "Discrete": ("n", "start", "dtype"), "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
}  # fmt: skip

Array = NDArray[Any]


def describe_space(space: gs.Space[Any]) -> dict[str, Any]:
    """A Gymnasium space as plain data."""
    if isinstance(space, gs.Dict):
        # pairs, because the order of the parts is the order in which they are flattened
        return {"type": "Dict", "parts": [[name, describe_space(part)] for name, part in space.spaces.items()]}
    if isinstance(space, gs.Tuple):
        return {"type": "Tuple", "parts": [describe_space(part) for part in space.spaces]}
    kind = next((kind for kind in ARGUMENTS if isinstance(space, getattr(gs, kind))), None)
    if kind is None:
        raise UserError(f"the space {in_words(space)} is not supported.")
    return {"type": kind} | {name: _as_plain(getattr(space, name)) for name in ARGUMENTS[kind]}


def _as_plain(value: Any) -> Any:
    """An argument of a space as an array, a list, an int or a text."""
    if isinstance(value, np.dtype):
        return str(value)
    return value if isinstance(value, np.ndarray) else np.asarray(value).tolist()


def build_space(data: Mapping[str, Any]) -> gs.Space[Any]:
    """The inverse of `describe_space`."""
    if data["type"] == "Dict":
        return gs.Dict([(name, build_space(part)) for name, part in data["parts"]])
    if data["type"] == "Tuple":
        return gs.Tuple([build_space(part) for part in data["parts"]])
    given = {name: data[name] for name in ARGUMENTS[data["type"]]}
    given = {name: np.asarray(value) if isinstance(value, list) else value for name, value in given.items()}
    if data["type"] == "Discrete" and given["dtype"] == "int64":
        del given["dtype"]  # the default; Gymnasium 1.1 does not take it
    elif "dtype" in given:
        given["dtype"] = np.dtype(given["dtype"]).type
    space: gs.Space[Any] = getattr(gs, data["type"])(**given)
    return space


def in_words(space: gs.Space[Any]) -> str:
    """A short description of a space, for a message."""
    text = " ".join(str(space).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def leaf_spaces(space: gs.Space[Any], name: str = "") -> Iterator[tuple[str, gs.Space[Any]]]:
    """The spaces inside a Dict or Tuple, at any depth, each with the path to it; any other space itself."""
    if isinstance(space, (gs.Dict, gs.Tuple)):
        parts = space.spaces.items() if isinstance(space, gs.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaf_spaces(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, space


def groups_of(space: Any) -> dict[str, Any]:
    """The parts of a Dict by name; any other space is one part without a name."""
    return dict(space.spaces) if isinstance(space, gs.Dict) else {"": space}


def check_groups(env_id: str, space: Any) -> None:
    """Raise a UserError unless an observation space on a device is a Box, or a Dict of Boxes that are vectors."""
    groups = groups_of(space)
    if not all(isinstance(part, gs.Box) for part in groups.values()):
        raise UserError(f"{env_id}: observation_space is {space}; it must be a Box or a Dict of Boxes.")
    if images := [name for name, part in groups.items() if name and image_layout(part)]:
        what = f"{env_id}: the part {images[0]!r} of observation_space is an image ({groups[images[0]]})"
        raise UserError(f"{what}; in a Dict on a device there must be vectors only.")


def image_layout(space: gs.Space[Any]) -> str | None:
    """The layout of an image: "plane", "channels_first" or "channels_last"; None if the space is not an image.

    Two equal sides are height and width. Otherwise the channels are the first side if that is the smallest, else the
    last one.
    """
    if not isinstance(space, gs.Box) or space.dtype not in (np.uint8, np.bool_) or len(space.shape) not in (2, 3):
        return None
    if len(space.shape) == 2:
        return "plane" if min(space.shape) >= SMALLEST_SIDE else None
    first, middle, last = space.shape
    if (first == middle) != (middle == last):
        channels_first = middle == last
    else:
        channels_first = first < middle and first < last
    sides = (middle, last) if channels_first else (first, middle)
    if min(sides) < SMALLEST_SIDE:
        return None
    return "channels_first" if channels_first else "channels_last"


def read_image(space: gs.Box, layout: str) -> tuple[tuple[int, ...], float]:
    """The shape of an image with channels first, and its largest value."""
    scale = 255.0 if space.dtype == np.uint8 and np.max(space.high) > 1 else 1.0
    if layout == "plane":
        return (1, *space.shape), scale
    return space.shape if layout == "channels_first" else (space.shape[-1], *space.shape[:-1]), scale


def read_observation(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...], str, str, float]:
    """Kind, shape, dtype, layout and scale of the observations that an algorithm gets, or a UserError."""
    layout = image_layout(space)
    if layout is not None:
        assert isinstance(space, gs.Box)
        shape, scale = read_image(space, layout)
        return "image", shape, "uint8", layout, scale
    supported = (gs.Box, gs.Discrete, gs.MultiDiscrete, gs.MultiBinary)
    size = int(gs.flatdim(space)) if all(isinstance(part, supported) for _, part in leaf_spaces(space)) else 0
    if size < 1:
        raise UserError(
            f"the observation space {in_words(space)} of {env_id} is not supported; "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them are."
        )
    pixels = sum(math.prod(part.shape or ()) for _, part in leaf_spaces(space) if image_layout(part) is not None)
    if pixels:
        return "mixed", (pixels + 4 * (size - pixels),), "uint8", "none", 1.0
    return "vector", (size,), "float32", "none", 1.0


def read_action(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...]]:
    """The kind of the actions, and the number of choices of each factor, or a UserError."""
    if isinstance(space, gs.Discrete):
        return "discrete", (int(space.n),)
    if isinstance(space, gs.MultiDiscrete):
        return "multi_discrete", tuple(int(n) for n in np.ravel(space.nvec))
    if isinstance(space, gs.MultiBinary) and math.prod(space.shape) <= MOST_FACTORS:
        return "multi_binary", (2,) * math.prod(space.shape)
    if isinstance(space, gs.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return "continuous", (1,) * int(np.prod(space.shape))
    reason = "is not supported; Discrete, Box with finite bounds, MultiDiscrete and MultiBinary are"
    if isinstance(space, gs.Box):
        wrapper = "gymnasium.wrappers.TransformAction(env, lambda a: a, gymnasium.spaces.Box(low, high, shape))"
        reason = f"has infinite bounds; give it finite ones, such as with {wrapper}"
    raise UserError(f"the action space {in_words(space)} of {env_id} {reason}.")


class ImagePart(NamedTuple):
    """An image inside a Dict or Tuple."""

    shape: tuple[int, ...]  # with channels first
    scale: float
    columns: Array  # of its pixels in the flattened observation, channels first


@dataclass(frozen=True, eq=False)
class EnvSpaces:
    """Observations and actions of one environment.

    Observations reach an algorithm as `[N, *obs_shape]` of `obs_dtype`: a float32 vector, or a uint8 image with
    channels first whose largest value is `image_scale`. For a Dict or Tuple with images they are bytes: the pixels of
    every image (`image_parts`), then four bytes per float of the vector that the other parts form. So stored pixels
    take one byte each, and a store needs only one array. An algorithm returns actions as integers `[N]` (discrete) or
    `[N, K]` (multi_discrete, multi_binary), or as floats in [-1, 1] `[N, D]` (continuous); `map_actions` converts them
    to the environment's actions.
    """

    env_id: str
    obs_kind: str  # "vector", "image" or "mixed"
    obs_shape: tuple[int, ...]
    obs_dtype: str
    image_layout: str  # "none", "channels_first", "channels_last" or "plane": layout of the raw image
    image_scale: float
    action_kind: str  # "discrete", "continuous", "multi_discrete" or "multi_binary"
    action_sizes: tuple[int, ...]  # choices per factor; for continuous actions one 1 per dimension
    raw_observation: dict[str, Any]
    raw_action: dict[str, Any]
    has_action_mask: bool = False
    normalize_observations: bool = False
    normalize_rewards: bool = False
    critic_obs: tuple[str, ...] = ()  # keys of a Dict that only the critic sees

    @classmethod
    def from_gym(
        cls, env_id: str, observation: gs.Space[Any], action: gs.Space[Any], **flags: Any
    ) -> EnvSpaces:
        """The spaces of an environment, or a UserError that says why they are not supported."""
        kind, shape, dtype, layout, scale = read_observation(env_id, observation)
        action_kind, sizes = read_action(env_id, action)
        return cls(
            env_id, kind, shape, dtype, layout, scale, action_kind, sizes,
            describe_space(observation), describe_space(action), **flags,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EnvSpaces:
        """The inverse of `to_dict`."""
        values = dict(data)
        for name in ("obs_shape", "action_sizes", "critic_obs"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def with_critic_obs(self, keys: Sequence[str]) -> EnvSpaces:
        """The same spaces, of whose observation only the critic sees these parts; a UserError if that is impossible."""
        if not keys:
            return self
        space, asked = self.observation_space, f"critic_obs is {list(keys)}"
        if not isinstance(space, gs.Dict):
            raise UserError(f"{asked}, but {self.env_id} has no Dict observation: {in_words(space)}; leave it out.")
        if unknown := [key for key in keys if key not in space.spaces]:
            raise UserError(f"{asked}; {self.env_id} has no part {unknown[0]!r}; {did_you_mean(unknown[0], space)}")
        if images := [key for key in keys if any(image_layout(part) for _, part in leaf_spaces(space[key]))]:
            raise UserError(f"{asked}, but {images[0]!r} has an image; only vectors can be for the critic alone.")
        if set(keys) == set(space.spaces):
            raise UserError(f"{asked}, which is everything; the actor of {self.env_id} must see at least one part.")
        return replace(self, critic_obs=tuple(keys))

    @cached_property
    def actor_space(self) -> gs.Space[Any]:
        """The part of the observation space that the actor sees, which is all that acting needs."""
        space = self.observation_space
        if not isinstance(space, gs.Dict):
            return space
        return gs.Dict([(key, part) for key, part in space.spaces.items() if key not in self.critic_obs])

    @cached_property
    def actor_columns(self) -> Array:
        """The indices within `vector_columns` that the actor sees."""
        space = self.observation_space
        parts = space.spaces.items() if isinstance(space, gs.Dict) else [("", space)]
        seen = np.concatenate([np.full(int(gs.flatdim(part)), key not in self.critic_obs) for key, part in parts])
        return np.flatnonzero(seen[self.vector_columns])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    @property
    def obs_dim(self) -> int:
        """Entries of one observation."""
        return int(np.prod(self.obs_shape if self.obs_kind != "mixed" else self.row_space.shape))

    @cached_property
    def image_parts(self) -> list[ImagePart]:
        """The images of a mixed observation, in its order."""
        parts, start = [], 0
        for _, space in leaf_spaces(self.observation_space):
            size = int(gs.flatdim(space))
            if (layout := image_layout(space)) is not None:
                assert isinstance(space, gs.Box)
                columns = _channels_first(np.arange(start, start + size).reshape(1, *space.shape), layout)
                parts.append(ImagePart(*read_image(space, layout), columns.ravel()))
            start += size
        return parts

    @cached_property
    def pixel_columns(self) -> Array:
        """The columns of the flattened observation that belong to images, in the order in which they are stored."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(part.columns for part in self.image_parts)])

    @cached_property
    def vector_columns(self) -> Array:
        """The columns of the flattened observation that belong to no image."""
        return np.setdiff1d(np.arange(self.obs_dim), self.pixel_columns)

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
        """Convert a policy's actions `[N, ...]` to actions of the environment; the only place where they are scaled."""
        return self._map(actions)

    @cached_property
    def _map(self) -> Callable[[Array], Array]:
        """The mapping, chosen once instead of per step: a usual Discrete action needs no conversion."""
        space = self.action_space
        shape = space.shape or ()
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            return partial(_scale, low=low, high=high, half=0.5 * (high - low), shape=shape, dtype=space.dtype)
        start = getattr(space, "start", 0)
        if isinstance(space, gs.Discrete) and start == 0:
            return lambda actions: actions
        return lambda actions: (actions.reshape(-1, *shape) + start).astype(space.dtype, copy=False)

    def as_given(self, actions: Array) -> Sequence[Any]:
        """Convert a policy's actions `[N, ...]` to arguments of each environment's `step`: a discrete one is an int."""
        mapped = self.map_actions(actions)
        return mapped.tolist() if self.action_kind == "discrete" else mapped  # type: ignore[return-value]

    def unmap_actions(self, actions: Array) -> Array:
        """The inverse of `map_actions`, for data that others recorded."""
        space = self.action_space
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            flat = actions.reshape(len(actions), -1).astype(np.float32)
            span = np.where(high > low, high - low, 1.0).astype(np.float32)  # if low == high, there is one action
            scaled: Array = np.clip(2.0 * (flat - low) / span - 1.0, -1.0, 1.0)
            return scaled
        shifted = np.asarray(actions, dtype=np.int64) - getattr(space, "start", 0)
        return shifted.reshape(len(actions), *self.action_shape)

    @cached_property
    def _action_bounds(self) -> tuple[Array, Array]:
        space = self.action_space
        assert isinstance(space, gs.Box)
        low, high = space.low.ravel().astype(np.float32), space.high.ravel().astype(np.float32)
        # rounded inwards, so that no float32 action is outside the bounds of a float64 space
        low = np.where(low < space.low.ravel(), np.nextafter(low, np.float32(np.inf)), low)
        return low, np.where(high > space.high.ravel(), np.nextafter(high, np.float32(-np.inf)), high)

    def random_actions(self, rng: np.random.Generator, count: int, masks: Array | None = None) -> Array:
        """Uniform random actions [count, ...] in the policy's form; only legal ones if there are masks."""
        return random_actions(rng, count, self.action_sizes, masks, self.action_kind)

    @cached_property
    def row_space(self) -> gs.Box:
        """The space of observations from `make_env`'s environment: its own observation space, or that flattened."""
        space = self.observation_space
        row = space if isinstance(space, gs.Box) else gs.flatten_space(space)
        assert isinstance(row, gs.Box)
        return row

    def read_row(self, row: Any) -> Array:
        """Convert one observation to an array of the space's shape, or raise an EnvironmentFailure with the reason."""
        try:
            array = np.asarray(row)
        except ValueError:  # rows of different lengths
            array = np.empty((), dtype=object)
        space = self.row_space
        if array.shape == space.shape and self._reads(array.dtype):
            return array
        if array.shape == space.shape:
            what = f"returned an observation of dtype {array.dtype}; its space says {space.dtype}"
        elif array.dtype.kind in "biuf":
            what = f"returned an observation of shape {array.shape}; its space says {space.shape}"
        else:
            found = "None" if array.ndim == 0 and array.item() is None else f"a {type(row).__name__}"
            what = f"returned {found} as an observation; its space says numbers of shape {space.shape}"
        raise EnvironmentFailure.of(self.env_id, what)

    def _reads(self, dtype: np.dtype[Any]) -> bool:
        """Whether numbers of this dtype are accepted for the space: another width, or integers for floats."""
        own = self.row_space.dtype
        return dtype == own or np.can_cast(dtype, own, "same_kind") or (dtype.kind in "biu" and own.kind in "biu")

    def encode_rows(self, rows: Sequence[Any]) -> Array:
        """`encode` for observations straight from environments, which are checked first."""
        try:
            stacked = np.array(rows)  # a quarter of the time of np.stack
            fits = stacked.shape[1:] == self.row_space.shape and self._reads(stacked.dtype)
        except ValueError:
            fits = False
        if not fits:
            stacked = np.stack([self.read_row(row) for row in rows])
        return self.encode(stacked)

    def encode(self, observations: Array) -> Array:
        """Stacked observations `[N, ...]` as the algorithm sees them."""
        if self.obs_kind == "vector":
            return np.asarray(observations, dtype=np.float32).reshape(len(observations), -1)
        if self.obs_kind == "image":
            return _channels_first(np.asarray(observations).astype(np.uint8, copy=False), self.image_layout)
        rows = np.asarray(observations)
        pixels, vector = (rows.take(columns, axis=1) for columns in (self.pixel_columns, self.vector_columns))
        floats = np.ascontiguousarray(vector, dtype=np.float32)
        return np.concatenate([pixels.astype(np.uint8), floats.view(np.uint8)], axis=1)

    def floats_of(self, encoded: Array) -> Array:
        """The part of encoded observations that may contain NaN: the vector of mixed ones `[N, V]`, else everything."""
        if self.obs_kind != "mixed":
            return encoded
        return np.ascontiguousarray(encoded[:, len(self.pixel_columns) :]).view(np.float32)

    def decode(self, encoded: Array) -> Array:
        """The inverse of `encode`; observations that `make_env` flattened stay flat."""
        if self.obs_kind == "image":
            return _channels_back(encoded, self.image_layout)
        if self.obs_kind == "vector":
            shape = self.observation_space.shape if self.raw_observation["type"] == "Box" else None
            return encoded if shape is None else encoded.reshape(len(encoded), *shape)
        rows = np.empty((len(encoded), self.obs_dim), np.float32)
        rows[:, self.pixel_columns] = encoded[:, : len(self.pixel_columns)]
        rows[:, self.vector_columns] = self.floats_of(encoded)
        return rows

    @cached_property
    def factor_starts(self) -> Array:
        """The index at which the choices of each factor of an action start."""
        return np.cumsum([0, *self.action_sizes[:-1]])


def _channels_first(images: Array, layout: str) -> Array:
    """Images [N, ...] of that layout as [N, C, H, W]."""
    if layout == "channels_last":
        return np.ascontiguousarray(np.moveaxis(images, -1, 1))
    return images[:, None] if layout == "plane" else images


def _channels_back(images: Array, layout: str) -> Array:
    """The inverse of `_channels_first`."""
    if layout == "channels_last":
        return np.ascontiguousarray(np.moveaxis(images, 1, -1))
    return images[:, 0] if layout == "plane" else images


def _scale(actions: Array, low: Array, high: Array, half: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Scale [-1, 1] to [low, high], then clip, so that rounding cannot exceed the environment's bounds."""
    scaled = actions + 1.0
    scaled *= half
    scaled += low
    if dtype.kind != "f":
        scaled = np.rint(scaled)
    inside = np.minimum(np.maximum(scaled, low, out=scaled), high, out=scaled)
    return inside.reshape(-1, *shape).astype(dtype, copy=False)
