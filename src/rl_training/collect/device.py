"""Collect on the device: acting, stepping and storing do not involve the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rl_training.collect.local import Behaviour, LocalCollector
from rl_training.data.store import Experience, ExperienceLayout, Request
from rl_training.envs.device import DeviceEngine, advance, encode, map_actions
from rl_training.envs.simulator import SimulatorEngine
from rl_training.envs.stepper import Stepper
from rl_training.errors import EnvironmentFailure
from rl_training.speed.capture import CapturedStep

MORE_ROWS = {"obs", "states", "starts"}  # arrays of experience with one row more than the steps


def sample_actions(
    learner: Any, obs: Tensor, memory: Tensor | None, ages: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Actions of the learner from this noise, with their log-probabilities, and the memory after these observations."""
    if memory is not None:
        obs, memory = learner.remember(obs, memory, ages == 0)
    return *learner.sample(obs, noise), memory


class DeviceCollector(LocalCollector):
    """A `LocalCollector` whose experience is tensors on the learner's device.

    All noise is drawn before a rollout starts, so on a GPU the rollout is one CUDA graph; with `accelerate` "compile"
    its steps are compiled. Statistics of finished episodes are computed on the device: their number, returns and
    lengths, or NaN if an environment returned a NaN or infinity. The experience's `totals` has those of this rollout,
    which several ranks average; `sums` has those of earlier ones.
    """

    part = "rollout on the device"
    can_capture = True
    draws_inside = False  # whether the captured rollout draws from the learner's generator

    def __init__(
        self, actor: Behaviour, stepper: Stepper, layout: ExperienceLayout, lag: int | None = None,
        accelerate: str = "none",
    ) -> None:  # fmt: skip
        engine: Any = stepper.engine
        self.engine: DeviceEngine = engine
        device = engine.device
        arrays = {name: torch.from_numpy(np.zeros(*spec)).to(device) for name, spec in layout.arrays().items()}
        super().__init__(actor, stepper, Experience(layout, arrays), lag)
        self.experience.totals = torch.zeros(4, dtype=torch.float64, device=device)
        self.returns = torch.zeros(layout.num_envs, dtype=torch.float64, device=device)  # of the current episodes
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.means: dict[str, float] = {}
        self._map = map_actions(stepper.spaces, device)
        captures = self.can_capture and device.type == "cuda" and accelerate != "none"
        self._roll: Any = self._roll_out
        if captures:  # an epsilon, which only acting reads, may be one of the numbers
            generator = actor.algorithm.generator if self.draws_inside else None
            self._roll = CapturedStep(self._roll_out, actor.algorithm.numbers, generator, engine.env.capture_mode)
        self._one_step = torch.compile(self._step, dynamic=False) if accelerate == "compile" else self._step

    def fill(self, experience: Experience, request: Request) -> None:
        """Collect `max_steps` rows."""
        layout = experience.layout
        experience.clear()
        experience.version = self.actor.version
        if self.stepper.interruption is not None:
            raise self.stepper.interruption
        self.stepper.start()
        self.sums += experience.totals
        with torch.no_grad():
            experience.totals.copy_(self._take_rows(request))
        experience.steps, experience.transitions = layout.max_steps, layout.max_steps * layout.num_envs

    def _take_rows(self, request: Request) -> Tensor:
        """Draw the noise of a rollout and fill the experience; return its `totals`."""
        layout, actor = self.experience.layout, self.actor
        noise = self._draw(layout.max_steps)
        generator, spaces = actor.algorithm.generator, actor.spaces
        choices = torch.empty(layout.max_steps, layout.num_envs, spaces.action_dim, device=self.engine.device)
        if spaces.action_kind == "continuous":
            choices.normal_(generator=generator)
        else:
            choices.exponential_(generator=generator).log_().neg_()
        sums: Tensor = self._roll({"choices": choices, **noise})
        return sums

    def _draw(self, steps: int) -> dict[str, Tensor]:
        """The environments' noise for so many steps."""
        return dict(zip(("resets", "steps"), self.engine.draw(steps), strict=True))

    def _roll_out(self, noise: Mapping[str, Tensor]) -> Tensor:
        """Fill the experience and return its `totals`."""
        engine, env = self.engine, self.engine.env
        steps, count = noise["resets"].shape[:2]
        begun = tree_map(lambda x: x.reshape(steps, count, *x.shape[1:]), env.reset(noise["resets"].flatten(0, 1)))
        state, ages, obs = engine.state, engine.ages, encode(self.actor.spaces, env.observe(engine.state))
        rows: dict[str, list[Tensor]] = {name: [] for name in self.experience.arrays if name != "values"}
        row = {"obs": obs, "states": self.actor.memory, "starts": ages == 0}
        for name in MORE_ROWS & rows.keys():
            rows[name].append(row[name])
        for t in range(steps):
            given = noise["choices"][t], noise["steps"][t], tree_map(itemgetter(t), begun)
            state, ages, row = self._one_step(state, ages, row["obs"], row.get("states"), *given)
            for name, column in rows.items():
                column.append(row[name])
        for name, column in rows.items():
            torch.stack(column, out=cast(Tensor, self.experience.arrays[name]))
        sums = self._sum_episodes(ages)
        engine.place(state, ages)
        self._place_memory(row.get("states"))
        return sums

    def _keep_memory(self, t: int, memory: Tensor | None, ages: Tensor) -> None:
        """Write the policy's memory before it reads row t, if the experience holds it."""
        rows: Any = self.experience
        if rows.states is not None:
            rows.states[t], rows.starts[t] = memory, ages == 0

    def _place_memory(self, memory: Tensor | None) -> None:
        """Write the policy's memory where the next rollout, or graph, reads it."""
        if memory is not None:
            self.actor.memory.copy_(memory)

    def _step(
        self, state: Any, ages: Tensor, obs: Tensor, memory: Tensor | None, choices: Tensor, noise: Tensor, begun: Any
    ) -> tuple[Any, Tensor, dict[str, Tensor]]:
        """Act and step once; return the new state and a row of experience."""
        spaces, learner = self.actor.spaces, cast(Any, self.actor.algorithm)
        actions, logprobs, memory = sample_actions(learner, obs, memory, ages, choices)
        after = advance(self.engine.env, self.engine.limit, state, ages, self._map(actions), noise, begun)
        row = {
            "obs": encode(spaces, after.obs), "final_obs": encode(spaces, after.final_obs), "actions": actions,
            "logprobs": logprobs, "rewards": after.rewards, "terminated": after.terminated,
            "truncated": after.truncated,
        }  # fmt: skip
        if memory is not None:
            row |= {"states": memory, "starts": after.ages == 0}
        return after.state, after.ages, row

    def _sum_episodes(self, ages: Tensor, begun: Tensor | None = None) -> Tensor:
        """Sums over the episodes that ended: the running sums before plus the new terms, minus the running sums now.

        `ages` [N] are the steps of the current episodes after the rollout, `begun` those before (the engine's if None).
        """
        rows: Any = self.experience
        rewards, done = rows.rewards.double(), rows.terminated | rows.truncated
        seen = rows.obs.sum(dtype=torch.float64) + rows.final_obs.sum(dtype=torch.float64) + rewards.sum()
        acts = rows.actions[0].sum(dtype=torch.float64).isfinite()  # if not, the policy is at fault
        goes_on = done.flip(0).cumsum(0).flip(0) == 0  # no end in this row or a later one
        under_way = (rewards * goes_on).sum(0) + self.returns * goes_on[0]
        returns = self.returns.sum() + rewards.sum() - under_way.sum()
        lengths = (self.engine.ages if begun is None else begun).sum() + rewards.numel() - ages.sum()
        self.returns.copy_(under_way)
        return torch.stack([done.sum().double(), returns, lengths.double(), torch.where(acts, seen, 0.0) * 0.0])

    def metrics(self, *, last: bool = False) -> dict[str, float]:
        """Mean return and length of the episodes that ended since the last call, or the last known means."""
        count, returns, lengths, finite = (self.sums + self.experience.totals).tolist()
        if math.isnan(finite):
            raise EnvironmentFailure.not_finite(self.stepper.spaces.env_id, "a reward or an observation")
        self.engine.check()
        means = self.means
        if count:
            means = {"episode_return_mean": returns / count, "episode_length_mean": lengths / count}
        if not last:
            self.means = means
            self._forget_episodes()
        return dict(means) | super().metrics(last=last)

    def _forget_episodes(self) -> None:
        self.sums.zero_()
        self.experience.totals.zero_()

    def abandon(self) -> None:
        """Discard the current episodes and start new ones."""
        super().abandon()
        self.returns.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The stepper's state, brought up to date from the device, and the statistics of finished episodes."""
        stepper = self.stepper
        if stepper.started:
            stepper.obs, stepper.returns = self.engine.look(), self.returns.cpu().numpy()
            stepper.lengths = self.engine.ages.cpu().numpy().astype("int64")
            stepper.is_first = stepper.lengths == 0
        return super().state_dict() | {
            "finished": {"sums": self.sums + self.experience.totals, "means": dict(self.means)}
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        sentences = super().load_state_dict(state)
        if self.stepper.started:
            self.returns.copy_(torch.from_numpy(self.stepper.returns))
        if self.stepper.started or not self.engine.state_format:
            self._forget_episodes()
            self.sums.copy_(state["finished"]["sums"])
            self.means = dict(state["finished"]["means"])
        return sentences


class DeviceStepCollector(DeviceCollector):
    """A `DeviceCollector` for replay: it acts as the learner explores, each row for itself, or at random.

    Exploration and random actions are drawn from the learner's generator. Steps with random actions are not captured,
    nor are those of a policy that lags, which takes the generator of the learner at every turn.
    """

    draws_inside = True

    def __init__(
        self, actor: Behaviour, stepper: Stepper, layout: ExperienceLayout, lag: int | None = None,
        accelerate: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(actor, stepper, layout, lag, "graph" if accelerate != "none" and not lag else "none")
        self.held: Tensor | None = None  # the last random actions
        self._choices = torch.tensor(stepper.spaces.action_sizes, device=self.engine.device)

    def _take_rows(self, request: Request) -> Tensor:
        """Act and step; return the experience's `totals`."""
        noise = self._draw(self.experience.layout.max_steps)
        sums: Tensor = self._step_rows(noise, request) if request.random else self._roll(noise)
        return sums

    def _roll_out(self, noise: Mapping[str, Tensor]) -> Tensor:
        """Fill the experience as the learner explores, and return its `totals`."""
        return self._step_rows(noise, Request())

    def _step_rows(self, noise: Mapping[str, Tensor], request: Request) -> Tensor:
        engine, env, spaces, arrays = self.engine, self.engine.env, self.actor.spaces, self.experience.arrays
        state, ages, obs = engine.state, engine.ages, encode(spaces, env.observe(engine.state))
        memory = self.actor.memory
        arrays["obs"][0] = obs
        self._keep_memory(0, memory, ages)
        for t, (for_reset, for_step) in enumerate(zip(noise["resets"], noise["steps"], strict=True)):
            is_random = t * len(ages) < request.random
            if not is_random or memory is not None:  # a memory reads every observation
                out = self.actor.algorithm.act_in_training(obs, memory, is_first=ages == 0)
                actions, memory = out.actions, out.carry
            if is_random:
                actions = self._act_randomly(request.hold)
            begun = env.reset(for_reset)
            after = advance(env, engine.limit, state, ages, self._map(actions), for_step, begun)
            state, ages, obs = after.state, after.ages, encode(spaces, after.obs)
            row = {
                "actions": actions, "rewards": after.rewards, "terminated": after.terminated,
                "truncated": after.truncated, "final_obs": encode(spaces, after.final_obs),
            }  # fmt: skip
            for name, values in row.items():
                arrays[name][t] = values
            arrays["obs"][t + 1] = obs
            self._keep_memory(t + 1, memory, ages)
        sums = self._sum_episodes(ages)
        engine.place(state, ages)
        self._place_memory(memory)
        return sums

    def _act_randomly(self, hold: float) -> Tensor:
        """Uniform actions [N, ...], each repeated for `hold` steps on average."""
        spaces, generator = self.actor.spaces, self.actor.algorithm.generator
        drawn = torch.empty(self.stepper.num_envs, len(self._choices) + 1, device=self.engine.device)
        drawn.uniform_(generator=generator)
        keeps, drawn = drawn[:, :1] >= 1.0 / hold, drawn[:, 1:]
        drawn = 2.0 * drawn - 1.0 if spaces.action_kind == "continuous" else (drawn * self._choices).long()
        self.held = drawn if self.held is None else torch.where(keeps, self.held, drawn)
        return self.held.view(-1, *spaces.action_shape)

    def state_dict(self) -> dict[str, Any]:
        """As before, with the repeated random actions."""
        return super().state_dict() | ({} if self.held is None else {"held": self.held.clone()})

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """The inverse of `state_dict`."""
        held = state.get("held")
        self.held = None if held is None else torch.as_tensor(held, device=self.engine.device)
        nothing = {"sums": torch.zeros(4), "means": {}}  # a state of another collector, which the store refuses
        return super().load_state_dict({"finished": nothing, **state, "held": None})


class SimulatorCollector(DeviceCollector):
    """A `DeviceCollector` of a `Simulator`, which keeps its own state: nothing of it is captured or compiled."""

    can_capture = False

    def _draw(self, steps: int) -> dict[str, Tensor]:
        return {}

    def _roll_out(self, noise: Mapping[str, Tensor]) -> Tensor:
        """Fill the experience, whose arrays are copies: the simulator may write to its tensors again."""
        simulator, learner = cast(SimulatorEngine, self.engine), cast(Any, self.actor.algorithm)
        arrays: Mapping[str, Tensor] = self.experience.arrays
        begun = simulator.ages.clone()
        arrays["obs"][0].copy_(simulator.obs[: simulator.num_envs])
        memory = self.actor.memory
        self._keep_memory(0, memory, begun)
        for t, choices in enumerate(noise["choices"]):
            if self.stepper.interruption is not None:
                raise self.stepper.interruption
            actions, logprobs, memory = sample_actions(learner, arrays["obs"][t], memory, simulator.ages, choices)
            obs, *rest = simulator.advance(self._map(actions))
            row = dict(zip(("final_obs", "rewards", "terminated", "truncated"), rest, strict=True))
            for name, column in (row | {"actions": actions, "logprobs": logprobs}).items():
                arrays[name][t].copy_(column)
            arrays["obs"][t + 1].copy_(obs)
            self._keep_memory(t + 1, memory, simulator.ages)
        self._place_memory(memory)
        return self._sum_episodes(simulator.ages, begun)
