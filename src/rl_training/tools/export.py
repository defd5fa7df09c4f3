"""Export a trained policy as one file: ONNX, or a program of `torch.export`.

The exported program maps the environment's own observations to its own actions. It contains the encoding, normalizer,
network, masks, the choice of the best action and its scaling. Memory is an input and an output.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor, nn

from rl_training.algorithms.base import Array
from rl_training.envs.device import map_actions
from rl_training.envs.inputs import encode_for_prediction
from rl_training.envs.spaces import EnvSpaces, image_layout, leaf_spaces
from rl_training.errors import TrainingFailure, UserError, install, kind_and_line
from rl_training.run.learner import PathLike, TrainedPolicy, load_algorithm, read_checkpoint
from rl_training.safe_files import output_written, refuse_link, write_text

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
OPSET = 18
OBS = "obs"  # the input of an observation, and the prefix of its parts' names
CHECKED = 1000  # observations on which the exported and the original policy are compared
WIDE = 1e3  # bounds beyond it are treated as infinite
STEPS = 20  # per episode in this comparison, for a policy with memory
TOLERANCE = 1e-4  # of an action, relative to the larger of 1 and its size
MOST_APART = 0.01  # share of the observations that may differ: if two actions are equally good, rounding decides


class ExportedPolicy(nn.Module):
    """Maps inputs in the order of `input_names`, each [N, ...], to actions [N, ...] (and, with memory, the state)."""

    def __init__(self, policy: TrainedPolicy) -> None:
        super().__init__()
        algorithm, spaces = policy.algorithm, policy.spaces
        self._learner = (algorithm,)  # in a tuple, so that critics and optimizers are not part of this module
        self.acting = algorithm.acting()
        for parameter in self.acting.parameters():
            parameter.data = parameter.data.clone()  # no longer a view of memory that also holds the critic
            parameter.requires_grad_(False)
        self.spaces = spaces
        carry = algorithm.initial_carry(1)
        if carry is not None and not isinstance(carry, Tensor):
            raise UserError(f"{policy.config.algo} has a memory of several parts; only one tensor can be exported.")
        self.state_size = None if carry is None else carry.shape[1:]
        self.structure = name_parts(spaces.actor_space)
        self.input_names = list(example_inputs(self, 1, np.random.default_rng(0)))
        self.output_names = ["action"] if self.state_size is None else ["action", "next_state"]
        self.scale = map_actions(spaces, torch.device("cpu"))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The best action, and with memory the state after it."""
        given = dict(zip(self.input_names, inputs, strict=True))
        obs = self.encode(given)
        is_first = torch.zeros_like(obs.flatten(1)[:, 0], dtype=torch.bool)  # a state of zeros is the first one
        out = self._learner[0].act(
            obs, given.get("state"), is_first=is_first, deterministic=True, action_masks=given.get("action_mask")
        )
        return (self.scale(out.actions),) if self.state_size is None else (self.scale(out.actions), out.carry)

    def encode(self, given: Mapping[str, Tensor]) -> Tensor:
        """`EnvSpaces.encode` of the observations with these parts; zeros for those that only the critic sees."""
        if self.spaces.obs_kind == "image":
            return channels_first(given[OBS].to(torch.uint8), self.spaces.image_layout)
        pixels, vector = [], []
        count = given[self.input_names[0]].shape[0]
        for name, space in leaf_spaces(self.spaces.observation_space, OBS):
            part = given.get(name)
            if part is None:
                vector.append(torch.zeros(count, gs.flatdim(space)))
            elif (layout := image_layout(space)) is not None:
                pixels.append(channels_first(part, layout).float().flatten(1))
            else:
                vector.append(flatten(space, part))
        return torch.cat([*pixels, *vector], -1)


def name_parts(space: gs.Space[Any], name: str = OBS) -> Any:
    """The names of the inputs, nested like the parts of an observation: mappings and lists of names, or one name."""
    if isinstance(space, gs.Dict):
        return {str(key): name_parts(part, f"{name}.{key}") for key, part in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        return [name_parts(part, f"{name}.{index}") for index, part in enumerate(space.spaces)]
    return name


def channels_first(image: Tensor, layout: str) -> Tensor:
    """Images [N, ...] of that layout as [N, C, H, W]."""
    if layout == "channels_last":
        return image.permute(0, 3, 1, 2)
    return image.unsqueeze(1) if layout == "plane" else image


def flatten(space: gs.Space[Any], part: Tensor) -> Tensor:
    """`gymnasium.spaces.flatten` for a batch: [N, ...] -> floats [N, D]."""
    rows = part.reshape(part.shape[0], -1)
    if isinstance(space, gs.Discrete | gs.MultiDiscrete):
        sizes = np.ravel(space.n if isinstance(space, gs.Discrete) else space.nvec).tolist()
        columns = zip(rows.split(1, dim=1), np.ravel(space.start).tolist(), sizes, strict=True)
        rows = torch.cat([column == torch.arange(start, start + size) for column, start, size in columns], -1)
    return rows.float()


def draw(space: gs.Space[Any], count: int, rng: np.random.Generator) -> Array:
    """Random elements of a space without parts, [count, ...]; near 0 where a Box is wide or unbounded."""
    drawn, dtype = copy.deepcopy(space), np.dtype(space.dtype)
    if isinstance(space, gs.Box):  # Gymnasium draws a normal number where there are no bounds
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        drawn = gs.Box(np.where(low < -WIDE, -np.inf, low), np.where(high > WIDE, np.inf, high), dtype=np.float64)
    drawn.seed(int(rng.integers(2**31)))
    rows = (drawn.sample() for _ in range(count))
    return np.stack([(row if dtype.kind == "f" else np.rint(row)).astype(dtype) for row in rows])


def draw_masks(spaces: EnvSpaces, count: int, rng: np.random.Generator) -> Array:
    """Masks [count, action_dim] with about half of the actions legal, at least one per factor."""
    pieces = [rng.random((count, size)) < 0.5 for size in spaces.action_sizes]
    for piece in pieces:
        piece[np.arange(count), rng.integers(piece.shape[1], size=count)] = True
    return np.concatenate(pieces, axis=1)


class Export(NamedTuple):
    """The path of the exported policy, and `facts`, the contents of the JSON file next to it."""

    path: Path
    facts: dict[str, Any]


def export_policy(
    checkpoint: PathLike, file_format: str = "onnx", output: PathLike | None = None, network: Any = None
) -> Export:
    """Write the deterministic policy of a checkpoint, compare it with `predict`, and add a JSON file with the result.

    A file that does not act like the checkpoint is not kept.
    """
    if file_format not in SUFFIXES:
        numpy = " (onnx, from which rl_training.deploy acts with numpy and onnxruntime)" * (file_format == "numpy")
        raise UserError(f"format is {file_format!r}; it must be {' or '.join(SUFFIXES)}{numpy}.")
    if missing := [name for name in PACKAGES[file_format] if find_spec(name) is None]:
        raise UserError(f"{missing[0]} is not installed, and --format onnx needs it; run {install('export')}.")
    tree = read_checkpoint(checkpoint)
    policy = TrainedPolicy(*load_algorithm(checkpoint, tree, network))
    path = Path(output or Path(checkpoint).with_suffix(SUFFIXES[file_format]))
    if not path.parent.is_dir() or path.suffix != SUFFIXES[file_format]:
        wanted = f"end with {SUFFIXES[file_format]}" if path.parent.is_dir() else "lie in a folder that exists"
        raise UserError(f"output is {path}; it must {wanted}.")
    # with its own learner, because tracing may change it
    module = ExportedPolicy(TrainedPolicy(*load_algorithm(checkpoint, tree, network))).eval()
    facts: dict[str, Any] = {
        "algo": policy.config.algo, "env_id": policy.spaces.env_id, "format": file_format,
        "opset": OPSET if file_format == "onnx" else None, "checkpoint": str(checkpoint), "step": tree["run"]["step"],
        "observation": module.structure, **describe_shapes(module),
        "versions": {name: version(name) for name in ("rl-training", "torch", *PACKAGES[file_format])},
    }  # fmt: skip
    with output_written(path, "output"):
        refuse_link(path.parent)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
            partial = Path(folder, path.name)
            write_program(module, partial, file_format, facts)
            facts["parity"] = compare(policy, module, load_program(partial, file_format))
            os.replace(partial, path)
        write_text(path.with_name(f"{path.name}.json"), json.dumps(facts, indent=2) + "\n")
    return Export(path, facts)


def describe_shapes(module: ExportedPolicy) -> dict[str, Any]:
    """Name, dtype and shape of every input and output; "batch" is any number of rows."""
    given = example_inputs(module, 2, np.random.default_rng(0))
    with torch.no_grad():
        made = [out.numpy() for out in module(*map(torch.from_numpy, given.values()))]
    kinds = {"inputs": given, "outputs": dict(zip(module.output_names, made, strict=True))}
    return {
        kind: [{"name": name, "dtype": str(a.dtype), "shape": ["batch", *a.shape[1:]]} for name, a in arrays.items()]
        for kind, arrays in kinds.items()
    }


def example_inputs(module: ExportedPolicy, count: int, rng: np.random.Generator) -> dict[str, Array]:
    """Random observations and masks and an empty memory, by the names of the inputs."""
    spaces = module.spaces
    inputs = {name: draw(space, count, rng) for name, space in leaf_spaces(spaces.actor_space, OBS)}
    if spaces.has_action_mask:
        inputs["action_mask"] = draw_masks(spaces, count, rng)
    if module.state_size is not None:
        inputs["state"] = np.zeros((count, *module.state_size), np.float32)
    return inputs


def write_program(module: ExportedPolicy, path: Path, file_format: str, facts: dict[str, Any]) -> None:
    """Trace the policy for any number of rows and write the file."""
    examples = tuple(map(torch.from_numpy, example_inputs(module, 2, np.random.default_rng(0)).values()))
    rows = torch.export.Dim("batch")
    with torch.no_grad(), quiet():
        try:
            program = torch.export.export(module, examples, dynamic_shapes=(tuple({0: rows} for _ in examples),))
        except Exception as error:  # a third-party algorithm may not be traceable
            reason = f"{facts['algo']} cannot be exported, since torch.export cannot trace its act"
            raise TrainingFailure(f"{reason} ({kind_and_line(error)})") from error
        if file_format == "torch":
            torch.export.save(program, path, extra_files={"rl_training.json": json.dumps(facts)})
            return
        made = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=module.input_names,
            output_names=module.output_names, verbose=False,
        )  # fmt: skip
        assert made is not None
        made.model.metadata_props["rl_training"] = json.dumps(facts)
        made.save(path, external_data=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporters, which print, warn and log about unrelated packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def load_program(path: Path, file_format: str) -> Callable[[dict[str, Array]], list[Array]]:
    """The exported policy as a function of its inputs by name."""
    if file_format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda inputs: session.run(None, inputs)
    program = torch.export.load(path).module()
    return lambda inputs: [out.numpy() for out in program(*map(torch.from_numpy, inputs.values()))]


def compare(
    policy: TrainedPolicy, module: ExportedPolicy, run: Callable[[dict[str, Array]], list[Array]]
) -> dict[str, Any]:
    """Compare the file's actions with the policy's on random observations, and count those that differ too much.

    A policy with memory plays episodes, in which each side keeps its own memory.
    """
    rng = np.random.default_rng(0)
    steps = 1 if module.state_size is None else STEPS
    rows = CHECKED // steps
    spaces, session = policy.spaces, policy.session(rows, True)
    memory: dict[str, Array] = {}
    pairs: list[tuple[Array, Array]] = []
    states_apart: list[float] = []
    for step in range(steps):
        inputs = example_inputs(module, rows, rng) | memory
        encoded, _ = encode_for_prediction(spaces, [assemble(module.structure, inputs, row) for row in range(rows)])
        wanted = spaces.map_actions(session.act(encoded, inputs.get("action_mask"), np.full(rows, step == 0)))
        actions, *states = run(inputs)
        pairs.append((wanted.reshape(rows, -1).astype(np.float64), actions.reshape(rows, -1).astype(np.float64)))
        if states:
            memory["state"] = states[0]
            states_apart.append(float(np.abs(states[0] - session.carry.numpy()).max()))
    own, found = (np.concatenate(part) for part in zip(*pairs, strict=True))
    distance = np.abs(found - own)
    apart = int((distance > TOLERANCE * np.maximum(1.0, np.abs(own))).any(1).sum())
    if apart > MOST_APART * len(own):
        differ = f"{apart} of {len(own)} actions differ from predict, by up to {distance.max():.3g}"
        raise TrainingFailure(f"the exported policy is not the checkpoint's: {differ}; nothing was written.")
    return {
        "observations": len(own), "distinct_actions": len(np.unique(own, axis=0)),
        "max_abs_difference": float(distance.max()), "different": apart, "tolerance": TOLERANCE,
        **({"max_abs_state_difference": max(states_apart)} if states_apart else {}),
    }  # fmt: skip


def assemble(structure: Any, inputs: dict[str, Array], row: int) -> Any:
    """One observation of a batch, built from its parts."""
    if isinstance(structure, str):
        return inputs[structure][row]
    if isinstance(structure, dict):
        return {name: assemble(part, inputs, row) for name, part in structure.items()}
    return tuple(assemble(part, inputs, row) for part in structure)
