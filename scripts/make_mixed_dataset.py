"""Transitions of mixed quality: as many of each of one run's policies, at several points of its training.

`python scripts/make_mixed_dataset.py F.npz --config sac/pendulum --levels 0 2500 10000 --rows 3000` trains the preset
and records each policy, with its exploration, after so many steps; level 0 is random play. `--worse G.npz` writes the
worse half of the episodes too: data without the good half.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_training.config.train_config import load_config
from rl_training.data import TransitionDataset
from rl_training.run.evaluation import record_policy, record_random
from rl_training.run.run import Callback, Run
from rl_training.run.workflows import train


class SaveAt(Callback):
    """Keeps a checkpoint of the run at each of these steps."""

    def __init__(self, levels: Sequence[int], folder: Path) -> None:
        self.paths = {level: folder / f"{level}.ckpt" for level in sorted(levels)}

    def on_update(self, run: Run) -> None:
        """Save what is due."""
        for level, path in self.paths.items():
            if run.step >= level and not path.exists():
                run.save_checkpoint()
                shutil.copy(run.run_dir / "checkpoints" / "latest.ckpt", path)


def record_levels(
    config_name: str, levels: Sequence[int], rows: int, seed: int, deterministic: bool = False
) -> list[TransitionDataset]:
    """`rows` transitions of each level, in this order."""
    with tempfile.TemporaryDirectory() as folder:
        trained = [level for level in levels if level]
        changes = {"output_dir": folder, "seed": seed, "eval_episodes": 0, "total_timesteps": max(levels)}
        config = load_config(config_name).model_copy(update=changes)
        saved = SaveAt(trained, Path(folder))
        if trained:
            train(config, callbacks=[saved])
        return [
            record_policy(saved.paths[level], rows, seed=seed, deterministic=deterministic) if level
            else record_random(config.env_id, rows, seed)
            for level in levels
        ]  # fmt: skip


def join(parts: Sequence[TransitionDataset], **metadata: object) -> TransitionDataset:
    """One data set after the other; an episode that was not recorded to its end counts as truncated."""
    arrays = {name: np.concatenate([part.arrays()[name] for part in parts]) for name in parts[0].arrays()}
    ends = np.cumsum([len(part) for part in parts]) - 1
    arrays["truncated"][ends] |= ~arrays["terminated"][ends]
    return TransitionDataset(**arrays, metadata=dict(metadata))


def keep_worse_half(dataset: TransitionDataset) -> TransitionDataset:
    """The half of the episodes with the smaller returns, in their order."""
    kept = dataset.episode_returns < np.median(dataset.episode_returns)
    return dataset.take(np.flatnonzero(np.repeat(kept, dataset.episode_lengths)))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Transitions of one run's policies at several points of its training.")
    parser.add_argument("output", type=Path, help="the npz file to write")
    parser.add_argument("--config", default="sac/pendulum", help="preset or file of the run")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 2_500, 10_000], help="steps of training")
    parser.add_argument("--rows", type=int, default=3_000, help="transitions per level")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the recorded steps")
    parser.add_argument("--worse", type=Path, help="a second npz file, for the half of the episodes with less return")
    parser.add_argument("--deterministic", action="store_true", help="record without exploration")
    given = parser.parse_args(argv)
    parts = record_levels(given.config, given.levels, given.rows, given.seed, given.deterministic)
    for level, part in zip(given.levels, parts, strict=True):
        print(f"{level} steps: return {part.episode_returns.mean():.1f} over {len(part.episode_returns)} episodes")
    policy = f"{given.config} after {', '.join(map(str, given.levels))} steps"
    dataset = join(parts, env_id=parts[0].metadata["env_id"], policy=policy, seed=given.seed)
    print(f"wrote: {dataset.save_npz(given.output)}")
    if given.worse is not None:
        print(f"wrote: {keep_worse_half(dataset).save_npz(given.worse)}")


if __name__ == "__main__":
    main()
