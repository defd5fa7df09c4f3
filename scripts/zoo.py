"""The zoo's files: `zoo.py add PRESET=RUN ...`, `zoo.py train PRESET ... [--seed N]`, `zoo.py check [NAME ...]`.

`add` takes the final policy of a finished run; `train` makes that run first. The policy file is written to
src/rl_training/assets/zoo, 20 episodes are played with it, and the card is written next to it. `check` plays every
policy again in other episodes; it fails if a checksum differs, or a mean return by more than chance explains.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

from rl_training.config.train_config import load_config
from rl_training.record.checkpoints import save_checkpoint
from rl_training.run.learner import load_algorithm, policy_tree, read_checkpoint
from rl_training.run.workflows import evaluate_checkpoint, train
from rl_training.run.zoo import SUFFIX, Card, find_policy, list_zoo, read_card
from rl_training.tools.records import read_run

ZOO = Path(__file__).resolve().parents[1] / "src" / "rl_training" / "assets" / "zoo"
EPISODES = 20
EPISODE_SEED = 2_000_000  # of the card; the gates and training use lower ones
CHECK_SEED = 3_000_000
LARGEST = 300_000  # bytes of a file with 32-bit weights; a larger one gets 16 bits
MOST_ERRORS = 4.0  # standard errors between a card's mean and a check's


def add(preset: str, run: Path, machine: str) -> Card:
    """Write the policy file and the card of a finished run."""
    record = read_run(run)
    if record.status != "done":
        raise SystemExit(f"{run} is {record.status} at step {record.last_step:,}; finish it first.")
    if (asked := load_config(preset)).algo != record.algo or asked.env_id != record.env_id:
        raise SystemExit(f"{run} is {record.algo} on {record.env_id}, which is not {preset}.")
    checkpoint = run / "checkpoints" / "latest.ckpt"
    tree = read_checkpoint(checkpoint)
    algorithm, _, config = load_algorithm(checkpoint, tree)
    path = ZOO / f"{preset}{SUFFIX}"
    tree["config"] |= {"output_dir": "runs", "name": None}
    save_checkpoint(path, policy_tree(tree, algorithm))
    if large := path.stat().st_size > LARGEST:
        save_checkpoint(path, policy_tree(tree, algorithm, half=True))
    played = evaluate_checkpoint(path, num_episodes=EPISODES, seed=EPISODE_SEED)
    card = Card(
        preset=preset, algo=config.algo, env_id=config.env_id, seed=config.seed, steps=tree["run"]["step"],
        returns=[round(value, 3) for value in played["eval_returns"]], episode_seed=EPISODE_SEED,
        command=f"rl-training train --config {preset} --seed {config.seed}", machine=machine,
        commit=str((record.manifest.get("git") or {}).get("commit", ""))[:12],
        train_seconds=round(tree["run"]["train_seconds"], 1), weights="float16" if large else "float32",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(card.model_dump(), indent=1) + "\n", encoding="utf-8")
    print(f"{preset}: {np.mean(card.returns):,.1f} ± {np.std(card.returns):,.1f}, {path.stat().st_size:,} bytes")
    return card


def check(name: str) -> bool:
    """Whether a policy still has its checksum and its return."""
    card, path = read_card(name), find_policy(name)
    if hashlib.sha256(path.read_bytes()).hexdigest() != card.sha256:
        print(f"{name}: the checksum differs")
        return False
    found = evaluate_checkpoint(path, num_episodes=EPISODES, seed=CHECK_SEED)["eval_returns"]
    error = math.sqrt((np.var(found, ddof=1) + np.var(card.returns, ddof=1)) / EPISODES)
    apart = abs(float(np.mean(found)) - float(np.mean(card.returns)))
    holds = apart <= MOST_ERRORS * error + 1e-3 * abs(float(np.mean(card.returns)))
    print(f"{name}: {np.mean(found):,.1f}, card {np.mean(card.returns):,.1f}: {'ok' if holds else 'DIFFERS'}")
    return holds


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("add", "train", "check"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="PRESET=RUN for add, presets for train and check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default=platform.machine(), help="a name for the machine")
    asked = parser.parse_args()
    if asked.command == "check":
        results = [check(name) for name in asked.names or list_zoo()]
        sys.exit(0 if all(results) else 1)
    for name in asked.names:
        if asked.command == "add":
            preset, _, run = name.partition("=")
            add(preset, Path(run), asked.machine)
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(name).model_copy(update={"seed": asked.seed, "output_dir": folder})
            add(name, train(config, console=False).run_dir, asked.machine)


if __name__ == "__main__":
    main()
