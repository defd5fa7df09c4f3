"""What the tests of settings share: another value of each, and what a few updates learn with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from resume_cases import SPECS, TINY, env_of, take_steps, tiny
from rl_training.run.build import open_session
from rl_training.run.loop import Cadence, first_state
from rl_training.run.run import Run

UPDATES, MOST_STEPS = 6, 120
# Small enough networks and so few steps that nearly every number shows in the weights.
PLAIN: dict[str, Any] = {
    "num_steps": 16, "minibatch_size": 16, "train_frequency": 2, "target_update_interval": 2, "learning_rate": 0.01,
    "batch_size": 16, "sequence_length": 4, "train_ratio": 8, "num_bins": 11, "imagination_horizon": 2,
    "model_updates": 3, "line_search_steps": 10, "offline_pretrain_updates": 0, "v_min": -20.0, "v_max": 20.0,
    "offline_updates": 2,
}  # fmt: skip
OTHER: dict[str, Any] = {  # another value than the default, of a setting with that name or, for learning rates, ending
    "gamma": 0.5, "tau": 0.37, "learning_rate": 0.013, "gae_lambda": 0.3, "optimizer_eps": 0.05, "max_grad_norm": 1e-3,
    "rollout_horizon": 3.0, "target_kl": 1e-9, "desired_kl": 1e-3, "action_gradient_clip": 1e-4, "clip_coef": 1e-3,
    "alpha": 0.7, "target_entropy": 3.0, "kl_target": 1e-7, "line_search_shrink": 0.5, "gradient_penalty": 2.0,
    "train_ratio": 16.0, "free_nats": 20.0, "v_min": -5.0, "v_max": 7.0, "exploration_noise": 0.6, "policy_noise": 0.9,
    "noise_clip": 0.05, "n_step": 1, "random_action_hold": 1.0, "epsilon_end": 0.9, "heldout_fraction": 0.5,
    "buffer_capacity": 20, "value_minibatch_size": 8, "minibatch_size": 32, "line_search_steps": 1,
    "critic_subset_size": 1, "model_batch_size": 4, "rollout_batch_size": 30, "rollout_refresh_interval": 2,
    "synthetic_buffer_capacity": 40, "synthetic_rounds": 1, "model_train_frequency": 4, "policy_lag": 3,
    "num_elites": 1, "dataset_kind": "npz", "dataset_path": "some.npz", "dataset_id": "some/data",
    "expert_dataset_kind": "npz", "expert_dataset_path": "some.npz", "expert_dataset_id": "some/data",
    "expert_checkpoint": "some.ckpt", "prioritized_eps": 0.5, "widen_support": "both",
    "target_entropy_per_dimension": -0.2, "sequence_length": 8,
    "reward_scale": 0.1, "target_gap": 1.0, "least_difference": 9.0, "max_weight": 0.5, "actor_bc_coef": 0.3,
    "huber_delta": 0.01,
    "return_bound": 0.5, "noise_repeat": 1, "exploration_noise_min": 0.01,
}  # fmt: skip


def other_value(algo: str, name: str) -> Any:
    """A value of a setting that is neither its default nor the one that `run` uses."""
    if name == "network":
        return torch.nn.Linear(4 if env_of(SPECS[algo]) == "CartPole-v1" else 3, 5)
    info = SPECS[algo].params.model_fields[name]
    default = {**TINY, **PLAIN}.get(name, info.default)
    for ending, value in OTHER.items():
        if value != default and (name == ending or (ending == "learning_rate" and name.endswith(ending))):
            return value
    listed = [choice for part in (info.annotation, *get_args(info.annotation)) for choice in get_args(part)]
    if words := [choice for choice in listed if isinstance(choice, str) and choice != default]:
        return words[0]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1 if default < 8 else default // 2
    if isinstance(default, float):
        return 0.5 * default if default else 0.5
    return 3 if int in get_args(info.annotation) else [5]


def run(algo: str, kwargs: dict[str, Any]) -> Iterator[list[Tensor]]:
    """The weights of the learner after each turn of a short run without files."""
    model = SPECS[algo].params
    settings = {name: PLAIN[name] for name in PLAIN if name in model.model_fields and name not in model.synonyms}
    session = open_session(tiny(algo, Path("unused"), num_envs=2, threads=1, kwargs={**settings, **kwargs}))
    algorithm, store = session.algorithm, session.store
    run = object.__new__(Run)  # without its folder, logs and evaluation
    run.session, run.state = session, first_state(session.config, session.params)
    run.cadence = Cadence(session.config, session.params, run.state)
    updates = 0
    try:
        while updates < UPDATES and run.step < MOST_STEPS:
            run.apply_schedules()
            run.state.step += take_steps(session, run.step)
            for phase, batch in store.batches(algorithm, run.step):
                store.feedback(batch, algorithm.update(batch, phase=phase, global_step=run.step, sync=False))
                updates += 1
            yield [tensor.detach().clone() for tensor in algorithm.parameters()]
    finally:
        session.close()


def learned(algo: str, kwargs: dict[str, Any]) -> list[Tensor]:
    """The weights of the learner after a short run."""
    return list(run(algo, kwargs))[-1]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two learners have the same weights, bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
