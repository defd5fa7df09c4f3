"""BC in the registry: hyper-parameters and entry."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.bc import BC
from rl_training.config.networks import build_on_policy
from rl_training.config.params import LINEAR_HEADS, Facts, Params, Reason, Reasons
from rl_training.config.replay_params import DatasetParams
from rl_training.config.rollout_params import ACTION_KINDS
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.recorded_store import DatasetStore
from rl_training.run.workflows import train_function


class BCParams(Params, DatasetParams):
    """Hyper-parameters of BC."""

    unused: ClassVar[Reasons] = (
        Reason(("gamma",), "it learns from recorded actions and discounts nothing"), LINEAR_HEADS,
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (Reason(("heldout_fraction",), "the data is divided once, when the run is built"),)

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of the optimizer.")
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    batch_size: int = Field(256, ge=1, le=10**6, description="Rows per update.")
    heldout_fraction: float = Field(0.1, gt=0, lt=1, description="Share of the episodes that is held out.")
    heldout_interval: int = Field(100, ge=1, description="Updates between evaluations on the held-out data.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the rows of a batch."""
        return super().facts._replace(rows=self.batch_size)


SPECS = [
    AlgorithmSpec(
        name="bc", class_name="BC", year=1988, lane="dataset",
        paper="Pomerleau 1988, ALVINN: An Autonomous Land Vehicle in a Neural Network (NIPS 1988)",
        scope="Negative log-likelihood of recorded actions, held-out loss; every action kind, vectors and images.",
        params=BCParams, learner=BC, build=partial(build_on_policy, BC, scales_rewards=False), store=DatasetStore,
        action_kinds=ACTION_KINDS,
        steps_environments=False, defaults={"log_interval": 100, "total_timesteps": 20_000},
    )
]  # fmt: skip

train_bc = train_function(__name__, SPECS)
