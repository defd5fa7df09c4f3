"""`doctor` finds what is wrong with an environment and says what to change; `bench` says where time goes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rl_training.cli.main import app
from rl_training.config.choices import torch_settings_restored
from rl_training.config.spec import AlgorithmSpec, get_algorithm_spec
from rl_training.config.train_config import load_config
from rl_training.envs.factory import read_recipe
from rl_training.envs.probe import probe, probe_spaces
from rl_training.envs.spaces import EnvSpaces
from rl_training.run.learner import build_algorithm
from rl_training.tools import bench, doctor
from rl_training.tools.bench import Floor

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
        self.resets += self.history
        self.at = self.np_random.normal() + self.resets
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
    monkeypatch.setattr(bench, "CALL_SECONDS", 1e-6)
    for tool, name in ((bench, "PACE_SECONDS"), (bench, "LONG_START"), (bench, "MOST_SECONDS")):
        monkeypatch.setattr(tool, name, 0.0)
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []  # neither leaves anything behind


def check(spec: AlgorithmSpec | None = None, **faults: Any) -> dict[str, doctor.Check]:
    recipe = read_recipe("walk", {}, lambda **_: Walk(**faults))
    return {found.name: found for found in doctor.check_environment(recipe, probe(recipe), spec)}


def test_a_sound_environment_passes_every_check() -> None:
    found = check()
    assert {check.status for check in found.values()} == {"ok"}


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


def test_reward_normalization_is_recommended_only_where_the_algorithm_has_it() -> None:
    assert "normalize_reward=true" in check(get_algorithm_spec("ppo"), size=500.0)["episodes"].fix
    fix = check(get_algorithm_spec("dqn"), size=500.0)["episodes"].fix
    assert "normalize_reward" not in fix
    assert "dqn" in fix


class Tally(Walk):
    """Its rewards depend on the episodes before, its observations do not."""

    tallies = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episodes = getattr(self, "episodes", 0) + 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward + 0.1 * self.episodes * self.tallies, terminated, truncated, info


class OnlyCounts(Tally):
    """Counts its episodes, and nothing depends on it yet."""

    tallies = False


@pytest.mark.parametrize(
    ("maker", "part"),
    [
        (Tally, "a different return"),
        (lambda: gym.wrappers.NormalizeReward(Walk()), "a different return"),
        (OnlyCounts, "OnlyCounts.episodes did not come back"),
    ],
)
def test_what_carries_over_in_rewards_or_attributes_is_found(maker: Any, part: str) -> None:
    recipe = read_recipe("tally", {}, lambda **_: maker())
    found = doctor.check_replay(recipe, probe_spaces(recipe), 0)
    assert found.status == "warn"
    assert part in found.detail


def test_history_across_episodes_is_not_mistaken_for_randomness() -> None:
    assert check(history=True)["determinism"].status == "ok"


def test_a_raising_environment_fails_the_check_and_not_the_command() -> None:
    class Raising(Walk):
        def step(self, action: Any) -> Any:
            raise RuntimeError("no")

    recipe = read_recipe("raising", {}, lambda **_: Raising())
    found = list(doctor.check_environment(recipe, probe(recipe)))
    assert {"fail"} <= {one.status for one in found}
    assert any("RuntimeError: no" in one.detail for one in found)


def test_continuous_actions_are_scaled_to_the_bounds() -> None:
    spaces = probe_spaces(read_recipe("Pendulum-v1", {}))
    assert doctor.check_action_scaling(spaces).detail == "[-1, 1] becomes [-2, 2]"


def spaces_with(observation: gym.Space[Any], action: gym.Space[Any]) -> EnvSpaces:
    return EnvSpaces.from_gym("mine", observation, action)


def test_bounds_that_differ_are_shown_per_dimension() -> None:
    box = gym.spaces.Box(np.array([-3.0, 0.0], np.float32), np.array([-1.0, 100.0], np.float32))
    detail = doctor.check_action_scaling(spaces_with(box, box)).detail
    assert detail == "[-1, 1] becomes [-3, -1], [0, 100]"


def test_a_long_dict_is_shown_by_its_names() -> None:
    parts: dict[str, gym.Space[Any]] = {f"part_{i}": gym.spaces.Box(-1, 1, (3,), np.float32) for i in range(8)}
    shown = doctor._shorten(gym.spaces.Dict(parts))
    assert shown == "Dict of part_0, part_1, part_2, part_3, part_4, part_5 and 2 more"


def test_equal_nans_are_no_randomness() -> None:
    class Broken(Walk):
        def _look(self) -> Any:
            return np.array([np.nan], np.float32)

        def step(self, action: Any) -> Any:
            obs, _, ended, cut, info = super().step(action)
            return obs, float("nan"), ended, cut, info

    recipe = read_recipe("broken", {}, lambda **_: Broken())
    found = {one.name: one for one in doctor.check_environment(recipe, probe(recipe))}
    assert found["determinism"].status == "ok"
    assert found["observations"].status == "fail"


def test_random_actions_keep_to_the_masks() -> None:
    spaces = probe_spaces(read_recipe("walk", {}, lambda **_: Walk()))
    masks = np.array([[False, True, False]] * 50)
    assert set(spaces.random_actions(np.random.default_rng(0), 50, masks)) == {1}


def test_the_algorithm_is_weighed_and_timed() -> None:
    memory, eta = doctor.check_algorithm(load_config(PPO))
    assert "weights" in memory.detail
    assert "256 steps in about" in eta.detail
    assert eta.detail.count("(") == 1  # where it was measured, said once


DATA = {"dataset_kind": "random", "dataset_size": 100}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", {"num_steps": 64}),
    "dqn": ("CartPole-v1", {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 50, "train_frequency": 4}),
    "prioritized_dqn": ("CartPole-v1", {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 50}),
    "rlpd": ("Pendulum-v1", {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 50, **DATA}),
    "dreamer": ("CartPole-v1", {"size": "xxs", "batch_size": 2, "sequence_length": 8, "train_ratio": 1,
                                "learning_starts": 50, "imagination_horizon": 3}),
    "mbpo": ("Pendulum-v1", {"hidden_sizes": [8], "batch_size": 8, "learning_starts": 50, "model_hidden_sizes": [8],
                             "num_ensembles": 2, "num_elites": 1, "model_updates": 2, "rollout_batch_size": 10,
                             "rollout_horizon": 1, "synthetic_buffer_capacity": 100}),
    "bc": ("CartPole-v1", {"hidden_sizes": [8], **DATA}),
}  # fmt: skip


def tiny(algo: str, **changes: Any) -> Any:
    env_id, kwargs = TINY[algo]
    return load_config({"algo": algo, "env_id": env_id, "total_timesteps": 200, "eval_episodes": 0,
                        "algo_kwargs": kwargs | changes})  # fmt: skip


@pytest.mark.parametrize("algo", TINY)
def test_bytes_of_experience_are_those_of_the_arrays_that_hold_it(algo: str) -> None:
    session = bench.open_measured(tiny(algo))
    store: Any = session.store
    expected = {
        "ppo": lambda: 0,
        "rlpd": lambda: store.buffer.nbytes + sum(v.nbytes for v in store.dataset.arrays().values()),
        "mbpo": lambda: store.buffer.nbytes + store.imagined.nbytes,
        "bc": lambda: sum(v.nbytes for v in store.dataset.arrays().values()),
    }.get(algo, lambda: store.buffer.nbytes)()
    if algo != "bc":
        collector: Any = session.collector
        expected += sum(v.nbytes for v in vars(collector.experience).values() if isinstance(v, np.ndarray))
    session.close()
    assert bench.storage_bytes(session) == expected


@pytest.mark.parametrize("algo", TINY)
def test_time_is_measured_while_learning(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.open_measured(tiny(algo))
    turns: list[tuple[int, bool]] = []

    class Noted(bench.Turns):
        def apply_schedules(self) -> None:
            super().apply_schedules()
            self.begun_at = self.step

        def tick(self) -> None:
            super().tick()
            turns.append((self.begun_at, self.learned))

    monkeypatch.setattr(bench, "Turns", Noted)
    starts = getattr(session.params, "learning_starts", 0)
    assert bench.estimate_seconds(session, 0.0) > 0
    session.close()
    learned = [number for number, (_, has_learned) in enumerate(turns) if has_learned]
    assert learned[-1] == len(turns) - 1
    assert all(step >= starts for step, _ in turns[learned[0] :])


def test_a_budget_counts_a_model_fit_as_often_as_it_will_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.open_measured(tiny("mbpo", model_train_frequency=50))
    session.close()
    timings = iter([(1, 7.0), (10, 20.0)])  # a step with a fit; ten steps without
    monkeypatch.setattr(bench, "play_at_random", lambda _: 0)
    monkeypatch.setattr(bench, "time_turns", lambda *_: next(timings))
    assert bench.estimate_seconds(session, 1.0) == 200 * 2.0 + 4 * 5.0


def test_a_late_start_of_learning_is_not_waited_for() -> None:
    session = bench.open_measured(tiny("dqn", learning_starts=80_000))
    session.close()
    assert session.config.algo_kwargs["learning_starts"] == bench.MOST_RANDOM


@pytest.mark.parametrize("algo", ["dqn", "mbpo", "dreamer"])
def test_bench_times_steps_that_learn(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first_steps = []
    run_loop = bench.run_loop

    def noted(session: Any, run: Any, *timed: Any) -> None:
        if isinstance(run, bench.Run):
            first_steps.append(run.step)
        run_loop(session, run, *timed)

    monkeypatch.setattr(bench, "run_loop", noted)
    result = bench.benchmark(tiny(algo).model_copy(update={"total_timesteps": 40}))
    assert 50 <= first_steps[0] < 100
    assert 40 <= result.steps < 60
    assert result.updates >= {"dqn": 10, "mbpo": 40, "dreamer": 2}[algo]
    assert result.seconds["learn"] > 0


def test_bench_accounts_for_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LONG_START", 1e9)
    monkeypatch.setattr(bench, "settings_to_try", lambda result: {"num_envs=1": {"num_envs": 1}})
    result = bench.benchmark(load_config(PPO))
    assert result.steps >= 256
    assert result.updates >= 4
    assert set(result.seconds) == {*bench.PARTS, "rest"}
    assert all(result.seconds[part] > 0 for part in ("environment", "act", "store", "learn"))
    assert sum(result.seconds.values()) == pytest.approx(result.total_seconds)
    assert result.floor is not None
    assert result.floor.total > 0 < result.pace
    assert [trial.setting for trial in result.trials] == ["num_envs=1"]


def test_products_are_counted_by_shape_forwards_and_backwards() -> None:
    network, rows = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.ones(5, 3)
    with bench.Products() as products:
        for _ in range(4):
            network(rows).sum().backward()
    shapes = {tuple(tuple(x[0]) for x in key[1] if len(x[0]) == 2): count for key, count in products.counts.items()}
    assert shapes == {  # two layers forwards; into the weights of both, and into the input of the second
        ((5, 3), (3, 8)): 4, ((5, 8), (8, 2)): 4, ((2, 5), (5, 8)): 4, ((8, 5), (5, 3)): 4, ((5, 2), (2, 8)): 4,
    }  # fmt: skip
    assert products.time(torch.device("cpu")) > 0


def test_the_kernel_of_a_whole_network_is_a_product_of_its_shapes() -> None:
    """As `rl_training::mlp_forward`, which only a GPU has."""

    @torch.library.custom_op("bench_test::mlp_forward", mutates_args=(), schema="(Tensor x, Tensor[] y) -> Tensor")
    def mlp_forward(x: Any, parameters: Any) -> Any:
        return x + parameters[0].sum()

    with bench.Products() as products:
        for value in (1.0, 2.0):
            mlp_forward(torch.full((3, 2), value), [torch.full((2, 2), value), torch.ones(2)])
        mlp_forward(torch.ones(4, 2), [torch.ones(2, 2), torch.ones(2)])
    assert sorted(products.counts.values()) == [1, 2]


@pytest.mark.parametrize(
    ("algo", "vectorization"), [*((algo, "auto") for algo in TINY), ("ppo", "device"), ("dqn", "device")]
)
def test_a_floor_has_the_parts_that_a_run_has(algo: str, vectorization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Any:
        built.append(build_algorithm(*arguments, **options))
        return built[0]

    monkeypatch.setattr(bench, "build_algorithm", build)
    with closing(bench.open_measured(tiny(algo).model_copy(update={"vectorization": vectorization}))) as session:
        step = bench.warm_up(session)
        before = session.algorithm.num_updates
        found = bench.measure_floor(session, step, 0.0)
    (learner,) = built
    assert learner.device == session.algorithm.device
    assert learner.num_updates == session.algorithm.num_updates - before > 0
    assert found.learn > 0
    assert [bool(found.environment), found.act > 0] == [algo != "bc"] * 2
    assert found.total == pytest.approx(sum(found))


def breakdown(seconds: dict[str, float], **changes: Any) -> bench.Breakdown:
    plain = {"threads": 1, "vectorization": "native", "accelerate": "none"}
    config = load_config(PPO).model_copy(update=plain | changes)
    return bench.Breakdown(config, 1_000, 10, sum(seconds.values()), seconds, Floor(2e-5, 1e-5, 1e-5), 10_000.0)


def test_floor_and_bottleneck_are_said_in_words() -> None:
    result = breakdown({"environment": 0.05, "act": 0.01, "learn": 0.04})
    assert result.describe_floor() == (
        "environment alone 20.0 + matrix products 20.0 (acting 10.0, learning 10.0) = 40.0 µs per step; "
        "the run's best round, 10,000 steps/s, is 40% of that speed"
    )
    assert result.describe_bottleneck() == (
        "the environment, 50% of the time; its own steps alone would take 40% of that"
    )
    assert breakdown({"store": 0.6, "learn": 0.4}).describe_bottleneck() == "storing and sampling, 60% of the time"
    on_gpu = breakdown({"rollout on the device": 0.1}, device="cuda")
    assert "matrix products as a CUDA graph 20.0" in on_gpu.describe_floor()
    assert on_gpu.describe_bottleneck() == (
        "rollouts on the device, 100% of the time; environment and matrix products alone would take 30% of that"
    )


WORKERS = "execution_backend=local_async num_envs=8"
LEARNS, COLLECTS = {"environment": 0.1, "learn": 0.9}, {"environment": 0.5, "learn": 0.1, "store": 0.4}


@pytest.mark.parametrize(
    ("seconds", "changes", "gpu", "tried"),
    [
        (LEARNS, {}, False, {"threads=2"}),
        (LEARNS, {"vectorization": "sync"}, False, {"threads=2", "accelerate=compile"}),
        (LEARNS, {"algo": "dqn", "algo_kwargs": {}}, False, {"threads=2", "accelerate=compile"}),
        (LEARNS, {"algo": "dqn", "algo_kwargs": {}, "accelerate": "compile"}, False, {"threads=2"}),
        (LEARNS, {"algo": "dreamer", "algo_kwargs": {}}, False, {"threads=2"}),
        (LEARNS, {"threads": 2}, True, {"threads=1", "device=cuda"}),
        (LEARNS, {"device": "cuda", "accelerate": "none"}, True, {"accelerate=graph", "device=cpu"}),
        (LEARNS, {"device": "cuda", "accelerate": "graph"}, True, {"device=cpu"}),
        (COLLECTS, {}, False, {"num_envs=8 (other batches)", "vectorization=device", WORKERS}),
        (COLLECTS, {"algo": "dqn", "algo_kwargs": {}, "vectorization": "sync"}, False,
         {"num_envs=8", "vectorization=device", "vectorization=async", WORKERS}),
        ({"rollout on the device": 1.0}, {"vectorization": "device"}, False,
         {"num_envs=8 (other batches)", "vectorization=auto", "accelerate=compile", WORKERS}),
        (COLLECTS, {"algo": "bc", "algo_kwargs": {}}, False, set()),
    ],
)  # fmt: skip
def test_what_is_tried_depends_on_the_bottleneck(
    seconds: dict[str, float], changes: dict[str, Any], gpu: bool, tried: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    assert set(bench.settings_to_try(breakdown(seconds, **changes))) == tried


@pytest.mark.parametrize(("seconds", "rounds"), [(0.4, 3), (2.0, 1)])
def test_long_turns_are_timed_once(seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = iter([(100, seconds), (300, seconds), (200, seconds)])
    monkeypatch.setattr(bench, "time_turns", lambda *_: next(timed))
    assert bench.measure_pace(cast(Any, None), 0) == (300 if rounds == 3 else 100) / seconds
    assert len(list(timed)) == 3 - rounds


def test_settings_are_tried_in_runs_of_their_own_and_the_best_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {2: 5_000.0, 8: 40_000.0}
    changes: dict[str, Any] = {"num_envs=8": {"num_envs": 8}, "threads=2": {"threads": 2}}
    changes |= {"impossible": {"env_id": "Nowhere-v0"}, "too large": {"num_envs": 16}}
    monkeypatch.setattr(bench, "settings_to_try", lambda result: changes)

    def measure(session: Any, step: int) -> float:
        if session.config.num_envs not in rates:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rates[session.config.num_envs]

    monkeypatch.setattr(bench, "measure_pace", measure)
    result = breakdown(LEARNS, env_id="Acrobot-v1", vectorization="sync")
    with torch_settings_restored():
        found = replace(result, trials=bench.try_settings(result))
    assert found.trials == (("num_envs=8", 4.0, 0.0), ("threads=2", 0.5, 0.0))
    assert found.describe_trials() == "num_envs=8: 4.00 times the steps/s; threads=2: 0.50 times"
    none = replace(result, trials=found.trials[1:])
    assert none.describe_trials() == "nothing that was tried (threads=2: 0.50 times the steps/s)"


def test_a_setting_that_compiles_says_how_long_it_takes_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"accelerate=compile": {"accelerate": "compile"}, "threads=2": {"threads": 2}}
    for name, replaced in {
        "open_session": lambda config: io.StringIO(), "warm_up": lambda session: 1_200,
        "measure_pace": lambda session, step: 200.0, "settings_to_try": lambda result: changes,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench, name, replaced)
    clock = iter([0.0, 22.0, 30.0, 31.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    result = replace(breakdown(LEARNS), pace=100.0)
    found = replace(result, trials=bench.try_settings(result))
    assert found.describe_trials() == (
        "accelerate=compile: 2.00 times the steps/s, after a start of 22 s; threads=2: 2.00 times"
    )


def test_bench_tells_waiting_for_workers_from_storing() -> None:
    config = load_config(PPO).model_copy(update={"execution_backend": "local_async", "num_workers": 1})
    result = bench.benchmark(config)
    assert result.seconds["wait for workers"] > 0 == result.seconds["environment"]


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
    assert runner.invoke(app, ["doctor", "--env", "CartPole-v1"]).exit_code == 0
    timed = runner.invoke(app, ["bench", "--config", "ppo/cartpole", "--total-timesteps", "1024", "--num-envs", "4"])
    assert timed.exit_code == 0, timed.output
    assert "device cpu, accelerate none, threads 1, 4 environments" in timed.stdout
    assert all(part in timed.stdout for part in ("environment", "act", "store", "learn", "rest", "floor", "bottleneck"))


def test_doctor_refuses_an_algorithm_that_does_not_fit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from rl_training.config import spec

    only_discrete = dataclasses.replace(spec.get_algorithm_spec("ppo"), action_kinds=("discrete",))
    monkeypatch.setattr(spec, "get_algorithm_spec", lambda name: only_discrete)
    result = CliRunner().invoke(app, ["doctor", "--env", "Pendulum-v1", "--algo", "ppo"])
    assert result.exit_code == 1
    assert "does not support the continuous actions" in result.stdout
