"""Experience in memory and on disk."""

from rl_training.data.datasets import TransitionDataset
from rl_training.data.loading import export_random_transition_dataset, load_transition_dataset
from rl_training.data.prioritized import PrioritizedReplayBuffer
from rl_training.data.replay import ReplayBuffer
from rl_training.data.rings import RecurrentReplayBuffer
from rl_training.data.store import Experience

__all__ = [
    "Experience",
    "PrioritizedReplayBuffer",
    "RecurrentReplayBuffer",
    "ReplayBuffer",
    "TransitionDataset",
    "export_random_transition_dataset",
    "load_transition_dataset",
]
