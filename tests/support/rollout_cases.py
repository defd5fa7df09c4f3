"""What the update tests of the rollout learners share: tiny policies, rollouts, Stable-Baselines3 on the same data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import env_zoo
from rl_training.algorithms.base import Batch, UpdateResult
from rl_training.models.blocks import ObservationInput
from rl_training.models.mlp_actor_critic import MLPActorCritic

torch.set_num_threads(1)  # networks this small only wait for each other's threads

OBS_DIM, HIDDEN = 2, 8
KINDS: dict[str, tuple[int, ...]] = {
    "discrete": (2,), "continuous": (1,), "multi_discrete": (2, 3), "multi_binary": (2, 2),
}  # fmt: skip
# What IMPALA and APPO need of a rollout.
VTRACE_COLUMNS = ("obs", "actions", "rewards", "dones", "behavior_logprobs", "bootstrap_value")
# An optimizer whose step is minus the gradient, so that a test can compare the two.
PLAIN_STEP: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": None}


def make_policy(kind: str = "discrete", seed: int = 0, *, normalizes: bool = False) -> MLPActorCritic:
    """A policy that is not uniform and has no two equal weights."""
    torch.manual_seed(seed)
    sizes = KINDS[kind]
    policy = MLPActorCritic(
        obs_dim=OBS_DIM, action_dim=sum(sizes), hidden_sizes=(HIDDEN,), action_kind=kind, action_sizes=sizes,
        observation_input=ObservationInput(normalize_size=OBS_DIM if normalizes else None),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def make_rollout(
    policy: MLPActorCritic, steps: int = 7, envs: int = 3, seed: int = 1, *, lag: float = 0.0, truncates: bool = False
) -> dict[str, Tensor]:
    """A rollout [T, B] that ends episodes here and there; `lag` is how far log-probabilities of mu are from pi's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    obs = normal(steps, envs, OBS_DIM)
    with torch.no_grad():
        out = policy.act(obs.flatten(0, 1), generator=generator)
    ends = torch.rand(steps, envs, generator=generator)
    logprobs = out.logprobs.view(steps, envs) + lag * normal(steps, envs)
    batch = {
        "obs": obs, "actions": out.actions.view(steps, envs, *out.actions.shape[1:]), "rewards": normal(steps, envs),
        "logprobs": logprobs, "behavior_logprobs": logprobs, "values": out.values.view(steps, envs),
        "bootstrap_value": normal(envs), "dones": ends < 0.2,
    }  # fmt: skip
    if truncates:
        batch |= {"terminated": batch["dones"], "truncated": ends > 0.8, "truncation_values": 5 + normal(steps, envs)}
        del batch["dones"]
    return batch


def only(batch: Batch, *names: str) -> dict[str, Tensor]:
    """Some columns of a batch."""
    return {name: batch[name] for name in names}


def flat_rows(batch: Batch, *, seed: int = 2) -> dict[str, Tensor]:
    """The rows [B] that A2C, PPO and TRPO take, with random advantages and returns."""
    rows = {name: batch[name].flatten(0, 1) for name in ("obs", "actions", "logprobs")}
    advantages, returns = torch.randn(2, len(rows["obs"]), generator=torch.Generator().manual_seed(seed))
    return rows | {"advantages": advantages, "returns": returns}


def n_step_advantages(batch: Batch, gamma: float, lambda_: float) -> Tensor:
    """Generalised advantages [T, B], one temporal difference at a time, last row first."""
    steps, envs = batch["rewards"].shape
    terminated = batch["dones"] if "dones" in batch else batch["terminated"]
    truncated = batch.get("truncated", torch.zeros_like(terminated))
    advantages = torch.zeros(steps, envs)
    for env in range(envs):
        following, carried = batch["bootstrap_value"][env], torch.zeros(())
        for t in reversed(range(steps)):
            if terminated[t, env]:
                following, carried = torch.zeros(()), torch.zeros(())
            elif truncated[t, env]:
                following, carried = batch["truncation_values"][t, env], torch.zeros(())
            carried = batch["rewards"][t, env] + gamma * following - batch["values"][t, env] + gamma * lambda_ * carried
            advantages[t, env], following = carried, batch["values"][t, env]
    return advantages


def by_torch_distributions(policy: MLPActorCritic, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and values [B], written out with torch's own distributions."""
    outputs = policy.actor(obs)
    values = policy.critic(obs).squeeze(-1)
    if policy.log_std is not None:
        gaussian = Independent(Normal(outputs, policy.log_std.exp().expand_as(outputs)), 1)
        return gaussian.log_prob(actions), gaussian.entropy(), values
    factors = [Categorical(logits=part) for part in outputs.split(list(policy.action_sizes), -1)]
    columns = actions.reshape(len(actions), -1).unbind(-1)
    logprobs = torch.stack([factor.log_prob(column) for factor, column in zip(factors, columns, strict=True)]).sum(0)
    return logprobs, torch.stack([factor.entropy() for factor in factors]).sum(0), values


def weights_of(*modules: nn.Module) -> Tensor:
    """All parameters as one vector, copied."""
    return torch.cat([p.detach().reshape(-1).clone() for module in modules for p in module.parameters()])


def gradient_of(loss: Tensor, *modules: nn.Module) -> Tensor:
    """The gradient of a scalar as one vector, in the order of `weights_of`."""
    parameters = [p for module in modules for p in module.parameters()]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def minibatches_of(learner: Any, batch: Batch) -> tuple[int, list[dict[str, Tensor]]]:
    """How many gradient steps an update took, and the minibatch of each."""
    seen: list[dict[str, Tensor]] = []
    step = learner.minibatch_step

    def record(minibatch: Batch) -> Tensor:
        seen.append(dict(minibatch))
        return step(minibatch)

    learner.minibatch_step = record
    return learner.update(batch).num_gradient_steps, seen


def assert_one_step_reports(learner: Any, batch: Batch, metrics: set[str]) -> UpdateResult:
    """An update takes this batch, moves the policy by one gradient step and reports these metrics, as floats."""
    with step_of(learner.policy) as step:
        result = learner.update(batch, global_step=21)
    assert set(result.metrics) >= metrics
    assert all(isinstance(value, float) for value in result.metrics.values())
    assert result.num_gradient_steps == learner.num_updates == 1
    assert step.abs().max() > 0
    return result


class OtherRank:
    """A second learner whose means are those of this one plus `more`, so that the mean of both is half of it off."""

    def __init__(self, more: float) -> None:
        self.more = more

    def mean_(self, mean: Tensor) -> Tensor:
        return mean.add_(0.5 * self.more)


def seen_by(policy: MLPActorCritic) -> tuple[Tensor, Tensor, float]:
    """Mean, variance and number of the observations in the policy's running statistics, copied."""
    norm = policy.observation_input.norm
    assert norm is not None
    return norm.mean.clone(), norm.var.clone(), float(norm.count)


@contextmanager
def step_of(policy: MLPActorCritic) -> Iterator[Tensor]:
    """How far the parameters move inside the block: filled in at its end."""
    before = weights_of(policy)
    step = torch.zeros_like(before)
    yield step
    step.copy_(weights_of(policy) - before)


# ---- Stable-Baselines3 -----------------------------------------------------------------------------------------------


def sb3_learner(make: Any, policy: MLPActorCritic, batch: Batch, **options: Any) -> Any:
    """A Stable-Baselines3 algorithm with the same weights, whose buffer holds the same rollout."""
    logger = pytest.importorskip("stable_baselines3.common.logger")
    vectorized = pytest.importorskip("stable_baselines3.common.vec_env")
    steps, envs = batch["rewards"].shape
    maker: Any = partial(env_zoo.Constant, action=policy.action_kind)
    learner = make(
        "MlpPolicy", vectorized.DummyVecEnv([maker] * envs), n_steps=steps, device="cpu",
        policy_kwargs={"net_arch": {"pi": [HIDDEN], "vf": [HIDDEN]}, **options.pop("policy_kwargs", {})}, **options,
    )  # fmt: skip
    learner.set_logger(logger.Logger(folder=None, output_formats=[]))
    for theirs, ours in zip(sb3_parameters(learner), our_parameters(policy), strict=True):
        theirs.data.copy_(ours.data)
    fill_sb3_buffer(learner, batch)
    return learner


def sb3_parameters(learner: Any) -> list[nn.Parameter]:
    """Actor, critic, deviation."""
    policy = learner.policy
    parts = (policy.mlp_extractor.policy_net, policy.action_net, policy.mlp_extractor.value_net, policy.value_net)
    parameters = [p for part in parts for p in part.parameters()]
    return [*parameters, policy.log_std] if hasattr(policy, "log_std") else parameters


def our_parameters(policy: MLPActorCritic) -> list[nn.Parameter]:
    """The same in the same order."""
    parameters = [*policy.actor.parameters(), *policy.critic.parameters()]
    return parameters if policy.log_std is None else [*parameters, policy.log_std]


def fill_sb3_buffer(learner: Any, batch: Batch) -> None:
    """The rollout in the buffer; it has no truncations, so their value is added to the reward as `collect` does."""
    steps, envs = batch["rewards"].shape
    cuts, rewards = batch["terminated"] | batch["truncated"], batch["rewards"]
    rewards = rewards + learner.gamma * batch["truncation_values"] * batch["truncated"]
    starts = np.ones(envs, dtype=bool)
    learner.rollout_buffer.reset()
    for t in range(steps):
        actions = batch["actions"][t].numpy()
        if isinstance(learner.action_space, gym.spaces.Discrete):
            actions = actions.reshape(envs, 1)
        learner.rollout_buffer.add(
            batch["obs"][t].numpy(), actions, rewards[t].numpy(), starts, batch["values"][t], batch["logprobs"][t]
        )
        starts = cuts[t].numpy()
    learner.rollout_buffer.compute_returns_and_advantage(batch["bootstrap_value"], starts)


def assert_same_weights(learner: Any, policy: MLPActorCritic, **tolerances: float) -> None:
    """Their parameters are ours, to within rounding."""
    for theirs, ours in zip(sb3_parameters(learner), our_parameters(policy), strict=True):
        torch.testing.assert_close(ours, theirs, **{"rtol": 1e-4, "atol": 1e-6, **tolerances})
