"""Experience in memory and on disk."""

from rl_training.data.datasets import TransitionDataset
from rl_training.data.loading import export_random_transition_dataset, load_transition_dataset
from rl_training.data.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay import ReplayBuffer
from rl_training.data.rollout import RolloutStorage
from rl_training.data.sequences import RecurrentReplayBuffer

__all__ = [
    "PrioritizedReplayBuffer",
    "RecurrentReplayBuffer",
    "ReplayBuffer",
    "RolloutStorage",
    "TransitionDataset",
    "export_random_transition_dataset",
    "load_transition_dataset",
]
