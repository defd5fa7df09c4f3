"""`Stepper` steps an engine and tells the ends of episodes apart; `ReplayableEpisodes` makes one environment resumable.

A checkpoint stores an environment as the seed of its episode and the actions since then; a resume replays them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.envs.hidden_state import checksum, hidden_state
from rl_training.envs.spaces import Array, EnvSpaces
from rl_training.envs.wrappers import LifeEpisodes, layers
from rl_training.errors import EnvironmentFailure, UserError

CAN_BE_LEFT = True  # a signal may interrupt this code (run/interruption.py)
NO_REWARDS: Array = np.zeros(0, dtype=np.float32)


def episode_seed(run_seed: int, index: int, episode: int) -> int:
    """The reset seed of one episode of one environment: a function of these three and nothing else."""
    return int(np.random.SeedSequence([run_seed, index, episode]).generate_state(1)[0])


class ReplayableEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Seeds every reset from the run's own sequence and remembers the actions since the reset.

    The environment's state is then a function of (episode seed, actions), which is all that a checkpoint stores. An
    Atari emulator reloads its game at a seeded reset (100 ms), so there only the first reset is seeded, and the state
    of the emulator and of its generator just before each later reset replaces the seed. Episodes that end with a lost
    life are replayed from the start of their game.

    The episode's return, its action mask, checksums of the attributes that changed and the names of those that cannot
    be read are stored too, so that `differences` can detect a replay with another result.
    """

    def __init__(self, env: gym.Env[Any, Any], run_seed: int, index: int) -> None:
        super().__init__(env)
        self.run_seed, self.index = run_seed, index
        self.episode = -1
        self.before_reset: dict[str, Any] | None = None
        self._steps = 0
        self._taken = bytearray()  # the actions; a list of small arrays takes ten times the memory
        self._return: Any = 0.0
        self._info: Any = {}
        self._at_first = hidden_state(env).sums
        self._dtype = env.action_space.dtype
        self._emulator = getattr(env.unwrapped, "ale", None)
        self._lives = next((layer for layer in layers(env) if isinstance(layer, LifeEpisodes)), None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode of the sequence; a seed given here is ignored."""
        self._return, seed = 0.0, None
        if not self._game_goes_on:
            self._steps = 0
            self._taken.clear()
            self.episode += 1
            if self._emulator is not None and self.episode > 0:
                generator = self.env.unwrapped.np_random.bit_generator.state
                state = self._emulator.cloneSystemState().serialize()
                self.before_reset = {"emulator": state, "generator": dict(generator)}
            else:
                seed = episode_seed(self.run_seed, self.index, self.episode)
        observation, self._info = self.env.reset(seed=seed)
        return observation, self._info

    @property
    def _game_goes_on(self) -> bool:
        """Whether a life was lost, so that the next reset continues the same game."""
        return self._lives is not None and self._lives.goes_on

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, remember the action, and sum the environment's own rewards."""
        self._steps += 1
        self._taken += np.asarray(action, self._dtype).tobytes()
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += reward
        self._info = info
        if terminated or truncated:  # a copy, because an environment may write its next observation into the last one
            observation = np.array(observation)
        return observation, reward, terminated, truncated, info

    def actions(self) -> NDArray[Any]:
        """The actions since the episode began, or since its game began if a lost life ends an episode."""
        return np.frombuffer(bytes(self._taken), self._dtype).reshape(self._steps, *(self.action_space.shape or ()))

    def episode_state(self) -> dict[str, Any]:
        """The data needed to replay this episode, and its results so far."""
        hidden = hidden_state(self.env)
        mask = self._info.get("action_mask") if isinstance(self._info, Mapping) else None
        return {
            "episode": self.episode, "actions": self.actions(), "before_reset": self.before_reset,
            "return": float(np.sum(self._return)), "action_mask": checksum(mask),
            "checksums": {name: value for name, value in hidden.sums.items() if value != self._at_first.get(name)},
            "unseen": hidden.unseen,
        }  # fmt: skip

    def brief_state(self) -> dict[str, Any]:
        """`episode_state` without checksums, and with the number of actions instead of the actions."""
        return {
            "episode": self.episode, "before_reset": self.before_reset, "steps": self._steps,
            "return": float(np.sum(self._return)),
        }  # fmt: skip

    def restore_episode(self, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replay an episode; return the observation and info at its end.

        The user's own environment, used again, may begin where the stored one ended; its attributes count as changed.
        """
        moved = state.get("checksums", {})
        self._at_first = {name: value for name, value in self._at_first.items() if moved.get(name) != value}
        if state["before_reset"] is not None:
            import ale_py

            if self._emulator is None:
                raise UserError("the checkpoint holds an Atari emulator's state; this environment has no emulator.")
            self.episode = -1
            self.reset()
            self._emulator.restoreSystemState(ale_py.ALEState(state["before_reset"]["emulator"]))
            self.env.unwrapped.np_random.bit_generator.state = state["before_reset"]["generator"]
        self.episode = state["episode"] - 1
        observation, info = self.reset()
        for action in _as_given(np.asarray(state["actions"])):
            observation, _, terminated, truncated, info = self.step(action)
            if terminated or truncated:
                goes_on = self._game_goes_on
                observation, info = self.reset()
                if not goes_on:  # the stored episode did not end here, so it cannot be replayed
                    break
        return observation, info


class Differences(NamedTuple):
    """How a restored environment differs: in what a learner sees, in attributes, and what cannot be compared."""

    seen: list[str]
    hidden: list[str]
    unseen: list[str]

    def describe_attributes(self) -> str:
        """Such as `My.count did not come back, My.queue (a generator) cannot be compared`; empty if there is none."""
        found = {"did not come back": self.hidden, "cannot be compared": self.unseen}
        return ", ".join(f"{join_names(names)} {what}" for what, names in found.items() if names)


def join_names(names: Iterable[str]) -> str:
    """Up to five different names in a sentence."""
    return " and ".join(list(dict.fromkeys(names))[:5])


def differences(stored: dict[str, Any], replayed: dict[str, Any]) -> Differences:
    """The differences of a replayed episode from the stored one.

    An older checkpoint does not store all of this, or other checksums, so there is less to compare.
    """
    if stored["episode"] != replayed["episode"]:
        return Differences(["length of the episode"], [], [])
    names = {"return": "return", "action_mask": "action mask"}
    seen = [name for key, name in names.items() if key in stored and stored[key] != replayed[key]]
    before, after = stored.get("checksums", replayed["checksums"]), replayed["checksums"]
    hidden = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    unseen = {**stored["unseen"], **replayed["unseen"]} if "checksums" in stored else {}
    return Differences(seen, hidden, [f"{name} ({what})" for name, what in unseen.items()])


def _as_given(actions: NDArray[Any]) -> Any:
    """Discrete actions as plain ints again; floats keep their width, otherwise the replay would round differently."""
    return actions.tolist() if actions.ndim == 1 and actions.dtype.kind in "iu" else actions


class Step(NamedTuple):
    """One step of N environments, rows in order.

    `final_obs` holds the true last observation in the rows that ended (same-step autoreset) and arbitrary values in the
    others; it is None if no row ended. `final_masks` are the legal actions there. `valid` is None, or false in the rows
    in which an engine with next-step autoreset only reset. `successes` holds 1 or 0 in the rows that ended with an
    `info["is_success"]`, otherwise NaN; it is None if there is none.
    """

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    final_obs: Array | None = None
    masks: Array | None = None
    valid: Array | None = None
    final_masks: Array | None = None
    successes: Array | None = None


StepTold = Callable[[Step, list[Any]], None]  # called with a step and the infos of its N environments


class Engine:
    """Steps N environments with actions in the environment's own form."""

    resets_next_step = False  # if true, the row after an end holds the final observation, and its step only resets
    inexact = ""  # why the same seed can give other numbers here, in words
    state_format = ""  # engines with the same format read each other's states; empty: it cannot be saved
    unsaved = ""  # why it cannot be saved, as the beginning of a sentence
    envs: Sequence[gym.Env[Any, Any]] = ()  # the environments, where they are in this process

    def reset(self) -> tuple[Array, Array | None]:
        """The first observations and masks."""
        raise NotImplementedError

    def step(self, actions: Array) -> Step:
        """Step every environment."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue from here."""
        return {}

    def brief_state(self) -> dict[str, Any]:
        """The state without the parts that grow with an episode, for a caller that records the actions."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the environments; return their current observations and masks."""
        return self.reset()

    def watch_steps(self, told: StepTold) -> None:
        """Call `told` after every step; only an engine that has `envs` can."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise an EnvironmentFailure if the current state is wrong."""

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """What the environments have logged, as `Collector.metrics`."""
        return {}

    def notes(self) -> list[str]:
        """Sentences for the start of a run."""
        return []

    def close(self) -> None:
        """Close the environments."""


class Episode(NamedTuple):
    """A finished episode of the training environments."""

    episode_return: float
    length: int
    success: bool | None = None  # its `info["is_success"]` at the end


class Stepper:
    """Steps an engine with actions of a policy and keeps the current observation and the episode statistics."""

    def __init__(self, engine: Engine, spaces: EnvSpaces, num_envs: int) -> None:
        self.engine, self.spaces, self.num_envs = engine, spaces, num_envs
        self.obs: Array = np.empty(0)
        self.masks: Array | None = None
        self.is_first = np.ones(num_envs, dtype=bool)
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.started = False
        self.interruption: BaseException | None = None  # raised instead of the next step
        self._map = spaces.map_actions
        self._sees_floats, self._is_mixed = spaces.obs_kind != "image", spaces.obs_kind == "mixed"

    @property
    def resets_next_step(self) -> bool:
        """Whether the row after an end holds the final observation (see `Engine`)."""
        return self.engine.resets_next_step

    def start(self) -> None:
        """Reset the environments once; a restored stepper is already started."""
        if not self.started:
            self.obs, self.masks = self.engine.reset()
            self._check_finite(self.obs, NO_REWARDS, None)
            self.started = True

    def step(self, actions: Array) -> tuple[Step, list[Episode]]:
        """Apply a policy's actions `[N, ...]`; return the step and the episodes that ended."""
        if self.interruption is not None:
            raise self.interruption
        step = self.engine.step(self._map(actions))
        self._check_finite(step.obs, step.rewards, step.final_obs)
        self.obs, self.masks = step.obs, step.masks
        self.returns += step.rewards
        self.lengths += 1
        if step.valid is not None:
            self.returns[~step.valid] = 0.0
            self.lengths[~step.valid] = 0
        self.is_first = done = step.terminated | step.truncated
        if self.engine.resets_next_step:
            self.is_first = np.zeros_like(done) if step.valid is None else ~step.valid
        if not np.count_nonzero(done):  # several times faster than any() on a few rows
            return step, []
        ended = np.flatnonzero(done)
        episodes = [Episode(float(self.returns[i]), int(self.lengths[i])) for i in ended]
        if step.successes is not None:
            known = [None if math.isnan(value) else bool(value) for value in step.successes[ended]]
            episodes = [one._replace(success=value) for one, value in zip(episodes, known, strict=True)]
        self.returns[ended] = 0.0
        self.lengths[ended] = 0
        return step, episodes

    def _check_finite(self, obs: Array, rewards: Array, final_obs: Array | None) -> None:
        """Raise an error that names the environment if it returned a NaN or infinity, before that reaches the loss."""
        if self._is_mixed:
            obs, final_obs = self.spaces.floats_of(obs), None if final_obs is None else self.spaces.floats_of(final_obs)
        squares: Any = np.vdot(rewards, rewards)  # half the time of isfinite; an overflow is checked again
        if self._sees_floats:
            squares = squares + np.vdot(obs, obs) + (0.0 if final_obs is None else np.vdot(final_obs, final_obs))
        if math.isfinite(squares):
            return
        for what, values in (("a reward", rewards), ("an observation", obs), ("an observation", final_obs)):
            if values is not None and not np.isfinite(values).all():
                raise EnvironmentFailure.not_finite(self.spaces.env_id, what)

    def state_dict(self, engine: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything needed to continue exactly from here, with the engine's state or the given one.

        It is empty before the start, and if the engine's state cannot be saved.
        """
        if not self.started or not self.engine.state_format:
            return {}
        engine = self.engine.state_dict() if engine is None else engine
        return {
            "format": self.engine.state_format, "engine": engine, "obs": self.obs,
            "is_first": self.is_first, "returns": self.returns.copy(), "lengths": self.lengths.copy(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore the environments; return one sentence for each difference."""
        if not state:
            return []
        if state["format"] != self.engine.state_format or len(state["obs"]) != self.num_envs:
            return [f"{self.spaces.env_id} has another engine or number of environments now; new episodes start."]
        self.obs, self.masks = self.engine.load_state_dict(state["engine"])
        self.is_first = np.array(state["is_first"])
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.started = True
        found = self.find_differences(state)
        if not any(found):
            return []
        what = f"{self.spaces.env_id} did not replay to the stored {join_names([*found.seen, *found.hidden])}"
        if not found.seen and not found.hidden:
            what = f"{join_names(found.unseen)} of {self.spaces.env_id} cannot be compared with the stored state"
        return [f"{what}, so this resume {'is not' if found.seen else 'may not be'} exact."]

    def find_differences(self, stored: dict[str, Any]) -> Differences:
        """The differences from `stored`."""
        seen = [] if np.array_equal(self.obs, stored["obs"]) else ["observation"]
        total = Differences(seen, [], [])
        states = stored["engine"], self.engine.state_dict()
        if states[0].get("device") != states[1].get("device"):  # another kind of device draws other numbers
            seen.append("random generator")
        for pair in zip(*(state.get("episodes", []) for state in states), strict=True):
            for names, more in zip(total, differences(*pair), strict=True):
                names += more
        return total

    def abandon(self) -> None:
        """Discard the current episodes: the state is empty from now on, and new ones start."""
        self.started, self.is_first = False, np.ones(self.num_envs, dtype=bool)
        self.returns[:] = self.lengths[:] = 0

    def close(self) -> None:
        """Close the environments."""
        self.engine.close()
