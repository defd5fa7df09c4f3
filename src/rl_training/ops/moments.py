"""Running moments: count, mean and variance of rows that arrive in groups."""

from __future__ import annotations

from torch import Tensor

Moments = tuple[Tensor, Tensor, Tensor]  # count [], mean and variance (divided by the count) [...]


def merge_moments(before: Moments, rows: float | Tensor, mean: Tensor, var: Tensor) -> Moments:
    """The moments with a group of so many `rows`, which has this mean and variance (Chan's parallel formula)."""
    count, old_mean, old_var = before
    total, delta = count + rows, mean - old_mean
    share = (rows / total).to(delta.dtype)
    spread = old_var * (1 - share) + var * share + delta.square() * share * (1 - share)
    return total, old_mean + delta * share, spread


def moments_of_sums(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [], mean and variance [D], from the number of rows, their sum and the sum of their squares: [1 + 2 D].

    Mean and variance are 0 if there are no rows.
    """
    rows, size = sums[0], len(sums) // 2
    total, squares = sums[1:].split(size)
    mean = total / rows.clamp(min=1.0)
    return rows, mean, (squares / rows.clamp(min=1.0) - mean.square()).clamp(min=0.0)
