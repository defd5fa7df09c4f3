"""Acting from an exported ONNX file with numpy and onnxruntime alone: neither torch nor Gymnasium is imported.

    from rl_training.deploy import Policy
    action = Policy("policy.onnx").predict(obs)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.errors import UserError, first_line

Array = NDArray[Any]
DTYPES = {"float": "float32", "double": "float64"}  # where ONNX and numpy use different names


def _names(structure: Any) -> Iterator[str]:
    """The inputs in a description of observations."""
    if isinstance(structure, str):
        yield structure
    else:
        for part in structure.values() if isinstance(structure, dict) else structure:
            yield from _names(part)


def _read_input(given: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape of one row, and dtype, of an input of a session."""
    kind = given.type.removeprefix("tensor(").removesuffix(")")
    shape, dtype = tuple(given.shape[1:]), np.dtype(DTYPES.get(kind, kind))
    if not all(isinstance(size, int) for size in shape) or dtype.kind not in "biuf":
        raise ValueError(f"its input {given.name} has the type {given.type} and the shape {given.shape}")
    return shape, dtype


class Policy:
    """The policy in a file that `rl-training export --format onnx` wrote.

    `metadata` describes its origin. Observations and actions have the environment's own form.
    """

    def __init__(self, path: str | os.PathLike[str], *, providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise UserError("rl_training.deploy needs onnxruntime (pip install onnxruntime).") from None
        if not os.path.isfile(path):
            raise UserError(f"{path} is not a file; give one that `rl-training export --format onnx` wrote.")
        self.path = path
        try:
            self._session = onnxruntime.InferenceSession(os.fspath(path), providers=list(providers))
            self.metadata: dict[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["rl_training"])
            self._inputs = {given.name: _read_input(given) for given in self._session.get_inputs()}
            parts = sorted(name for name in self._inputs if name not in ("action_mask", "state"))
            if sorted(_names(self.metadata["observation"])) != parts:
                raise ValueError(f"its description of observations does not name its inputs, {', '.join(parts)}")
        except Exception as error:  # onnxruntime has a different exception for every kind of damage
            raise self._useless("be loaded", error) from None
        self.reset()

    def _useless(self, what: str, error: Exception) -> UserError:
        known = isinstance(error, KeyError | TypeError | json.JSONDecodeError | RecursionError)
        reason = "rl-training did not write its metadata" if known else first_line(error)
        return UserError(f"{self.path} cannot {what} ({reason}); export the checkpoint again.")

    def reset(self) -> None:
        """Forget the episode so far; matters only for a policy with memory."""
        self._state: Array | None = None

    def predict(self, obs: Any, *, action_mask: Any = None) -> Any:
        """Return the action for one observation, or the actions for a batch, each as the first step of an episode.

        A batch is an array with one more dimension. For observations with parts it is a list of observations, or one
        observation whose parts are batches.
        """
        return self._run(obs, action_mask, None)[0]

    def act(self, obs: Any, *, action_mask: Any = None) -> Any:
        """Return the action for the next observation of an episode; call `reset()` when an episode starts."""
        action, self._state = self._run(obs, action_mask, self._state)
        return action

    def _run(self, obs: Any, action_mask: Any, state: Array | None) -> tuple[Any, Array | None]:
        parts = dict(self._parts(self.metadata["observation"], obs))
        batch = self._batch_of(parts)
        rows = batch or (1,)
        feed = {name: array.reshape(*rows, *self._inputs[name][0]) for name, array in parts.items()}
        if "action_mask" in self._inputs:
            shape = (*rows, *self._inputs["action_mask"][0])
            mask = np.ones(shape, dtype=bool) if action_mask is None else np.asarray(action_mask).astype(bool)
            if mask.size != np.prod(shape):
                raise UserError(f"action_mask has {mask.size} entries; {' x '.join(map(str, shape))} are needed.")
            feed["action_mask"] = mask.reshape(shape)
        elif action_mask is not None:
            raise UserError("action_mask is given, but the policy was trained without action masks; leave it out.")
        if "state" in self._inputs:
            shape, dtype = self._inputs["state"]
            feed["state"] = state if state is not None and len(state) == rows[0] else np.zeros((*rows, *shape), dtype)
        try:
            actions, *states = self._session.run(None, feed)
        except Exception as error:  # a file whose parts do not fit each other
            raise self._useless("act", error) from None
        action = actions if batch else actions[0]
        whole = action.ndim == 0 and action.dtype.kind in "iu"
        return int(action) if whole else action, states[0] if states else None

    def _batch_of(self, parts: Mapping[str, Array]) -> tuple[int, ...]:
        """The shape of the batch, which is empty for one observation; refuse parts that do not fit each other."""
        found = set()
        for name, array in parts.items():
            shape = self._inputs[name][0]
            rank = array.ndim - len(shape)
            if rank not in (0, 1) or array.shape[rank:] != shape:
                raise UserError(f"{name} has the shape {array.shape}; the policy needs {shape}, or a batch of it.")
            found.add(array.shape[:rank])
        if len(found) != 1 or found == {(0,)}:
            raise UserError(f"the parts of obs are batches of {sorted(found)}; all must be of one size, at least 1.")
        return found.pop()

    def _parts(self, structure: Any, value: Any) -> Iterator[tuple[str, Array]]:
        """(input, array) for each part of an observation, or of a list of observations."""
        if isinstance(structure, str):
            array = np.asarray(value)
            if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
                raise UserError(f"{structure} contains something other than finite numbers; the policy needs numbers.")
            yield structure, array.astype(self._inputs[structure][1])
        elif isinstance(value, list):
            rows = [dict(self._parts(structure, row)) for row in value]
            yield from ((name, np.stack([row[name] for row in rows])) for name in (rows[0] if rows else ()))
        elif isinstance(structure, dict):
            if not isinstance(value, Mapping) or set(value) != set(structure):
                raise UserError(f"obs must be a mapping with exactly the keys {', '.join(structure)}.")
            for name, inner in structure.items():
                yield from self._parts(inner, value[name])
        else:
            if not isinstance(value, tuple) or len(value) != len(structure):
                raise UserError(f"obs must be a tuple of {len(structure)} parts.")
            for inner, part in zip(structure, value, strict=True):
                yield from self._parts(inner, part)
