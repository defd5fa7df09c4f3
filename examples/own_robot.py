"""Your own robot: a MuJoCo model and three functions of tensors, with friction that differs between worlds.

    python examples/own_robot.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training import PPO
from rl_training.envs.mujoco import MujocoEnvironment, State

SLIDER = """
<mujoco>
  <option timestep="0.02"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 0.1"/>
    <body name="box" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom name="box" type="box" size="0.1 0.1 0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="x" gear="12" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""


class Slider(MujocoEnvironment):
    """Push a box to the middle of a floor whose friction is different in every episode."""

    max_episode_steps, frame_skip = 100, 2
    varied, vary_noise = ("geom_friction",), 1

    def __init__(self) -> None:
        super().__init__(SLIDER)

    def start(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Anywhere on the x axis, at rest on the floor."""
        qpos, qvel = noise.split([2, 2], -1)
        return torch.stack([2.0 * qpos[:, 0] - 1.0, torch.zeros_like(qpos[:, 1])], -1), torch.zeros_like(qvel)

    def vary(self, noise: Tensor) -> State:
        """The sliding friction of floor and box, between 0.2 and 0.8."""
        sliding = (0.2 + 0.6 * noise).expand(-1, self.model.ngeom)
        rolling = torch.full_like(sliding, 0.005)
        return {"geom_friction": torch.stack([sliding, rolling, 0.02 * rolling], -1)}

    def observe(self, state: State) -> Tensor:
        """Place and speed."""
        return torch.stack([state["qpos"][:, 0], state["qvel"][:, 0]], -1)

    def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
        """Minus the distance from the middle."""
        return -after["qpos"][:, 0].abs()


def main(total_timesteps: int = 200_000, num_envs: int = 64) -> float:
    """Train many boxes, then evaluate one at a time."""
    ppo = PPO(Slider, vectorization="device", num_envs=num_envs, num_steps=32, minibatch_size=num_envs * 8)
    ppo.learn(total_timesteps)
    mean: float = ppo.evaluate(20)["eval_return_mean"]
    print(f"return {mean:.1f}; a box that is not pushed scores about -50")
    return mean


if __name__ == "__main__":
    main()
