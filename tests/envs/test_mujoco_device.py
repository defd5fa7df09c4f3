"""MuJoCo tasks as device environments: Gymnasium's code step by step, own models, overflow, and resume.

Quick tests run the formulas on MuJoCo itself; the slow ones on MuJoCo Warp, whose kernels take a minute to compile.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from resume_cases import assert_same_run, stop_and_resume, tiny
from rl_training import PPO
from rl_training.envs.device_checks import check_functions
from rl_training.envs.mujoco import INTEGRATED, OVERFLOW, MujocoEnvironment, State
from rl_training.envs.mujoco_tasks import TASKS, GymnasiumTask
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.run.workflows import train

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

NAMES = (
    "HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant", "Humanoid", "HumanoidStandup", "Reacher", "Pusher",
    "InvertedPendulum", "InvertedDoublePendulum",
)  # fmt: skip
# MuJoCo Warp turns the friction pyramids of Ant's feet another way, which changes forces in contact.
# Share of the numbers of an observation that may lie outside the tolerance: forces where a contact begins or ends.
ODD = {
    "mujoco": {"HumanoidStandup": 0.01},  # its state is rounded to 32 bits
    "warp": {"Ant": 0.05, "Humanoid": 0.002, "HumanoidStandup": 0.02},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("HalfCheetah", {"exclude_current_positions_from_observation": False, "frame_skip": 3}),
    ("HalfCheetah", {"forward_reward_weight": 2.0}),
    ("Swimmer", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.1}),
    ("Hopper", {"terminate_when_unhealthy": False, "healthy_z_range": (1.245, 5.0)}),
    ("Hopper", {"healthy_state_range": (-1.0, 1.0), "healthy_reward": 2.0}),
    ("Walker2d", {"healthy_angle_range": (-0.05, 0.05), "healthy_reward": 3.0}),
    ("Ant", {"include_cfrc_ext_in_observation": False, "contact_force_range": (-0.5, 0.5), "contact_cost_weight": 0.1}),
    ("Ant", {"main_body": 4, "healthy_z_range": (0.5, 0.7)}),
    ("Humanoid", {"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    ("Humanoid", {"contact_cost_weight": 0.01, "contact_cost_range": (0.5, 2.0), "healthy_z_range": (1.3, 1.4)}),
    ("HumanoidStandup", {"impact_cost_weight": 0.01, "include_cinert_in_observation": False}),
    ("Reacher", {"reward_dist_weight": 3.0, "reward_control_weight": 0.5}),
    ("Pusher", {"reward_near_weight": 2.0, "reward_dist_weight": 3.0}),
    ("InvertedDoublePendulum", {"healthy_reward": 5.0}),
]  # fmt: skip


def open_task(name: str, physics: str, **env_kwargs: Any) -> tuple[Any, GymnasiumTask]:
    """Gymnasium's environment, and the same task on this physics."""
    env: Any = gym.make(f"{name}-v5", **env_kwargs).unwrapped
    task = TASKS[f"{type(env).__module__}:{type(env).__name__}"](env)
    task.physics = physics
    return env, task


def read_state(env: Any, task: MujocoEnvironment) -> dict[str, np.ndarray]:
    """What the task's state holds, out of Gymnasium's environment."""
    return {name: np.array(getattr(env.data, name)) for name in (*INTEGRATED, *task.fields)}


def play(env: Any, task: MujocoEnvironment, steps: int) -> tuple[State, dict[str, np.ndarray], list[Any]]:
    """States of random play in Gymnasium, the actions, and what followed."""
    states, actions, results = [], [], []
    env.action_space.seed(1)
    env.reset(seed=0)
    hold = np.zeros(env.action_space.shape)
    for step in range(steps):
        if step % 3 == 0:
            hold = env.action_space.sample()
        states.append(read_state(env, task))
        actions.append(hold)
        results.append(env.step(hold))
        if results[-1][2] or step % 40 == 39:
            env.reset()
    state = {name: torch.from_numpy(np.stack([row[name] for row in states])).float() for name in states[0]}
    state[OVERFLOW] = torch.zeros(steps, dtype=torch.int32)
    obs, rewards, terminated = (np.array([result[i] for result in results]) for i in range(3))
    return state, {"obs": obs, "rewards": rewards, "terminated": terminated}, actions


def compare(name: str, physics: str, steps: int, env_kwargs: dict[str, Any], near: float) -> None:
    """One step from each state, in Gymnasium and in the task."""
    env, task = open_task(name, physics, **env_kwargs)
    state, wanted, actions = play(env, task, steps)
    given = torch.from_numpy(np.stack(actions)).float()
    after, rewards, terminated = task.step(state, given, torch.zeros(steps, 0))
    obs = task.observe(after).numpy()
    scale = 1.0 + np.abs(wanted["obs"])
    odd = (np.abs(obs - wanted["obs"]) / scale > near).mean()
    assert odd <= ODD[physics].get(name, 0.0)
    reward_error = np.abs(rewards.numpy() - wanted["rewards"]) / (1.0 + np.abs(wanted["rewards"]))
    assert np.quantile(reward_error, 0.5 if (physics, name) == ("warp", "Ant") else 0.98) < near
    assert (terminated.numpy() == wanted["terminated"]).all()
    assert task.fault(after) == ""


@pytest.mark.parametrize(("name", "env_kwargs"), VARIANTS)
def test_a_step_is_gymnasiums(name: str, env_kwargs: dict[str, Any]) -> None:
    compare(name, "mujoco", 120, env_kwargs, near=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_mujoco_warp_is_gymnasiums(name: str) -> None:
    pytest.importorskip("mujoco_warp")
    compare(name, "warp", 1000, {}, near=1e-3)


def test_the_variants_make_a_difference() -> None:
    for name, env_kwargs in VARIANTS:
        for option in env_kwargs:
            env, task = open_task(name, "mujoco", **env_kwargs)
            left_out = {key: value for key, value in env_kwargs.items() if key != option}
            other, plain = open_task(name, "mujoco", **left_out)
            state, wanted, _ = play(env, task, 60)
            _, others, _ = play(other, plain, 60)
            same = all(wanted[key].shape == others[key].shape and (wanted[key] == others[key]).all() for key in wanted)
            assert not same, (name, option)
            assert len(state["qpos"]) == 60


@pytest.mark.parametrize("name", NAMES)
def test_episodes_begin_as_gymnasiums_do(name: str) -> None:
    env, task = open_task(name, "mujoco")
    count = 400
    wanted = np.stack([env.reset(seed=seed)[0] for seed in range(count)])
    drawn = torch.rand(count, task.reset_noise, generator=torch.Generator().manual_seed(0))
    obs = task.observe(task.reset(drawn)).double().numpy()
    spread = wanted.std(0)
    moving = spread > 1e-5
    assert (obs.std(0) < 1e-5 + 1e-6 * np.abs(wanted).max(0))[~moving].all()
    np.testing.assert_allclose(obs.std(0)[moving], spread[moving], rtol=0.2)
    five_errors = 5 * spread * (2 / count) ** 0.5
    assert (np.abs(obs.mean(0) - wanted.mean(0)) <= five_errors + 1e-5 * (1 + np.abs(wanted).max(0))).all()


@pytest.mark.parametrize("name", ["Reacher", "Pusher"])
def test_a_target_is_never_where_gymnasium_would_not_put_it(name: str) -> None:
    _, task = open_task(name, "mujoco")
    state = task.reset(torch.rand(5000, task.reset_noise, generator=torch.Generator().manual_seed(0)))
    place = state["qpos"][:, -2:] if name == "Reacher" else state["qpos"][:, -4:-2]
    distance = place.norm(dim=-1)
    if name == "Reacher":
        assert distance.max() < 0.2
        assert (distance < 0.1).float().mean() == pytest.approx(0.25, abs=0.02)  # evenly over the disc
    else:
        assert distance.min() > 0.17


@pytest.mark.parametrize("name", ["HalfCheetah", "InvertedDoublePendulum"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    config = tiny("ppo", tmp_path, env_id=f"{name}-v5", vectorization="device", num_envs=4, total_timesteps=192)
    assert_same_run(train(config, console=False), stop_and_resume(config, 96))


class StillWorlds:
    """Worlds that do not move, in place of kernels."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.shapes = shapes

    def place(self, state: State) -> State:
        qpos = state["qpos"]
        return state | {name: qpos.new_zeros(len(qpos), *shape) for name, shape in self.shapes.items()}

    def step(self, state: State, ctrl: Tensor, times: int) -> State:
        return self.place(state)


class CopiesToDevice(TorchDispatchMode):
    """Counts the copies between the memories of the host and of a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        self.count += len({x.device.type for x in tensors}) > 1 and function.overloadpacket.__name__ in COPIES
        return result


COPIES = ("_to_copy", "copy_", "_copy_from")


@pytest.mark.parametrize("name", NAMES)
def test_after_the_first_step_nothing_is_copied_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot hold such a copy. Torch's "meta" stands for the GPU."""
    _, task = open_task(name, "mujoco")
    real = task.reset(torch.rand(1, task.reset_noise))
    worlds = StillWorlds({field: real[field].shape[1:] for field in task.fields})
    monkeypatch.setattr(task, "worlds", lambda count, device: worlds)

    def turn() -> None:
        state = task.reset(torch.empty(4, task.reset_noise, device="meta"))
        actions = torch.empty(4, *task.action_space.shape, device="meta")
        state, rewards, ends = task.step(state, actions, actions.new_empty(4, 0))
        assert {part.device.type for part in (task.observe(state), rewards, ends)} == {"meta"}

    with CopiesToDevice() as copies:
        turn()
        first = copies.count
        turn()
    assert copies.count == first
    assert first == (2 if name == "Humanoid" else 1), "the constants"


def test_evaluation_plays_gymnasiums_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = PPO("InvertedPendulum-v5", vectorization="device", num_envs=4, output_dir=tmp_path, total_timesteps=64,
              num_steps=8, minibatch_size=16, eval_episodes=0)  # fmt: skip
    ppo.learn()
    monkeypatch.setattr(MujocoEnvironment, "step", lambda *_: pytest.fail("the device environment was played"))
    assert ppo.evaluate(2)["eval_episodes"] == 2


def test_without_mujoco_warp_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *others: Any) -> Any:
        if name in ("warp", "mujoco_warp"):
            raise ImportError(name)
        return plain(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    _, task = open_task("Hopper", "warp")
    with pytest.raises(UserError, match=r"MuJoCo Warp, which is not installed: pip install 'rl-training\[warp\]'"):
        task.step(task.reset(torch.rand(2, task.reset_noise)), torch.zeros(2, 3), torch.zeros(2, 0))


# ---- one's own -------------------------------------------------------------------------------------------------------


def slide(friction: float, physics: str) -> float:
    """How far a box slides that is pushed for ten steps."""
    from own_robot import Slider

    task = Slider()
    task.physics = physics
    noise = torch.full((2, task.reset_noise), 0.5)
    noise[:, -1] = friction
    state = task.reset(noise)
    for _ in range(10):
        state, rewards, terminated = task.step(state, torch.ones(2, 1), torch.zeros(2, 0))
    assert not terminated.any()
    assert torch.equal(rewards, -state["qpos"][:, 0].abs())
    assert (state["qpos"][0] == state["qpos"][1]).all()
    return float(state["qpos"][0, 0])


def test_a_field_of_the_model_differs_between_worlds() -> None:
    assert slide(0.0, "mujoco") > slide(1.0, "mujoco") + 0.1


def test_what_is_missing_in_ones_own_robot_is_named() -> None:
    from own_robot import SLIDER, Slider

    class NoReward(MujocoEnvironment):
        def observe(self, state: State) -> Tensor:
            return state["qpos"]

    class Column(Slider):
        def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
            return after["qpos"][:, :1]

    class Undeclared(Slider):
        fields = ("cvel",)

        def observe(self, state: State) -> Tensor:
            return state["xpos"][:, 0]

    class UndeclaredInReward(Slider):
        def reward(self, before: State, after: State, actions: Tensor) -> Tensor:
            return after["xpos"][:, 0, 0]

    class Misspelled(Slider):
        def observe(self, state: State) -> Tensor:
            return state["qposs"]

    with pytest.raises(UserError, match=r"robot fails in step with .*: define reward\(before, after, actions\)"):
        check_functions(NoReward(SLIDER), "robot")
    with pytest.raises(UserError, match=r"robot: reward of 17 environments has the shape \(17, 1\), not .* \(17,\)"):
        check_functions(Column(), "robot")
    with pytest.raises(UserError, match=r"Undeclared reads state\['xpos'\].*: fields = \('cvel', 'xpos'\)\."):
        Undeclared()
    with pytest.raises(UserError, match=r"InReward reads state\['xpos'\].*: fields = \('xpos',\)\."):
        check_functions(UndeclaredInReward(), "robot")
    with pytest.raises(KeyError, match="qposs"):
        Misspelled()


@pytest.mark.slow
def test_worlds_of_mujoco_warp_have_the_same_fields() -> None:
    pytest.importorskip("mujoco_warp")
    for friction in (0.0, 1.0):
        assert slide(friction, "warp") == pytest.approx(slide(friction, "mujoco"), abs=1e-3)


def test_a_critic_may_see_the_friction_of_ones_own_robot(tmp_path: Path) -> None:
    from own_robot import Slider

    class Privileged(Slider):
        def observe(self, state: State) -> Any:
            return {"actor": super().observe(state), "critic": state["model.geom_friction"][:, 0]}

    space: Any = Privileged().observation_space
    assert {name: part.shape for name, part in space.spaces.items()} == {"actor": (2,), "critic": (3,)}
    config = tiny("ppo", tmp_path, env_id="own", kwargs={"critic_obs": ["critic"]}, num_envs=4, vectorization="device")
    result = train(config, env=Privileged, console=False)
    assert result.metrics["eval_episodes"] == 2
    assert result.policy.predict({"actor": np.array([0.1, 0.0], np.float32)}).shape == (1,)


def test_an_own_robot_learns_to_stop_in_the_middle(tmp_path: Path) -> None:
    from own_robot import Slider

    ppo = PPO(Slider, vectorization="device", num_envs=16, num_steps=32, minibatch_size=128, output_dir=tmp_path,
              total_timesteps=40_000, eval_episodes=0)  # fmt: skip
    ppo.learn()
    assert ppo.evaluate(10)["eval_return_mean"] > -30.0


@pytest.mark.slow
def test_an_overflow_ends_the_run_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco_warp")
    monkeypatch.setattr(MujocoEnvironment, "physics", "warp")
    monkeypatch.setattr(MujocoEnvironment, "limits", {"njmax": 2, "nconmax": 1})
    config = tiny("ppo", tmp_path, env_id="Ant-v5", vectorization="device", num_envs=4, total_timesteps=512)
    with pytest.raises(EnvironmentFailure, match=r"buffers overflowed .*; raise njmax or nconmax"):
        train(config, console=False)
