"""MBPO: model-based policy optimization (Janner et al. 2019, arXiv:1906.08253).

SAC whose batches are mostly imagined: an ensemble of probabilistic networks learns p(r, s' - s | s, a) from real
transitions, and short rollouts of the current policy through it start at real states. `fit` does all of the
model's learning. The code that makes batches (`data/model_store.py`) decides when to fit, when to roll out and
what a batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.algorithms.base import Batch, Number, UpdateResult
from rl_training.algorithms.sac import SAC
from rl_training.errors import UserError
from rl_training.speed.optimizer import PLAIN_ADAM

HELDOUT_SHARE, MOST_HELDOUT = 0.2, 5_000
PATIENCE, LEAST_GAIN = 5, 0.01  # stop after this many epochs in which no member's error falls by this fraction
# obs [B, O], actions in [-1, 1] [B, A], next_obs [B, O] -> rewards [B], or whether the episode ends there [B]
Outcome = Callable[[Tensor, Tensor, Tensor], Tensor]


def mbpo_model_loss(batch: Batch, name: str = "mbpo_model_loss") -> dict[str, Tensor]:
    """From predicted_means, predicted_logvars [E, B, D], targets [B, D] or [E, B, D], ensemble_disagreement [] or [B].

    The loss is twice the Gaussian negative log-likelihood without its constant, a mean per member, summed over members.
    """
    means, logvars = batch["predicted_means"], batch["predicted_logvars"]
    errors = means - batch["targets"]
    loss = torch.addcmul(logvars, errors.square(), (-logvars).exp()).mean((1, 2)).sum()
    maes = errors.detach().abs().mean((0, 1))
    return {
        name: loss, "reward_mae": maes[0], "delta_obs_mae": maes[1:].mean(),
        "ensemble_disagreement": batch["ensemble_disagreement"].mean(),
    }  # fmt: skip


def dynamics_targets(batch: Batch) -> Tensor:
    """The model's targets: reward and change of observation, [..., 1 + O]."""
    return torch.cat([batch["rewards"].unsqueeze(-1), batch["next_obs"] - batch["obs"]], -1)


def disagreement(means: Tensor) -> Tensor:
    """Deviation of the members' means on the same rows, averaged: [E, B, D] -> []."""
    return means.std(0, correction=0).mean()


def termination_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of each member's logits [E, B]: [E]; 0 where the batch does not say what terminated."""
    if "terminated" not in batch:
        return logits.new_zeros(len(logits))
    ends = batch["terminated"].float().expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits, ends, reduction="none").mean(1)


class MBPO(SAC):
    """The MBPO learner. `policy_model` is SAC's; `dynamics_model(obs, actions, members)` gives means, logvars, ends."""

    model_loss_name = "mbpo_model_loss"
    policy_learning_rate = Number(">= 0", of="learning_rate")
    model_learning_rate = Number(">= 0", 1e-3)
    model_weight_decay = Number(">= 0", 0.0, read="by value")
    steps = ("critic_step", "actor_step", "model_step")
    graphs = ("update_step", "model_step")
    eager_part = "imagined rollouts and the choice of elites"

    def __init__(
        self, *, policy_model: Any, dynamics_model: Any, policy_learning_rate: float = 3e-4,
        num_elites: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """`num_elites` is the number of members minus two unless given; `settings` include SAC's."""
        members = dynamics_model.num_ensembles
        elites = max(1, members - 2) if num_elites is None else num_elites
        if not 1 <= elites <= members:
            raise UserError(f"num_elites is {elites}; from 1 to num_ensembles ({members}) are possible.")
        super().__init__(model=policy_model, learning_rate=policy_learning_rate, **settings)
        self.dynamics_model: Any = dynamics_model
        self.model_optimizer = self.make_optimizer("model_optimizer", dynamics_model.parameters(), **PLAIN_ADAM)
        self.elites: Tensor
        self.last_disagreement: Tensor  # on held-out rows
        self.register_buffer("elites", torch.arange(elites, device=self.device))
        self.register_buffer("last_disagreement", torch.zeros((), device=self.device))
        self.fit_metrics: dict[str, Tensor | float] = {}  # of the last fit

    def update_model(self, batch: Batch, *, global_step: int = 0) -> UpdateResult:
        """Take one gradient step of every member."""
        return UpdateResult(self.model_step(batch), watch=self.model_loss_name)

    def model_step(self, batch: Batch) -> dict[str, Tensor]:
        """Take one gradient step of every member, on its own rows [E, B, ...] or all on the same [B, ...].

        The termination head learns if the batch has `terminated`.
        """
        prediction = self.dynamics_model(batch["obs"], batch["actions"])
        shared = batch["obs"].dim() == 2
        losses = mbpo_model_loss(
            {
                "predicted_means": prediction.means, "predicted_logvars": prediction.logvars,
                "targets": dynamics_targets(batch),
                "ensemble_disagreement": disagreement(prediction.means.detach()) if shared else self.last_disagreement,
            }, self.model_loss_name,
        )  # fmt: skip
        ends = termination_loss(prediction.termination_logits, batch).sum()
        loss = losses[self.model_loss_name] + self.dynamics_model.bounds_loss() + ends
        if self.model_weight_decay:
            loss = loss + self.model_weight_decay * self.dynamics_model.weight_loss()
        self.model_optimizer.step(loss)
        return losses

    @torch.no_grad()
    def heldout_errors(self, batch: Batch) -> Tensor:
        """Mean squared error of each member on held-out rows [B, ...], in standardized units: [E].

        If the batch has `terminated`, the termination head's cross-entropy is added.
        """
        prediction = self.dynamics_model(batch["obs"], batch["actions"])
        self.last_disagreement.copy_(disagreement(prediction.means))
        scaled: Tensor = (prediction.means - dynamics_targets(batch)) / self.dynamics_model.target_std
        return scaled.square().mean((1, 2)) + termination_loss(prediction.termination_logits, batch)

    def fit(
        self, data: Mapping[str, Tensor], rng: np.random.Generator, most_updates: int | None, batch_size: int
    ) -> Iterator[Batch]:
        """Yield `update_model` batches from rows [N, ...] until the held-out error stops falling, then choose elites.

        A fifth of the rows is held out; each member learns from its own bootstrap sample of the rest, [E, B, ...].
        A member starts from the weights of the last fit and ends with those of its best epoch; only gains above one
        percent count. The initial weights are not a candidate: they have seen most held-out rows in earlier fits.
        With `most_updates` None, the error alone stops a fit.
        """
        total = len(data["rewards"])
        order, held = rng.permutation(total), min(max(1, int(HELDOUT_SHARE * total)), MOST_HELDOUT)
        training, heldout = _take(data, order[held:] if total > 1 else order), _take(data, order[:held])
        model, rows = self.dynamics_model, len(training["rewards"])
        model.standardize(torch.cat([training["obs"], training["actions"]], -1), dynamics_targets(training))
        bootstrap = rng.integers(0, rows, (model.num_ensembles, rows))
        weights = model.member_parameters()
        kept = [weight.clone() for weight in weights]
        best = torch.full((model.num_ensembles,), torch.inf, device=self.device)
        stale = updates = 0
        while stale < PATIENCE and (most_updates is None or updates < most_updates):
            rng.permuted(bootstrap, axis=1, out=bootstrap)
            for start in range(0, rows, batch_size)[: None if most_updates is None else most_updates - updates]:
                yield _take(training, bootstrap[:, start : start + batch_size])
                updates += 1
            errors = self.heldout_errors(heldout)
            better = errors < (1.0 - LEAST_GAIN) * best
            for weight, keep in zip(weights, kept, strict=True):
                keep[better] = weight[better]
            best = torch.where(better, errors, best)
            stale = 0 if bool(better.any()) else stale + 1
        for weight, keep in zip(weights, kept, strict=True):
            weight.copy_(keep)
        self.elites.copy_(best.argsort()[: len(self.elites)])
        self.fit_metrics = {"heldout_error": best[self.elites].mean(), "model_fit_updates": float(updates)}

    @torch.no_grad()
    def imagine(
        self, obs: Tensor, terminates: Outcome | None = None, pays: Outcome | None = None
    ) -> dict[str, Tensor]:
        """Take one step of the current policy in the model from [B, O]; return transitions, in another row order.

        A random elite computes each row: the shuffled rows are cut into equal groups, and each of the shuffled elites
        takes one. Terminations come from `terminates` and rewards from `pays`, or both from the model.
        """
        rows, count, device = len(obs), len(self.elites), obs.device
        elites = self.elites[torch.randperm(count, generator=self.generator, device=device)]
        order = torch.randperm(rows, generator=self.generator, device=device)
        size = -(-rows // count)  # the last group is padded with copies of rows, which are dropped below
        obs = obs[order[torch.arange(size * count, device=device) % rows]]
        actions = self.act(obs).actions
        means, logvars, logits = self.dynamics_model(obs.view(count, size, -1), actions.view(count, size, -1), elites)
        noise = torch.randn(means.shape, generator=self.generator, device=device)
        outcome = torch.addcmul(means, (0.5 * logvars).exp(), noise).flatten(0, 1)[:rows]
        obs, actions = obs[:rows], actions[:rows]
        next_obs = obs + outcome[:, 1:]
        if terminates is not None:
            terminated = terminates(obs, actions, next_obs)
        else:
            chance = torch.rand(rows, generator=self.generator, device=device)
            terminated = chance < logits.flatten()[:rows].sigmoid()
        rewards = outcome[:, 0] if pays is None else pays(obs, actions, next_obs)
        rewards = self.imagined_rewards(rewards, obs, actions)
        return {"obs": obs, "actions": actions, "rewards": rewards, "next_obs": next_obs, "terminated": terminated}

    def imagined_rewards(self, rewards: Tensor, obs: Tensor, actions: Tensor) -> Tensor:
        """The rewards that SAC gets for predicted rewards [B]: unchanged."""
        return rewards


def _take(data: Mapping[str, Tensor], rows: Any) -> dict[str, Tensor]:
    index = torch.from_numpy(rows).to(data["rewards"].device)
    return {name: column[index] for name, column in data.items()}
