"""Simulators that step many environments at once and keep their own state on a device, and the engine for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces as gs
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rl_training.envs.device import Observed, encode, map_actions
from rl_training.envs.factory import EnvRecipe
from rl_training.envs.spaces import Array, EnvSpaces, check_groups, groups_of
from rl_training.envs.stepper import Engine, Step
from rl_training.errors import EnvironmentFailure, UserError, counted

SHARE = 32  # by default, one of so many rows is held out for evaluation
MOST_ROWS = 65536
PARTS = "observations, rewards, terminated, truncated, final observations (or None) and a log"
CRITIC = "critic"  # a group of observations of this name is for the critic alone
Stepped = tuple[Observed, Tensor, Tensor, Tensor, Observed | None, Mapping[str, Any]]


class Simulator:
    """N environments, the rows, that are stepped together; subclass it and set the attributes.

    If the observation space is a Dict of Boxes, observations are mappings of its names, the groups, to tensors; the
    setting `critic_obs` names the groups that only the critic sees.

    `has_final_obs` says whether `step` returns the final observations. If episodes have a time limit that the simulator
    applies, `max_episode_steps` is that limit, and `episode_length_buf` [N] may be the step counts of the current
    episodes, which `random_ages` writes to. With `state_dict` (plain data and tensors, which may come back as tensors
    on the CPU) and `load_state_dict`, a resume is exact.
    """

    num_envs: int
    device: torch.device | str = "cpu"
    observation_space: gs.Box | gs.Dict
    action_space: gs.Space[Any]
    max_episode_steps: int | None = None
    has_final_obs = True
    episode_length_buf: Any = None
    _engine: Any = None  # which began the current episodes

    def reset(self, rows: Tensor) -> Observed:
        """Begin new episodes in these rows, int64 indices; return the observations of all rows [N, ...]."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> Stepped:
        """Step every row, and begin a new episode in every row whose episode has ended.

        Actions [N, ...] are elements of the action space. Return the observations after the resets [N, ...], rewards
        [N], `terminated` [N], `truncated` [N], the observations before the resets (read only in the rows that ended;
        None without `has_final_obs`), and a mapping of names to numbers or 0-dim tensors to log.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free what the simulator holds; not called for an instance that the user made."""


def can_save(simulator: Simulator) -> bool:
    """Whether the simulator's state can be saved."""
    return all(callable(getattr(simulator, name, None)) for name in ("state_dict", "load_state_dict"))


class SimulatorView(gym.Env[Any, Any]):
    """The spaces of a simulator for everything that looks at an environment; it cannot be stepped."""

    def __init__(self, simulator: Simulator, recipe: EnvRecipe) -> None:
        check_simulator(simulator, recipe)
        self.simulator, self.settings, self.env_id = simulator, recipe.simulator, recipe.env_id
        self.is_lent = getattr(recipe.maker, "is_lent", False)
        self.observation_space, self.action_space = simulator.observation_space, simulator.action_space
        if self.settings.action_limit is not None:
            limit, space = self.settings.action_limit, simulator.action_space
            self.action_space = gs.Box(-limit, limit, space.shape, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """An observation of zeros: nothing is reset."""
        groups = groups_of(self.observation_space)
        zeros = {name: np.zeros(space.shape, space.dtype) for name, space in groups.items()}
        return zeros.get("", zeros), {}

    def step(self, action: Any) -> NoReturn:
        """Refuse: there is no single environment."""
        raise UserError(f"{self.env_id} is a Simulator, whose rows cannot be played one at a time, as is wanted here.")

    def check_critic(self, critic_obs: Sequence[str]) -> None:
        """Raise a UserError if the actor would see the group that is meant for the critic."""
        if CRITIC in groups_of(self.observation_space) and CRITIC not in critic_obs:
            what = f"the actor would see the group {CRITIC!r} of the observations of {self.env_id}"
            raise UserError(f"{what}; name it in critic_obs, or leave it out of observation_space.")

    def open_engine(self, spaces: EnvSpaces, num_envs: int, seed: int) -> SimulatorEngine:
        """The engine whose training rows are the first `num_envs`."""
        return SimulatorEngine(self, spaces, num_envs, seed)

    def held_out(self, eval_episodes: int) -> int:
        """How many rows are held out for this many episodes per evaluation."""
        asked, count = self.settings.eval_rows, self.simulator.num_envs
        if not eval_episodes:
            if asked:
                raise UserError(f"env_kwargs.simulator.eval_rows is {asked}, but eval_episodes is 0; leave one out.")
            return 0
        if count == 1:
            raise UserError(f"eval_episodes is {eval_episodes}; with a Simulator of 1 row it must be 0.")
        if asked is not None and asked >= count:
            what = f"env_kwargs.simulator.eval_rows is {asked}, but {self.env_id} has {count} rows"
            raise UserError(f"{what}; it must be from 1 to {count - 1}.")
        return asked or min(max(1, count // SHARE), eval_episodes)


def check_simulator(simulator: Simulator, recipe: EnvRecipe) -> None:
    """Raise a UserError if an attribute of a simulator is missing or does not fit the settings."""
    env_id, limit = recipe.env_id, simulator.max_episode_steps
    for name in ("reset", "step"):
        if getattr(type(simulator), name) is getattr(Simulator, name):
            raise UserError(f"{env_id} has no {name}; a Simulator must define reset and step.")
    for name, value, needed in (
        ("num_envs", getattr(simulator, "num_envs", None), True), ("max_episode_steps", limit, False),
    ):  # fmt: skip
        if (needed or value is not None) and (type(value) is not int or value < 1):
            raise UserError(f"{env_id}: {name} is {value!r}; it must be a whole number of at least 1.")
    if simulator.num_envs > MOST_ROWS:
        raise UserError(f"{env_id}: num_envs is {simulator.num_envs}; it must be at most {MOST_ROWS}.")
    observations, actions = (getattr(simulator, f"{name}_space", None) for name in ("observation", "action"))
    check_groups(env_id, observations)
    if not isinstance(actions, gs.Space):
        raise UserError(f"{env_id}: action_space is {actions!r}; it must be a gymnasium space.")
    check_given(simulator, recipe)


def check_given(simulator: Simulator, recipe: EnvRecipe) -> None:
    """Raise a UserError if the settings of a run do not fit the simulator."""
    env_id, settings, limit = recipe.env_id, recipe.simulator, simulator.max_episode_steps
    actions = simulator.action_space
    is_finite = not isinstance(actions, gs.Box) or actions.is_bounded()
    if settings.action_limit is None and not is_finite:
        how = "--set env_kwargs.simulator.action_limit=1.0 lets actions be from -1 to 1"
        raise UserError(f"{env_id}: action_space is {actions}, which has no finite limits; {how}.")
    if settings.action_limit is not None and is_finite:
        what = f"env_kwargs.simulator.action_limit is {settings.action_limit}, but"
        raise UserError(f"{what} the actions of {env_id} have finite limits of their own ({actions}); leave it out.")
    options = recipe.wrappers.model_dump(exclude_defaults=True)
    if odd := [name for name in options if name not in ("normalize_observation", "normalize_reward")]:
        what = f"env_kwargs.wrappers.{odd[0]} is {options[odd[0]]!r}"
        raise UserError(f"{what}; a Simulator's only wrappers are normalize_observation and normalize_reward.")
    if recipe.max_episode_steps is not None:
        what = f"env_kwargs.max_episode_steps is {recipe.max_episode_steps}"
        raise UserError(f"{what}, but {env_id} is a Simulator, which has a time limit of its own; leave it out.")
    if settings.random_ages and (limit is None or not isinstance(simulator.episode_length_buf, Tensor)):
        missing = "max_episode_steps" if limit is None else "episode_length_buf (a tensor of step counts)"
        raise UserError(f"env_kwargs.simulator.random_ages is true, but {env_id} has no {missing}; leave it out.")


class Moved(NamedTuple):
    """The result of a step in the first rows; `final_obs` are the observations to bootstrap from."""

    obs: Tensor
    final_obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


class SimulatorEngine(Engine):
    """Steps a `Simulator`; training sees its first `num_envs` rows, evaluation the others.

    With numpy arrays it is an engine like any other. `SimulatorCollector` uses `advance`, which stays on the device.
    Without final observations, those before the step stand in for them, so that time-outs bootstrap from V(s_t).
    """

    def __init__(self, view: SimulatorView, spaces: EnvSpaces, num_envs: int, seed: int) -> None:
        self.view, self.simulator, self.spaces, self.num_envs = view, view.simulator, spaces, num_envs
        self.state_format = "simulator" if can_save(self.simulator) else ""
        self.unsaved = f"{spaces.env_id} has no state_dict and load_state_dict, so its state cannot be saved"
        self.device, self.rows = torch.device(self.simulator.device), self.simulator.num_envs
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.obs = torch.zeros(0, device=self.device)  # of all rows, encoded
        self.ages = torch.zeros(num_envs, dtype=torch.int32, device=self.device)  # steps of the episodes of training
        dtype = torch.float32 if spaces.action_kind == "continuous" else torch.int64
        rest = torch.zeros(self.rows - num_envs, *spaces.action_shape, dtype=dtype, device=self.device)
        self.rest = map_actions(spaces, self.device)(rest)  # actions of the rows that are held out, while they wait
        self.logged: dict[str, tuple[Any, int]] = {}  # sums and counts since the last logged row
        self.means: dict[str, float] = {}  # of the last logged row
        self._checked = False

    def reset(self) -> tuple[Array, Array | None]:
        """Begin new episodes in all rows; with `random_ages`, in the middle of the time limit."""
        with self._failures():
            obs = self.simulator.reset(torch.arange(self.rows, device=self.device))
        self.simulator._engine = self
        self._check_groups("observations of reset", obs)
        self.obs = encode(self.spaces, obs).clone()
        self.ages.zero_()
        limit = self.simulator.max_episode_steps
        if self.view.settings.random_ages and limit is not None:
            drawn = torch.randint(limit, (self.num_envs,), generator=self.generator, device=self.device)
            self.simulator.episode_length_buf[: self.num_envs].copy_(drawn)
        return self.look(), None

    def look(self) -> Array:
        """The current observations of the training rows."""
        return self._array(self.obs[: self.num_envs])

    @torch.no_grad()
    def advance(self, actions: Tensor, count: int | None = None) -> Moved:
        """Step all rows; the actions are those of the first rows, or of all. Return the first `count` rows of results.

        Nothing is read by the host.
        """
        if self.simulator._engine is not self:
            what = f"something else began new episodes in {self.spaces.env_id} during this run"
            raise UserError(f"{what}; give it a simulator of its own (a function that makes one).")
        if len(actions) < self.rows:
            actions = torch.cat([actions, self.rest])
        with self._failures():
            given = self.simulator.step(actions)
            if not self._checked:
                self._check_step(given)
            obs, rewards, terminated, truncated, final_obs, log = given
            for name, value in log.items():
                total, times = self.logged.get(name, (0.0, 0))
                number = value.detach().double().mean() if isinstance(value, Tensor) else float(value)
                self.logged[name] = total + number, times + 1
        if (final_obs is not None) != self.simulator.has_final_obs:
            what = f"has_final_obs is {self.simulator.has_final_obs}"
            returned = "none" if final_obs is None else "final observations"
            raise UserError(f"{self.spaces.env_id}: {what}, but step returned {returned}.")
        before, self.obs = self.obs, encode(self.spaces, obs).clone()
        terminated, truncated = terminated.bool(), truncated.bool()
        done = terminated | truncated
        finals = before if final_obs is None else encode(self.spaces, final_obs)
        finals = torch.where(done.view(-1, *[1] * (finals.dim() - 1)), finals, self.obs)
        self.ages.add_(1).masked_fill_(done[: self.num_envs], 0)
        moved = self.obs, finals, rewards.float(), terminated, truncated
        return Moved(*(part[: self.num_envs if count is None else count] for part in moved))

    def step(self, actions: Array) -> Step:
        """Step the training rows with numpy arrays."""
        moved = self.advance(torch.from_numpy(np.ascontiguousarray(actions)).to(self.device))
        obs, finals, rewards, terminated, truncated = (self._array(part) for part in moved)
        return Step(obs, rewards, terminated, truncated, finals if (terminated | truncated).any() else None)

    def _array(self, tensor: Tensor) -> Array:
        array: Array = tensor.cpu().numpy().copy()
        return array

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (UserError, EnvironmentFailure):
            raise
        except (Exception, SystemExit) as error:
            raise EnvironmentFailure.from_error(self.spaces.env_id, error) from error

    def _check_step(self, given: Any) -> None:
        """Refuse what the first step returned, if a part is missing or of another shape."""
        if not isinstance(given, tuple) or len(given) != 6:
            raise UserError(f"{self.spaces.env_id}: step must return a tuple of six parts: {PARTS}.")
        obs, rewards, terminated, truncated, final_obs, _ = given
        self._check_groups("observations", obs)
        if final_obs is not None:
            self._check_groups("final observations", final_obs)
        self._check({"rewards": rewards, "terminated": terminated, "truncated": truncated}, ())
        self._checked = True

    def _check_groups(self, name: str, given: Any) -> None:
        """Refuse observations of which a group is missing or of another shape."""
        groups = groups_of(self.simulator.observation_space)
        if "" in groups:
            self._check({name: given}, groups[""].shape)
            return
        found = list(given.keys()) if hasattr(given, "keys") else []
        if set(groups) - set(found):
            known = f"have the groups {', '.join(found)}" if found else f"are a {type(given).__name__}"
            wanted = f"they must be a mapping with {' and '.join(groups)}"
            raise UserError(f"the {name} of {self.spaces.env_id} {known}; {wanted}.")
        for group, part in groups.items():
            self._check({f"{name} in the group {group!r}": given[group]}, part.shape)

    def _check(self, parts: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        for name, part in parts.items():
            wanted = (self.rows, *shape)
            if not isinstance(part, Tensor) or part.shape != wanted or part.device.type != self.device.type:
                is_tensor = isinstance(part, Tensor)
                found = f"{tuple(part.shape)} on {part.device}" if is_tensor else f"a {type(part).__name__}"
                place = f"the {name} of {self.spaces.env_id} are {found}"
                raise UserError(f"{place}; they must be a tensor of shape {wanted} on {self.device}.")

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """Means of what the simulator has logged since the last call without `last`, or the last known ones."""
        new = {f"sim/{name.strip('/')}": float(total) / count for name, (total, count) in self.logged.items()}
        means = self.means | new
        if not last:
            self.logged, self.means = {}, means
        return means

    def state_dict(self) -> dict[str, Any]:
        """The simulator's own state, the observations and ages, the generator, and what waits to be logged."""
        state: Any = self.simulator
        return {
            "simulator": tree_map_only(Tensor, torch.clone, state.state_dict()), "obs": self.obs.clone(),
            "ages": self.ages.clone(), "generator": self.generator.get_state().numpy(), "device": self.device.type,
            "logged": {name: [float(total), count] for name, (total, count) in self.logged.items()},
            "means": dict(self.means),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Array | None]:
        """Restore the state; the generator is not restored on another kind of device."""
        self.reset()
        simulator: Any = self.simulator
        with self._failures():
            simulator.load_state_dict(state["simulator"])
        self.obs.copy_(state["obs"])
        self.ages.copy_(state["ages"])
        self.logged = {name: (total, count) for name, (total, count) in state["logged"].items()}
        self.means = dict(state["means"])
        if state["device"] == self.device.type:
            self.generator.set_state(torch.from_numpy(np.array(state["generator"])))
        return self.look(), None

    def close(self) -> None:
        """Close a simulator that the run has made."""
        if not self.view.is_lent:
            with self._failures():
                self.simulator.close()

    def notes(self) -> list[str]:
        """Sentences for the start of a run."""
        held, found = self.rows - self.num_envs, []
        if not self.simulator.has_final_obs:
            found.append("the simulator gives no final observation, so time-outs bootstrap from V(s_t)")
        if held:
            what = f"evaluation plays in {counted(held, 'row')} of {self.rows:,}, which training does not see"
            restart = "" if self.state_format else "; it steps all rows, so the training episodes start over after it"
            found.append(what + restart)
        return found
