"""A real simulator: cartpole of mjlab through its shim. Runs where mjlab is installed; docs/simulators.md says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_training import PPO, SAC
from rl_training.envs.simulator_shims import ManagerSimulator, RslRlSimulator
from rl_training.record.metrics_file import read_metrics

mjlab_envs = pytest.importorskip("mjlab.envs", reason="mjlab is not installed")
pytest.importorskip("mjlab.tasks", reason="mjlab is not installed")
STEPS = 10
pytestmark = pytest.mark.slow  # MuJoCo Warp compiles its kernels once, in some minutes


def make_env(num_envs: int) -> Any:
    """Cartpole with episodes of `STEPS` steps."""
    from mjlab.tasks.registry import load_env_cfg

    cfg: Any = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.episode_length_s = num_envs, STEPS * cfg.decimation * cfg.sim.mujoco.timestep
    return mjlab_envs.ManagerBasedRlEnv(cfg, "cpu")


def make(num_envs: int = 8) -> ManagerSimulator:
    return ManagerSimulator(make_env(num_envs))


def make_groups() -> ManagerSimulator:
    return ManagerSimulator(make_env(8), ["actor", "critic"])


def make_vec_env(group: Any = None) -> RslRlSimulator:
    from mjlab.rl import RslRlVecEnvWrapper

    return RslRlSimulator(RslRlVecEnvWrapper(make_env(8), clip_actions=1.0), group)


def make_vec_env_groups() -> RslRlSimulator:
    return make_vec_env(["actor", "critic"])


def places(simulator: ManagerSimulator) -> Tensor:
    """The places of all carts, in the simulator's own state."""
    state: Tensor = simulator.plain.scene["cartpole"].data.joint_pos[:, 0].clone()
    return state


def test_final_observations_are_those_before_the_reset_and_rows_end_alone() -> None:
    simulator = make(4)
    obs: Tensor = simulator.reset(torch.arange(4))
    torch.testing.assert_close(obs[:, 0], places(simulator))
    simulator.episode_length_buf.copy_(torch.tensor([0, 0, 6, 7]))
    before: list[tuple[list[int], Tensor]] = []
    reset = simulator.plain._reset_idx

    def watched(rows: Tensor) -> None:
        before.append((rows.tolist(), places(simulator)))
        reset(rows)

    simulator.plain._reset_idx = watched
    ended = []
    for step in range(1, STEPS + 1):
        obs, rewards, terminated, truncated, final, log = simulator.step(torch.rand(4, 1) * 2 - 1)
        assert final is not None
        rows = truncated.nonzero().squeeze(-1).tolist()
        going = [row for row in range(4) if row not in rows]
        assert torch.equal(final[going], obs[going]), "a row that goes on sees what it saw"
        torch.testing.assert_close(obs[:, 0], places(simulator))
        assert not terminated.any()
        assert rewards.shape == (4,)
        if rows:
            [(given, there)] = before
            assert given == rows
            torch.testing.assert_close(final[rows, 0], there[rows])
            assert (final[rows] != obs[rows]).any(1).all(), "a new episode"
            assert "Episode_Reward/smooth_reward" in log
            before.clear()
        ended += [(row, step) for row in rows]
    assert ended == [(3, 3), (2, 4), (0, 10), (1, 10)]


def test_in_the_vec_env_of_rsl_rl_time_outs_are_truncations_without_final_observations() -> None:
    simulator = make_vec_env()
    simulator.reset(torch.arange(8))
    ends = [simulator.step(torch.zeros(8, 1))[2:5] for _ in range(STEPS)]
    assert [bool(truncated.all()) for _, truncated, _ in ends] == [False] * (STEPS - 1) + [True]
    assert not any(bool(terminated.any()) or final is not None for terminated, _, final in ends)


def test_final_observations_of_both_groups_are_those_before_the_reset() -> None:
    simulator = make_groups()
    simulator.reset(torch.arange(8))
    for step in range(1, STEPS + 1):
        obs, _, _, truncated, final, _ = simulator.step(torch.rand(8, 1) * 2 - 1)
        assert isinstance(obs, dict)
        assert isinstance(final, dict)
        assert bool(truncated.all()) == (step == STEPS)
        for name in ("actor", "critic"):
            assert bool((final[name] != obs[name]).any(1).all()) == (step == STEPS)
        torch.testing.assert_close(final["actor"][:, 0], final["critic"][:, 0], atol=0.2, rtol=0)  # one has noise
    torch.testing.assert_close(obs["critic"][:, 0], places(simulator))


class WithoutSetting:
    """The settings of an environment, of which nobody but itself sees `auto_reset`."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def __getattr__(self, name: str) -> Any:
        if name == "auto_reset":
            raise AttributeError(name)
        return getattr(self.cfg, name)


def test_what_its_manager_computes_between_steps_is_from_before_the_step() -> None:
    env = make_env(4)
    env.reset()
    before = env.observation_manager.compute()["actor"].clone()
    env.sim.step()
    assert torch.equal(env.observation_manager.compute()["actor"], before), "a cache"
    env.cfg = WithoutSetting(env.cfg)
    assert not ManagerSimulator(env).has_final_obs


OF_PPO: dict[str, Any] = {"num_steps": 16, "minibatch_size": 64}
OF_SAC: dict[str, Any] = {"learning_starts": 64, "train_frequency": 8, "batch_size": 32}
GROUPED = {"critic_obs": ["critic"]}


@pytest.mark.parametrize(("learner", "simulator", "kwargs"), [
    (PPO, make, OF_PPO), (PPO, make_vec_env, OF_PPO),
    (SAC, make, OF_SAC), (PPO, make_groups, OF_PPO | GROUPED), (SAC, make_groups, OF_SAC | GROUPED),
    (PPO, make_vec_env_groups, OF_PPO | GROUPED),
])  # fmt: skip
def test_learners_train_evaluate_and_log(learner: Any, simulator: Any, kwargs: dict[str, Any], tmp_path: Path) -> None:
    settings = {"action_limit": 1.0, "random_ages": True, "eval_rows": 2}
    model = learner(
        simulator, vectorization="device", env_kwargs={"simulator": settings}, eval_episodes=4, hidden_sizes=[16],
        output_dir=str(tmp_path), log_interval=96, **kwargs,
    )  # fmt: skip
    result = model.learn(480, progress=False)
    assert result.metrics["eval_length_mean"] == STEPS
    name = "sim/Episode_Reward/smooth_reward"
    logged = [row[name] for row in read_metrics(Path(result.run_dir) / "metrics.jsonl") if name in row]
    assert logged
    assert all(0.0 <= value <= 1.0 for value in logged)
