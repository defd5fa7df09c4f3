"""Worker processes for an environment whose steps are slow: the learner learns while they act.

The result depends only on the seed and the number of workers; a killed worker does not change it. On a Ray cluster, use
`execution_backend="ray"`.
"""

from __future__ import annotations

from rl_training import IMPALA


def main(total_timesteps: int = 20_000) -> float:
    """The share of its time that the learner waited for experience."""
    impala = IMPALA("Acrobot-v1", num_envs=8, execution_backend="local_async", num_workers=2)
    waited: float = impala.learn(total_timesteps).metrics["learner_waiting"]
    print(f"the learner waited {waited:.0%} of the time")
    return waited


if __name__ == "__main__":  # workers start fresh interpreters, which read this file
    main()
