"""`doctor` finds what is wrong with an environment and says what to change; `bench` says where time goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from typer.testing import CliRunner

from rl_training.cli.main import app
from rl_training.envs.factory import probe_spaces, read_recipe
from rl_training.experiment.config import load_config
from rl_training.runtime import bench, doctor
from rl_training.runtime.random_play import sample_actions

PPO = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 256, "num_envs": 2, "eval_episodes": 0,
       "algo_kwargs": {"num_steps": 32, "minibatch_size": 32}}  # fmt: skip


class Walk(gym.Env[Any, Any]):
    """A random walk that ends at 5; its faults are switched on one by one."""

    observation_space = gym.spaces.Box(-1e4, 1e4, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(
        self, *, unseeded: bool = False, history: bool = False, ends: bool = True, size: float = 1.0,
        reuse: bool = False,
    ) -> None:  # fmt: skip
        self.unseeded, self.history, self.ends, self.size = unseeded, history, ends, size
        self.view = np.zeros(1, np.float32) if reuse else None
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.resets += 1
        self.at = self.np_random.normal() + (self.resets if self.history else 0.0)
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        noise = np.random.normal() if self.unseeded else self.np_random.normal()
        self.at += action - 1 + noise
        return self._look(), self.size, self.ends and abs(self.at) > 5, False, {}

    def _look(self) -> Any:
        if self.view is None:
            return np.array([self.at * self.size], np.float32)
        self.view[0] = self.at
        return self.view


@pytest.fixture(autouse=True)
def _short_timings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []  # neither leaves anything behind


def check(**faults: Any) -> dict[str, doctor.Check]:
    recipe = read_recipe("walk", {}, lambda **_: Walk(**faults))
    return {found.name: found for found in doctor.check_environment(recipe, probe_spaces(recipe))}


def test_a_sound_environment_passes_every_check() -> None:
    assert {found.status for found in check().values()} == {"ok"}


@pytest.mark.parametrize(
    ("faults", "name", "fix"),
    [
        ({"unseeded": True}, "determinism", "np_random"),
        ({"unseeded": True}, "replay", "reset"),
        ({"history": True}, "replay", "reset"),
        ({"reuse": True}, "truncation", "new array"),
        ({"ends": False}, "episodes", "max_episode_steps"),
        ({"size": 500.0}, "episodes", "normalize_reward"),
        ({"size": 500.0}, "observation size", "normalize_observation"),
    ],
)
def test_a_fault_is_found_and_its_fix_named(faults: dict[str, Any], name: str, fix: str) -> None:
    found = check(**faults)
    assert found[name].status == "warn"
    assert fix in found[name].fix


def test_history_across_episodes_is_not_mistaken_for_randomness() -> None:
    assert check(history=True)["determinism"].status == "ok"


def test_a_raising_environment_fails_the_check_and_not_the_command() -> None:
    class Raising(Walk):
        def step(self, action: Any) -> Any:
            raise RuntimeError("no")

    recipe = read_recipe("raising", {}, lambda **_: Raising())
    found = list(doctor.check_environment(recipe, probe_spaces(recipe)))
    assert {"fail"} <= {one.status for one in found}
    assert any("RuntimeError: no" in one.detail for one in found)


def test_continuous_actions_are_scaled_to_the_bounds() -> None:
    spaces = probe_spaces(read_recipe("Pendulum-v1", {}))
    assert doctor.check_action_scaling(spaces).detail == "[-1, 1] becomes [-2, 2]"


def test_random_actions_keep_to_the_masks() -> None:
    spaces = probe_spaces(read_recipe("walk", {}, lambda **_: Walk()))
    masks = np.array([[False, True, False]] * 50)
    assert set(sample_actions(spaces, np.random.default_rng(0), 50, masks)) == {1}


def test_the_algorithm_is_weighed_and_timed() -> None:
    memory, eta = doctor.check_algorithm(load_config(PPO))
    assert "weights" in memory.detail
    assert "256 steps in about" in eta.detail


def test_bytes_of_storage_are_those_of_its_arrays() -> None:
    from rl_training.runtime.session import open_session

    session = open_session(load_config(PPO | {"algo_kwargs": {"num_steps": 64}}))
    arrays = [value for value in vars(session.source.storage).values() if isinstance(value, np.ndarray)]  # type: ignore[attr-defined]
    assert bench.storage_bytes(session) == sum(array.nbytes for array in arrays)
    session.source.close()
    assert bench.format_bytes(1536) == "1.5 KiB"


def test_bench_accounts_for_all_of_the_time() -> None:
    result = bench.benchmark(load_config(PPO))
    assert result.steps >= 256
    assert result.updates >= 4
    assert set(result.seconds) == {*bench.PARTS, "rest"}
    assert all(result.seconds[part] > 0 for part in ("environment", "act", "store", "learn"))
    assert sum(result.seconds.values()) == pytest.approx(result.total_seconds)


def test_a_stopwatch_counts_inner_calls_once() -> None:
    watch = bench.Stopwatch()

    def values() -> Iterator[int]:
        inner()
        yield 1

    inner = watch.wrap(lambda: 1, "inner")
    assert list(watch.wrap(values, "outer")()) == [1]
    assert set(watch.seconds) == {"inner", "outer"}


def test_doctor_and_bench_as_commands() -> None:
    runner = CliRunner()
    machine = runner.invoke(app, ["doctor"])
    assert machine.exit_code == 0
    assert "torch" in machine.stdout
    checked = runner.invoke(app, ["doctor", "--env", "CartPole-v1", "--algo", "ppo", "--total-timesteps", "1e3"])
    assert checked.exit_code == 0, checked.output
    assert "1,000 steps in about" in checked.stdout
    assert "nothing to fix" in checked.stdout
    timed = runner.invoke(app, ["bench", "--config", "ppo/cartpole", "--total-timesteps", "1024"])
    assert timed.exit_code == 0, timed.output
    assert all(part in timed.stdout for part in ("environment", "act", "store", "learn", "rest"))


def test_doctor_refuses_an_algorithm_that_does_not_fit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from rl_training.runtime import spec

    only_discrete = dataclasses.replace(spec.get_algorithm_spec("ppo"), action_kinds=("discrete",))
    monkeypatch.setattr(spec, "get_algorithm_spec", lambda name: only_discrete)
    result = CliRunner().invoke(app, ["doctor", "--env", "Pendulum-v1", "--algo", "ppo"])
    assert result.exit_code == 1
    assert "does not support the continuous actions" in result.stdout
