"""State that carries over between episodes: wherever an environment hides it, a resume notices it or says it cannot.
Environments that carry nothing over are not accused."""

from __future__ import annotations

import array
import copy
import ctypes
import functools
import io
import itertools
import mmap
import multiprocessing
import queue
import random
import socket
import sqlite3
import tempfile
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import env_zoo
from resume_cases import StopAt
from rl_training.config.train_config import TrainConfig
from rl_training.envs import hidden_state as module
from rl_training.envs.factory import make_env, read_recipe
from rl_training.envs.hidden_state import checksum, hidden_state
from rl_training.envs.probe import probe, probe_spaces
from rl_training.envs.stepper import Differences, ReplayableEpisodes, differences
from rl_training.run.workflows import resume_training, train
from rl_training.tools import doctor


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("count", "never_set")

    def __init__(self) -> None:
        self.count = 0


class MoreSlots(Slotted):
    __slots__ = ("other",)


class SlotsAndDict(Slotted):
    pass


@dataclass(slots=True)
class Record:
    count: int = 0


class OwnList(list[Any]):
    count = 0


class Node:
    def __init__(self, below: Any) -> None:
        self.below = below


class Pair(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int)]


Point = namedtuple("Point", "x y")


def deep_list(depth: int = 5000) -> list[Any]:
    nested: list[Any] = [0]
    for _ in range(depth):
        nested = [nested]
    return nested


def deepest(nested: Any) -> Any:
    while isinstance(nested[0], list):
        nested = nested[0]
    return nested


def linked(count: int = 3000) -> Node:
    below: Any = [0]
    for _ in range(count):
        below = Node(below)
    return below


def bottom(node: Any) -> list[int]:
    while isinstance(node, Node):
        node = node.below
    return node


def count_in_a_closure() -> Callable[[], int]:
    count = 0

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    return increment


def count_in_a_default() -> Callable[[], None]:
    return types.FunctionType(held_list.__code__, {}, "increment", ([0],))


class Counts:
    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> None:
        self.count += 1


def generator() -> Any:
    yield from range(1000)


def started(env: Any) -> Any:
    env.reset(seed=0)
    return env


def in_the_middle(numbers: Any) -> None:
    numbers[len(numbers) // 2] += 1


def last(numbers: Any) -> None:
    numbers[-1] += 1


def put(mask: Any, place: int) -> None:
    mask[place] = True


def bump(held: Any) -> None:
    held.count += 1


def held_list(held: Any) -> None:
    held[0] += 1


KEPT = Plain(count=0)  # by a weak reference only

# How a value is made, and how a reset changes it: in place, or by returning another one of its type
HIDING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "int": (lambda: 0, lambda x: x + 1),
    "float": (lambda: 0.0, lambda x: x + 1e-12),
    "complex": (lambda: 0j, lambda x: x + 1j),
    "text": (lambda: "", lambda x: x + "a"),
    "bytes": (lambda: b"", lambda x: x + b"a"),
    "list": (lambda: [0, 1], last),
    "long list": (lambda: list(range(20_000)), last),
    "long list of lists": (lambda: [[i] for i in range(3000)], lambda x: last(x[-1])),
    "tuple": (lambda: (0, 1), lambda x: (x[0] + 1, 1)),
    "named tuple": (lambda: Point(0, 1), lambda x: x._replace(y=x.y + 1)),
    "dict": (lambda: {"a": 0}, lambda x: x.update(a=x["a"] + 1)),
    "keys of a dict": (dict, lambda x: x.update({len(x): None})),
    "order of a dict": (lambda: OrderedDict.fromkeys(range(50)), lambda x: x.move_to_end(next(iter(x)))),
    "default dict": (lambda: defaultdict(list), lambda x: x["a"].append(1)),
    "counter": (Counter, lambda x: x.update("a")),
    "set": (set, lambda x: x.add(len(x))),
    "frozen set": (frozenset, lambda x: x | {(len(x),)}),
    "set of objects": (lambda: {Counts()}, lambda x: next(iter(x)).increment()),
    "deque": (lambda: deque(range(50)), lambda x: x.rotate()),
    "bytearray": (lambda: bytearray(3), last),
    "memoryview": (lambda: memoryview(bytearray(3)), last),
    "array of the standard library": (lambda: array.array("d", [0, 0]), last),
    "mapped memory": (lambda: mmap.mmap(-1, 10), last),
    "numpy array": (lambda: np.zeros(3), last),
    "array of 4 MiB": (lambda: np.zeros(1 << 19), in_the_middle),
    "array that is not contiguous": (lambda: np.zeros((4, 4))[:, 1], last),
    "array of objects": (lambda: np.array([Counts(), None]), lambda x: x[0].increment()),
    "array with fields": (lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]), lambda x: last(x["b"])),
    "masked array": (lambda: np.ma.masked_array(np.zeros(99), [False] * 99), lambda x: put(x.mask, x.mask.sum())),
    "numpy number": (lambda: np.float32(0), lambda x: np.float32(x + 1)),
    "date": (lambda: np.datetime64("2026-11-18"), lambda x: x + 1),
    "random.Random": (lambda: random.Random(0), lambda x: x.random()),
    "method of random.Random": (lambda: random.Random(0).random, lambda x: x()),
    "numpy generator": (lambda: np.random.default_rng(0), lambda x: x.random()),
    "spawned generators": (lambda: np.random.default_rng(0), lambda x: x.spawn(1)),
    "bit generator": (lambda: np.random.PCG64(0), lambda x: x.random_raw()),
    "random state": (lambda: np.random.RandomState(0), lambda x: x.rand()),
    "seed sequence": (lambda: np.random.SeedSequence(0), lambda x: x.spawn(1)),
    "generator of a space": (lambda: gym.spaces.Discrete(9, seed=0), lambda x: x.sample()),
    "object": (Counts, Counts.increment),
    "slots": (Slotted, bump),
    "inherited slots": (MoreSlots, bump),
    "slots and a dict": (SlotsAndDict, lambda x: setattr(x, "more", getattr(x, "more", 0) + 1)),
    "data class with slots": (Record, bump),
    "attribute of a list": (OwnList, bump),
    "items of a user's list": (OwnList, lambda x: x.append(1)),
    "deep nesting": (deep_list, lambda x: held_list(deepest(x))),
    "linked objects": (linked, lambda x: held_list(bottom(x))),
    "object in a cycle": (lambda: Plain(me=[]), lambda x: x.me.append(x)),
    "environment": (lambda: started(gym.make("CartPole-v1")), lambda x: x.step(0)),
    "environment in a list": (lambda: [started(env_zoo.Walk())], lambda x: x[0].step(0)),
    "wrapped environment": (
        lambda: started(gym.wrappers.NormalizeReward(env_zoo.Walk())), lambda x: x.step(0)
    ),
    "closure": (count_in_a_closure, lambda x: x()),
    "default of a function": (count_in_a_default, lambda x: x()),
    "attribute of a function": (count_in_a_closure, lambda x: setattr(x, "seen", getattr(x, "seen", 0) + 1)),
    "partial": (lambda: functools.partial(held_list, [0]), lambda x: x()),
    "bound method": (lambda: Counts().increment, lambda x: x()),
    "iterator of a list": (lambda: iter([0] * 1000), lambda x: next(x)),
    "iterator of a dict": (lambda: iter(dict.fromkeys(range(1000))), lambda x: next(x)),
    "enumerate": (lambda: enumerate([0] * 1000), lambda x: next(x)),
    "zip": (lambda: zip(range(1000), range(1000), strict=True), lambda x: next(x)),
    "queue": (queue.Queue, lambda x: x.put(1)),
    "memory file": (io.BytesIO, lambda x: x.write(b"a")),
    "text in memory": (io.StringIO, lambda x: x.write("a")),
    "weak reference": (lambda: weakref.ref(KEPT), lambda x: setattr(x(), "count", x().count + 1)),
    "tensor": (lambda: torch.zeros(3), lambda x: x.add_(1)),
    "view of one number": (lambda: torch.zeros(3)[1::2][:1], lambda x: x.add_(1)),
    "generator of torch": (lambda: torch.Generator().manual_seed(0), lambda x: torch.rand(1, generator=x)),
    "network": (lambda: torch.nn.Linear(1, 1), lambda x: x.weight.data.add_(1)),
}  # fmt: skip
UNSEEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "generator": (generator, lambda x: next(x), "a generator"),
    "count": (itertools.count, lambda x: next(x), "a count"),
    "cycle in a list": (lambda: [itertools.cycle([1, 2, 3])], lambda x: next(x[0]), "a cycle"),
    "generator in a closure": (lambda: functools.partial(next, generator()), lambda x: x(), "a generator"),
    "file": (tempfile.TemporaryFile, lambda x: x.write(b"a"), "a BufferedRandom"),
    "thread": (threading.Thread, lambda x: None, "a Thread"),
    "process": (multiprocessing.Process, lambda x: None, "a Process"),
    "pipe": (lambda: multiprocessing.Pipe()[0], lambda x: None, "a Connection"),
    "socket": (socket.socket, lambda x: None, "a socket"),
    "data base": (lambda: sqlite3.connect(":memory:"), lambda x: None, "a Connection"),
    "generator of the system": (random.SystemRandom, lambda x: x.random(), "a SystemRandom"),
    "C structure": (Pair, bump, "a Pair"),
}  # fmt: skip


def changed(held: Any, move: Callable[[Any], Any]) -> Any:
    moved = move(held)
    return moved if type(moved) is type(held) else held


class Hides(env_zoo.Walk):
    """A walk that keeps something from one episode to the next, which no observation shows."""

    def __init__(self, make: Callable[[], Any], move: Callable[[Any], Any]) -> None:
        super().__init__(length=3)
        self.held, self.move = make(), move

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.held = changed(self.held, self.move)
        return super().reset(seed=seed, options=options)


def compare_after_resume(make: Callable[[], Any], steps: int = 8) -> Differences:
    """Play some episodes, restore a new environment in the middle of one, and compare."""
    one = ReplayableEpisodes(make(), 0, 0)
    actions = copy.deepcopy(one.action_space)  # its generator is state
    actions.seed(0)
    one.reset()
    for _ in range(steps):
        action = actions.sample()
        _, _, terminated, truncated, _ = one.step(action if isinstance(action, np.ndarray) else int(action))
        if terminated or truncated:
            one.reset()
    state = one.episode_state()
    other = ReplayableEpisodes(make(), 0, 0)
    other.restore_episode(state)
    found = differences(state, other.episode_state())
    one.close()
    other.close()
    return found


@pytest.mark.parametrize("name", HIDING)
def test_state_that_carries_over_is_noticed(name: str) -> None:
    make, move = HIDING[name]
    assert compare_after_resume(lambda: Hides(make, move)) == ([], ["Hides.held"], [])


@pytest.mark.parametrize("name", UNSEEN)
def test_state_that_cannot_be_read_is_named(name: str) -> None:
    make, move, what = UNSEEN[name]
    found = compare_after_resume(lambda: Hides(make, move))
    assert (found.seen, found.unseen) == ([], [f"Hides.held ({what})"])


@pytest.mark.parametrize("name", ["int", "list", "object", "random.Random", "environment", "set", "closure"])
def test_state_in_a_wrapper_is_noticed(name: str) -> None:
    make, move = HIDING[name]

    class Keeps(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self) -> None:
            super().__init__(env_zoo.Walk(length=3))
            self.held = make()

        def reset(self, **given: Any) -> Any:
            self.held = changed(self.held, move)
            return super().reset(**given)

    assert compare_after_resume(Keeps).hidden == ["Keeps.held"]


LARGE: list[Callable[[], Any]] = [
    lambda: np.zeros(1 << 17), lambda: [[] for _ in range(2000)], lambda: [0] * (1 << 20), lambda: "a" * (1 << 20),
]  # fmt: skip


@pytest.mark.parametrize("make", LARGE)
def test_what_is_too_large_is_named_and_does_not_hide_the_rest(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    env: Any = Hides(make, lambda x: None)
    env.later = 1
    before = hidden_state(env)
    env.later = 2
    after = hidden_state(env)
    assert before.unseen == {"Hides.held": "it is too large"}
    assert [name for name in before.sums if before.sums[name] != after.sums[name]] == ["Hides.later"]


def test_an_attribute_that_is_set_later_is_compared() -> None:
    def move(x: Any) -> None:
        x["later"] = iter([1, 2, 3]) if len(x) > 1 else generator()
        x[len(x)] = None

    found = compare_after_resume(lambda: Hides(dict, move))
    assert found.hidden + found.unseen


# ---- no false alarm --------------------------------------------------------------------------------------------------

STOCK = [
    "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "FrozenLake-v1",
    "CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "HalfCheetah-v5", "Ant-v5", "Reacher-v5", "Pusher-v5",
    "InvertedPendulum-v5", "LunarLander-v3", "ALE/Pong-v5",
]  # fmt: skip
PACKAGES = {"v5": "mujoco", "LunarLander-v3": "Box2D", "ALE/Pong-v5": "ale_py"}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "frame stack": lambda env: gym.wrappers.FrameStackObservation(env, 3),
    "delay": lambda env: gym.wrappers.DelayObservation(env, 2),
    "time": gym.wrappers.TimeAwareObservation,
    "statistics": gym.wrappers.RecordEpisodeStatistics,
    "checker": gym.wrappers.PassiveEnvChecker,
    "order": gym.wrappers.OrderEnforcing,
    "sticky actions": lambda env: gym.wrappers.StickyAction(env, 0.3),
    "function": lambda env: gym.wrappers.TransformReward(env, lambda reward: 2 * reward),
}


@pytest.mark.parametrize("env_id", STOCK)
def test_an_environment_that_carries_nothing_over_is_not_accused(env_id: str) -> None:
    pytest.importorskip(PACKAGES.get(env_id, PACKAGES.get(env_id[-2:], "gymnasium")))
    recipe = read_recipe(env_id, {"max_episode_steps": 20})
    assert compare_after_resume(lambda: make_env(recipe), steps=50) == ([], [], [])


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_carries_nothing_over_is_not_accused(name: str) -> None:
    wrap = WRAPPERS[name]
    assert compare_after_resume(lambda: wrap(gym.make("CartPole-v1", max_episode_steps=10)), 25) == ([], [], [])
    assert compare_after_resume(lambda: Hides(lambda: wrap(gym.make("CartPole-v1")), lambda x: None)) == ([], [], [])


HARMLESS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "event": threading.Event,
    "class": lambda: Plain,
    "module": lambda: random,
    "logger": lambda: __import__("logging").getLogger("mine"),
    "pattern": lambda: __import__("re").compile("a"),
    "path": lambda: Path("/tmp"),
    "table": lambda: __import__("pandas").DataFrame({"price": [1.0, 2.0], "day": ["a", "b"]}),
    "method of the environment": lambda: env_zoo.Walk().step,
    "rebuilt by every reset": lambda: (lambda: generator),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_step_changes_is_not_accused(name: str) -> None:
    assert compare_after_resume(lambda: Hides(HARMLESS[name], lambda x: None)) == ([], [], [])


def test_the_order_of_a_set_does_not_matter() -> None:
    small, large = {0, 8}, {8, 0}
    assert list(small) != list(large)
    assert checksum(small) == checksum(large) != checksum({0, 9})
    assert checksum({(0,), (8,)}) == checksum({(8,), (0,)}) != checksum({(0,), (9,)})


def test_parts_that_are_one_object_are_told_from_two_equal_ones() -> None:
    part: list[int] = [1]
    assert checksum([part, part]) != checksum([part, [1]])


# ---- no code of the user runs ---------------------------------------------------------------------------------------


def test_reading_calls_nothing_of_the_users() -> None:
    called: list[str] = []

    def refuse(name: str) -> Any:
        def method(self: Any, *given: Any, **named: Any) -> Any:
            called.append(name)
            raise RuntimeError(name)

        return method

    names = [
        "__getattr__", "__getattribute__", "__eq__", "__hash__", "__repr__", "__str__", "__iter__", "__len__",
        "__bool__", "__reduce__", "__reduce_ex__", "__getstate__", "__contains__", "__getitem__", "__int__",
        "__float__", "__index__", "__bytes__", "__array__", "__next__", "__call__", "keys", "items", "values",
        "getstate", "get_state", "tobytes", "view", "state", "encode",
    ]  # fmt: skip
    watched: dict[str, Any] = {name: refuse(name) for name in names}
    watched["__class__"] = property(refuse("__class__"))
    watched["data"] = property(refuse("data"))
    makers: list[Any] = [object, list, dict, tuple, int, float, str, bytes, bytearray, set, deque, random.Random]
    objects = [type(f"Own{base.__name__}", (base,), watched).__new__(type("Own", (base,), watched)) for base in makers]
    objects.append(np.ndarray.__new__(type("OwnArray", (np.ndarray,), watched), 3))
    called.clear()  # making them may look at them
    env: Any = env_zoo.Walk()
    for number, each in enumerate(objects):
        setattr(env, f"held_{number}", each)
    before = hidden_state(env)
    assert called == []
    assert before.unseen == {}


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_run_says_once_at_its_start_what_a_resume_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def maker(**_: Any) -> Any:
        return Hides(itertools.count, lambda x: next(x))

    kwargs = {"num_steps": 4}
    config = TrainConfig(
        algo="a2c", env_id="hides", total_timesteps=48, output_dir=str(tmp_path), eval_episodes=0, device="cpu",
        algo_kwargs=kwargs,
    )  # fmt: skip
    result = train(config, env=maker, callbacks=[StopAt(24)], console=True)
    said = " ".join(capsys.readouterr().err.split())
    sentence = "Hides.held (a count) cannot be compared after a resume, so a resume may not be exact"
    assert said.count(sentence) == 1
    assert sentence in (result.run_dir / "manifest.json").read_text()
    resume_training(result.checkpoint_path, env=maker, console=True)
    said = " ".join(capsys.readouterr().err.split())
    what = "warning: Hides.held (a count) of hides cannot be compared with the stored state"
    assert f"{what}, so this resume may not be exact" in said
    assert sentence not in said


def test_doctor_names_what_cannot_be_compared() -> None:
    recipe = read_recipe("hides", {}, lambda **_: Hides(generator, lambda x: None))
    (problem,) = probe(recipe).problems
    assert "Hides.held (a generator) cannot be compared" in problem.detail
    found = doctor.check_replay(recipe, probe_spaces(recipe), 0)
    assert (found.status, found.detail.partition(";")[0]) == ("warn", "Hides.held (a generator) cannot be compared")
