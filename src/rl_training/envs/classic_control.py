"""Gymnasium's classic control environments as functions of tensors, with the constants of Gymnasium's code."""

from __future__ import annotations

from collections.abc import Callable
from math import pi
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.device import DeviceEnvironment


class ClassicControl(DeviceEnvironment):
    """A state [N, ...] with `reset_noise` numbers that start uniformly between `low` and `high`."""

    low: float
    high: float

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, noise: Tensor) -> Tensor:
        """Uniform between `low` and `high`, computed as numpy's `uniform` does."""
        return noise * (self.high - self.low) + self.low

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


class CartPole(ClassicControl):
    """Position, speed, angle, spin; two forces."""

    low, high, reset_noise = -0.05, 0.05, 4

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Euler's method."""
        env, mass = self.env, self.env.total_mass
        _, speed, angle, spin = state.unbind(-1)
        cos, sin = angle.cos(), angle.sin()
        push = actions * (2 * env.force_mag / mass) - env.force_mag / mass
        push = torch.addcmul(push, spin.square(), sin, value=env.polemass_length / mass)
        inertia = 4.0 / 3.0 * env.length - cos.square() * (env.length * env.masspole / mass)
        spin_up = torch.addcmul(sin * env.gravity, cos, push, value=-1.0) / inertia
        speed_up = torch.addcmul(push, spin_up, cos, value=-env.polemass_length / mass)
        state = torch.add(state, torch.stack([speed, speed_up, spin, spin_up], -1), alpha=env.tau)
        fell = (state[:, 0].abs() > env.x_threshold) | (state[:, 2].abs() > env.theta_threshold_radians)
        if env._sutton_barto_reward:
            return state, -fell.to(state.dtype), fell
        return state, torch.ones_like(push), fell


class MountainCar(ClassicControl):
    """Position and speed; left, nothing, right."""

    low, high, reset_noise = -0.6, -0.4, 1

    def reset(self, noise: Tensor) -> Tensor:
        """Somewhere in the valley, at rest."""
        position = super().reset(noise)
        return torch.cat([position, torch.zeros_like(position)], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The car is pushed, and the hill pulls."""
        state, done = self._roll(state, (actions - 1) * self.env.force, self.env.gravity)
        return state, -torch.ones_like(state[:, 0]), done

    def _roll(self, state: Tensor, push: Tensor, gravity: float) -> tuple[Tensor, Tensor]:
        env = self.env
        position, speed = state.unbind(-1)
        speed = (speed + push - gravity * (3 * position).cos()).clamp(-env.max_speed, env.max_speed)
        position = (position + speed).clamp(env.min_position, env.max_position)
        speed = torch.where(position <= env.min_position, speed.clamp(min=0.0), speed)
        return torch.stack([position, speed], -1), (position >= env.goal_position) & (speed >= env.goal_velocity)


class MountainCarContinuous(MountainCar):
    """MountainCar with a force in [-1, 1], which reduces the reward."""

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The car is pushed, and the hill pulls."""
        force = actions[:, 0]
        state, done = self._roll(state, force.clamp(self.env.min_action, self.env.max_action) * self.env.power, 0.0025)
        return state, 100.0 * done - 0.1 * force.square(), done


class Pendulum(ClassicControl):
    """Angle and spin; one torque. Torque, spin and distance from upright reduce the reward."""

    low, high, reset_noise = -1.0, 1.0, 2

    def reset(self, noise: Tensor) -> Tensor:
        """Any angle, and little spin."""
        angle, spin = super().reset(noise).unbind(-1)
        return torch.stack([angle * pi, spin], -1)

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Never terminates; only the time limit ends an episode."""
        env = self.env
        angle, spin = state.unbind(-1)
        torque = actions[:, 0].clamp(-env.max_torque, env.max_torque)
        tilt = torch.remainder(angle + pi, 2 * pi) - pi
        rewards = -(tilt.square() + 0.1 * spin.square() + 0.001 * torque.square())
        spin_up = 3 * env.g / (2 * env.l) * angle.sin() + 3.0 / (env.m * env.l**2) * torque
        spin = (spin + spin_up * env.dt).clamp(-env.max_speed, env.max_speed)
        return torch.stack([angle + spin * env.dt, spin], -1), rewards, torch.zeros_like(spin, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """The position of the tip, and the spin."""
        angle, spin = state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), spin], -1)


class Acrobot(ClassicControl):
    """Angles of two joints and their spins; a torque of -1, 0 or 1 on the second."""

    low, high, reset_noise = -0.1, 0.1, 4

    def step(self, state: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step of fourth-order Runge-Kutta; reaching the height ends the episode."""
        env, torque = self.env, (actions - 1).to(state.dtype)
        first = self._slope(state, torque)
        second = self._slope(state + env.dt / 2 * first, torque)
        third = self._slope(state + env.dt / 2 * second, torque)
        fourth = self._slope(state + env.dt * third, torque)
        state = state + env.dt / 6.0 * (first + 2 * second + 2 * third + fourth)
        angles, one, two = state[:, :2], state[:, 2], state[:, 3]
        angles = angles - 2 * pi * (angles / (2 * pi)).round()
        limits = (one, env.MAX_VEL_1), (two, env.MAX_VEL_2)
        state = torch.cat([angles, torch.stack([spin.clamp(-most, most) for spin, most in limits], -1)], -1)
        done = -state[:, 0].cos() - (state[:, 1] + state[:, 0]).cos() > 1.0
        return state, done.to(state.dtype) - 1.0, done

    def _slope(self, state: Tensor, torque: Tensor) -> Tensor:
        """The state's derivative [N, 4], by the equations of Sutton and Barto's book."""
        env, gravity = self.env, 9.8
        m1, m2, l1 = env.LINK_MASS_1, env.LINK_MASS_2, env.LINK_LENGTH_1
        c1, c2, inertia = env.LINK_COM_POS_1, env.LINK_COM_POS_2, env.LINK_MOI
        angle1, angle2, spin1, spin2 = state.unbind(-1)
        cos, sin = angle2.cos(), angle2.sin()
        d1 = m1 * c1**2 + m2 * (l1**2 + c2**2 + 2 * l1 * c2 * cos) + 2 * inertia
        d2 = m2 * (c2**2 + l1 * c2 * cos) + inertia
        phi2 = m2 * c2 * gravity * (angle1 + angle2 - pi / 2).cos()
        phi1 = phi2 - m2 * l1 * c2 * sin * spin2 * (spin2 + 2 * spin1)
        phi1 = phi1 + (m1 * c1 + m2 * l1) * gravity * (angle1 - pi / 2).cos()
        turning = torque + d2 / d1 * phi1 - m2 * l1 * c2 * spin1.square() * sin - phi2
        spin_up2 = turning / (m2 * c2**2 + inertia - d2.square() / d1)
        return torch.stack([spin1, spin2, -(d2 * spin_up2 + phi1) / d1, spin_up2], -1)

    def observe(self, state: Tensor) -> Tensor:
        """Cosine and sine of both angles, and the spins."""
        cos, sin = state[:, :2].cos(), state[:, :2].sin()
        return torch.stack([cos[:, 0], sin[:, 0], cos[:, 1], sin[:, 1], state[:, 2], state[:, 3]], -1)


PLACE = "gymnasium.envs.classic_control"
KNOWN: dict[str, Callable[[Any], DeviceEnvironment]] = {
    f"{PLACE}.cartpole:CartPoleEnv": CartPole,
    f"{PLACE}.mountain_car:MountainCarEnv": MountainCar,
    f"{PLACE}.continuous_mountain_car:Continuous_MountainCarEnv": MountainCarContinuous,
    f"{PLACE}.pendulum:PendulumEnv": Pendulum,
    f"{PLACE}.acrobot:AcrobotEnv": Acrobot,
}
