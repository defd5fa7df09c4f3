"""`TrainConfig` and `load_config`, under the name that scripts use."""

from rl_training.config.train_config import TrainConfig, load_config

__all__ = ["TrainConfig", "load_config"]
