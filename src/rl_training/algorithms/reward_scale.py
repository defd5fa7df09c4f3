"""Rewards divided by running statistics of the discounted return: of rollouts, and of replayed transitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_training.ops.moments import merge_moments, moments_of_sums


class RunningReturns(nn.Module):
    """Keeps the discounted return of each environment so far."""

    ranks: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.running: Tensor | None = None

    def forget_episodes(self) -> None:
        """Drop the returns so far, because new episodes start; the statistics stay."""
        self.running = None

    def get_extra_state(self) -> dict[str, Any]:
        """The discounted return of each environment so far."""
        return {"running": self.running}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_extra_state`."""
        running = state["running"]
        self.running = None if running is None else running.to(next(self.buffers()).device)


class RewardScale(RunningReturns):
    """Divide rewards by the running deviation of the discounted return, then clip them; no mean is subtracted."""

    def __init__(self, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.moments: Tensor
        # count, mean, sum of squares
        self.register_buffer("moments", torch.tensor([1e-4, 0.0, 1e-4], dtype=torch.float64))

    @torch.no_grad()
    def forward(self, rewards: Tensor, cuts: Tensor, valid: Tensor | None = None) -> Tensor:
        """Add rewards [T, N] to the statistics and scale them; the discounted return restarts at every cut."""
        running = torch.zeros_like(rewards[0]) if self.running is None else self.running
        returns = torch.empty_like(rewards)
        keep = self.gamma * (~cuts).to(rewards.dtype)
        for t in range(len(rewards)):
            returns[t] = running + rewards[t]
            running = returns[t] * keep[t]
        self.running = running.clone()
        rows = (returns if valid is None else returns[valid]).double().flatten()
        new_mean, new_var, new = rows.mean(), rows.var(correction=0), len(rows)
        if self.ranks is not None:
            (new_mean, new_var), new = self.ranks.moments(new_mean, new_var), new * self.ranks.count
        count, mean, squares = self.moments
        total = count + new
        delta = new_mean - mean
        squares = squares + new_var * new + delta.square() * count * new / total
        self.moments.copy_(torch.stack([total, mean + delta * new / total, squares]))
        deviation = (squares / total).sqrt().to(rewards.dtype) + 1e-8
        scaled: Tensor = (rewards / deviation).clamp(-self.clip, self.clip)
        return scaled


class ReturnScale(RunningReturns):
    """Divide rewards so that discounted returns have a deviation of 1 and are at most `bound` (Lee et al. 2025).

    The return G is that of every step that is taken, counted once, and the divisor max(sqrt(var G), max |G| / bound).
    As in the published code, an end of an episode cuts the sum in front of its last reward, not behind it.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound
        # count, mean and variance of G, and its largest size
        self.statistics = nn.Buffer(torch.tensor([1e-4, 0.0, 1.0, 0.0], dtype=torch.float64))

    def divisor(self) -> Tensor:
        """What rewards are divided by: []."""
        _, _, var, largest = self.statistics
        return torch.maximum((var + 1e-8).sqrt(), largest / self.bound).float()

    def returns_of(self, count: int, envs: Any) -> Tensor:
        """The returns so far of these environments, or of all `count`."""
        size, device = count if envs is None else int(max(envs)) + 1, self.statistics.device
        known = torch.zeros(0, device=device) if self.running is None else self.running
        self.running = torch.cat([known, torch.zeros(max(0, size - len(known)), device=device)])
        return self.running if envs is None else self.running[torch.as_tensor(envs, device=device)]

    def keep(self, returns: Tensor, envs: Any) -> None:
        """Replace the returns of these environments, or of all."""
        assert self.running is not None
        if envs is None:
            self.running = returns
        else:
            self.running[torch.as_tensor(envs, device=returns.device)] = returns

    def add(self, returns: Tensor, rewards: Tensor, ends: Tensor, valid: Tensor, gamma: Any) -> Tensor:
        """Add the valid ones of rewards [N] to the statistics; return the returns after them. A function of tensors."""
        after = torch.where(valid, gamma * returns * ~ends + rewards, returns)
        rows = after.double() * valid
        sums = torch.stack([valid.double().sum(), rows.sum(), rows.square().sum()])
        largest = torch.maximum(self.statistics[3], rows.abs().amax())
        if self.ranks is not None:
            sums, largest = self.ranks.mean_(sums) * self.ranks.count, self.ranks.largest_(largest)
        count, mean, var = (part.squeeze() for part in moments_of_sums(sums))
        known: Any = self.statistics[:3].unbind()
        self.statistics.copy_(torch.stack([*merge_moments(known, count, mean, var), largest]))
        return after
