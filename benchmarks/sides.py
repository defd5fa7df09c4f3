"""Shared by the comparisons: arguments, a process per side, alternating rounds, the better number of threads, a table.

A script gives `serve` one function per kind of job and starts its sides with `Side(__file__, ...)`. Each side's process
has imported and warmed up before the first measurement, and sleeps while another one works.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

THREADS = (1, 2)
PACKAGES = ("torch", "numpy", "gymnasium", "stable-baselines3", "sb3-contrib")
Job = Mapping[str, Any]
Worker = Callable[[Job, str], dict[str, Any]]  # a job and a scratch folder -> steps, seconds, ...
Rates = dict[str, dict[str, list[float]]]  # `side/name/threads` -> steps/s of each round, by wall clock and CPU time


class Comparison(NamedTuple):
    """One row: what is measured, on whose side under which name, with how many steps, and the ratio to reach."""

    name: str
    title: str
    our_name: str
    their_name: str
    our_steps: int | None
    their_steps: int
    target: float
    their_side: str = "theirs"


def make_parser(script: str, description: str | None, known: Sequence[str], *, rounds: int) -> argparse.ArgumentParser:
    """The arguments of every comparison; `script` is its file, `known` are the names that --only picks from."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if odd := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no comparison {odd[0]!r}; there are {', '.join(known)}")
        return chosen

    path = Path(script)
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("--only", type=names, default=list(known), help="comparisons, by comma")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of every speed measurement")
    parser.add_argument("--output", type=Path, default=path.parent / "results" / f"{path.stem}.json")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


class Side:
    """The process of one side."""

    def __init__(self, script: str, side: str, **environment: str) -> None:
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, script, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

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


def serve(workers: Mapping[tuple[str, str], Worker]) -> None:
    """A side's process: one job per line in, one result per line out; `workers` by side and kind."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for line in sys.stdin:
            job = json.loads(line)
            result = workers[job["side"], job["kind"]](job, folder)
            print("RESULT " + json.dumps(result), flush=True)


class Stopwatch:
    """Seconds of wall clock and of CPU time since it was made or started again."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """From here on."""
        self.begun, self.cpu_begun = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """What has passed."""
        wall, cpu = time.perf_counter() - self.begun, time.process_time() - self.cpu_begun
        return {"seconds": wall, "cpu_seconds": cpu}


class FromTheStart:
    """A callback of ours that starts a stopwatch when the set-up is done."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_start(self, run: Any) -> None:
        """The first step is next."""
        self.watch.start()


def our_speed(config: Any, job: Job, folder: str) -> dict[str, Any]:
    """Steps and seconds of one run of ours: the seconds of the loop, logging included."""
    from rl_training.experiment.default_manager import DefaultExperimentManager  # a name that every version has

    changes = {"output_dir": folder, "threads": job["threads"], "eval_episodes": 0, "device": "cpu"}
    watch = Stopwatch()
    experiment = DefaultExperimentManager().setup(config.model_copy(update=changes))
    metrics = experiment.train(callbacks=[FromTheStart(watch)]).metrics
    return {**watch.read(), "steps": metrics["global_step"], "seconds": metrics["train_seconds"]}


def measure_speeds(
    jobs: Iterable[tuple[Side, str, int | None]], rounds: int, probe_steps: int, threads: Sequence[int] = THREADS
) -> Rates:
    """Steps/s of every job (side, name, steps), one entry per round."""
    jobs = list(dict.fromkeys(jobs))
    chosen = {(side.side, name): choose_threads(side, name, probe_steps, threads) for side, name, _ in jobs}
    rates: Rates = {}
    for number in range(rounds):
        for side, name, steps in jobs:
            for number_of in chosen[side.side, name]:
                result = side.run("speed", name, steps=steps, threads=number_of)
                entry = rates.setdefault(f"{side.side}/{name}/{number_of}", {"wall": [], "cpu": []})
                entry["wall"].append(result["steps"] / result["seconds"])
                entry["cpu"].append(result["steps"] / result["cpu_seconds"])
                rate = f"{entry['wall'][-1]:>10,.0f} steps/s (CPU: {entry['cpu'][-1]:,.0f})"
                print(f"  round {number + 1}: {side.side:8} {name:8} {number_of} thread(s) {rate}", flush=True)
    return rates


def choose_threads(side: Side, name: str, probe_steps: int, among: Sequence[int]) -> list[int]:
    """Warm up, and leave out a number of threads that is far behind (two on a busy machine can be 20 times slower)."""
    rates = {}
    for threads in (*among, *among):  # the second turn counts
        result = side.run("speed", name, steps=probe_steps, threads=threads)
        rates[threads] = result["steps"] / result["seconds"]
    found = ", ".join(f"{rate:,.0f} steps/s with {threads}" for threads, rate in rates.items())
    print(f"  warm-up: {side.side:8} {name:8} {found}", flush=True)
    return [threads for threads, rate in rates.items() if rate > 0.7 * max(rates.values())]


def best(rates: Rates, side: str, name: str, clock: str = "wall") -> tuple[float, int]:
    """Median steps/s at the better number of threads, and that number."""
    mine = {key: rate[clock] for key, rate in rates.items() if key.startswith(f"{side}/{name}/")}
    medians = {int(key.rpartition("/")[2]): statistics.median(values) for key, values in mine.items()}
    return max((median, threads) for threads, median in medians.items())


def compare_speeds(rates: Rates, comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """A row per comparison; the ratio is the median of the rounds' ratios, which a busy minute moves on both sides."""
    rows = []
    for name, title, our_name, their_name, _, _, target, side in comparisons:
        mine, my_threads = best(rates, "ours", our_name)
        other, other_threads = best(rates, side, their_name)
        pairs = zip(
            rates[f"ours/{our_name}/{my_threads}"]["wall"], rates[f"{side}/{their_name}/{other_threads}"]["wall"],
            strict=True,
        )  # fmt: skip
        ratios = sorted(a / b for a, b in pairs)
        ratio = statistics.median(ratios)
        of_cpu = best(rates, "ours", our_name, "cpu")[0] / best(rates, side, their_name, "cpu")[0]
        rows.append(
            {"name": name, "title": title, "ours": mine, "our_threads": my_threads, "theirs": other,
             "their_threads": other_threads, "ratio": ratio, "ratios": ratios, "cpu_ratio": of_cpu, "target": target,
             "met": ratio >= target}
        )  # fmt: skip
    return rows


def print_speeds(rows: list[dict[str, Any]], peer: str) -> None:
    """The comparisons as a Markdown table; with the distance to the floor where a row has one."""
    floor = any("floor_us" in row for row in rows)
    print(f"\n| Workload | ours, steps/s | {peer}, steps/s | ratio | target | | of CPU time |" + floor * " floor |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: |" + floor * " ---: |")
    for row in rows:
        ours, theirs = f"{row['ours']:,.0f} ({row['our_threads']}t)", f"{row['theirs']:,.0f} ({row['their_threads']}t)"
        ratio, verdict = f"{row['ratio']:.2f}x | {row['target']:g}x", "met" if row["met"] else "NOT met"
        line = f"| {row['title']} | {ours} | {theirs} | {ratio} | {verdict} | {row['cpu_ratio']:.2f}x |"
        if floor:
            line += f" {row['floor_us']:,.0f} us of {row['step_us']:,.0f} us ({row['floor_distance']:.2f}x) |"
        print(line)


def start_report(rounds: int) -> dict[str, Any]:
    """What the numbers depend on: machine, versions, command."""
    from importlib.metadata import version

    machine = {
        "platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
        "load_average": os.getloadavg(), **{name: version(name) for name in PACKAGES},
    }  # fmt: skip
    return {"machine": machine, "command": without_folders(sys.argv), "rounds": rounds}


def without_folders(command: Sequence[str]) -> list[str]:
    """The command, of each absolute path the name only: a record is no place for the folders of a machine."""
    return [os.path.basename(part) if os.path.isabs(part) else part for part in command]


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the results."""
    report["machine"]["load_average_after"] = os.getloadavg()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {path}")
