"""BC in the registry: hyper-parameters and entry."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_training.algorithms.bc import BC
from rl_training.config.networks import LINEAR_HEADS, make_policy
from rl_training.config.params import Unused
from rl_training.config.recorded_data import DatasetLaneParams
from rl_training.config.rollout import ACTION_KINDS
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.recorded_store import DatasetStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.run.workflows import train_function


class BCParams(DatasetLaneParams):
    """Hyper-parameters of BC."""

    unused: ClassVar[tuple[Unused, ...]] = (
        Unused(("gamma",), "it learns from recorded actions and discounts nothing"), LINEAR_HEADS,
    )  # fmt: skip

    learning_rate: float = Field(1e-3, ge=0, le=10, description="Learning rate of the optimizer.")
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")

    def fixed_numbers(self) -> dict[str, str]:
        """As the base class, plus a number that is read once."""
        return super().fixed_numbers() | {"heldout_fraction": "the data is divided once, when the run is built"}


def build(params: BCParams, spaces: EnvSpaces) -> BC:
    """Build the learner with a new policy."""
    return BC(policy=make_policy(params, spaces), **params.arguments_of(BC))


SPECS = [
    AlgorithmSpec(
        name="bc", class_name="BC", year=1988, lane="dataset",
        paper="Pomerleau 1988, ALVINN: An Autonomous Land Vehicle in a Neural Network (NIPS 1988)",
        scope="Negative log-likelihood of recorded actions, held-out loss; every action kind, vectors and images.",
        params=BCParams, learner=BC, build=build, store=DatasetStore, action_kinds=ACTION_KINDS,
        steps_environments=False, defaults={"log_interval": 100, "total_timesteps": 20_000},
    )
]  # fmt: skip

train_bc = train_function(__name__, SPECS)
