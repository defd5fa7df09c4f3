"""Names of the contract: `run/workflows.py` defines them."""

from rl_training.run.workflows import evaluate_checkpoint as evaluate_checkpoint
from rl_training.run.workflows import predict_checkpoint as predict_checkpoint
from rl_training.run.workflows import resume_training as resume_training
