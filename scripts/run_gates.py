"""Run the learning gates of `gates.yaml`: one small JSON file per (gate, seed); recorded ones are skipped.

`python scripts/run_gates.py [--only NAME] [--seeds 0,1] [--jobs 2]` trains what is missing; `--list` shows what is
recorded; `--check` runs nothing and exits 1 if a recorded gate does not meet its rule. A record is valid as long as the
preset, with every default filled in, is the one it was made with; otherwise the job is stale and runs again. With
`--runs FOLDER` a stopped job continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from rl_training.config.settings import read_config
from rl_training.config.train_config import TrainConfig, read_yaml
from rl_training.errors import UserError, did_you_mean
from rl_training.record.metrics_file import read_metrics
from rl_training.run.run import Callback
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, resume_training, train
from rl_training.validation import StrictModel, validate

ROOT = Path(__file__).resolve().parents[1]
GATES, RESULTS = ROOT / "scripts" / "gates.yaml", ROOT / "results"
OTHER_EPISODES = 1_000_000  # added to a seed: evaluation episodes that chose no checkpoint
BEST_SHARE = 0.8  # of the seeds: how many best checkpoints must be at the bar
WORST_SLACK = 0.1  # of |bar|: how far below the bar the worst seed may be
LAST_EPISODES = 10  # of training: what the rule `training` averages
TRAIN_POINTS, EVAL_POINTS = 80, 20  # most points of a stored curve
# of a config: what does not change what is learned
UNHASHED = {
    "seed", "output_dir", "name", "loggers", "tags", "benchmark", "worker_timeout", "max_worker_restarts", "ray",
}  # fmt: skip
# Hyper-parameters that came later, at the value that leaves an algorithm as it was before: earlier records stay fresh.
ADDED_LATER = {
    "clip_value_loss": False, "head_hidden_sizes": None, "actor_learning_rate": None, "critic_learning_rate": None,
    "initial_alpha": 1.0, "backup_entropy": True, "model_weight_decay": 0.0, "random_action_hold": 1.0,
    "epsilon_ladder": 0.0, "network": None, "replay_memory": "auto", "widen_support": "auto",
    "desired_kl": None, "initial_log_std": 0.0, "critic_obs": [], "synthetic_rounds": None,
    "num_critics": 2, "critic_hidden_sizes": None, "critic_subset_size": None, "actor_q": None, "num_quantiles": None,
    "top_quantiles_to_drop": 2, "critic_dropout": 0.0, "critic_layer_norm": False, "actor_update_interval": 1,
    "memory": "none", "memory_size": 128, "memory_layers": 1, "sequence_length": None, "refresh_memory": False,
    "burn_in": 8, "sequence_period": None, "priority_eta": 0.9, "huber_delta": 1.0, "rescale_values": False,
    "augmentation": "none", "shift_pixels": 4, "adam_beta1": 0.9, "weight_decay": 0.01,
    "architecture": "mlp", "target_networks": True, "joint_forward": "none",
    "learning_rate_decay": "none", "return_bound": None, "noise_repeat": 1,
    "actor_first": False, "observation_statistics": "batches", "target_entropy_per_dimension": None,
    "her_ratio": 0.0, "her_strategy": "future", "exploration_noise_min": None, "target_actor": True,
    "own_targets": False, "logvar_units": "standardized",
}  # fmt: skip
Q_LEARNING = (
    "dqn", "double_dqn", "dueling_dqn", "prioritized_dqn", "n_step_dqn", "c51_dqn", "noisy_dqn", "qr_dqn",
    "rainbow_dqn", "iqn", "fqf",
)  # fmt: skip
ONE_CRITIC = {"num_critics": 1, "actor_q": "first", "policy_noise": None, "noise_clip": 0.5, "policy_delay": 1}
ADDED_TO = {  # the same, where other algorithms always had it
    **{name: {"num_atoms": None, "v_min": None, "v_max": None} for name in ("sac", "tqc", "redq", "droq", "rlpd")},
    "d4pg": {"target_update_interval": 1, **ONE_CRITIC},
    "ddpg": ONE_CRITIC,
    "td3": {"actor_q": "first"},
    **{algo: {"sequence_length": 40} for algo in Q_LEARNING},
}
ALWAYS_THERE = {  # of those, in these algorithms
    "dreamer": ("actor_learning_rate", "critic_learning_rate"),
    "rlpd": ("num_critics", "critic_subset_size", "critic_layer_norm", "actor_update_interval"),
}
# A synonym, at the value that earlier records have; the other name has the number that is used.
STORED_AS = {"trpo": {"learning_rate": 3e-4}}
BAD = ("fail", "stale", "incomplete")

Record = dict[str, Any]


class Gate(StrictModel):
    """What a preset must reach in a budget, or stay below; the fields are explained in gates.yaml."""

    name: str
    preset: str
    env: str
    budget: int = Field(ge=1)
    threshold: float | None = None
    rule: Literal["final", "best", "training", "reach"] = "final"
    seeds: tuple[int, ...] = Field((0, 1, 2, 3, 4), min_length=1)
    overrides: dict[str, Any] = Field(default_factory=dict)
    control: bool = False
    in_progress: bool = False
    below: float | str | None = None
    above: float | str | None = None
    share: float = Field(1.0, gt=0)
    every_seed: bool = False
    figure: str
    eval_episodes: int = Field(20, ge=1)


Job = tuple[Gate, int]  # and a seed


@dataclass(frozen=True)
class Verdict:
    """`pass`, `fail`, `recorded` (nothing is claimed), `not run`, `incomplete` or `stale`, and why."""

    status: str
    reason: str
    records: tuple[Record, ...] = ()

    @property
    def returns(self) -> list[float]:
        """What each recorded seed is judged by: what the rule names, else the evaluation of the final weights."""
        return [judged(record) for record in self.records]


def judged(record: Record) -> float:
    """What the gate's rule reads: a mean return, or the steps that were needed (infinite when never)."""
    if "reached" in record:
        return math.inf if record["reached"] is None else float(record["reached"])
    value: float = (record.get("best") or record.get("training") or record["eval"])["mean"]
    return value


def load_gates(path: Path = GATES) -> dict[str, Gate]:
    """The gates of a file by name."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    shared = {key: value for key, value in data.items() if key != "gates"}
    gates = {name: validate(Gate, {"name": name, **shared, **entry}, name) for name, entry in data["gates"].items()}
    for gate in gates.values():
        for field, other in (("below", gate.below), ("above", gate.above)):
            if isinstance(other, str) and other not in gates:
                raise UserError(f"{gate.name}: {field} names the gate {other!r}; {did_you_mean(other, gates)}")
        if gate.threshold is None and not gate.control:
            raise UserError(f"{gate.name} has no threshold; only a control goes without.")
    return gates


# configs and records -------------------------------------------------------------------------------------------------


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` put in, mapping by mapping."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def gate_config(gate: Gate, seed: int, output_dir: str | Path = "runs") -> TrainConfig:
    """The config of one job: the preset with the gate's overrides."""
    data = merge(read_yaml(gate.preset), gate.overrides)
    config = read_config({**data, "seed": seed, "output_dir": output_dir}, None)
    if config.env_id != gate.env:
        raise UserError(f"{gate.name}: env is {gate.env!r}, but {gate.preset} trains on {config.env_id}.")
    return config


def config_hash(gate: Gate) -> str:
    """Of the job's config: what a record must have been made with to count."""
    return hash_config(gate_config(gate, seed=0), gate.eval_episodes)


def hash_config(config: TrainConfig, eval_episodes: int) -> str:
    """Of a config with every default spelled out, and of how it is evaluated."""
    from rl_training.config.params import dump_params, read_params
    from rl_training.config.spec import get_algorithm_spec

    plain = config.model_dump(mode="json", exclude=UNHASHED)
    if plain["device"] == "cuda":
        plain["device"] = "auto"  # which the preset says; the record names the device
    if config.execution_backend == "local_sync":
        del plain["num_workers"]  # nobody reads it
    # as it was before they came
    before = {
        "worker_order": "fixed", "max_policy_lag": None, "eval_max_steps": None, "eval_deterministic": True,
        "matmul_precision": "highest",
    }  # fmt: skip
    plain = {name: value for name, value in plain.items() if name not in before or value != before[name]}
    if said := plain["env_kwargs"].pop("wrappers", None):  # what is off is off, whether or not it is said
        said = {name: value for name, value in said.items() if value is not False} or None
    plain["env_kwargs"] |= {} if said is None else {"wrappers": said}
    params = dump_params(read_params(get_algorithm_spec(config.algo).params, config.algo_kwargs))
    params["eval_interval"] = params["eval_interval"] or 0  # which was the default; what is learned is the same
    params |= STORED_AS.get(config.algo, {})
    added = {**ADDED_LATER, **ADDED_TO.get(config.algo, {})}
    always = ALWAYS_THERE.get(config.algo, ())
    later = [name for name, value in params.items() if name not in always and added.get(name, ...) == value]
    plain["algo_kwargs"] = {name: value for name, value in params.items() if name not in later}
    for value in plain["algo_kwargs"].values():
        if isinstance(value, dict) and value.get("begin") == 0.0:  # a schedule without a delay, as all were
            del value["begin"]
    text = json.dumps([plain, eval_episodes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_path(results: Path, gate: Gate, seed: int) -> Path:
    """Where a job's record is."""
    return results / gate.name / f"seed_{seed}.json"


def read_record(path: Path) -> Record | None:
    """A job's record, None when there is none."""
    if not path.is_file():
        return None
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def write_record(path: Path, record: Record) -> None:
    """Write a record whole or not at all; one line per key, so that a curve does not fill pages."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    os.replace(temporary, path)


# one job -------------------------------------------------------------------------------------------------------------


@contextmanager
def run_folder(runs: Path | None, gate: Gate, seed: int) -> Iterator[Path]:
    """Where a job's run is written: under `runs`, where it stays until it has ended, or a temporary folder."""
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="gate-") as folder:
            yield Path(folder)
    else:
        kept = runs / gate.name / f"seed_{seed}"
        yield kept
        shutil.rmtree(kept)


def train_or_go_on(gate: Gate, seed: int, folder: Path, callbacks: Sequence[Callback]) -> TrainResult:
    """Train, from the checkpoint of a run that was stopped in this folder if there is one."""
    stopped = next(folder.glob("*/checkpoints/latest.ckpt"), None)
    if stopped is not None:
        return resume_training(stopped, callbacks=callbacks, console=False, raise_on_signal=False)
    return train(gate_config(gate, seed, folder), callbacks=callbacks, console=False, raise_on_signal=False)


def run_job(gate: Gate, seed: int, results: Path, jobs: int = 1, runs: Path | None = None) -> Record:
    """Train one (gate, seed), evaluate its final weights, and write the record."""
    begun = time.perf_counter()
    recent: list[float] = []
    with run_folder(runs, gate, seed) as folder:
        run = train_or_go_on(gate, seed, folder, [LastReturns(recent)])
        if run.metrics["stop_reason"] in ("SIGINT", "SIGTERM"):
            raise KeyboardInterrupt
        evaluation = evaluate_checkpoint(run.checkpoint_path, num_episodes=gate.eval_episodes)
        special: Record = {}
        if gate.rule == "reach" and gate.threshold is not None:
            special = {"reached": first_reached(run.run_dir / "metrics.jsonl", gate.threshold)}
        if gate.rule == "training":
            special = {"training": {"mean": statistics.fmean(recent), "returns": recent}}
        if gate.rule == "best":  # chosen by the run's own evaluations, judged on other episodes
            path = run.checkpoint_path.with_name("best.ckpt")
            chosen = evaluate_checkpoint(path, num_episodes=gate.eval_episodes, seed=seed + OTHER_EPISODES)
            special = {"best": {"mean": chosen["eval_return_mean"], "returns": chosen["eval_returns"]}}
        resolved = yaml.safe_load((run.run_dir / "config.yaml").read_text(encoding="utf-8"))
        manifest = json.loads((run.run_dir / "manifest.json").read_text(encoding="utf-8"))
        curve = read_curve(run.run_dir / "metrics.jsonl")
    record = {
        "gate": gate.name, "preset": gate.preset, "env": gate.env, "overrides": gate.overrides, "seed": seed,
        "config_hash": config_hash(gate),
        "eval": {
            "mean": evaluation["eval_return_mean"], "std": evaluation["eval_return_std"],
            "episodes": gate.eval_episodes, "deterministic": True, "returns": evaluation["eval_returns"],
        },
        **special,
        "global_step": run.metrics["global_step"], "stop_reason": run.metrics["stop_reason"],
        "train_seconds": round(run.metrics["train_seconds"], 3), "wall_seconds": round(time.perf_counter() - begun, 3),
        "curve": curve,
        "resolved": {name: resolved[name] for name in ("device", "threads", "num_envs", "vectorization")},
        "versions": {name: manifest[name] for name in ("rl_training", "python", "torch", "gymnasium", "numpy", "git")},
        "machine": describe_machine(jobs),
        "command": f"python scripts/run_gates.py --only {gate.name} --seeds {seed}",
    }  # fmt: skip
    write_record(record_path(results, gate, seed), record)
    return record


def first_reached(path: Path, bar: float) -> int | None:
    """The step of the first of two successive evaluations at the bar, None when there are no such two."""
    points = [(row["step"], row["eval_return_mean"]) for row in read_metrics(path) if "eval_return_mean" in row]
    for (step, value), (_, following) in itertools.pairwise(points):
        if min(value, following) >= bar:
            return int(step)
    return None


class LastReturns(Callback):
    """A callback that keeps the returns of the last training episodes."""

    def __init__(self, returns: list[float]) -> None:
        self.returns = returns

    def on_end(self, run: Any) -> None:
        """At the end of a run."""
        self.returns[:] = [episode[0] for episode in run.state.episodes][-LAST_EPISODES:]


def read_curve(path: Path) -> dict[str, list[list[float]]]:
    """Thinned [step, return] points: mean over the last 100 training episodes, and evaluations."""
    rows = read_metrics(path)
    train = [[row["step"], round(row["episode_return_mean"], 3)] for row in rows if "episode_return_mean" in row]
    evaluations = [[row["step"], round(row["eval_return_mean"], 3)] for row in rows if "eval_return_mean" in row]
    return {"train": thin(train, TRAIN_POINTS), "eval": thin(evaluations, EVAL_POINTS)}


def thin(points: Sequence[list[float]], most: int) -> list[list[float]]:
    """At most that many of the points, evenly spread, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def describe_machine(jobs: int) -> str:
    """Processor, cores, system, and how many jobs shared them."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, {platform.system()}; jobs side by side: {jobs}"


# verdicts ------------------------------------------------------------------------------------------------------------


def judge(gate: Gate, gates: Mapping[str, Gate], results: Path, seeds: Sequence[int] | None = None) -> Verdict:
    """Whether the records of a gate meet its rule, over its own seeds or the given ones."""
    wanted = seeds or gate.seeds
    found = {seed: record for seed in wanted if (record := read_record(record_path(results, gate, seed)))}
    records = tuple(found.values())
    if not found:
        return Verdict("not run", "nothing recorded")
    expected = config_hash(gate)
    if stale := [seed for seed, record in found.items() if record["config_hash"] != expected]:
        return Verdict("stale", f"seeds {join(stale)} were recorded with another config", records)
    if missing := [seed for seed in wanted if seed not in found]:
        return Verdict("incomplete", f"seeds {join(missing)} are missing", records)
    status, reason = decide(gate, gates, results, wanted, records)
    return Verdict(status, reason, records)


def decide(
    gate: Gate, gates: Mapping[str, Gate], results: Path, seeds: Sequence[int], records: Sequence[Record]
) -> tuple[str, str]:
    """The rule itself, on a complete set of records."""
    returns = [judged(record) for record in records]
    median, worst = statistics.median(returns), worst_of(gate, returns)
    steps = max(record["global_step"] for record in records)
    reasons = []
    if steps > gate.budget:
        reasons.append(f"{steps:,} steps are over the budget of {gate.budget:,}")
    if gate.rule == "reach":
        if not gate.control and math.isinf(worst):
            reasons.append(f"{returns.count(math.inf)} of {len(returns)} seeds never reach {gate.threshold:g}")
    elif gate.threshold is not None and gate.rule == "best":
        good = sum(value >= gate.threshold for value in returns)
        if good < BEST_SHARE * len(returns):
            reasons.append(f"{good} of {len(returns)} best checkpoints reach {gate.threshold:g}")
    elif gate.threshold is not None:
        lowest = worst_allowed(gate.threshold)
        if median < gate.threshold:
            reasons.append(f"median {median:.1f} is below {gate.threshold:g}")
        if worst < lowest:
            reasons.append(f"worst {worst:.1f} is below {lowest:g}")
    for word, other in (("below", gate.below), ("above", gate.above)):
        if other is None:
            continue
        limit, name = find_limit(other, gate.share, gates, results, seeds)
        if limit is None:
            return "incomplete", f"{name} is not recorded to compare with"
        by_seed = {f"seed {seed}": value for seed, value in zip(seeds, returns, strict=True)}
        for whose, value in (by_seed if gate.every_seed else {"median": median}).items():
            if not (value < limit if word == "below" else value > limit):
                reasons.append(f"{whose} {value:.1f} is not {word} {name}")
    if reasons:
        return "fail", "; ".join(reasons)
    claims = not gate.control or gate.below is not None or gate.above is not None
    return ("pass" if claims else "recorded"), f"median {median:.1f}, worst {worst:.1f}, at most {steps:,} steps"


def find_limit(
    other: float | str, share: float, gates: Mapping[str, Gate], results: Path, seeds: Sequence[int]
) -> tuple[float | None, str]:
    """The number to stay below or above, None when the gate it comes from has no fresh records."""
    if not isinstance(other, str):
        return share * other, f"{share * other:g}"
    compared = gates[other]
    verdict = judge(compared, gates, results, [seed for seed in seeds if seed in compared.seeds] or None)
    if verdict.status in ("not run", "incomplete", "stale"):
        return None, other
    limit = share * statistics.median(verdict.returns)
    part = "" if share == 1 else f"{share:.3g} of "
    return limit, f"{limit:.1f}, {part}the median of {other}"


def worst_of(gate: Gate, values: Sequence[float]) -> float:
    """The least of the returns, the most of the steps."""
    return max(values) if gate.rule == "reach" else min(values)


def worst_allowed(bar: float) -> float:
    """The bar less 10 % of its size, which is downwards for negative bars too."""
    return bar - WORST_SLACK * abs(bar)


# the command ---------------------------------------------------------------------------------------------------------


def join(values: Iterable[object]) -> str:
    """Words with commas."""
    return ", ".join(str(value) for value in values)


def due_jobs(gates: Iterable[Gate], results: Path, seeds: Sequence[int] | None) -> Iterator[Job]:
    """The jobs that have no fresh record."""
    for gate in gates:
        expected = config_hash(gate)
        for seed in seeds or gate.seeds:
            record = read_record(record_path(results, gate, seed))
            if record is None or record["config_hash"] != expected:
                yield gate, seed


def run_jobs(jobs: Sequence[Job], results: Path, processes: int, runs: Path | None) -> int:
    """Run the jobs and print a line for each; returns how many failed."""
    failed = 0
    for name, outcome in outcomes(jobs, results, processes, runs):
        if isinstance(outcome, Exception):
            failed += 1
            print(f"{name}: {type(outcome).__name__}: {outcome}", flush=True)
        else:
            score = f"{outcome['eval']['mean']:.1f} ± {outcome['eval']['std']:.1f}"
            print(f"{name}: {score} at {outcome['global_step']:,} steps, {outcome['wall_seconds']:.0f} s", flush=True)
    return failed


def outcomes(
    jobs: Sequence[Job], results: Path, processes: int, runs: Path | None
) -> Iterator[tuple[str, Record | Exception]]:
    """Each job's name with its record or its error, as they finish; one process works in this one."""
    if processes == 1:
        for gate, seed in jobs:
            try:
                yield f"{gate.name} seed {seed}", run_job(gate, seed, results, runs=runs)
            except Exception as error:
                yield f"{gate.name} seed {seed}", error
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_job, *job, results, processes, runs): f"{job[0].name} seed {job[1]}" for job in jobs}
        for future in as_completed(running):
            problem = future.exception()  # result() raises what is no Exception, such as an interrupt
            yield running[future], problem if isinstance(problem, Exception) else future.result()


def print_verdicts(gates: Iterable[Gate], every: Mapping[str, Gate], results: Path, seeds: Sequence[int] | None) -> int:
    """One line per gate; returns how many do not meet their rule."""
    bad = 0
    for gate in gates:
        verdict = judge(gate, every, results, seeds)
        bad += verdict.status in BAD and not gate.in_progress
        print(f"{gate.name:26} {verdict.status:10} {verdict.reason}")
    return bad


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run the learning gates, or check what is recorded.")
    parser.add_argument("--only", action="append", metavar="NAME", help="this gate; may be repeated (default: all)")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], help="such as 0,1")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default 2)")
    parser.add_argument("--gates", type=Path, default=GATES, help="another gates.yaml")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder of records")
    parser.add_argument("--runs", type=Path, help="keep the runs here; one that was stopped goes on")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="run nothing; say what is recorded")
    what.add_argument("--check", action="store_true", help="run nothing; exit 1 if a recorded gate misses its rule")
    return parser.parse_args(argv)


def select_gates(gates: Mapping[str, Gate], names: Sequence[str] | None) -> list[Gate]:
    """The gates of these names, all when none is given."""
    for name in names or ():
        if name not in gates:
            raise UserError(f"there is no gate {name!r}; {did_you_mean(name, gates)}")
    return [gates[name] for name in names or gates]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, list or check."""
    arguments = read_arguments(argv)
    try:
        gates = load_gates(arguments.gates)
        selected = select_gates(gates, arguments.only)
        if arguments.list or arguments.check:
            bad = print_verdicts(selected, gates, arguments.results, arguments.seeds)
            return 1 if bad and arguments.check else 0
        jobs = list(due_jobs(selected, arguments.results, arguments.seeds))
        print(f"{len(jobs)} jobs to run, {max(1, arguments.jobs)} side by side", flush=True)
        failed = run_jobs(jobs, arguments.results, max(1, arguments.jobs), arguments.runs)
        print_verdicts(selected, gates, arguments.results, arguments.seeds)
        return 1 if failed else 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what is recorded is kept, and the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
