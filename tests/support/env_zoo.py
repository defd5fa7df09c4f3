"""Small hand-made environments, one peculiarity each; reached as `env_zoo:ClassName` or as a callable."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

Array = NDArray[Any]
FOLDER = str(Path(__file__).parent)  # on the path of every process that makes one of these by its name


class Constant(gym.Env[Any, Any]):
    """Reward 1 per step at one constant observation; an episode of `length` steps is truncated, or terminates."""

    terminates = False
    observation_space: gs.Space[Any] = gs.Box(-1.0, 1.0, (2,), np.float32)
    action_space: gs.Space[Any] = gs.Discrete(2)

    def __init__(self, length: int = 5, action: str = "discrete") -> None:
        self.length, self.t = length, 0
        if action == "continuous":
            self.action_space = gs.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        ended = self.t >= self.length
        return self.observe(), 1.0, ended and self.terminates, ended and not self.terminates, self.info()

    def observe(self) -> Any:
        return np.array([1.0, 0.5], dtype=np.float32)

    def info(self) -> dict[str, Any]:
        return {}


class AlwaysTruncates(Constant):
    """The values of its only state are 1 / (1 - gamma)."""


class AlwaysTerminates(Constant):
    """The same, but the episode really ends."""

    terminates = True


class EndsBothWays(Constant):
    """Every other episode terminates, the others are truncated; the observation says which."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.terminates = not self.terminates
        return super().reset(seed=seed)

    def observe(self) -> Any:
        return np.array([not self.terminates, self.terminates], dtype=np.float32)


class Walk(Constant):
    """A random walk whose observation tells everything: [position, t], truncated at `length`, terminated far out."""

    observation_space: gs.Space[Any] = gs.Box(-100.0, 100.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, seed=seed)
        self.position = float(self.np_random.normal())
        return super().reset()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position += float(np.mean(action)) - 0.5 + float(self.np_random.normal())
        observation, _, _, truncated, info = super().step(action)
        return observation, self.position, bool(abs(self.position) > 3.0), truncated, info

    def observe(self) -> Any:
        return np.array([self.position, self.t], dtype=np.float32)


class Shares(Walk):
    """Says that its observations are in [0, 1]."""

    observation_space: gs.Space[Any] = gs.Box(0.0, 1.0, (2,), np.float32)


class ReusesItsArray(Walk):
    """Writes every observation into one array."""

    def observe(self) -> Any:
        if not hasattr(self, "_array"):
            self._array = np.zeros(2, dtype=np.float32)
        self._array[:] = self.position, self.t
        return self._array


class DictObservation(Walk):
    """Parts in an order that is not the alphabet's, one of them nested."""

    observation_space = gs.Dict(
        [
            ("walk", gs.Box(-100.0, 100.0, (2,), np.float32)),
            ("clock", gs.Discrete(50)),
            ("more", gs.Dict({"flags": gs.MultiBinary(2)})),
        ]
    )

    def observe(self) -> Any:
        walk = np.array([self.position, self.t], dtype=np.float32)
        return {"walk": walk, "clock": self.t, "more": {"flags": np.array([self.t % 2, 1], dtype=np.int8)}}


class TupleObservation(Walk):
    observation_space = gs.Tuple([gs.Discrete(50), gs.Box(-100.0, 100.0, (2,), np.float32)])

    def observe(self) -> Any:
        return self.t, np.array([self.position, self.t], dtype=np.float32)


class DiscreteObservation(Walk):
    observation_space = gs.Discrete(50, start=-1)

    def observe(self) -> Any:
        return self.t - 1


class ShiftedDiscrete(Walk):
    """Actions 5, 6 and 7."""

    action_space = gs.Discrete(3, start=5)


class MultiDiscreteActions(Walk):
    action_space = gs.MultiDiscrete([2, 3, 4], start=[0, 1, 0])


class MultiBinaryActions(Walk):
    action_space = gs.MultiBinary(3)


class BoxActions(Walk):
    """Other bounds in each of two dimensions, of a width that float32 cannot say exactly."""

    action_space = gs.Box(np.array([-0.1, 2.0]), np.array([0.3, 5.0]), dtype=np.float64)


class ScalarActions(Walk):
    """One float, not an array of one; multiplied in its own width, so that a wider replay would show."""

    action_space = gs.Box(-1.0, 1.0, (), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position += float(action * np.float32(0.1))
        return super().step(np.float32(action) if isinstance(action, float) else np.asarray(action))


class InfiniteActions(Walk):
    action_space = gs.Box(-np.inf, np.inf, (1,), np.float32)


class TextObservation(Walk):
    observation_space = gs.Dict({"words": gs.Text(5)})


class Masked(Walk):
    """Exactly one of five actions is legal, another one each step; an illegal one raises."""

    action_space = gs.Discrete(5)

    @property
    def legal(self) -> int:
        return (self.t + int(self.position * 10)) % 5

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action != self.legal:
            raise RuntimeError(f"action {action} is illegal; {self.legal} is legal")
        return super().step(action)

    def info(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(5) == self.legal).astype(np.int8)}


class LastMoves(Masked):
    """As `Masked`, but truncated after three steps, and where it ends by itself no action is legal any more."""

    def __init__(self) -> None:
        super().__init__(3)

    def info(self) -> dict[str, Any]:
        return {"action_mask": super().info()["action_mask"] * int(abs(self.position) <= 3.0)}


class MaskedFactors(Walk):
    """MultiDiscrete [3, 5]: two legal choices, then one; the mask is a tuple, as Gymnasium's own masks are."""

    action_space = gs.MultiDiscrete([3, 5])

    @property
    def legal(self) -> int:
        return (self.t + int(self.position * 10)) % 5

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action[0] == self.t % 3 or action[1] != self.legal:
            raise RuntimeError(f"action {action} is illegal at {self.t}")
        return super().step(action)

    def info(self) -> dict[str, Any]:
        first, second = np.arange(3) != self.t % 3, np.arange(5) == self.legal
        return {"action_mask": (first.astype(np.int8), second.astype(np.int8))}


class Image(Walk):
    """uint8, channels last, 12 x 10; pixel [0, 0, 0] is the time and a gradient tells rows from columns."""

    shape: tuple[int, ...] = (12, 10, 3)
    dtype: Any = np.uint8

    def __init__(self, length: int = 5) -> None:
        super().__init__(length)
        self.observation_space = gs.Box(0, 1 if self.dtype is np.bool_ else 255, self.shape, self.dtype)

    def observe(self) -> Any:
        image = (np.arange(np.prod(self.shape)).reshape(self.shape) % 200).astype(np.uint8)
        image.flat[0] = self.t
        return image.astype(self.dtype)


class ImageChannelFirst(Image):
    shape = (3, 12, 10)


class ImagePlane(Image):
    shape = (12, 10)


class MinAtarLike(Image):
    shape, dtype = (10, 10, 4), np.bool_


class NotReplayable(Walk):
    """Its noise does not come from the seeded generator, and depends on all that happened in the process."""

    calls = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        NotReplayable.calls += 1
        self.position += 0.001 * NotReplayable.calls
        return super().step(action)


class ScalesByHistory(Walk):
    """Rewards over the number of episodes that this instance has begun; observations tell nothing of it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.begun = getattr(self, "begun", 0) + 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward / self.begun, terminated, truncated, info


class MasksByHistory(ScalesByHistory):
    """What is legal depends on the number of episodes; the rewards do not."""

    action_space = gs.Discrete(5)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 1.0, terminated, truncated, info

    def info(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(5) != self.begun % 5).astype(np.int8)}


class OwnGenerator(Walk):
    """Draws from a generator of its own that no seed reaches, and looks at the draw in its tenth step only."""

    def __init__(self, length: int = 30) -> None:
        super().__init__(length)
        self.own = np.random.default_rng()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        drawn = self.own.normal()
        self.position += drawn if self.t == 10 else 0.0
        return super().step(action)


HISTORIES: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # steps of each walk that keeps them


class KeepsHistory(Walk):
    """As a physics engine that is not rebuilt: what earlier episodes did moves the walk, from step `since` on.

    It lies where no attribute shows it, as in a library's memory.
    """

    def __init__(self, length: int = 9, since: int = 3) -> None:
        super().__init__(length)
        self.since = since

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        HISTORIES[self] = HISTORIES.get(self, 0) + 1
        self.position += 0.001 * HISTORIES[self] if self.t >= self.since else 0.0
        return super().step(action)


class FailsInReset(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise RuntimeError("the simulator is not there.\nSecond line.")


class FailsInStep(Walk):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t >= 2:
            raise RuntimeError("the simulator broke")
        return super().step(action)


class WrongShape(Walk):
    def observe(self) -> Any:
        return np.zeros(3, dtype=np.float32)


class CannotBePickled(RuntimeError):
    """Neither it nor what it holds can be pickled."""

    def __init__(self) -> None:
        super().__init__("no pickle", threading.Lock())


class Misbehaves(Walk):
    """A walk that does one wrong thing: ZOO_FAULT, from step ZOO_AFTER of this environment on.

    Variables of the process rather than arguments, so that a checkpoint of a good walk can be played by a bad one.
    ZOO_MARK names a file that is there once the fault has begun.
    """

    def __init__(self, length: int = 5) -> None:
        self.fault, self.after = os.environ.get("ZOO_FAULT", ""), int(os.environ.get("ZOO_AFTER", "30"))
        self.taken = 0
        super().__init__(10**9 if self.fault == "never ends" else length)
        self.closed = threading.Event()
        if self.fault == "threads":
            threading.Thread(target=self.closed.wait).start()

    @property
    def is_bad(self) -> bool:
        bad = self.taken >= self.after
        if bad and "ZOO_MARK" in os.environ:
            Path(os.environ["ZOO_MARK"]).touch()
        return bad

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.fault == "raises in reset" and self.is_bad:
            raise RuntimeError("no more episodes")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        if self.is_bad:
            self.break_down()
        observation, reward, _, truncated, info = super().step(action)
        if self.fault == "NaN reward" and self.is_bad:
            reward = float("nan")
        return observation, reward, False, truncated, info

    def break_down(self) -> None:
        match self.fault:
            case "raises in step":
                raise RuntimeError("the simulator broke")
            case "raises what no pickle holds":
                raise CannotBePickled
            case "stalls":
                time.sleep(3600)
            case "sys.exit":
                sys.exit(0)
            case "os._exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                time.sleep(0.002)
            case "torch with two threads":
                import torch

                torch.set_num_threads(2)
                torch.randn(300, 300) @ torch.randn(300, 300)
            case "own random generator":
                self.position += float(np.random.default_rng().normal())

    def observe(self) -> Any:
        good = super().observe()
        if not self.is_bad:
            return good
        if self.fault == "changing spaces":
            self.observation_space = gs.Box(-100.0, 100.0, (3,), np.float32)
        wrong = {
            "wrong shape": good[None], "wrong dtype": good.astype(np.complex64), "scalar": np.float32(0.5),
            "None": None, "NaN": good * np.nan, "changing spaces": np.zeros(3, dtype=np.float32),
        }  # fmt: skip
        return wrong.get(self.fault, good)

    def info(self) -> Any:
        if self.fault == "wrong mask":
            return {"action_mask": np.ones(3 if self.is_bad else 2, dtype=np.int8)}
        if self.fault == "ragged info":
            return {"notes": np.zeros(self.t + int(abs(self.position) * 5)), f"key {self.t}": [[], [1]]}
        return None if self.fault == "info is None" else {}

    def close(self) -> None:
        self.closed.set()
        if self.fault == "sys.exit in close" and self.is_bad:
            sys.exit(0)


class NeverCloses(Walk):
    """Its `close` waits for something that never comes, once it was stepped."""

    def close(self) -> None:
        if self.t:
            threading.Event().wait()


class CountsSteps(Walk):
    """Counts every step taken by any instance."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        CountsSteps.steps += 1
        return super().step(action)


def not_an_env() -> str:
    """A maker that makes something else."""
    return "hello"


for _env in (Walk, Masked):
    gym.register(f"Zoo{_env.__name__}-v0", f"{__name__}:{_env.__name__}", max_episode_steps=4)


class DotToTarget(gym.Env[Any, Any]):
    """Move a dot along a line to a target, both seen on a 16x16 image only; the reward is minus their distance."""

    observation_space: gs.Space[Any] = gs.Box(0, 255, (16, 16, 2), np.uint8)
    action_space = gs.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, (self.dot, self.target) = 0, self.np_random.uniform(0, 15, 2)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.dot = float(np.clip(self.dot + 3.0 * action[0], 0, 15))
        return self.observe(), -abs(self.dot - self.target) / 16, False, self.t >= 16, {}

    def observe(self) -> Any:
        image = np.zeros((16, 16, 2), np.uint8)
        for channel, place in enumerate((self.dot, self.target)):
            image[5:11, max(0, round(place) - 1) : round(place) + 2, channel] = 255
        return image


class HiddenScale(gym.Env[Any, Any]):
    """Episodes of 8 steps whose rewards have a scale that is drawn at the reset; only the part "hidden" shows it."""

    def __init__(self, action: str = "continuous", shows: bool = True) -> None:
        parts = {"clock": gs.Box(-1.0, 1.0, (2,), np.float32), "goal": gs.Discrete(3)}
        hidden = {"hidden": gs.Box(-4.0, 4.0, (1,), np.float32)} if shows else {}
        self.observation_space = gs.Dict([("clock", parts["clock"]), *hidden.items(), ("goal", parts["goal"])])
        self.action_space = gs.Box(-1.0, 1.0, (1,), np.float32) if action == "continuous" else gs.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.scale = 0, float(self.np_random.uniform(-3.0, 3.0))
        self.goal = int(self.np_random.integers(3))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        near = 1.0 - 0.1 * abs(float(np.ravel(action)[0]) - (self.goal - 1.0))
        return self.observe(), self.scale * near, self.t == 8, False, {}

    def observe(self) -> dict[str, Any]:
        clock = np.array([self.t / 8, np.cos(self.t)], dtype=np.float32)
        every = {"clock": clock, "hidden": np.array([self.scale], dtype=np.float32), "goal": self.goal}
        return {name: every[name] for name in self.observation_space.spaces}  # type: ignore[attr-defined]
