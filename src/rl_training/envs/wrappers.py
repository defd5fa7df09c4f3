"""The wrappers between an environment and an algorithm: their options, and the code that applies them."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from pydantic import Field

from rl_training.envs.spaces import image_layout, leaf_spaces
from rl_training.errors import UserError
from rl_training.validation import StrictModel

Env = gym.Env[Any, Any]


class PixelOptions(StrictModel):
    """Rendered frames as observations."""

    resize_shape: tuple[int, int] = Field((84, 84), description="Height and width.")
    frame_stack: int = Field(1, ge=1, le=16, description="Number of frames stacked along the channels.")
    channel_first: bool = Field(True, description="Channels before height and width.")
    grayscale: bool = Field(False, description="One channel instead of three.")


class AtariOptions(StrictModel):
    """Gymnasium's AtariPreprocessing, but a lost life does not end the game; needs frameskip 1 in env_kwargs."""

    noop_max: int = Field(30, ge=0, description="Maximum number of no-op actions after a reset.")
    frame_skip: int = Field(4, ge=1, description="Frames per agent step.")
    screen_size: int = Field(84, ge=16, description="Height and width.")
    terminal_on_life_loss: bool = Field(
        False, description="End the training episode with a life; the game goes on in the next. Never in evaluation."
    )
    frame_stack: int = Field(4, ge=1, le=16, description="Number of frames stacked along the channels.")


class WrapperOptions(StrictModel):
    """`env_kwargs.wrappers`: the wrappers between the environment and the algorithm."""

    pixels: PixelOptions | None = Field(None, description="Learn from rendered frames.")
    atari: AtariOptions | None = Field(None, description="Standard Atari preprocessing.")
    frame_stack: int = Field(1, ge=1, le=64, description="Number of observations stacked.")
    normalize_observation: bool | Literal["auto"] = Field(
        False,
        description="Normalize by a running mean and variance; auto: not for images, one-hot vectors and [0, 1].",
    )
    normalize_reward: bool = Field(
        False, description="Divide rewards by the deviation of the discounted return; rollout learners and GAIL."
    )
    clip_reward: bool | tuple[float, float] = Field(
        False, description="Clip rewards: true for [-1, 1], or [low, high]; not in evaluation."
    )

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The lowest and the highest reward, or None if rewards are not clipped."""
        return (-1.0, 1.0) if self.clip_reward is True else self.clip_reward or None


def wrap(env: Env, options: WrapperOptions, *, evaluation: bool = False) -> Env:
    """The environment in its wrappers; evaluation does not clip rewards or end an episode at a lost life."""
    if options.atari:
        env = _wrap_atari(env, options.atari, evaluation)
    if options.pixels:
        env = _wrap_pixels(env, options.pixels)
    if not isinstance(env.observation_space, gs.Box):
        if options.frame_stack > 1 and any(image_layout(part) for _, part in leaf_spaces(env.observation_space)):
            raise UserError("frame_stack does not stack images inside a Dict or Tuple; stack them in its step")
        env = gym.wrappers.FlattenObservation(env)
    if options.frame_stack > 1:
        env = _stack_frames(env, options.frame_stack)
    if options.clip_range and not evaluation:
        env = gym.wrappers.ClipReward(env, *options.clip_range)
    return env


def _wrap_atari(env: Env, options: AtariOptions, evaluation: bool) -> Env:
    given = options.model_dump(exclude={"frame_stack", "terminal_on_life_loss"})
    env = gym.wrappers.AtariPreprocessing(env, **given)
    if options.terminal_on_life_loss and not evaluation:
        env = LifeEpisodes(env)
    return gym.wrappers.FrameStackObservation(env, options.frame_stack)


def _wrap_pixels(env: Env, options: PixelOptions) -> Env:
    env = gym.wrappers.AddRenderObservation(env, render_only=True)
    if options.grayscale:
        env = gym.wrappers.GrayscaleObservation(env, keep_dim=True)
    env = gym.wrappers.ResizeObservation(env, options.resize_shape)
    return _stack_frames(env, options.frame_stack, options.channel_first)


def _stack_frames(env: Env, count: int, channel_first: bool | None = None) -> Env:
    """Stack the newest `count` observations; images along their channels, in their own layout or as requested."""
    space = env.observation_space
    layout = image_layout(space) if channel_first is None else "channels_last"
    stacked = gym.wrappers.FrameStackObservation(env, count)
    if layout not in ("channels_first", "channels_last"):
        return stacked
    first = layout == "channels_first" if channel_first is None else channel_first

    def fold(frames: Any) -> Any:
        """[stack, H, W, C] or [stack, C, H, W] with the stack folded into the channels."""
        frames = np.moveaxis(frames, -1, 1) if layout == "channels_last" else frames  # [stack, C, H, W]
        image = frames.reshape(-1, *frames.shape[2:])
        return np.ascontiguousarray(image if first else np.moveaxis(image, 0, -1))

    assert isinstance(space, gs.Box)
    low, high = (fold(np.stack([bound] * count)) for bound in (space.low, space.high))
    return gym.wrappers.TransformObservation(stacked, fold, gs.Box(low, high, dtype=space.dtype.type))


def lost(before: Any, after: Any) -> Any:
    """Whether a life was lost, but not the last one, which ends the game (some games show 0 lives before that)."""
    return (after > 0) & (after < before)


class LifeEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode when a life is lost; the next reset continues the game, or starts a new one if it is over.

    `terminal_on_life_loss` of Gymnasium's AtariPreprocessing starts a new game for every life, so a learner never
    sees the later part of a game.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.goes_on = False  # whether the next reset continues the game
        self._lives = 0
        self._last: tuple[Any, dict[str, Any]] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The observation at which a life was lost, or the first one of a new game."""
        if not self.goes_on or seed is not None:
            self._last = self.env.reset(seed=seed, options=options)
            self._lives = self._last[1]["lives"]
        self.goes_on = False
        assert self._last is not None
        return self._last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take one step; it terminates the episode if a life is lost and the game is not over."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.goes_on = lost(self._lives, info["lives"]) and not (terminated or truncated)
        self._lives, self._last = info["lives"], (observation, info)
        return observation, reward, terminated or self.goes_on, truncated, info


def layers(env: Any) -> list[Any]:
    """An environment and what it wraps, from the outermost wrapper to the environment itself."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found
