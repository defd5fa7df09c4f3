"""2,000 configs and checkpoints, each wrong in one place: every one is one sentence, and nothing is written.

The wrong values come from the models' own JSON schemas, so that a new field is covered when it is added.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

from resume_cases import SPECS, StopAt, env_of, tiny
from rl_training.config.params import EarlyStopping, Schedule
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.envs.wrappers import WrapperOptions
from rl_training.errors import UserError
from rl_training.experiment.default_manager import DefaultExperimentManager
from rl_training.record.checkpoints import load_checkpoint, save_checkpoint
from rl_training.run.loop import RunState
from rl_training.run.workflows import evaluate_checkpoint, predict_checkpoint, resume_training, train

COUNT, SAMPLE, COMMANDS, SEED = 2000, 150, 60, 20260101
NAN, INF = float("nan"), float("inf")
Tree = dict[Any, Any]


class Case(NamedTuple):
    """One wrong input: what it is, how to prepare it in a folder, the uses that must refuse it, words of the answer."""

    name: str
    prepare: Callable[[Path], Any]
    uses: tuple[str, ...]
    words: tuple[str, ...]


# ---- wrong values, from a schema -------------------------------------------------------------------------------------


def kinds_of(schema: Tree, definitions: Tree) -> list[Tree]:
    """The alternatives of a schema, references followed."""
    if "$ref" in schema:
        return kinds_of(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return [kind for part in schema["anyOf"] for kind in kinds_of(part, definitions)] if "anyOf" in schema else [schema]


def wrong_values(schema: Tree, definitions: Tree) -> Iterator[Any]:
    """Values that the schema cannot hold, however leniently text and numbers are read."""
    kinds = kinds_of(schema, definitions)
    types = {kind.get("type", "enum" if {"enum", "const"} & set(kind) else "any") for kind in kinds}
    choices = [choice for kind in kinds for choice in kind.get("enum", [kind["const"]] if "const" in kind else [])]
    numeric = types & {"integer", "number"}
    if "any" in types:
        return
    if "null" not in types:
        yield None
    if "object" not in types:
        yield from ({}, {"x": 1}, {1: 2})
    if "array" not in types:
        yield from ([], [1, "x"], [[]], [None])
    if "string" not in types or choices:
        yield from ("nonsense", "", "1,5", "0x1f", "--", "1 2", "ünï", "a" * 5000, "line\nbreak")
    misses = [miss for choice in choices for miss in (f"{choice}x", choice[1:], choice.upper())]
    yield from (miss for miss in misses if miss not in choices)  # "async" without its first letter is right
    if "boolean" not in types and not numeric:
        yield from (True, False)
    if not numeric and "boolean" not in types:
        yield from (5, -1, 2.5, NAN, 10**30)
    if "boolean" in types and not numeric:
        yield from (2, -1, 0.5, NAN, 10**30, "yess", "tru")
    for kind in kinds if numeric else ():
        yield from wrong_numbers(kind)
    for kind in kinds:
        if kind.get("type") == "array":
            yield from wrong_arrays(kind, definitions)
        elif kind.get("type") == "string" and kind.get("minLength"):
            yield ""


def wrong_numbers(kind: Tree) -> Iterator[Any]:
    if kind.get("type") not in ("integer", "number"):
        return
    yield from (True, False, NAN, INF, -INF, "nan", "inf", "-inf", "1e", "one", 10**400)
    low, high = kind.get("minimum"), kind.get("maximum")
    above, below = kind.get("exclusiveMinimum"), kind.get("exclusiveMaximum")
    yield from () if low is None else (low - 1, low - 1e9, -(10**12), str(low - 1))
    yield from () if above is None else (above, above - 0.5, -1e9, str(above))
    yield from () if high is None else (high + 1, high * 2 + 1, 10**18, str(high + 1))
    yield from () if below is None else (below, below + 0.5)
    if kind["type"] == "integer":
        yield from (1.5, -0.5, "2.5", 1e-9, 10**30, "9e99")


def wrong_arrays(kind: Tree, definitions: Tree) -> Iterator[Any]:
    yield from ("64", 5, {"0": 1}, "[1, 2]")
    if "prefixItems" in kind:
        good = [1] * len(kind["prefixItems"])
        yield from ([], good[1:], [*good, 1], ["x", *good[1:]], [None, *good[1:]], [NAN, *good[1:]])
        return
    items = kind.get("items", {})
    yield from ([value] for value in wrong_values(items, definitions) if not isinstance(value, bool))
    if items.get("type") == "integer":  # widths of layers
        yield from ([0], [-1], [10**9], [8, 0], [64, 64, -64])
    if "maxItems" in kind:
        yield [8] * (kind["maxItems"] + 1)


def wrong_names(names: list[str], rng: random.Random) -> Iterator[str]:
    """Near misses of the names, and nonsense."""
    for name in names:
        place = rng.randrange(len(name))
        for wrong in (name[:place] + name[place + 1 :], name[:place] + name[place] + name[place:], name.upper()):
            if wrong and wrong not in names:
                yield wrong
    yield from ("", "nonsense", " ", "learning rate", "__class__", "a" * 3000, "new\nline", "ключ")


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the tree with a value at a path."""
    result = copy.copy(tree)
    result[path[0]] = value if len(path) == 1 else put(tree.get(path[0]) or {}, path[1:], value)
    return result


def drop(tree: Any, path: tuple[Any, ...]) -> Any:
    """A copy of the tree without what is at a path."""
    result = copy.copy(tree)
    if len(path) == 1:
        del result[path[0]]
    else:
        result[path[0]] = drop(tree[path[0]], path[1:])
    return result


# ---- wrong configs ---------------------------------------------------------------------------------------------------


def base_config(algo: str) -> Tree:
    return tiny(algo, Path("out")).model_dump(mode="json")


@cache
def schema_of(model: Any) -> Tree:
    return model.model_json_schema()  # type: ignore[no-any-return]


def model_edits(model: Any, path: tuple[str, ...], *skip: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, wrong value) for every field of a model."""
    schema = schema_of(model)
    for name, field in schema["properties"].items():
        if name not in skip:
            for value in wrong_values(field, schema.get("$defs", {})):
                yield (*path, name), value


# What is right for the schema and wrong for what the words mean.
MEANT: dict[str, tuple[Any, ...]] = {
    "algo": ("pppo", "PPO", "ppo ", "sarsa", "p", "none"),
    "env_id": (
        "CartPole-v9", "CartPol-v1", "cartpole-v1", "Cart Pole-v1", "nope", "../CartPole-v1", "no_such_module:Env",
        "numpy:nope", "os:getcwd", "json:dumps", "resume_cases:SPECS", "CartPole-v1:x", ":", "ALE/Nope-v5", "v1", "\0",
        "test_robustness:TextActions", "test_robustness:EndlessActions", "test_robustness:TextObservations",
        "test_robustness:BrokenReset", "test_robustness:NoEnvironment",
    ),
    "execution_backend": ("spark", "", "LOCAL_SYNC"),
    "device": ("gpu", "5", "cuda:", "cuda:-1", "cuda:x", "cuda:²", "cuda:99999", "CPU", "", "cpu:0"),
    "accelerate": ("graph", "cuda_graph", "", "true"),
    "matmul_precision": ("medium", "tf32", ""),
    "threads": (0, -1, 1025, "all", 1.5),
    "vectorization": ("threads",),
}  # fmt: skip
MEANT_ENV: tuple[tuple[tuple[str, ...], Any], ...] = (
    *((("max_episode_steps",), value) for value in (0, -1, 1.5, "ten", True, [], {}, NAN)),
    *((("wrappers",), value) for value in (5, "atari", [], [{"atari": {}}], True, {"atary": {}}, {"": {}})),
    (("gravitty",), 3), (("sutton",), 3), (("wrappers", "atari"), {}),
    (("wrappers", "pixels"), {"resize_shape": [0, 0]}),
    (("wrappers", "pixels"), {"resize_shape": [-4, 84]}), (("wrappers", "clip_reward"), [1.0, -1.0]),
    (("nested",), {1: 2}), (("value",), object()), (("value",), {2, 3}), (("value",), b"x"),
)  # fmt: skip


class TextActions(gym.Env[Any, Any]):
    """Actions that no algorithm takes."""

    observation_space: Any = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space: Any = gym.spaces.Text(5)

    def reset(self, **_: Any) -> Any:
        return np.zeros(2, dtype=np.float32), {}


class EndlessActions(TextActions):
    """A Box without bounds."""

    action_space = gym.spaces.Box(-INF, INF, (2,))


class TextObservations(TextActions):
    """Observations that no algorithm reads."""

    observation_space, action_space = gym.spaces.Text(5), gym.spaces.Discrete(2)


class BrokenReset(TextActions):
    """Fails when it is reset."""

    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        raise RuntimeError("the simulator\nis not there")


def NoEnvironment() -> int:
    """Makes something else."""
    return 5


def config_edits(algo: str, rng: random.Random) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every (path, wrong value) of one algorithm's config."""
    params = SPECS[algo].params
    fields = [name for name in params.model_fields if name != "schedules"]
    yield from model_edits(TrainConfig, (), "algo_kwargs", "env_kwargs", "benchmark")
    yield from model_edits(params, ("algo_kwargs",), "schedules", "early_stopping")
    yield from model_edits(WrapperOptions, ("env_kwargs", "wrappers"), "pixels", "atari")
    for name, option in schema_of(WrapperOptions)["$defs"].items():
        wrapper = {"PixelOptions": "pixels", "AtariOptions": "atari"}[name]
        for field, schema in option["properties"].items():
            yield from ((("env_kwargs", "wrappers", wrapper, field), value) for value in wrong_values(schema, {}))
    for name, meant in MEANT.items():
        yield from (((name,), value) for value in meant)
    for path, value in MEANT_ENV:
        yield ("env_kwargs", *path), value
    for name in ("algo_kwargs", "env_kwargs", "benchmark"):
        yield from (((name,), value) for value in (5, "x", [], [1], None, {1: 2}, True))
    yield from ((("benchmark",), {"a": value}) for value in (object(), {1: 2}, b"x", [[{2: 3}]]))
    yield from (((name,), 1) for name in wrong_names(list(TrainConfig.model_fields), rng))
    yield from ((("algo_kwargs", name), 1) for name in wrong_names(fields, rng) if name != "schedules")
    yield from early_stopping_edits(rng)
    yield from schedule_edits(algo, rng)


def early_stopping_edits(rng: random.Random) -> Iterator[tuple[tuple[str, ...], Any]]:
    good = {"metric": "eval_return_mean", "threshold": 1.0, "patience": 2}
    place = ("algo_kwargs", "early_stopping")
    yield from ((place, value) for value in (5, "x", [], [1], True, {}, {"metric": "loss"}))
    for path, value in model_edits(EarlyStopping, ()):
        yield place, put(good, path, value)
    yield from ((place, {**good, name: 1}) for name in wrong_names(list(good), rng))


def schedule_edits(algo: str, rng: random.Random) -> Iterator[tuple[tuple[str, ...], Any]]:
    good = {"type": "linear", "start": 0.5, "end": 0.1}
    place = ("algo_kwargs", "gamma_schedule")
    yield from ((place, value) for value in (5, "linear", [], [0.5, 0.1], True, {}, {"start": 0.5}))
    for path, value in model_edits(Schedule, ()):
        if not (path == ("end",) and value is None):
            yield place, put(good, path, value)
    yield from ((place, {**good, name: 1}) for name in wrong_names([*good, "fraction"], rng))
    yield from ((place, {**good, end: value}) for end in ("start", "end") for value in (-0.1, 1.1, 50))
    for name in ("hidden_sizes", "num_steps", "activation", "nonsense", ""):
        yield ("algo_kwargs", f"{name}_schedule"), good


def config_cases(rng: random.Random) -> list[Case]:
    cases = []
    for algo in SPECS:
        base = base_config(algo)
        for path, value in config_edits(algo, rng):
            cases.append(config_case(f"{algo} {'.'.join(path)} = {value!r:.60}", put(base, path, value), path))
        for name in ("algo", "env_id", "total_timesteps"):
            cases.append(config_case(f"{algo} without {name}", drop(base, (name,)), (name,)))
    text = yaml.safe_dump(base_config("ppo"))
    for name, wrong in wrong_texts(text).items():
        cases.append(Case(f"config file: {name}", file_writer("config.yaml", wrong), ("train",), ("config.yaml",)))
    return cases


def config_case(name: str, data: Tree, path: tuple[str, ...]) -> Case:
    def prepare(folder: Path) -> Any:
        placed = {**data, "output_dir": str(folder / "out")} if data.get("output_dir") == "out" else data
        try:
            text = yaml.safe_dump(placed)
            loaded = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            return placed
        if repr(loaded) != repr(dict(sorted(placed.items()))):
            return placed
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        return folder / "config.yaml"

    words = (*path, "unknown key", "is not a word", "schedules no number", "the environment ", str(data.get("env_id")))
    return Case(name, prepare, ("train",), words)


def wrong_texts(text: str) -> dict[str, bytes]:
    laughs = "\n".join(f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'ha'] * 9)}]" for i in range(12))
    return {
        "empty": b"", "a list": b"- ppo\n- cartpole\n", "a word": b"ppo", "a number": b"5", "null": b"null\n",
        "binary": bytes(range(256)), "not UTF-8": "env_id: é".encode("latin-1"), "a tab": b"algo: ppo\n\tenv_id: x\n",
        "open quote": text.encode() + b"tags: ['a\n", "open brace": text.encode() + b"benchmark: {a: 1\n",
        "python object": text.encode() + b"benchmark: !!python/object/apply:os.system ['false']\n",
        "alias to itself": text.encode() + b"benchmark: &a {b: *a}\n", "nested": b"[" * 5000 + b"]" * 5000,
        "laughs": text.replace("benchmark: {}", f"benchmark:\n{laughs}").encode(), "unknown alias": b"algo: *nope\n",
        "a date": text.replace("benchmark: {}", "benchmark: {day: 2026-01-01}").encode(), "zeros": b"\0" * 64,
    }  # fmt: skip


def file_writer(name: str, data: bytes) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return prepare


# ---- wrong checkpoints -----------------------------------------------------------------------------------------------

ALL = ("evaluate", "predict", "resume")


def leaves_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves_of(value, (*path, key))
    else:
        yield path, tree


class Explode:
    """Unpickling it would end the test run."""

    def __reduce__(self) -> Any:
        return (sys.exit, ("code of a checkpoint was run",))


def checkpoint_cases(originals: dict[str, Path], rng: random.Random) -> list[Case]:
    cases: list[Case] = []
    for name, path in originals.items():
        data, tree = path.read_bytes(), load_checkpoint(path)
        cases += [byte_case(name, *change, data) for change in byte_changes(data, rng)]
        for place, value, uses in tree_edits(tree, rng):
            cases.append(tree_case(name, place, value, uses, tree))
    torch.save({"schema": 1, "config": Explode()}, stream := io.BytesIO())
    foreign = {"torch": stream.getvalue(), "pickle": pickle.dumps({"schema": 1, "config": Explode()}),
               "text": b"algo: ppo\n", "zip": b"PK\3\4" * 40, "gzip": b"\x1f\x8b\x08" + bytes(60),
               "png": b"\x89PNG\r\n\x1a\n" + bytes(80), "zeros": bytes(4096),
               "json": json.dumps({"schema": 1}).encode(), "noise": rng.randbytes(3000)}  # fmt: skip
    for kind, data in foreign.items():
        cases.append(Case(f"{kind} file", file_writer("x.ckpt", data), ALL, ("x.ckpt",)))
    return cases


def byte_changes(data: bytes, rng: random.Random) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    for _ in range(60):
        place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        yield f"bit {bit} of byte {place}", lambda d, p=place, b=bit: d[:p] + bytes([d[p] ^ b]) + d[p + 1 :]  # type: ignore[misc]
    for place in [*range(24), *range(len(data) - 24, len(data))]:
        yield f"byte {place} inverted", lambda d, p=place: d[:p] + bytes([d[p] ^ 0xFF]) + d[p + 1 :]  # type: ignore[misc]
    for size in [0, 1, 7, 8, 16, 35, len(data) - 1, *(rng.randrange(len(data)) for _ in range(30))]:
        yield f"cut to {size}", lambda d, s=size: d[:s]  # type: ignore[misc]
    for size in (1, 8, 4096):
        yield f"{size} bytes more", lambda d, s=size: d + bytes(s)  # type: ignore[misc]
        yield f"{size} bytes less at the start", lambda d, s=size: d[s:]  # type: ignore[misc]
    yield "twice", lambda d: d + d


def byte_case(name: str, what: str, change: Callable[[bytes], bytes], data: bytes) -> Case:
    return Case(f"{name}: {what}", lambda folder: file_writer("x.ckpt", change(data))(folder), ALL, ("x.ckpt",))


MISSING = object()


def tree_edits(tree: Tree, rng: random.Random) -> Iterator[tuple[tuple[Any, ...], Any, tuple[str, ...]]]:
    """(path, wrong value or MISSING, the uses that must refuse it)."""
    for part in ("schema", "config", "spaces", "algorithm", "source", "run"):
        yield from (((part,), value, ALL) for value in (MISSING, None, 5, "x", [], [{}], 2.5, torch.zeros(2)))
    yield from ((("schema",), value, ALL) for value in (0, 2, 99, -1, "1", {}))
    for path, value in config_edits(tree["config"]["algo"], rng):
        if savable(value):
            yield ("config", *path), value, uses_of(path, value)
    yield from ((("config", name), MISSING, ALL) for name in ("algo", "env_id", "total_timesteps"))
    yield from spaces_edits(tree["spaces"])
    yield from algorithm_edits(tree["algorithm"])
    yield from source_edits(tree["source"])
    for name, field in RunState.model_fields.items():
        if field.is_required():  # the others came later
            yield ("run", name), MISSING, ("resume",)
    edits = model_edits(RunState, ("run",), "best_return")
    yield from ((path, value, ("resume",)) for path, value in edits if savable(value))
    yield from ((("run", "best_return"), value, ("resume",)) for value in (None, "x", NAN, INF, True, [], {}))
    yield from ((("run", name), 1, ("resume",)) for name in wrong_names(list(RunState.model_fields), rng) if name)


def uses_of(path: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """The uses that read this part of a checkpoint's config."""
    if value == [1.0, -1.0]:
        return ("resume",)  # only training clips
    return ("evaluate", "resume") if path[0] in ("env_kwargs", "env_id") else ALL


def savable(value: Any) -> bool:
    """Whether a checkpoint can hold the value and give it back."""
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and savable(part) for key, part in value.items())
    if isinstance(value, list):
        return all(savable(part) for part in value)
    big = isinstance(value, int) and abs(value) > 10**300  # JSON reads it, Python does not print it
    return value is None or (isinstance(value, bool | int | float | str) and not big)


def spaces_edits(spaces: Tree) -> Iterator[tuple[tuple[Any, ...], Any, tuple[str, ...]]]:
    flags = ("has_action_mask", "normalize_observations", "normalize_rewards")
    for name in spaces:
        wrong: list[Any] = [None, 5, "x", [], [None], {}, 2.5, {"type": "Box"}, [3, 3, 3], NAN]
        if name not in flags:
            wrong.append(MISSING)
        if name == "env_id":
            wrong.remove("x")
        yield from ((("spaces", name), value, ALL) for value in wrong)
    for part in ("raw_observation", "raw_action"):
        for key in spaces[part]:
            yield from ((("spaces", part, key), value, ALL) for value in (MISSING, "Sphere", {}, "<f9"))
    yield ("spaces", "more"), 1, ALL
    yield ("spaces", "raw_observation"), spaces["raw_action"], ALL
    yield ("spaces", "raw_action"), spaces["raw_observation"], ALL


def algorithm_edits(state: Tree) -> Iterator[tuple[tuple[Any, ...], Any, tuple[str, ...]]]:
    yield ("algorithm", "more.weight"), torch.zeros(2), ALL
    for path, value in leaves_of(state):
        place = ("algorithm", *path)
        for wrong in (MISSING, None, "x", [], {}, 2.5):
            yield place, wrong, ALL
        if isinstance(value, torch.Tensor):
            yield from ((place, wrong, ALL) for wrong in (value[None], torch.zeros(*value.shape, 2), value.numpy()))
            yield place, value.to(torch.int16), ALL
            if value.dim():
                yield from ((place, wrong, ALL) for wrong in (value[1:], torch.cat([value, value])))
            if value.is_floating_point() and path != ("critic.bins",):  # which the slow critic's state overwrites
                yield from ((place, torch.full_like(value, bad), ALL) for bad in (NAN, INF, -INF))


def source_edits(source: Tree) -> Iterator[tuple[tuple[Any, ...], Any, tuple[str, ...]]]:
    uses = ("resume",)
    yield from ((("source", name), MISSING, uses) for name in source if name != "replay")  # a buffer may be absent
    yield from ((("source", "rng"), value, uses) for value in (None, 5, "x", [], {}, {"bit_generator": "MT19937"}))
    yield from ((("source", "rng", key), MISSING, uses) for key in ("bit_generator", "state"))
    if "stepper" not in source:  # a lane that steps no environment
        return
    stepper = source["stepper"]
    yield from ((("source", "stepper"), value, uses) for value in (5, "x", [1], True, {"format": stepper["format"]}))
    yield from ((("source", "stepper", key), MISSING, uses) for key in stepper)
    yield from ((("source", "stepper", key), None, uses) for key in ("obs", "engine"))
    yield from ((("source", "stepper", "engine"), value, uses) for value in ({}, 5, "x", [], [{}]))
    for key in stepper["engine"]:
        yield from ((("source", "stepper", "engine", key), value, uses) for value in (MISSING, None, 5))
    if "episodes" in stepper["engine"]:
        episodes = stepper["engine"]["episodes"]
        first = episodes[0]
        broken = [drop(first, (key,)) for key in ("episode", "actions", "before_reset")]  # the others came later
        broken += [put(first, ("episode",), value) for value in (None, "x", -7, 2.5)]
        broken += [put(first, ("actions",), value) for value in (None, "x", 5, np.full(9, 77), np.array(["a", "b"]))]
        for wrong in ([], *([one, *episodes[1:]] for one in [*broken, None, 5, {}])):
            yield ("source", "stepper", "engine", "episodes"), wrong, uses


def tree_case(name: str, path: tuple[Any, ...], value: Any, uses: tuple[str, ...], tree: Tree) -> Case:
    def prepare(folder: Path) -> Path:
        placed = put(tree, ("config", "output_dir"), str(folder / "out")) if path != ("config", "output_dir") else tree
        changed = drop(placed, path) if value is MISSING else put(placed, path, value)
        return save_checkpoint(folder / "x.ckpt", changed, durable=False)

    shown = tuple(value.shape) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
    what = "missing" if value is MISSING else f"= {type(value).__name__} {shown}"
    words = ("x.ckpt", *map(str, path[1:]), "unknown key", "the checkpoint was made for", "schedules no number",
             "the environment ", str(value) if path[-1] == "env_id" else "")  # fmt: skip
    return Case(f"{name}: {'.'.join(map(str, path))} {what}", prepare, uses, words)


# ---- the test --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good checkpoints, the stuff of wrong ones."""
    folder = tmp_path_factory.mktemp("originals")
    made = {name: tiny(name, folder, num_envs=2, vectorization="sync") for name in SPECS}
    made["native"] = tiny("ppo", folder, num_envs=4)
    made["pendulum"] = tiny("ppo", folder, num_envs=2, env_id="Pendulum-v1")
    return {
        name: train(config, callbacks=[StopAt(64)], console=False).checkpoint_path for name, config in made.items()
    }


def generate(originals: dict[str, Path]) -> list[Case]:
    """2,000 cases: as many configs as checkpoints, chosen at random from all there are."""
    rng = random.Random(SEED)
    configs, checkpoints = config_cases(rng), checkpoint_cases(originals, rng)
    chosen = [*rng.sample(configs, COUNT // 2), *rng.sample(checkpoints, COUNT - COUNT // 2)]
    rng.shuffle(chosen)
    return chosen


def use(kind: str, given: Any, obs: list[float]) -> Any:
    match kind:
        case "train":
            config = load_config(given)
            return DefaultExperimentManager().setup(config).train()
        case "evaluate":
            return evaluate_checkpoint(given, num_episodes=1)
        case "predict":
            return predict_checkpoint(given, obs)
        case _:
            return resume_training(given, console=False)


def observation_of(case: Case) -> list[float]:
    """An observation of the environment of the case's checkpoint."""
    name = case.name.partition(":")[0]
    return [0.0] * (3 if name == "pendulum" or (name in SPECS and env_of(SPECS[name]) == "Pendulum-v1") else 4)


def check(case: Case, folder: Path) -> list[str]:
    """What is wrong with the answers to one case."""
    folder.mkdir()
    given = case.prepare(folder)
    before = sorted(folder.rglob("*"))
    problems = []
    for kind in case.uses:
        try:
            use(kind, given, observation_of(case))
            problems.append(f"{case.name}: {kind} accepted it")
        except UserError as error:
            sentence = str(error)
            if "\n" in sentence or len(sentence) >= 400 or not sentence:
                problems.append(f"{case.name}: {kind} does not answer with one sentence: {sentence}")
            if not any(word and word in sentence for word in case.words):
                problems.append(f"{case.name}: {kind} names neither field nor file: {sentence}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problems.append(f"{case.name}: {kind} raised {type(error).__name__}: {error}")
    if sorted(folder.rglob("*")) != before:
        problems.append(f"{case.name}: something was written")
    return problems


def check_all(cases: list[Case], folder: Path) -> None:
    problems = [problem for number, case in enumerate(cases) for problem in check(case, folder / f"{number}")]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:40])


@pytest.mark.slow  # test_save_and_load_keep_everything is quick, and of these checkpoints too
def test_the_originals_are_right(originals: dict[str, Path], tmp_path: Path) -> None:
    for path in originals.values():
        evaluate_checkpoint(path, num_episodes=1)
        resume_training(path, output_dir=tmp_path, console=False)
    for algo in SPECS:
        DefaultExperimentManager().setup({**base_config(algo), "output_dir": str(tmp_path)})


def test_a_sample_of_wrong_inputs_is_answered_with_one_sentence_each(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    check_all(generate(originals)[:SAMPLE], tmp_path)


@pytest.mark.slow
def test_every_wrong_input_is_answered_with_one_sentence(originals: dict[str, Path], tmp_path: Path) -> None:
    check_all(generate(originals)[SAMPLE:], tmp_path)


# ---- as commands -----------------------------------------------------------------------------------------------------

OPTIONS: tuple[tuple[str, ...], ...] = (
    ("train",), ("train", "--config", "nope/nope"), ("train", "--algo", "ppo"), ("train", "--algo", "p", "--env", "x"),
    ("train", "--algo", "ppo", "--env", "CartPole-v1", "--num-envs", "many"),
    ("train", "--algo", "ppo", "--env", "CartPole-v1", "--set", "learning_rat=1"),
    ("train", "--config", "ppo/cartpole", "--seeds", "1,1"), ("trian",), ("resume",), ("predict", "--obs", "[0]"),
    ("eval", "--checkpoint", "missing.ckpt"), ("train", "--config", "ppo/cartpole", "--set", "num_envs=0"),
)  # fmt: skip


def command_of(case: Case, folder: Path) -> list[str] | None:
    """The command that meets the case, or None where only Python can."""
    folder.mkdir()
    given = case.prepare(folder)
    if not isinstance(given, Path):
        return None
    if case.uses == ("train",):
        return ["train", "--config", str(given)]
    kind = case.uses[-1] if "predict" not in case.uses else "predict"
    words = {"evaluate": ["eval"], "predict": ["predict"], "resume": ["resume"]}[kind]
    obs = ["--obs", json.dumps(observation_of(case))] if kind == "predict" else []
    return [*words, "--checkpoint", str(given), *obs]


@pytest.mark.slow
def test_sixty_of_them_as_commands_end_with_one_sentence_and_exit_code_2(
    originals: dict[str, Path], tmp_path: Path
) -> None:
    commands = [list(words) for words in OPTIONS]
    for number, case in enumerate(generate(originals)):
        command = command_of(case, tmp_path / f"{number}")
        commands += [command] if command is not None else []
        if len(commands) == COMMANDS:
            break
    before = sorted(tmp_path.rglob("*"))
    problems = []
    for command in commands:
        ended = subprocess.run(
            [sys.executable, "-m", "rl_training", *command], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        lines = ended.stderr.strip().splitlines()
        if ended.returncode != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or ended.stdout:
            problems.append(f"{' '.join(command)}: {ended.returncode} {ended.stdout} {ended.stderr}")
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems)
    assert sorted(tmp_path.rglob("*")) == before
