"""The dynamics of MBPO and MOPO: an ensemble of probabilistic networks as one batched network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.models.blocks import MLPEnsemble

LogvarUnits = Literal["environment", "standardized"]
LAYER_DECAYS = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)  # L2 from the first layer to the last, in the published code
BOUNDS_WEIGHT = 0.01  # how hard the loss pulls the two bounds of the log-variance together


class Prediction(NamedTuple):
    """Means and log-variances [E, B, 1 + O] of (reward, change of observation); logits [E, B] of the end."""

    means: Tensor
    logvars: Tensor
    termination_logits: Tensor


class MLPMOPOEnsembleModel(nn.Module):
    """p(r, s' - s | s, a) by E members, each a Gaussian with its own variance (Chua et al. 2018, Janner et al. 2019).

    Inputs and outputs are in the environment's own units: both are standardized inside, with statistics that are
    buffers and changed only by `standardize`. The log-variance is softly held between bounds that are learned. They
    start at -10 and 0.5: in the environment's units as in the published code, or of standardized targets. One more
    output is the logit of termination, which learns if batches have `terminated`.
    """

    def __init__(
        self, *, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (200, 200, 200, 200),
        num_ensembles: int = 7, activation: str = "silu", logvar_units: LogvarUnits = "environment",
    ) -> None:  # fmt: skip
        super().__init__()
        self.logvar_units = logvar_units
        self.obs_dim, self.num_ensembles, self.targets = obs_dim, num_ensembles, 1 + obs_dim
        self.members = MLPEnsemble(
            num_members=num_ensembles, inputs=obs_dim + action_dim, hidden_sizes=hidden_sizes,
            outputs=2 * self.targets + 1, activation=activation,
        )  # fmt: skip
        self.max_logvar = nn.Parameter(torch.full((self.targets,), 0.5))
        self.min_logvar = nn.Parameter(torch.full((self.targets,), -10.0))
        weights = sum("weight" in name for name, _ in self.members.named_parameters())
        places = np.linspace(0.0, 1.0, weights), np.linspace(0.0, 1.0, len(LAYER_DECAYS))
        self.decays = nn.Buffer(torch.tensor(np.interp(*places, LAYER_DECAYS).tolist()), persistent=False)
        self.input_mean = nn.Buffer(torch.zeros(obs_dim + action_dim))
        self.input_std = nn.Buffer(torch.ones(obs_dim + action_dim))
        self.target_mean = nn.Buffer(torch.zeros(self.targets))
        self.target_std = nn.Buffer(torch.ones(self.targets))

    def forward(self, obs: Tensor, actions: Tensor, subset: Tensor | None = None) -> Prediction:
        """Predictions of every member, or only of those in `subset` [M], at their cost alone.

        Rows [B, ...] are shared by all members; rows [E, B, ...] give each its own.
        """
        inputs = (torch.cat([obs, actions], -1) - self.input_mean) / self.input_std
        means, logvars, logits = self.members.run(inputs, subset).split([self.targets, self.targets, 1], -1)
        means = torch.addcmul(self.target_mean, means, self.target_std)
        to_units = 2.0 * self.target_std.log()
        raw = self.logvar_units == "environment"
        logvars = self.bound(logvars + to_units) if raw else self.bound(logvars) + to_units
        return Prediction(means, logvars, logits.squeeze(-1))

    def bound(self, logvars: Tensor) -> Tensor:
        """Log-variances in the `logvar_units`, softly between `min_logvar` and `max_logvar`."""
        logvars = self.max_logvar - F.softplus(self.max_logvar - logvars)
        return self.min_logvar + F.softplus(logvars - self.min_logvar)

    def bounds_loss(self) -> Tensor:
        """Keeps the bounds no wider than the data needs."""
        return BOUNDS_WEIGHT * (self.max_logvar.sum() - self.min_logvar.sum())

    def weight_loss(self) -> Tensor:
        """L2 of every layer's weights with the published coefficients, interpolated over the layers."""
        squares = torch.stack([p.square().sum() for name, p in self.members.named_parameters() if "weight" in name])
        return 0.5 * (self.decays * squares).sum()

    @torch.no_grad()
    def standardize(self, inputs: Tensor, targets: Tensor) -> None:
        """Take the statistics from rows of (obs, action) [B, O + A] and (reward, change of observation) [B, 1 + O]."""
        spread = inputs.std(0, correction=0)
        self.input_mean.copy_(inputs.mean(0))
        self.input_std.copy_(spread.masked_fill(spread < 1e-6, 1.0))  # a constant input may change later
        self.target_mean.copy_(targets.mean(0))
        # A constant target is predicted to stay constant; the floor is above the rounding of float32.
        floor = 1e-6 + 1e-4 * self.target_mean.abs()
        self.target_std.copy_(targets.std(0, correction=0).maximum(floor))

    def member_parameters(self) -> list[Tensor]:
        """The weights of the members, each [E, ...], without gradients."""
        return [parameter.detach() for parameter in self.members.parameters()]
