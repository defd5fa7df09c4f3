"""Discrete SAC in the registry: hyper-parameters, build and entry."""

from __future__ import annotations

from pydantic import Field

from rl_training.algorithms.discrete_sac import DiscreteSAC
from rl_training.config.networks import any_kind, make_network
from rl_training.config.replay_params import ActorCriticParams, AlphaParams
from rl_training.config.spec import AlgorithmSpec
from rl_training.data.replay_store import ReplayStore
from rl_training.envs.spaces import EnvSpaces
from rl_training.models.mlp_discrete_sac import MLPDiscreteSACModel
from rl_training.run.workflows import train_function


class DiscreteSACParams(AlphaParams, ActorCriticParams):
    """Hyper-parameters of discrete SAC."""

    target_entropy_ratio: float = Field(
        0.5, ge=0, le=1, description="Of alpha auto: target entropy, as a share of that of uniform legal actions."
    )
    target_update_interval: int = Field(1, ge=1, description="Updates between updates of the target; tau 1 copies it.")


def build(params: DiscreteSACParams, spaces: EnvSpaces) -> DiscreteSAC:
    """The learner with new networks."""
    model = make_network(MLPDiscreteSACModel, params, spaces, **any_kind(spaces))
    return DiscreteSAC(model=model, **params.arguments_of(DiscreteSAC))


SPECS = [
    AlgorithmSpec(
        name="discrete_sac", class_name="DiscreteSAC", year=2019, lane="replay",
        paper="Christodoulou 2019, Soft Actor-Critic for Discrete Action Settings (arXiv:1910.07207)",
        scope="Categorical actor, twin critics as one batched network, exact expectations, fixed or tuned temperature; "
        "one choice or several independent ones, masks, vectors and images.",
        params=DiscreteSACParams, learner=DiscreteSAC, build=build, store=ReplayStore,
        action_kinds=("discrete", "multi_discrete", "multi_binary"),
        defaults={"log_interval": 100, "total_timesteps": 50_000},
    )
]  # fmt: skip

train_discrete_sac = train_function(__name__, SPECS)
