"""Experience in memory and on disk."""

from rl_training.data.rollout import RolloutStorage

__all__ = ["RolloutStorage"]
