"""Gymnasium's spaces as plain data, in words and part by part, and how an algorithm sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gs

from rl_training.errors import UserError

MOST_FACTORS = 2**20  # of an action; a few bytes can describe a MultiBinary of any size
SMALLEST_SIDE = 3  # of an image; anything smaller is too small for a convolution and is read as a vector


# What each space is made from, by the names of its attributes and arguments
ARGUMENTS = {
    "Box": ("low", "high", "dtype"), "Discrete": ("n", "start", "dtype"), "MultiDiscrete": ("nvec", "start", "dtype"),
    "MultiBinary": ("n",),
}  # fmt: skip


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
    if "dtype" in given:
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
