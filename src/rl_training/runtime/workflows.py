"""`evaluate_checkpoint`, `predict_checkpoint`, `resume_training` and `train`, under the name that scripts use."""

from rl_training.run.learner import load_policy
from rl_training.run.workflows import TrainResult, evaluate_checkpoint, predict_checkpoint, resume_training, train

__all__ = ["TrainResult", "evaluate_checkpoint", "load_policy", "predict_checkpoint", "resume_training", "train"]
