"""Offline to online: record a mediocre policy, then learn with RLPD from its data and a few new steps."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rl_training import RLPD, SAC
from rl_training.run.evaluation import read_replay_buffer


def main(first_timesteps: int = 3_000, more_timesteps: int = 1_000) -> float:
    """SAC leaves its replay buffer, RLPD starts from it."""
    with TemporaryDirectory() as folder:
        sac = SAC("Pendulum-v1", output_dir=folder)
        result = sac.learn(first_timesteps)
        data = Path(folder) / "replay.npz"
        read_replay_buffer(result.checkpoint_path).save_npz(data)
        rlpd = RLPD("Pendulum-v1", output_dir=folder, dataset_kind="npz", dataset_path=data, learning_starts=200)
        rlpd.learn(more_timesteps)
        mean: float = rlpd.evaluate(10)["eval_return_mean"]
    print(f"return {mean:.0f} after {more_timesteps} new steps; solved is about -150")
    return mean


if __name__ == "__main__":
    main()
