"""Train with our defaults and Stable-Baselines3's on the environments and budgets of `defaults.yaml`.

`python scripts/compare_defaults.py ROUND... --jobs 16` runs the jobs of a round of that file that have no record yet,
the longest jobs first, one process and one torch thread per job. With `--seconds` it starts no job that would not end
in time, and stops jobs that exceed it. Each job is one line in `results/defaults/`. `--plan` counts jobs and minutes,
`--table` shows the records; neither runs anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from run_gates import ROOT, describe_machine, hash_config, merge

from rl_training.config.settings import UNSAID, fill_defaults
from rl_training.config.train_config import TrainConfig, load_config
from rl_training.errors import UserError, did_you_mean

SETTINGS, RECORDS = ROOT / "scripts" / "defaults.yaml", ROOT / "results" / "defaults"
NORMALIZED = "sb3_normalized"  # a side: theirs with VecNormalize
LONGEST_EPISODE = 5_000  # steps of an evaluation episode in an environment without a limit of its own
SLACK = 1.2  # how much longer than expected a job may take

Settings = dict[str, Any]
Record = dict[str, Any]
Predict = Callable[[Any, Any], Any]  # observations and action masks, or None, of a batch


@dataclass(frozen=True)
class Job:
    """One training run: `label` names a candidate of defaults.yaml, or `default` for none."""

    side: str
    algo: str
    label: str
    env: str
    seed: int
    budget: int

    @property
    def key(self) -> tuple[object, ...]:
        """What a record is found by."""
        return tuple(asdict(self).values())


# jobs ----------------------------------------------------------------------------------------------------------------


def load_settings(path: Path = SETTINGS) -> Settings:
    """What defaults.yaml says."""
    settings: Settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings


def jobs_of(settings: Settings, round_name: str) -> Iterator[Job]:
    """The jobs of a round: each of its entries crosses algorithms, labels, environments and seeds."""
    if round_name not in settings["rounds"]:
        raise UserError(f"there is no round {round_name!r}; {did_you_mean(round_name, settings['rounds'])}")
    for entry in settings["rounds"][round_name]:
        for algo in entry["algorithms"]:
            about, known = settings["algorithms"][algo], settings["candidates"].get(algo, {})
            named = {"all": ["default", *known], "candidates": [*known]}
            labels = entry.get("labels", ["default"])
            for label in named[labels] if isinstance(labels, str) else labels:
                if label != "default" and label not in known:
                    continue
                for env, where in settings["environments"].items():
                    wanted = env in entry["environments"] if "environments" in entry else where["half"] == entry["half"]
                    if wanted and where["actions"] in about["actions"]:
                        budget = int(about["budget"] * entry.get("scale", where.get("scale", 1)))
                        for seed in entry["seeds"]:
                            yield Job(entry["side"], algo, label, env, seed, budget)


def our_config(settings: Settings, job: Job, output_dir: str = "runs", device: str = "cpu") -> TrainConfig:
    """What `train --algo NAME --env ID` would run, with the candidate's changes and nothing that costs time."""
    from rl_training.config.spec import get_algorithm_spec

    base, changes = get_algorithm_spec(job.algo).defaults, {}
    if job.label != "default":
        base = settings["before"].get(job.algo, base)
        changes = copy.deepcopy(settings["candidates"][job.algo][job.label])
        if settings["environments"][job.env]["observations"] != "vector":
            changes.get("env_kwargs", {}).get("wrappers", {}).pop("normalize_observation", None)
    data = merge({"algo": job.algo, "env_id": job.env, **base}, changes)
    quiet = {"eval_episodes": 0, "replay_in_checkpoint": False, "checkpoint_interval": 10**9, "threads": 1}
    fixed = {"total_timesteps": job.budget, "seed": job.seed, "output_dir": output_dir, "device": device}
    return load_config({**data, **quiet, **fixed})


def job_hash(settings: Settings, job: Job) -> str:
    """Of what was trained: our settings spelled out, or the version of theirs."""
    if job.side == "ours":
        return hash_config(our_config(settings, job), settings["episodes"])
    module = settings["algorithms"][job.algo]["theirs"].partition(":")[0]
    return f"{module} {version(module.replace('_', '-'))}"


def read_records(folder: Path) -> dict[tuple[object, ...], Record]:
    """Every line of every file, by the key of its job; of two for one job the later file's; none of a stopped run."""
    found: dict[tuple[object, ...], Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["steps"] >= record["budget"]:
                found[Job(**{name: record[name] for name in Job.__dataclass_fields__}).key] = record
    return found


def due_jobs(settings: Settings, rounds: Iterable[str], records: Mapping[tuple[object, ...], Record]) -> list[Job]:
    """The jobs of the rounds without a fresh record, each once."""
    jobs = dict.fromkeys(job for name in rounds for job in jobs_of(settings, name))
    return [job for job in jobs if records.get(job.key, {}).get("hash") != job_hash(settings, job)]


def expected_seconds(settings: Settings, job: Job, records: Iterable[Record]) -> float:
    """By the same algorithm on the same environment if that is recorded, else by defaults.yaml."""
    like = [r for r in records if (r["side"], r["algo"], r["env"]) == (job.side, job.algo, job.env)]
    if like:
        return job.budget * statistics.median(record["seconds"] / record["steps"] for record in like)
    slowness = settings["environments"][job.env].get("slowness", {}).get(job.side, 1)
    rates = settings["algorithms"][job.algo]["rates"]
    rate: float = rates[job.side if job.side in rates else "sb3"]
    return job.budget / rate * slowness


# one job -------------------------------------------------------------------------------------------------------------


class Examiner:
    """Plays whole episodes with a deterministic policy, the same ones each time, and keeps the curve."""

    def __init__(self, settings: Settings, job: Job) -> None:
        import gymnasium as gym

        if job.env.startswith("MinAtar/"):
            import rl_training.envs.minatar  # noqa: F401 - registers them
        self.make, self.job, self.settings = lambda: gym.make(job.env), job, settings
        self.envs: list[Any] = []
        self.curve: list[tuple[int, float]] = []
        self.seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Whether the next point of the curve has been passed; the last one is the final weights'."""
        points = self.settings["points"]
        return len(self.curve) < points - 1 and step >= (len(self.curve) + 1) * self.job.budget / points

    def look(self, step: int, predict: Predict, episodes: int) -> list[float]:
        """A point of the curve; `predict` takes a batch of observations and of masks."""
        begun = time.perf_counter()
        returns = self.play(predict, episodes)
        self.curve.append((step, round(statistics.fmean(returns), 3)))
        self.seconds += time.perf_counter() - begun
        return returns

    def play(self, predict: Predict, episodes: int) -> list[float]:
        """The returns of that many episodes, all side by side."""
        self.envs += [self.make() for _ in range(episodes - len(self.envs))]
        envs = self.envs[:episodes]
        begun = [env.reset(seed=1_000_000 + 1_000 * self.job.seed + i) for i, env in enumerate(envs)]
        obs, infos = [first for first, _ in begun], [info for _, info in begun]
        returns, playing = [0.0] * episodes, set(range(episodes))
        for _ in range(LONGEST_EPISODE):
            masks = np.stack([info["action_mask"] for info in infos]) if "action_mask" in infos[0] else None
            actions = predict(np.stack(obs), masks)
            for i in sorted(playing):
                action = actions[i].item() if np.ndim(actions) == 1 else actions[i]
                obs[i], reward, terminated, truncated, infos[i] = envs[i].step(action)
                returns[i] += float(reward)
                if terminated or truncated:
                    playing.discard(i)
            if not playing:
                break
        return returns


def train_ours(settings: Settings, job: Job, examiner: Examiner, folder: str) -> tuple[int, Predict]:
    """Our training: steps that it took, and the final policy."""
    from rl_training.run.learner import TrainedPolicy
    from rl_training.run.run import Callback
    from rl_training.run.workflows import train

    class Look(Callback):
        def on_update(self, run: Any) -> None:
            if examiner.is_due(run.step):
                policy = TrainedPolicy(run.session.algorithm, run.session.spaces, run.session.config)
                examiner.look(run.step, with_masks(policy), settings["curve_episodes"])

    config = our_config(settings, job, folder, settings["device"])
    if job.label != "default":  # else it would get today's defaults where it says nothing
        config = load_config(fill_defaults(config.model_dump(exclude_unset=True), UNSAID))
    result = train(config, callbacks=[Look()], console=False, raise_on_signal=False)
    return result.metrics["global_step"], with_masks(result.policy)


def with_masks(policy: Any) -> Predict:
    """Our policy, which keeps to the masks that it learned with."""
    return lambda obs, masks: policy.predict(obs, action_mask=masks)


def train_theirs(settings: Settings, job: Job, examiner: Examiner, folder: str) -> tuple[int, Predict]:
    """Their training with nothing but an environment: steps that it took, and the final policy."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            if examiner.is_due(self.num_timesteps):
                examiner.look(self.num_timesteps, predict, settings["curve_episodes"])
            return True

    def predict(obs: Any, masks: Any) -> Any:  # which these algorithms of theirs do not take
        return model.predict(obs if scale is None else scale.normalize_obs(obs), deterministic=True)[0]

    env: Any = examiner.make()
    scale = with_vec_normalize(env) if job.side == NORMALIZED else None
    module, _, name = settings["algorithms"][job.algo]["theirs"].partition(":")
    model = getattr(import_module(module), name)("MlpPolicy", scale or env, seed=job.seed, device="cpu")
    model.learn(job.budget, callback=Look())
    return model.num_timesteps, predict


def with_vec_normalize(env: Any) -> Any:
    """The environment in their VecNormalize, with its defaults; it cannot normalize discrete observations."""
    from gymnasium.spaces import Box
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    return VecNormalize(DummyVecEnv([lambda: env]), norm_obs=isinstance(env.observation_space, Box))


def run_job(settings: Settings, job: Job, path: Path, folder: str, jobs: int) -> None:
    """Train, play the final episodes, and append the record."""
    import torch

    torch.set_num_threads(1)
    begun = time.perf_counter()
    examiner = Examiner(settings, job)
    steps, predict = (train_ours if job.side == "ours" else train_theirs)(settings, job, examiner, folder)
    if steps < job.budget:  # a signal stopped our train()
        raise SystemExit(f"stopped after {steps} of {job.budget} steps; nothing is recorded")
    returns = examiner.look(steps, predict, settings["episodes"])
    seconds = time.perf_counter() - begun
    record = {
        **asdict(job), "hash": job_hash(settings, job), "steps": steps, "final": examiner.curve[-1][1],
        "best": max(value for _, value in examiner.curve), "curve": examiner.curve,
        "returns": [round(value, 3) for value in returns],
        "seconds": round(seconds, 2), "train_seconds": round(seconds - examiner.seconds, 2),
        "versions": {name: version(name) for name in ("torch", "gymnasium", "numpy")},
        "machine": describe_machine(jobs), "device": settings["device"] if job.side == "ours" else "cpu",
    }  # fmt: skip
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# the pool ------------------------------------------------------------------------------------------------------------


def run_jobs(settings: Settings, jobs: Sequence[Job], path: Path, processes: int, seconds: float) -> int:
    """Run the jobs in the order given, each in its own process; returns how many failed or were stopped."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if settings["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "gymnasium", "rl_training.run.workflows", "compare_defaults"])
    path.parent.mkdir(parents=True, exist_ok=True)
    begun, waiting, failed = time.monotonic(), list(jobs), 0
    running: dict[int, tuple[Any, Job]] = {}
    records = list(read_records(path.parent).values())
    expected = {job: expected_seconds(settings, job, records) for job in jobs}
    with tempfile.TemporaryDirectory(prefix="defaults-") as folder:
        while True:
            left = seconds - (time.monotonic() - begun)
            for job in [job for job in waiting if SLACK * expected[job] < left][: processes - len(running)]:
                waiting.remove(job)
                process = context.Process(target=run_job, args=(settings, job, path, folder, processes))
                process.start()
                running[process.sentinel] = process, job
            if not running:
                break
            for sentinel in connection.wait(list(running), timeout=min(max(left, 0), 60)):
                process, job = running.pop(sentinel)
                process.join()
                failed += process.exitcode != 0
                state = "done" if process.exitcode == 0 else f"FAILED with {process.exitcode}"
                print(f"{time.monotonic() - begun:5.0f} s  {state}: {' '.join(map(str, job.key))}", flush=True)
            if time.monotonic() - begun >= seconds:
                for process, job in running.values():
                    process.kill()
                    process.join()
                    print(f"stopped: {' '.join(map(str, job.key))}", flush=True)
                failed += len(running)
                break
    if waiting:
        print(f"{len(waiting)} jobs were not started; the same command goes on with them", flush=True)
    return failed


# tables --------------------------------------------------------------------------------------------------------------


def normalized(settings: Settings, record: Record) -> float:
    """0 for random actions, 1 for the reference of defaults.yaml."""
    where = settings["environments"][record["env"]]
    score: float = (record["final"] - where["random"]) / (where["reference"] - where["random"])
    return score


def render_table(settings: Settings, records: Iterable[Record], half: str) -> str:
    """Mean final returns by algorithm and label, one environment per column, and their normalized mean and worst."""
    envs = [env for env, where in settings["environments"].items() if where["half"] == half]
    rows: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record["env"] in envs and record["algo"] in settings["before"]:
            rows.setdefault((record["algo"], record["side"], record["label"]), []).append(record)
    lines = [["Algorithm", "Settings", "Seeds", "Normalized mean", "Worst", *envs], ["---"] * (5 + len(envs))]
    order = list(settings["algorithms"])
    for (algo, side, label), found in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        by_env = {env: [record for record in found if record["env"] == env] for env in envs}
        covered = [mine for mine in by_env.values() if mine]
        scores = [statistics.fmean(normalized(settings, r) for r in mine) for mine in covered]
        kinds = settings["algorithms"][algo]["actions"]
        possible = sum(settings["environments"][env]["actions"] in kinds for env in envs)
        part = f" ({len(scores)} of {possible})" if len(scores) < possible else ""
        cells = [f"{statistics.fmean(r['final'] for r in mine):.4g}" if mine else "" for mine in by_env.values()]
        name = f"**{label}**" if settings["chosen"].get(algo) == label else label
        name = {"sb3": "SB3", NORMALIZED: "SB3, VecNormalize"}.get(side, name)
        seeds = "/".join(map(str, sorted({len(mine) for mine in covered})))
        lines.append([algo, name, seeds, f"{statistics.fmean(scores):.3f}{part}", f"{min(scores):.2f}", *cells])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# the command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run, plan or show."""
    parser = argparse.ArgumentParser(description="Our defaults next to Stable-Baselines3's.")
    parser.add_argument("rounds", nargs="*", metavar="ROUND", help="of defaults.yaml; earlier ones come first")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side (default 2)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--device", help="of our runs, instead of what defaults.yaml says")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="another defaults.yaml")
    parser.add_argument("--output", type=Path, default=RECORDS / "records.jsonl", help="where records are appended")
    parser.add_argument("--plan", action="store_true", help="run nothing; count jobs and core minutes")
    parser.add_argument("--table", action="store_true", help="run nothing; show what is recorded")
    arguments = parser.parse_args(argv)
    settings = load_settings(arguments.settings)
    settings["device"] = arguments.device or settings["device"]
    records = read_records(arguments.output.parent)
    if arguments.table:
        for half in ("tune", "report"):
            print(f"The {half} half:\n\n{render_table(settings, records.values(), half)}")
        return 0
    try:
        jobs: list[Job] = []
        for name in arguments.rounds:
            due = [job for job in due_jobs(settings, [name], records) if job not in jobs]
            cost = {job: expected_seconds(settings, job, records.values()) for job in due}
            jobs += sorted(due, key=cost.__getitem__, reverse=True)
            print(f"{name}: {len(due)} jobs, {sum(cost.values()) / 60:.0f} core minutes expected", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.plan:
        return 0
    return 1 if run_jobs(settings, jobs, arguments.output, arguments.jobs, arguments.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
