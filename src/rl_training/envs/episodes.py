"""Replayable episodes: what a checkpoint stores about an environment, and how a resume restores it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rl_training.envs.hidden_state import checksum, hidden_state
from rl_training.envs.wrappers import LifeEpisodes, layers
from rl_training.errors import UserError


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
