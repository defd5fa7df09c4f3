"""`EnvSpaces`: what an algorithm needs to know about an environment, as plain data for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

from rl_training.errors import EnvironmentFailure, UserError
from rl_training.play import random_actions

Array = NDArray[Any]
MOST_FACTORS = 2**20  # of an action; a MultiBinary of a few bytes can claim any number
SMALLEST_SIDE = 3  # of an image; what is smaller has nothing for a convolution and is read as a vector


class ImagePart(NamedTuple):
    """An image inside a Dict or Tuple: its columns in the flattened observation, and how it lies there."""

    columns: slice
    space: gs.Box
    layout: str
    shape: tuple[int, ...]  # with channels first
    scale: float


@dataclass(frozen=True, eq=False)
class EnvSpaces:
    """Observations and actions of one environment.

    Observations reach an algorithm as `[N, *obs_shape]` of `obs_dtype`: a float32 vector, a uint8 image with channels
    first whose largest value is `image_scale`, or, of a Dict or Tuple with images, bytes: those of every image
    (`image_parts`), then the four of every float of the vector that the other parts make. Pixels stay one byte each
    wherever rows are stored, and a store needs only one array. Actions leave it as whole numbers `[N]`
    (discrete) or `[N, K]` (multi_discrete, multi_binary), or as floats in [-1, 1] `[N, D]` (continuous); `map_actions`
    makes them the environment's.
    """

    env_id: str
    obs_kind: str  # "vector", "image" or "mixed"
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
        return int(np.prod(self.obs_shape if self.obs_kind != "mixed" else self.row_space.shape))

    @cached_property
    def image_parts(self) -> list[ImagePart]:
        """The images of a mixed observation, in its order."""
        parts, start = [], 0
        for _, space in leaf_spaces(self.observation_space):
            columns = slice(start, start + int(gs.flatdim(space)))
            if (layout := image_layout(space)) is not None:
                assert isinstance(space, gs.Box)
                parts.append(ImagePart(columns, space, layout, *_read_image(space, layout)))
            start = columns.stop
        return parts

    @cached_property
    def vector_columns(self) -> Array:
        """Where the flattened observation is no image."""
        is_pixel = np.zeros(self.obs_dim, dtype=bool)
        for part in self.image_parts:
            is_pixel[part.columns] = True
        return np.flatnonzero(~is_pixel)

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
        return self._map(actions)

    @cached_property
    def _map(self) -> Callable[[Array], Array]:
        """Chosen once, not per step: the usual Discrete action needs no work at all."""
        space = self.action_space
        shape = space.shape or ()
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            return partial(_scale, low=low, high=high, half=0.5 * (high - low), shape=shape, dtype=space.dtype)
        if isinstance(space, gs.Discrete):
            start = int(space.start)
            return (lambda actions: actions + start) if start else (lambda actions: actions)
        if isinstance(space, gs.MultiDiscrete):
            return lambda actions: (actions.reshape(-1, *shape) + space.start).astype(space.dtype, copy=False)
        return lambda actions: actions.reshape(-1, *shape).astype(space.dtype)

    def as_given(self, actions: Array) -> Sequence[Any]:
        """Actions of a policy `[N, ...]` as `step` of each environment takes them: a discrete one is an int."""
        mapped = self.map_actions(actions)
        return mapped.tolist() if self.action_kind == "discrete" else mapped  # type: ignore[return-value]

    def unmap_actions(self, actions: Array) -> Array:
        """The inverse of `map_actions`, for data that others recorded."""
        space = self.action_space
        if isinstance(space, gs.Box):
            low, high = self._action_bounds
            flat = actions.reshape(len(actions), -1).astype(np.float32)
            span = np.where(high > low, high - low, 1.0).astype(np.float32)  # a dimension without room has one action
            return np.clip(2.0 * (flat - low) / span - 1.0, -1.0, 1.0)
        if isinstance(space, gs.Discrete):
            return np.asarray(actions, dtype=np.int64).reshape(len(actions)) - int(space.start)
        start = space.start if isinstance(space, gs.MultiDiscrete) else 0
        return (np.asarray(actions, dtype=np.int64) - start).reshape(len(actions), -1)

    @cached_property
    def _action_bounds(self) -> tuple[Array, Array]:
        space = self.action_space
        assert isinstance(space, gs.Box)
        low, high = space.low.ravel().astype(np.float32), space.high.ravel().astype(np.float32)
        # rounded inwards, so that no float32 action lies outside the bounds of a float64 space
        low = np.where(low < space.low.ravel(), np.nextafter(low, np.float32(np.inf)), low)
        return low, np.where(high > space.high.ravel(), np.nextafter(high, np.float32(-np.inf)), high)

    def random_actions(self, rng: np.random.Generator, count: int, masks: Array | None = None) -> Array:
        """Uniform actions of a policy [count, ...], legal ones where masks say so."""
        return random_actions(rng, count, self.action_sizes, masks, self.action_kind)

    @cached_property
    def row_space(self) -> gs.Box:
        """The space of the observations that `make_env`'s environment gives: its own, or that flattened."""
        space = self.observation_space
        row = space if isinstance(space, gs.Box) else gs.flatten_space(space)
        assert isinstance(row, gs.Box)
        return row

    def read_row(self, row: Any) -> Array:
        """One observation as an array of the space's shape, or an EnvironmentFailure that says what it is instead."""
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
        """Whether such numbers can be used for the space: another width, or integers for floats."""
        own = self.row_space.dtype
        return dtype == own or np.can_cast(dtype, own, "same_kind") or (dtype.kind in "biu" and own.kind in "biu")

    def encode_rows(self, rows: Sequence[Any]) -> Array:
        """`encode`, for observations that come from environments and are looked at first."""
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
        images = (
            _channels_first(rows[:, part.columns].astype(np.uint8).reshape(-1, *part.space.shape), part.layout)
            for part in self.image_parts
        )
        floats = np.ascontiguousarray(rows[:, self.vector_columns], dtype=np.float32)
        return np.concatenate([*(image.reshape(len(rows), -1) for image in images), floats.view(np.uint8)], axis=1)

    def floats_of(self, encoded: Array) -> Array:
        """What of encoded observations may be a NaN: the vector of mixed ones `[N, V]`, else all of them."""
        if self.obs_kind != "mixed":
            return encoded
        pixels = self.obs_shape[0] - 4 * len(self.vector_columns)
        return np.ascontiguousarray(encoded[:, pixels:]).view(np.float32)

    def decode(self, encoded: Array) -> Array:
        """The inverse of `encode`; what was flattened from a Dict stays flat, as `make_env` has it."""
        if self.obs_kind == "image":
            return _channels_back(encoded, self.image_layout)
        if self.obs_kind == "vector":
            shape = self.observation_space.shape if self.raw_observation["type"] == "Box" else None
            return encoded if shape is None else encoded.reshape(len(encoded), *shape)
        rows, start = np.empty((len(encoded), self.obs_dim), np.float32), 0
        for part in self.image_parts:
            size = math.prod(part.shape)
            image = encoded[:, start : start + size].reshape(-1, *part.shape)
            rows[:, part.columns] = _channels_back(image, part.layout).reshape(len(rows), -1)
            start += size
        rows[:, self.vector_columns] = self.floats_of(encoded)
        return rows

    def encode_for_prediction(self, observation: Any) -> tuple[Array, bool]:
        """One raw observation or a batch of them, as `([N, *obs_shape], was_a_batch)`."""
        rows, is_batch = self._split(observation)
        if not rows:
            raise UserError(f"obs is an empty batch; {self.env_id} wants {in_words(self.observation_space)}.")
        return self.encode(np.stack([self._flatten(row) for row in rows])), is_batch

    def masks_for_prediction(self, action_mask: Any, count: int, *, is_batch: bool) -> Array | None:
        """What a caller allows, one mask or for a batch one per row, as `[count, action_dim]`; None allows all."""
        if action_mask is None:
            return None
        if not self.has_action_mask:
            raise UserError(f"action_mask is given, but {self.env_id} has no action masks; leave it out.")
        if hasattr(action_mask, "tolist"):
            action_mask = action_mask.tolist()
        if not is_batch:
            return self._read_mask(action_mask, "action_mask")[None]
        if not isinstance(action_mask, (list, tuple)) or len(action_mask) != count:
            size = len(action_mask) if isinstance(action_mask, (list, tuple)) else "no"
            raise UserError(f"action_mask has {size} rows; obs is a batch of {count}, and each row needs a mask.")
        return np.stack([self._read_mask(mask, f"action_mask[{i}]") for i, mask in enumerate(action_mask)])

    def _read_mask(self, mask: Any, where: str) -> Array:
        has_parts = isinstance(mask, (list, tuple)) and any(np.iterable(part) for part in mask)
        parts = [read_numbers(part, self.env_id, where) for part in (mask if has_parts else [mask])]
        flat = flatten_mask(parts, self, where)
        if not np.isin(flat, (0, 1)).all():
            raise UserError(f"{where} contains something other than 0 and 1; 1 allows an action and 0 forbids it.")
        self.check_masks(flat[None].astype(bool), where)
        return flat.astype(bool)

    def check_masks(self, masks: Array, where: str) -> None:
        """Refuse masks [N, action_dim] that leave nothing to choose, for a part of the action too."""
        legal = np.logical_or.reduceat(masks, self._mask_starts, axis=1)
        if not legal.all():
            part = f" in part {legal.all(axis=0).argmin()}" if self.action_shape else ""
            raise UserError(f"{where} forbids every action{part}; at least one entry there must be 1.")

    @cached_property
    def _mask_starts(self) -> Array:
        return np.cumsum([0, *self.action_sizes[:-1]])

    def _split(self, observation: Any) -> tuple[list[Any], bool]:
        """The raw observations in `observation`, read as elements of the space, and whether it was a batch."""
        space = self.observation_space
        if isinstance(space, gs.Dict):
            is_batch = isinstance(observation, (list, tuple, np.ndarray))
        elif isinstance(space, gs.Tuple):  # JSON has lists only, so that one observation and a batch look alike
            try:
                return [read_element(space, observation, self.env_id)], False
            except UserError:
                is_batch = isinstance(observation, list) and all(isinstance(row, (list, tuple)) for row in observation)
                if not is_batch:
                    raise
        else:
            observation = read_numbers(observation, self.env_id)
            is_batch = observation.ndim == len(space.shape or ()) + 1
        rows = list(observation) if is_batch else [observation]
        return [read_element(space, row, self.env_id) for row in rows], is_batch

    def _flatten(self, element: Any) -> Array:
        space = self.observation_space
        return np.asarray(element if isinstance(space, gs.Box) else gs.flatten(space, element))


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
    """[-1, 1] to [low, high]; clipped after scaling, so that rounding cannot leave the environment's bounds."""
    scaled = actions + 1.0
    scaled *= half
    scaled += low
    if dtype.kind != "f":
        scaled = np.rint(scaled)
    inside = np.minimum(np.maximum(scaled, low, out=scaled), high, out=scaled)
    return inside.reshape(-1, *shape).astype(dtype, copy=False)


def in_words(space: gs.Space[Any]) -> str:
    """A space for a message: one short line."""
    text = " ".join(str(space).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


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
        raise UserError(f"{where} is not in the observation space {in_words(space)} of {env_id}.")
    return element[()]


def leaf_spaces(space: gs.Space[Any], name: str = "") -> Iterator[tuple[str, gs.Space[Any]]]:
    """The spaces inside a Dict or Tuple, at any depth, each with the names that lead to it; any other space itself."""
    if isinstance(space, (gs.Dict, gs.Tuple)):
        parts = space.spaces.items() if isinstance(space, gs.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from leaf_spaces(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, space


def image_layout(space: gs.Space[Any]) -> str | None:
    """How an image lies: "plane", "channels_first" or "channels_last"; None where the space holds no image.

    Two equal sides are height and width; where that does not tell, the channels are the smallest and rather last.
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


def _read_observation(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...], str, str, float]:
    layout = image_layout(space)
    if layout is not None:
        assert isinstance(space, gs.Box)
        shape, scale = _read_image(space, layout)
        return "image", shape, "uint8", layout, scale
    size = int(gs.flatdim(space)) if _is_supported(space) else 0
    if size < 1:
        raise UserError(
            f"the observation space {in_words(space)} of {env_id} is not supported; "
            "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them are."
        )
    pixels = sum(math.prod(part.shape or ()) for _, part in leaf_spaces(space) if image_layout(part) is not None)
    if pixels:
        return "mixed", (pixels + 4 * (size - pixels),), "uint8", "none", 1.0
    return "vector", (size,), "float32", "none", 1.0


def _read_image(space: gs.Box, layout: str) -> tuple[tuple[int, ...], float]:
    """Its shape with channels first, and its largest value."""
    scale = 255.0 if space.dtype == np.uint8 and np.max(space.high) > 1 else 1.0
    if layout == "plane":
        return (1, *space.shape), scale
    return space.shape if layout == "channels_first" else (space.shape[-1], *space.shape[:-1]), scale


def _is_supported(space: gs.Space[Any]) -> bool:
    if isinstance(space, (gs.Dict, gs.Tuple)):
        parts = space.spaces.values() if isinstance(space, gs.Dict) else space.spaces
        return all(_is_supported(part) for part in parts)
    return isinstance(space, (gs.Box, gs.Discrete, gs.MultiDiscrete, gs.MultiBinary))


def _read_action(env_id: str, space: gs.Space[Any]) -> tuple[str, tuple[int, ...]]:
    if isinstance(space, gs.Discrete):
        return "discrete", (int(space.n),)
    if isinstance(space, gs.MultiDiscrete):
        return "multi_discrete", tuple(int(n) for n in np.ravel(space.nvec))
    if isinstance(space, gs.MultiBinary) and math.prod(space.shape) <= MOST_FACTORS:
        return "multi_binary", (2,) * math.prod(space.shape)
    if isinstance(space, gs.Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return "continuous", (1,) * int(np.prod(space.shape))
    reason = "has infinite bounds; rescale it with gymnasium.wrappers.RescaleAction" if isinstance(space, gs.Box) else (
        "is not supported; Discrete, Box with finite bounds, MultiDiscrete and MultiBinary are"
    )
    raise UserError(f"the action space {in_words(space)} of {env_id} {reason}.")


def describe_space(space: gs.Space[Any]) -> dict[str, Any]:
    """A Gymnasium space as plain data."""
    if isinstance(space, gs.Box):
        return {"type": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, gs.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, gs.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start, "dtype": str(space.dtype)}
    if isinstance(space, gs.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, gs.Dict):
        # pairs, because the order of the parts is the order in which they are flattened
        return {"type": "Dict", "parts": [[name, describe_space(part)] for name, part in space.spaces.items()]}
    if isinstance(space, gs.Tuple):
        return {"type": "Tuple", "parts": [describe_space(part) for part in space.spaces]}
    raise UserError(f"the space {in_words(space)} is not supported.")


def build_space(data: Mapping[str, Any]) -> gs.Space[Any]:
    """The inverse of `describe_space`."""
    match data["type"]:
        case "Box":
            return gs.Box(np.asarray(data["low"]), np.asarray(data["high"]), dtype=np.dtype(data["dtype"]).type)
        case "Discrete":
            return gs.Discrete(data["n"], start=data["start"], dtype=np.dtype(data["dtype"]).type)
        case "MultiDiscrete":
            dtype = np.dtype(data["dtype"]).type
            return gs.MultiDiscrete(np.asarray(data["nvec"]), dtype=dtype, start=np.asarray(data["start"]))
        case "MultiBinary":
            return gs.MultiBinary(data["n"])
        case "Dict":
            return gs.Dict([(name, build_space(part)) for name, part in data["parts"]])
        case _:
            return gs.Tuple([build_space(part) for part in data["parts"]])


def read_action_mask(info: Any, spaces: EnvSpaces) -> Array:
    """The mask of legal actions `[action_dim]` in an environment's info; all legal where it gives none, or no info."""
    mask = info.get("action_mask") if isinstance(info, Mapping) else None
    if mask is None:
        return np.ones(spaces.action_dim, dtype=bool)
    return flatten_mask(mask, spaces, "info['action_mask']").astype(bool)


def read_masks(infos: Iterable[Any], spaces: EnvSpaces) -> Array | None:
    """The masks `[N, action_dim]` of several environments; None where they have none."""
    return np.stack([read_action_mask(info, spaces) for info in infos]) if spaces.has_action_mask else None


def flatten_mask(mask: Any, spaces: EnvSpaces, where: str) -> Array:
    """A mask, whole or a part for each factor of the action, as `[action_dim]` numbers."""
    flat = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, (list, tuple)) else np.ravel(mask)
    if flat.size != spaces.action_dim:
        raise UserError(
            f"{where} of {spaces.env_id} has {flat.size} entries; its action space needs {spaces.action_dim}."
        )
    return flat
