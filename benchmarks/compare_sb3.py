"""Compare speed with Stable-Baselines3 and sb3-contrib on CartPole-v1: run `python benchmarks/compare_sb3.py`.

One run measures both libraries, alternating (ours, theirs, ours, theirs, ...; see `sides.py`). A number is the
median over the rounds, at the better of 1 and 2 torch threads. Steps/s are environment steps divided by the seconds of
training: our `train_seconds` (including logging), their `learn()`. On a busy machine the ratio of CPU seconds is more
stable, and two threads that wait for each other can be 20 times slower than one: a number of threads that is much
slower in the warm-up is left out. `--only` selects comparisons; `--rounds` and `--seeds` shorten the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from sides import (
    Comparison,
    Job,
    Side,
    Stopwatch,
    best,
    compare_speeds,
    make_parser,
    measure_speeds,
    our_speed,
    print_speeds,
    serve,
    start_report,
    write_report,
)

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
SPEEDS = (
    Comparison("ppo", "PPO, 8 envs x 128, 4 epochs of 256 (native)", "ppo", "ppo", 65_536, 65_536, 3.5),
    Comparison("ppo_sync", "PPO, the same with vectorization: sync", "ppo_sync", "ppo", 65_536, 65_536, 3.0),
    Comparison("a2c", "A2C, 8 envs x 5", "a2c", "a2c", 65_536, 32_768, 4.0),
    Comparison("trpo", "TRPO, 8 envs x 128, 80 critic steps of 128", "trpo", "trpo", 65_536, 32_768, 2.5),
    Comparison("impala", "IMPALA, packaged preset, against their PPO", "impala", "ppo", None, 65_536, 10.0),
    Comparison("appo", "APPO, packaged preset, against their PPO", "appo", "ppo", None, 65_536, 10.0),
)
SOLVE_TARGET = 1 / 3


# the two sides, each in a process of its own --------------------------------------------------------------------------


def our_workload(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one run of ours."""
    from rl_training.config.train_config import load_config

    given, steps = dict(OURS[job["name"]]), job["steps"]
    preset = given.pop("preset", None)
    config = load_config(preset or {"env_id": ENV, "total_timesteps": steps, **given})
    return our_speed(config if steps is None else config.model_copy(update={"total_timesteps": steps}), job, folder)


def our_solve(job: Job, folder: str) -> dict[str, Any]:
    """Seconds of `learn()` until an evaluation reaches the bar, with the packaged preset."""
    from rl_training import PPO
    from rl_training.config.train_config import load_config

    config = load_config("ppo/cartpole")
    stop = {"eval_interval": EVAL_EVERY, "early_stopping": {"threshold": SOLVED}}
    config = config.model_copy(
        update={
            "output_dir": folder, "threads": job["threads"], "device": "cpu", "seed": job["seed"],
            "eval_episodes": EVAL_EPISODES, "algo_kwargs": {**config.algo_kwargs, **stop},
        }
    )  # fmt: skip
    model = PPO(config)
    watch = Stopwatch()
    metrics = model.learn().metrics
    seconds = watch.read()
    solved = metrics["stop_reason"] == "early_stopping"
    return {"steps": metrics["global_step"], **seconds, "solved": solved}


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


def their_speed(job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one `learn()` of theirs."""
    import torch

    torch.set_num_threads(job["threads"])
    model = their_model(job["name"], seed=0)
    watch = Stopwatch()
    model.learn(job["steps"])
    return {"steps": model.num_timesteps, **watch.read()}


def linear(start: float) -> Callable[[float], float]:
    """A schedule of theirs from `start` to 0."""
    return lambda remaining: start * remaining


def their_solve(job: Job, folder: str) -> dict[str, Any]:
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
    watch = Stopwatch()
    model.learn(budget, callback=callback)
    return {"steps": model.num_timesteps, **watch.read(), "solved": bool(callback.best_mean_reward >= SOLVED)}


# the comparison -------------------------------------------------------------------------------------------------------


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


def main() -> None:
    """Measure, print and write the results."""
    parser = make_parser(__file__, __doc__, [*(row.name for row in SPEEDS), "solve"], rounds=5)
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the time to a solved evaluation")
    arguments = parser.parse_args()
    if arguments.work:
        serve(
            {("ours", "speed"): our_workload, ("ours", "solve"): our_solve, ("theirs", "speed"): their_speed,
             ("theirs", "solve"): their_solve}
        )  # fmt: skip
        return
    names = arguments.only
    report = start_report(arguments.rounds)
    ours, theirs = Side(__file__, "ours"), Side(__file__, "theirs")
    wanted = [row for row in SPEEDS if row.name in names]
    try:
        jobs = [
            job for row in wanted
            for job in ((ours, row.our_name, row.our_steps), (theirs, row.their_name, row.their_steps))
        ]  # fmt: skip
        rates = measure_speeds(jobs, arguments.rounds, PROBE_STEPS)
        report["speeds"], report["rates"] = compare_speeds(rates, wanted), rates
        if "solve" in names:
            threads = (1, 1) if "ppo" not in names else (best(rates, "ours", "ppo")[1], best(rates, "theirs", "ppo")[1])
            report["solve"] = measure_solving(ours, theirs, arguments.seeds, threads)
    finally:
        ours.close()
        theirs.close()
    print_speeds(report["speeds"], "SB3")
    if "solve" in report:
        print_solving(report["solve"])
    write_report(report, arguments.output)


if __name__ == "__main__":
    main()
