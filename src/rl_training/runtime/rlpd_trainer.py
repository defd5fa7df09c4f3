"""RLPD in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.rlpd import RLPD
from rl_training.config.params import Facts, Reason, Reasons
from rl_training.config.replay_params import DIVIDED_ONCE, DatasetParams, SACParams, continuous_spec
from rl_training.data.recorded_store import PriorReplayStore
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function


class RLPDParams(SACParams, DatasetParams):
    """Hyper-parameters of RLPD."""

    one_step_with: ClassVar[str] = "prior data"
    fixed: ClassVar[Reasons] = (Reason(("offline_batch_ratio",), DIVIDED_ONCE),)

    offline_batch_ratio: float = Field(0.5, ge=0, le=1, description="Share of every batch that is prior data.")
    offline_pretrain_updates: int = Field(0, ge=0, description="Updates on prior data only, before the first step.")
    target_entropy: float | None = Field(None, description="Of alpha auto; null: minus half the action dimensions.")
    num_critics: int = Field(10, ge=1, le=1_000, description="Critics in the ensemble.")
    critic_subset_size: int | None = Field(
        2, ge=1, description="Critics, drawn for each update, of which the target is made; null: all."
    )
    critic_layer_norm: bool = Field(True, description="LayerNorm after each hidden layer of the critics.")
    gradient_updates_per_step: int = Field(20, ge=1, le=10_000, description="Updates per training turn.")
    actor_update_interval: int | None = Field(
        None, ge=1, description="Critic steps per actor and temperature step; null: one actor step per training turn."
    )

    @property
    def facts(self) -> Facts:
        """As the base classes, plus the prior data."""
        return super().facts._replace(pretrain_updates=self.offline_pretrain_updates)


SPECS = [
    continuous_spec(
        RLPD, MLPSACModel, name="rlpd", class_name="RLPD", year=2023, params=RLPDParams, store=PriorReplayStore,
        paper="Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data (arXiv:2302.02948)",
        scope="SAC with prior data in every batch, an ensemble of LayerNorm critics, many updates per step; "
        "vectors and images.",
    )
]  # fmt: skip

train_rlpd = train_function(__name__, SPECS)
