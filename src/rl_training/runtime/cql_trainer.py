"""CQL in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_training.algorithms.cql import CQL
from rl_training.config.offline_params import OfflineParams, offline_spec
from rl_training.config.params import Reason, Reasons, Widths
from rl_training.config.replay_params import SACParams
from rl_training.models.mlp_sac import MLPSACModel
from rl_training.run.workflows import train_function


class CQLParams(OfflineParams, SACParams):
    """Hyper-parameters of CQL and Cal-QL."""

    unused: ClassVar[Reasons] = (
        Reason(("sparse_rewards",), "calibrated is false, so no returns are needed", lambda p: not p.calibrated),
    )
    fixed: ClassVar[Reasons] = (
        Reason(("gamma",), "the returns of recorded episodes are computed once", lambda p: p.calibrated),
        Reason(("target_gap",), "it is null, so give target_gap as a number too", lambda p: p.target_gap is None),
    )

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of critics, actor and temperature.")
    actor_learning_rate: float | None = Field(1e-4, ge=0, le=10, description="Rate of the actor; null: learning_rate.")
    critic_hidden_sizes: Widths | None = Field(
        (256, 256, 256), description="Widths of the critics' layers; null: hidden_sizes."
    )
    backup_entropy: bool = Field(False, description="Include the entropy in the critics' targets, as SAC does.")
    penalty_coef: float = Field(
        10.0, ge=0, description="Weight of what the critics' values exceed those of recorded actions by."
    )
    num_proposals: int = Field(10, ge=1, le=1_000, description="Actions of each of three kinds that are compared.")
    importance_sampling: bool = Field(
        True, description="Divide by the densities of the compared actions; false: compare them with the recorded one."
    )
    best_proposal_backup: bool = Field(
        False, description="Take the best of num_proposals actions in the targets, as in the settings for AntMaze."
    )
    target_gap: float | None = Field(
        None, ge=0, description="Tune a multiplier of penalty_coef so that the excess is this; null: no multiplier."
    )
    least_difference: float | None = Field(None, description="Smallest excess of a row that counts; null: no bound.")
    calibrated: bool = Field(
        False, description="Cal-QL: values of the policy's actions count as at least the return recorded from there."
    )
    sparse_rewards: bool = Field(
        False, description="An episode whose last reward is the smallest of the data is worth that reward for ever."
    )

    @property
    def recorded_column(self) -> Literal["", "returns_to_go"]:
        """Cal-QL needs the returns."""
        return "returns_to_go" if self.calibrated else ""


SPECS = [
    offline_spec(
        CQL, MLPSACModel, name="cql", class_name="CQL", year=2020, params=CQLParams,
        paper="Kumar et al. 2020, Conservative Q-Learning for Offline Reinforcement Learning (arXiv:2006.04779)",
        scope="SAC with a penalty on values that exceed those of recorded actions, and with calibrated values Cal-QL; "
        "from recorded data and then online; vectors and images.",
    )
]  # fmt: skip

train_cql = train_function(__name__, SPECS)
