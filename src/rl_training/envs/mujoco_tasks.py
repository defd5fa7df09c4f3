"""Gymnasium's MuJoCo tasks (v5) on MuJoCo Warp: observations, rewards and ends as in Gymnasium's code."""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor

from rl_training.envs.mujoco import MujocoEnvironment, State


class GymnasiumTask(MujocoEnvironment):
    """A task whose constants, model and spaces are those of Gymnasium's environment."""

    normal_velocities = False

    def __init__(self, env: Any) -> None:
        self.env, self.frame_skip = env, env.frame_skip
        self.start_noise = getattr(env, "_reset_noise_scale", 0.0)
        self.prepare(env.model, env.action_space, env.init_qpos)
        self.observation_space = env.observation_space

    def start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform around the initial pose; some tasks have normally distributed velocities."""
        qpos, qvel = super().start(noise)
        if self.normal_velocities:
            drawn = torch.special.ndtri(noise[:, self.model.nq :].clamp(min=2.0**-25))
            qvel = drawn * self.start_noise
        return qpos, qvel

    def positions(self, state: State, skipped: int) -> Tensor:
        """The positions that are observed: without the first ones, unless the environment includes them."""
        return state["qpos"][:, skipped * self.env._exclude_current_positions_from_observation :]

    def effort(self, actions: Tensor) -> Tensor:
        """The cost of the controls."""
        cost: Tensor = self.env._ctrl_cost_weight * actions.square().sum(-1)
        return cost


class HalfCheetah(GymnasiumTask):
    """Run forward; never ends."""

    normal_velocities = True

    def observe(self, state: State) -> Tensor:
        """Positions without the first, and velocities."""
        return torch.cat([self.positions(state, 1), state["qvel"]], -1)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Speed forward minus effort."""
        speed = (after["qpos"][:, 0] - before["qpos"][:, 0]) / self.dt
        return self.env._forward_reward_weight * speed - self.effort(actions)


class Swimmer(HalfCheetah):
    """Swim forward; never ends."""

    normal_velocities = False

    def observe(self, state: State) -> Tensor:
        """Positions without the first two, and velocities."""
        return torch.cat([self.positions(state, 2), state["qvel"]], -1)


class Walker2d(HalfCheetah):
    """Walk without falling."""

    normal_velocities = False

    def observe(self, state: State) -> Tensor:
        """Positions without the first, and clipped velocities."""
        return torch.cat([self.positions(state, 1), state["qvel"].clamp(-10.0, 10.0)], -1)

    def healthy(self, state: State) -> Tensor:
        """Whether height and angle are in their ranges."""
        height, angle = state["qpos"][:, 1], state["qpos"][:, 2]
        return is_between(height, self.env._healthy_z_range) & is_between(angle, self.env._healthy_angle_range)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Speed forward minus effort, and a bonus for being healthy."""
        return super().reward(before, after, actions) + self.healthy(after) * self.env._healthy_reward

    def terminated(self, state: State) -> Tensor:
        """Ends when unhealthy."""
        return ~self.healthy(state) & self.env._terminate_when_unhealthy


class Hopper(Walker2d):
    """Hop without falling."""

    def healthy(self, state: State) -> Tensor:
        """As for Walker2d; the other parts of the state have a range too."""
        others = torch.cat([state["qpos"], state["qvel"]], -1)[:, 2:]
        return super().healthy(state) & is_between(others, self.env._healthy_state_range).all(-1)


class Ant(GymnasiumTask):
    """Walk forward on four legs."""

    normal_velocities = True
    fields = ("xpos", "cfrc_ext")

    def forces(self, state: State) -> Tensor:
        """External forces on the bodies, clipped, [N, bodies * 6]."""
        return state["cfrc_ext"].flatten(1).clamp(*self.env._contact_force_range)

    def observe(self, state: State) -> Tensor:
        """Positions without the first two, velocities, and forces on the bodies."""
        parts = [self.positions(state, 2), state["qvel"]]
        if self.env._include_cfrc_ext_in_observation:
            parts.append(self.forces(state)[:, 6:])
        return torch.cat(parts, -1)

    def healthy(self, state: State) -> Tensor:
        """Whether the height is in its range and everything is finite."""
        low, high = self.env._healthy_z_range
        height = state["qpos"][:, 2]
        finite = torch.cat([state["qpos"], state["qvel"]], -1).isfinite().all(-1)
        return finite & (height >= low) & (height <= high)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Speed forward and a bonus for being healthy, minus effort and forces."""
        env, body = self.env, self.model.body(self.env._main_body).id
        speed = (after["xpos"][:, body, 0] - before["xpos"][:, body, 0]) / self.dt
        costs = self.effort(actions) + env._contact_cost_weight * self.forces(after).square().sum(-1)
        return speed * env._forward_reward_weight + self.healthy(after) * env._healthy_reward - costs

    def terminated(self, state: State) -> Tensor:
        """Ends when unhealthy."""
        return ~self.healthy(state) & self.env._terminate_when_unhealthy


class HumanoidStandup(GymnasiumTask):
    """Stand up from the floor; never ends."""

    fields = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    impact = "impact"

    def observe(self, state: State) -> Tensor:
        """Positions without the first two, velocities, inertias, body velocities, and forces."""
        env = self.env
        parts = [self.positions(state, 2), state["qvel"]]
        for name in ("cinert", "cvel", "qfrc_actuator", "cfrc_ext"):
            if getattr(env, f"_include_{name}_in_observation"):
                parts.append(state[name][:, 6 if name == "qfrc_actuator" else 1 :].flatten(1))
        return torch.cat(parts, -1)

    def impacts(self, state: State) -> Tensor:
        """The cost of forces on the bodies."""
        cost = getattr(self.env, f"_{self.impact}_cost_weight") * state["cfrc_ext"].square().sum((-2, -1))
        return cost.clamp(*getattr(self.env, f"_{self.impact}_cost_range"))

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Height over the duration of one physics step, minus effort and forces."""
        height = after["qpos"][:, 2] / self.model.opt.timestep
        return height - self.effort(actions) - self.impacts(after) + 1.0


class Humanoid(HumanoidStandup):
    """Walk forward on two legs."""

    impact = "contact"

    def prepare(self, model: Any, action_space: Box, qpos: Any) -> None:
        """As for other tasks; the center of mass needs masses."""
        super().prepare(model, action_space, qpos)
        self.masses = torch.as_tensor(model.body_mass, dtype=torch.float32)

    def center(self, state: State) -> Tensor:
        """The x coordinate of the center of mass."""
        masses = self.constant("masses", state["xipos"])
        return (state["xipos"][..., 0] * masses).sum(-1) / masses.sum()

    def healthy(self, state: State) -> Tensor:
        """Whether the height is in its range."""
        return is_between(state["qpos"][:, 2], self.env._healthy_z_range)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Speed forward and a bonus for being healthy, minus effort and forces."""
        speed = (self.center(after) - self.center(before)) / self.dt
        gains = self.env._forward_reward_weight * speed + self.healthy(after) * self.env._healthy_reward
        return gains - self.effort(actions) - self.impacts(after)

    def terminated(self, state: State) -> Tensor:
        """Ends when unhealthy."""
        return ~self.healthy(state) & self.env._terminate_when_unhealthy


class Reacher(GymnasiumTask):
    """Touch a target with the fingertip; never ends."""

    fields = ("xpos",)

    def start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """An arm near its initial pose, and a target anywhere in a disc."""
        qpos, qvel = noise.split([self.model.nq, self.model.nv], -1)
        angle, radius = 2.0 * pi * qpos[:, -2], 0.2 * qpos[:, -1].sqrt()
        target = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
        arm = (0.2 * qpos - 0.1 + self.constant("qpos", noise))[:, :-2]
        speeds = 0.01 * qvel[:, :-2] - 0.005
        return torch.cat([arm, target], -1), torch.cat([speeds, torch.zeros_like(target)], -1)

    def distance(self, state: State) -> Tensor:
        """From the target to the fingertip, [N, 3]."""
        return self.place_of(state, "fingertip") - self.place_of(state, "target")

    def place_of(self, state: State, body: str) -> Tensor:
        """A body's position, [N, 3]."""
        return state["xpos"][:, self.model.body(body).id]

    def observe(self, state: State) -> Tensor:
        """Angles, target, speeds, and the way to the target."""
        qpos, qvel, angles = state["qpos"], state["qvel"], state["qpos"][:, :2]
        return torch.cat([angles.cos(), angles.sin(), qpos[:, 2:], qvel[:, :2], self.distance(state)[:, :2]], -1)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Minus the distance to the target, and minus effort."""
        away = self.distance(after).norm(dim=-1) * self.env._reward_dist_weight
        return -away - actions.square().sum(-1) * self.env._reward_control_weight


class Pusher(Reacher):
    """Push a cylinder to a goal; never ends."""

    TRIES = 16  # places for the cylinder; the first that is far enough from the goal is taken

    def prepare(self, model: Any, action_space: Box, qpos: Any) -> None:
        """As for other tasks; an episode needs more noise."""
        super().prepare(model, action_space, qpos)
        self.reset_noise = 2 * self.TRIES + model.nv

    def start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The arm in its initial pose, and a cylinder that is not at the goal."""
        drawn, speeds = noise.split([2 * self.TRIES, self.model.nv], -1)
        drawn = drawn.unflatten(-1, (self.TRIES, 2))
        places = torch.stack([0.3 * drawn[..., 0] - 0.3, 0.4 * drawn[..., 1] - 0.2], -1)
        first = (places.norm(dim=-1) > 0.17).int().argmax(-1)
        cylinder = places[torch.arange(len(places), device=noise.device), first]
        arm = self.constant("qpos", noise)[:-4].expand(len(noise), -1)
        qvel = torch.cat([0.01 * speeds[:, :-4] - 0.005, torch.zeros_like(speeds[:, -4:])], -1)
        return torch.cat([arm, cylinder, torch.zeros_like(cylinder)], -1), qvel

    def observe(self, state: State) -> Tensor:
        """The arm's angles and speeds, and where the arm's tip, the cylinder and the goal are."""
        places = [self.place_of(state, body) for body in ("tips_arm", "object", "goal")]
        return torch.cat([state["qpos"][:, :7], state["qvel"][:, :7], *places], -1)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Minus the distances of the cylinder from the arm's tip and from the goal, and minus effort."""
        tip, cylinder, goal = (self.place_of(after, body) for body in ("tips_arm", "object", "goal"))
        near = (cylinder - tip).norm(dim=-1) * self.env._reward_near_weight
        away = (cylinder - goal).norm(dim=-1) * self.env._reward_dist_weight
        return -near - away - actions.square().sum(-1) * self.env._reward_control_weight


class InvertedPendulum(GymnasiumTask):
    """Balance a pole."""

    def observe(self, state: State) -> Tensor:
        """Positions and velocities."""
        return torch.cat([state["qpos"], state["qvel"]], -1)

    def terminated(self, state: State) -> Tensor:
        """The pole has fallen, or a number is not finite."""
        obs = self.observe(state)
        return ~obs.isfinite().all(-1) | (obs[:, 1].abs() > 0.2)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """1 while the pole stands."""
        return (~self.terminated(after)).float()


class InvertedDoublePendulum(GymnasiumTask):
    """Balance two poles on each other."""

    normal_velocities = True
    fields = ("site_xpos", "qfrc_constraint")

    def observe(self, state: State) -> Tensor:
        """Position, angles, clipped velocities, and the force at the limit of the rail."""
        angles = state["qpos"][:, 1:]
        bounded = [state["qvel"].clamp(-10.0, 10.0), state["qfrc_constraint"][:, :1].clamp(-10.0, 10.0)]
        return torch.cat([state["qpos"][:, :1], angles.sin(), angles.cos(), *bounded], -1)

    def terminated(self, state: State) -> Tensor:
        """The tip is low."""
        return state["site_xpos"][:, 0, 2] <= 1.0

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """A bonus while the tip is high, minus its distance from upright and its speeds."""
        x, _, height = after["site_xpos"][:, 0].unbind(-1)
        first, second = after["qvel"][:, 1], after["qvel"][:, 2]
        away = 0.01 * x.square() + (height - 2.0).square()
        speeds = 0.001 * first.square() + 0.005 * second.square()
        return self.env._healthy_reward * (~self.terminated(after)) - away - speeds


def is_between(x: Tensor, limits: tuple[float, float]) -> Tensor:
    """Strictly between the two limits."""
    return (x > limits[0]) & (x < limits[1])


TASKS: dict[str, type[GymnasiumTask]] = {
    f"gymnasium.envs.mujoco.{module}_v5:{task.__name__}Env": task
    for module, task in {
        "half_cheetah": HalfCheetah, "hopper": Hopper, "walker2d": Walker2d, "ant": Ant, "humanoid": Humanoid,
        "humanoidstandup": HumanoidStandup, "swimmer": Swimmer, "reacher": Reacher, "pusher": Pusher,
        "inverted_pendulum": InvertedPendulum, "inverted_double_pendulum": InvertedDoublePendulum,
    }.items()
}  # fmt: skip
