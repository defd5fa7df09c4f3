"""Speed beside Stable-Baselines3 and sb3-contrib on CartPole-v1: run `python benchmarks/compare_sb3.py`.

One run measures both libraries, turn about (ours, theirs, ours, theirs, ...), each in a process of its own that has
imported and warmed up before the first measurement and sleeps while the other one works. A number is the median over
the rounds, at the better of 1 and 2 torch threads. Steps/s are environment steps over the seconds of training: our
`train_seconds` (logging included), their `learn()`. On a busy machine the ratio of CPU seconds (setting up included)
is the steadier one, and two threads that wait for each other can be 20 times slower than one: a number of threads that
is far behind in the warm-up is left out. `--only` picks comparisons, `--rounds` and `--seeds` shorten it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = (1, 2)
PROBE_STEPS = 2_048
ENV = "CartPole-v1"
SOLVED, EVAL_EVERY, EVAL_EPISODES = 475, 5_000, 20
PPO_WORKLOAD = {"num_steps": 128, "update_epochs": 4, "minibatch_size": 256}
# Our side of a comparison: a config, as it differs from the packaged preset or from the defaults of its algorithm.
OURS: dict[str, dict[str, Any]] = {
    "ppo": {"algo": "ppo", "num_envs": 8, "log_interval": 4, "algo_kwargs": PPO_WORKLOAD},
    "ppo_sync": {"algo": "ppo", "num_envs": 8, "log_interval": 4, "vectorization": "sync", "algo_kwargs": PPO_WORKLOAD},
    "a2c": {"algo": "a2c", "num_envs": 8, "log_interval": 100, "algo_kwargs": {"num_steps": 5}},
    "trpo": {
        "algo": "trpo", "num_envs": 8,
        "algo_kwargs": {
            "num_steps": 128, "value_updates": 80, "value_minibatch_size": 128, "cg_iterations": 15,
            "line_search_steps": 10,
        },
    },
    "impala": {"preset": "impala/cartpole"},
    "appo": {"preset": "appo/cartpole"},
}  # fmt: skip
# name, what it is, our side, their side, steps of ours and theirs, target ratio
SPEEDS = (
    ("ppo", "PPO, 8 envs x 128, 4 epochs of 256 (native)", "ppo", "ppo", 65_536, 65_536, 3.5),
    ("ppo_sync", "PPO, the same with vectorization: sync", "ppo_sync", "ppo", 65_536, 65_536, 3.0),
    ("a2c", "A2C, 8 envs x 5", "a2c", "a2c", 65_536, 32_768, 4.0),
    ("trpo", "TRPO, 8 envs x 128, 80 critic steps of 128", "trpo", "trpo", 65_536, 32_768, 2.5),
    ("impala", "IMPALA, packaged preset, against their PPO", "impala", "ppo", None, 65_536, 10.0),
    ("appo", "APPO, packaged preset, against their PPO", "appo", "ppo", None, 65_536, 10.0),
)
SOLVE_TARGET = 1 / 3


# the two sides, each in a process of its own --------------------------------------------------------------------------


def our_config(name: str, steps: int | None, threads: int, folder: str) -> Any:
    """The config of one of our measurements."""
    from rl_training.experiment.config import load_config

    given = dict(OURS[name])
    preset = given.pop("preset", None)
    config = load_config(preset or {"env_id": ENV, "total_timesteps": steps, **given})
    changes: dict[str, Any] = {"output_dir": folder, "threads": threads, "eval_episodes": 0, "device": "cpu"}
    return config.model_copy(update=changes if steps is None else {**changes, "total_timesteps": steps})


def our_speed(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Steps and seconds of one run of ours."""
    from rl_training.runtime.workflows import train

    config = our_config(job["name"], job["steps"], job["threads"], folder)
    metrics = train(config, console=False).metrics
    return {"steps": metrics["global_step"], "seconds": metrics["train_seconds"]}


def our_solve(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seconds of `learn()` until an evaluation reaches the bar, with the packaged preset."""
    from rl_training import PPO
    from rl_training.experiment.config import load_config

    config = load_config("ppo/cartpole")
    stop = {"eval_interval": EVAL_EVERY, "early_stopping": {"threshold": SOLVED}}
    config = config.model_copy(
        update={
            "output_dir": folder, "threads": job["threads"], "device": "cpu", "seed": job["seed"],
            "eval_episodes": EVAL_EPISODES, "algo_kwargs": {**config.algo_kwargs, **stop},
        }
    )  # fmt: skip
    model = PPO(config)
    begun = time.perf_counter()
    metrics = model.learn().metrics
    seconds = time.perf_counter() - begun
    solved = metrics["stop_reason"] == "early_stopping"
    return {"steps": metrics["global_step"], "seconds": seconds, "solved": solved}


def their_model(name: str, seed: int, **options: Any) -> Any:
    """A model of Stable-Baselines3 or sb3-contrib on 8 environments of a DummyVecEnv."""
    from sb3_contrib import TRPO
    from stable_baselines3 import A2C, PPO
    from stable_baselines3.common.env_util import make_vec_env

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "ppo": (PPO, {"n_steps": 128, "batch_size": 256, "n_epochs": 4}),
        "a2c": (A2C, {"n_steps": 5}),
        "trpo": (
            TRPO,
            {"n_steps": 128, "batch_size": 128, "n_critic_updates": 10, "cg_max_steps": 15, "line_search_max_iter": 10},
        ),
    }
    kind, defaults = kinds[name]
    env = make_vec_env(ENV, n_envs=8, seed=seed)
    return kind("MlpPolicy", env, **{**defaults, **options}, seed=seed, device="cpu", verbose=0)


def their_speed(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Steps and seconds of one `learn()` of theirs."""
    import torch

    torch.set_num_threads(job["threads"])
    model = their_model(job["name"], seed=0)
    begun = time.perf_counter()
    model.learn(job["steps"])
    return {"steps": model.num_timesteps, "seconds": time.perf_counter() - begun}


def linear(start: float) -> Callable[[float], float]:
    """A schedule of theirs from `start` to 0."""
    return lambda remaining: start * remaining


def their_solve(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seconds of `learn()` until an evaluation reaches the bar: our preset's hyper-parameters, or RL Zoo's own."""
    import torch
    from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(job["threads"])
    shared = {"gamma": 0.98, "gae_lambda": 0.8, "batch_size": 256, "ent_coef": 0.0}
    if job["name"] == "ppo_zoo":
        own: dict[str, Any] = {"n_steps": 32, "n_epochs": 20, "learning_rate": linear(1e-3), "clip_range": linear(0.2)}
        budget = 100_000
    else:
        own, budget = {"n_steps": 128, "n_epochs": 4, "learning_rate": linear(2e-3)}, 98_000
    model = their_model("ppo", job["seed"], **shared, **own)
    stop = StopTrainingOnRewardThreshold(SOLVED, verbose=0)
    callback = EvalCallback(
        make_vec_env(ENV, n_envs=EVAL_EPISODES, seed=1000 + job["seed"]), callback_on_new_best=stop,
        n_eval_episodes=EVAL_EPISODES, eval_freq=EVAL_EVERY // 8, verbose=0,
    )  # fmt: skip
    begun = time.perf_counter()
    model.learn(budget, callback=callback)
    seconds = time.perf_counter() - begun
    return {"steps": model.num_timesteps, "seconds": seconds, "solved": bool(callback.best_mean_reward >= SOLVED)}


def work() -> None:
    """A side's process: one job per line in, one result per line out."""
    jobs = {"ours": (our_speed, our_solve), "theirs": (their_speed, their_solve)}
    with tempfile.TemporaryDirectory(prefix="compare-sb3-") as folder:
        for line in sys.stdin:
            job = json.loads(line)
            speed, solve = jobs[job["side"]]
            cpu = time.process_time()
            result = (speed if job["kind"] == "speed" else solve)(job, folder)
            print("RESULT " + json.dumps({**result, "cpu_seconds": time.process_time() - cpu}), flush=True)


# the comparison -------------------------------------------------------------------------------------------------------


class Side:
    """The process of one side."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, kind: str, name: str, **job: Any) -> dict[str, Any]:
        """Send one job and wait for its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"side": self.side, "kind": kind, "name": name, **job}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        raise SystemExit(f"the process of {self.side} ended at {kind} {name}")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure_speeds(ours: Side, theirs: Side, names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Steps/s of every measurement that the comparisons need, by `side/name/threads`, one entry per round."""
    wanted = [row for row in SPEEDS if row[0] in names]
    jobs: list[tuple[Side, str, int | None]] = []
    for _, _, our_name, their_name, our_steps, their_steps, _ in wanted:
        for job in ((ours, our_name, our_steps), (theirs, their_name, their_steps)):
            if job not in jobs:
                jobs.append(job)
    chosen = {(side.side, name): choose_threads(side, name) for side, name, _ in jobs}
    rates: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for side, name, steps in jobs:
            for threads in chosen[side.side, name]:
                result = side.run("speed", name, steps=steps, threads=threads)
                entry = rates.setdefault(f"{side.side}/{name}/{threads}", {"wall": [], "cpu": []})
                entry["wall"].append(result["steps"] / result["seconds"])
                entry["cpu"].append(result["steps"] / result["cpu_seconds"])
                rate = f"{entry['wall'][-1]:>10,.0f} steps/s (CPU: {entry['cpu'][-1]:,.0f})"
                print(f"  round {number + 1}: {side.side:6} {name:8} {threads} thread(s) {rate}", flush=True)
    return rates


def choose_threads(side: Side, name: str) -> list[int]:
    """Warm up, and leave out a number of threads that is far behind (two on a busy machine can be 20 times slower)."""
    rates = {}
    for threads in (*THREADS, *THREADS):  # the second turn counts
        result = side.run("speed", name, steps=PROBE_STEPS, threads=threads)
        rates[threads] = result["steps"] / result["seconds"]
    found = ", ".join(f"{rate:,.0f} steps/s with {threads}" for threads, rate in rates.items())
    print(f"  warm-up: {side.side:6} {name:8} {found}", flush=True)
    return [threads for threads, rate in rates.items() if rate > 0.7 * max(rates.values())]


def best(rates: dict[str, dict[str, list[float]]], side: str, name: str, clock: str = "wall") -> tuple[float, int]:
    """Median steps/s at the better number of threads, and that number."""
    mine = {key: rate[clock] for key, rate in rates.items() if key.startswith(f"{side}/{name}/")}
    medians = {int(key.rpartition("/")[2]): statistics.median(values) for key, values in mine.items()}
    return max((median, threads) for threads, median in medians.items())


def compare_speeds(rates: dict[str, dict[str, list[float]]], names: list[str]) -> list[dict[str, Any]]:
    """A row per comparison."""
    rows = []
    for name, title, our_name, their_name, _, _, target in SPEEDS:
        if name in names:
            mine, my_threads = best(rates, "ours", our_name)
            other, other_threads = best(rates, "theirs", their_name)
            of_cpu = best(rates, "ours", our_name, "cpu")[0] / best(rates, "theirs", their_name, "cpu")[0]
            rows.append(
                {"name": name, "title": title, "ours": mine, "our_threads": my_threads, "theirs": other,
                 "their_threads": other_threads, "ratio": mine / other, "cpu_ratio": of_cpu, "target": target,
                 "met": mine / other >= target}
            )  # fmt: skip
    return rows


def measure_solving(ours: Side, theirs: Side, seeds: int, threads: tuple[int, int]) -> dict[str, Any]:
    """Seconds to a solved evaluation, a seed at a time, both sides; a run that is not solved counts as endless."""
    theirs.run("speed", "ppo", steps=2_048, threads=threads[1])
    ours.run("speed", "ppo", steps=2_048, threads=threads[0])
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": [], "theirs_zoo": []}
    for seed in range(1, seeds + 1):
        for label, side, name in (("ours", ours, "ppo"), ("theirs", theirs, "ppo"), ("theirs_zoo", theirs, "ppo_zoo")):
            result = side.run("solve", name, seed=seed, threads=threads[0] if side is ours else threads[1])
            runs[label].append(result)
            end = "solved" if result["solved"] else "NOT SOLVED"
            print(f"  seed {seed}: {label:10} {result['seconds']:7.2f} s  {result['steps']:>7,} steps  {end}")
    medians = {
        label: statistics.median(run["seconds"] if run["solved"] else float("inf") for run in entries)
        for label, entries in runs.items()
    }
    faster = min(("theirs", "theirs_zoo"), key=lambda label: medians[label])
    ratio = medians["ours"] / medians[faster]
    return {"runs": runs, "medians": medians, "faster_of_theirs": faster, "ratio": ratio, "target": SOLVE_TARGET,
            "met": ratio <= SOLVE_TARGET, "threads": threads}  # fmt: skip


def print_speeds(rows: list[dict[str, Any]]) -> None:
    """The comparisons as a Markdown table."""
    print("\n| Workload | ours, steps/s | SB3, steps/s | ratio | target | | of CPU time |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: |")
    for row in rows:
        ours, theirs = f"{row['ours']:,.0f} ({row['our_threads']}t)", f"{row['theirs']:,.0f} ({row['their_threads']}t)"
        ratio, verdict = f"{row['ratio']:.2f}x | {row['target']:g}x", "met" if row["met"] else "NOT met"
        print(f"| {row['title']} | {ours} | {theirs} | {ratio} | {verdict} | {row['cpu_ratio']:.2f}x |")


def print_solving(result: dict[str, Any]) -> None:
    """Seconds to 475 as a Markdown table."""
    print("\n| Seconds to 475, PPO | median | by seed | steps (median) |\n| --- | ---: | --- | ---: |")
    titles = {
        "ours": "ours, `ppo/cartpole`", "theirs": "SB3, the same hyper-parameters",
        "theirs_zoo": "SB3, RL Zoo's hyper-parameters",
    }  # fmt: skip
    for label, runs in result["runs"].items():
        by_seed = " ".join(f"{run['seconds']:.1f}" if run["solved"] else "never" for run in runs)
        steps = statistics.median(run["steps"] for run in runs)
        print(f"| {titles[label]} | {result['medians'][label]:.2f} | {by_seed} | {steps:,.0f} |")
    verdict = "met" if result["met"] else "NOT met"
    print(f"\nratio to the faster of theirs: {result['ratio']:.2f} (target {result['target']:.2f}): {verdict}")


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on."""
    from importlib.metadata import version

    packages = ("torch", "numpy", "gymnasium", "stable-baselines3", "sb3-contrib")
    return {
        "platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
        "load_average": os.getloadavg(), **{name: version(name) for name in packages},
    }  # fmt: skip


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="ppo,ppo_sync,a2c,trpo,impala,appo,solve", help="comparisons, by comma")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of every speed measurement")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the time to a solved evaluation")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "compare_sb3.json")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    names = arguments.only.split(",")
    known = [*(row[0] for row in SPEEDS), "solve"]
    if odd := [name for name in names if name not in known]:
        parser.error(f"there is no comparison {odd[0]!r}; there are {', '.join(known)}")
    report: dict[str, Any] = {"machine": describe_machine(), "command": sys.argv, "rounds": arguments.rounds}
    ours, theirs = Side("ours"), Side("theirs")
    try:
        rates = measure_speeds(ours, theirs, names, arguments.rounds)
        report["speeds"], report["rates"] = compare_speeds(rates, names), rates
        if "solve" in names:
            threads = (1, 1) if "ppo" not in names else (best(rates, "ours", "ppo")[1], best(rates, "theirs", "ppo")[1])
            report["solve"] = measure_solving(ours, theirs, arguments.seeds, threads)
    finally:
        ours.close()
        theirs.close()
    print_speeds(report["speeds"])
    if "solve" in report:
        print_solving(report["solve"])
    report["machine"]["load_average_after"] = os.getloadavg()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
