"""TD3+BC in the registry."""

from __future__ import annotations

from rl_training.algorithms.td3_bc import TD3BC
from rl_training.config.offline_params import TD3BCParams, offline_spec
from rl_training.models.mlp_td3 import MLPTD3Model
from rl_training.run.workflows import train_function

SPECS = [
    offline_spec(
        TD3BC, MLPTD3Model, name="td3_bc", class_name="TD3BC", year=2021, params=TD3BCParams,
        paper="Fujimoto and Gu 2021, A Minimalist Approach to Offline Reinforcement Learning (arXiv:2106.06860)",
        scope="TD3 with imitation in the actor's loss, from recorded data and then online; vectors and images.",
    )
]  # fmt: skip

train_td3_bc = train_function(__name__, SPECS)
