"""Advantages and returns of rollouts: GAE, V-trace and lambda-returns.

All tensors are [T, N] (more trailing dimensions are fine) and all results are stop-gradient. Three tensors describe how
a row ends, so that terminations and truncations stay separate:

- `discounts`: gamma * (1 - terminated). Zero only where there is no future value.
- `next_values`: value of the true successor: of the final observation at a truncation, of the bootstrap observation in
  the last row, and `values[t + 1]` everywhere else. (The entry of a terminated row is multiplied by a zero discount.)
- `cuts`: bool, true where an episode terminated or was truncated. The recursion does not look past such a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Up to this many rows a plain backward loop costs less than the doubling scan (measured on one CPU thread).
_LOOP_ROWS = 12


@torch.no_grad()
def gae(
    rewards: Tensor, discounts: Tensor, values: Tensor, next_values: Tensor, cuts: Tensor, lambda_: float | Tensor
) -> Tensor:
    """Generalized advantage estimates [T, N] (Schulman et al. 2016, eq. 16), all inputs [T, N].

    A_t = delta_t + g_t lambda A_{t+1} with delta_t = r_t + g_t V_{t+1} - V_t; the second term is dropped where cut.
    The value target of the same rows is `advantages + values`.
    """
    deltas = torch.addcmul(rewards, discounts, next_values).sub_(values)
    decays = (discounts * lambda_).masked_fill_(cuts, 0.0)
    return _accumulate(deltas, decays)


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    cuts: Tensor,
    *,
    rho_clip: float | Tensor = 1.0,
    c_clip: float | Tensor = 1.0,
    pg_rho_clip: float | Tensor | None = 1.0,
    lambda_: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace value targets and policy-gradient advantages, each [T, N] (Espeholt et al. 2018, eq. 1 and section 4.2).

    `log_rhos` is log pi(a|s) - log mu(a|s). v_t = V_t + delta_t + g_t c_t (v_{t+1} - V_{t+1}), and the advantage is
    rho_t (r_t + g_t q_{t+1} - V_t) with q_{t+1} = lambda v_{t+1} + (1 - lambda) V_{t+1}; where cut, and in the last
    row, the recursion's term is dropped and q_{t+1} is `next_values[t]`. `lambda_` is not in the paper (1 there).
    With `pg_rho_clip` None the advantage is left unweighted, for a surrogate that multiplies by the ratio itself.
    """
    rhos = log_rhos.exp()
    td_errors = torch.addcmul(rewards, discounts, next_values).sub_(values)
    decays = (discounts * lambda_).masked_fill_(cuts, 0.0)
    corrections = _accumulate(rhos.clamp(max=rho_clip).mul_(td_errors), decays * rhos.clamp(max=c_clip))
    # With x_t = v_t - V_t, q_{t+1} = V_{t+1} + lambda x_{t+1}: the advantage is the TD error plus the decayed x_{t+1},
    # with V_{t+1} from next_values. Reading v_{t+1} out of row t+1 would leak the next episode's start at a truncation.
    td_errors[:-1].addcmul_(decays[:-1], corrections[1:])
    weighted = td_errors if pg_rho_clip is None else rhos.clamp(max=pg_rho_clip).mul_(td_errors)
    return values + corrections, weighted


@torch.no_grad()
def lambda_returns(rewards: Tensor, discounts: Tensor, next_values: Tensor, lambda_: float | Tensor) -> Tensor:
    """Lambda-returns [T, N]: R_t = r_t + g_t ((1 - lambda) V_{t+1} + lambda R_{t+1}); the last row uses V_T alone."""
    one_step = torch.addcmul(rewards, discounts, next_values)
    decays = discounts * lambda_
    one_step[:-1].addcmul_(decays[:-1], next_values[:-1], value=-1.0)
    return _accumulate(one_step, decays)


def _accumulate(terms: Tensor, decays: Tensor) -> Tensor:
    """Solve x_t = terms_t + decays_t x_{t+1}, x_T = 0, backwards in time. Overwrites and returns `terms` [T, ...]."""
    if terms.shape[0] > _LOOP_ROWS:
        return _accumulate_by_doubling(terms, decays)
    rows, row_decays = terms.unbind(0), decays.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(row_decays[t], rows[t + 1])
    return terms


def _accumulate_by_doubling(terms: Tensor, decays: Tensor) -> Tensor:
    """The same recursion in log2(T) passes over whole arrays instead of T steps: 5 times faster at T = 128.

    Before a pass, row t holds its sum over `reach` rows and `decays[t]` the product of their decays. Products of decays
    above 1 (V-trace with c_clip > 1) can overflow, but only where the recursion itself is already far out of range.
    """
    num_rows, reach = terms.shape[0], 1
    decays = decays[:-1]
    while reach < num_rows:
        terms[:-reach].add_(decays * terms[reach:])  # the product is a temporary: in place, the slices overlap
        if 2 * reach < num_rows:
            decays = decays[:-reach] * decays[reach:]
        reach *= 2
    return terms
