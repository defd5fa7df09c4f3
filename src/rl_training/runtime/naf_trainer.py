"""NAF in the registry: hyper-parameters and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.naf import NAF
from rl_training.config.replay_params import ReplayParams, continuous_spec
from rl_training.models.mlp_naf import MLPNAFModel
from rl_training.run.workflows import train_function


class NAFParams(ReplayParams):
    """Hyper-parameters of NAF."""

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of the optimizer.")
    tau: float = Field(0.005, gt=0, le=1, description="Polyak factor of the target network per update.")
    exploration_noise: float = Field(0.1, ge=0, le=10, description="Deviation of the noise on actions in [-1, 1].")


SPECS = [
    continuous_spec(
        NAF, MLPNAFModel, name="naf", class_name="NAF", year=2016, params=NAFParams,
        paper="Gu et al. 2016, Continuous Deep Q-Learning with Model-based Acceleration (arXiv:1603.00748)",
        scope="Quadratic advantage with one shared torso, Gaussian noise; no imagination rollouts; vectors and images.",
    )
]  # fmt: skip

train_naf = train_function(__name__, SPECS)
