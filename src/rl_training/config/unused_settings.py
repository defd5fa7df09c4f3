"""Which of the settings that a user gave have no effect in a run: one sentence per reason."""

from __future__ import annotations

from collections.abc import Iterator

from rl_training.config.params import Params
from rl_training.config.spec import get_algorithm_spec
from rl_training.config.train_config import TrainConfig
from rl_training.envs.spaces import EnvSpaces

# Fields of TrainConfig; a hyper-parameter is declared where its model is (`Params.unused`).
OF_WORKERS = ("num_workers", "worker_order", "max_policy_lag", "max_worker_restarts")


def find_unused_fields(config: TrainConfig, params: Params) -> dict[str, str]:
    """Fields of a resolved config that have no effect, and why: the end of a sentence."""
    reasons: dict[str, str] = {}
    backend = f"execution_backend is {config.execution_backend!r}"
    if not config.has_workers:
        reasons |= dict.fromkeys(OF_WORKERS, f"{backend}, which has no workers")
    if config.execution_backend != "ray":
        reasons["ray"] = backend
    if not config.has_workers and config.vectorization != "async":
        reasons["worker_timeout"] = "no environment has a process of its own"
    if not get_algorithm_spec(config.algo).steps_environments:
        reasons |= dict.fromkeys(("num_envs", "vectorization"), f"{config.algo} steps no environments")
    if config.device == "cpu":
        reasons["matmul_precision"] = "device is 'cpu'"
    if not config.checkpoint_interval:
        reasons["checkpoint_keep"] = "checkpoint_interval is 0, so no step_<n> is written"
    if not params.facts.replay_rows:
        reasons["replay_in_checkpoint"] = f"{config.algo} has no replay buffer"
    return reasons


def find_unused(config: TrainConfig, params: Params, spaces: EnvSpaces) -> Iterator[str]:
    """Sentences about the settings in `config.given` that have no effect in this run."""
    starts = params.facts.random_steps
    if starts >= config.total_timesteps and not params.facts.pretrain_updates:
        yield f"learning_starts is {starts}, but the run ends after {config.total_timesteps} steps: it learns nothing"
    given = set(config.given)
    if given.issuperset(type(params).model_fields.keys() - {"schedules"}):
        return  # the config of an earlier run, which has every setting
    fields = TrainConfig.model_fields
    idle = {
        name: why
        for name, why in find_unused_fields(config, params).items()
        if getattr(config, name) != fields[name].get_default(call_default_factory=True)
    } | params.find_unused(spaces)
    reasons: dict[str, list[str]] = {}
    for name, why in idle.items():
        if name in given:
            reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        yield f"{listed} {'has' if len(names) == 1 else 'have'} no effect: {why}"
