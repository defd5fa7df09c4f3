"""GAE, V-trace and lambda-returns: published numbers, and the definitions written out as explicit sums."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rl_training.ops.losses import bellman_target, double_q_values, fold_discounts
from rl_training.ops.returns import gae, lambda_returns, vtrace


def rows(data: list) -> Tensor:
    """[B, T] as published -> [T, B]."""
    return torch.tensor(data).transpose(0, 1)


def successors(values: Tensor, bootstrap: Tensor) -> Tensor:
    return torch.cat([values[1:], bootstrap[None]])


class Rollout(NamedTuple):
    log_rhos: Tensor
    rewards: Tensor
    discounts: Tensor
    values: Tensor
    next_values: Tensor
    cuts: Tensor


def random_rollout(seed: int, num_steps: int, num_envs: int = 3) -> Rollout:
    """Terminations and truncations at random places; a truncated row's successor is not the row that follows it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = normal(num_steps + 1, num_envs)
    ends = torch.rand(num_steps, num_envs, generator=generator)
    terminated, truncated = ends < 0.1, ends > 0.85
    next_values = torch.where(terminated | truncated, 5.0 + normal(num_steps, num_envs), values[1:])
    discounts = 0.95 * (1.0 - terminated.double())
    log_rhos, rewards = normal(num_steps, num_envs), normal(num_steps, num_envs)
    return Rollout(log_rhos, rewards, discounts, values[:-1], next_values, terminated | truncated)


def episode_end(cuts: Tensor, start: int, env: int) -> int:
    """Last row that belongs to the episode of row `start`."""
    return next((t for t in range(start, len(cuts)) if cuts[t, env]), len(cuts) - 1)


def gae_by_definition(r: Rollout, lambda_: float) -> Tensor:
    advantages = torch.zeros_like(r.values)
    for env in range(r.values.shape[1]):
        for start in range(len(r.values)):
            for t in range(start, episode_end(r.cuts, start, env) + 1):
                weight = math.prod(float(lambda_ * r.discounts[i, env]) for i in range(start, t))
                delta = r.rewards[t, env] + r.discounts[t, env] * r.next_values[t, env] - r.values[t, env]
                advantages[start, env] += weight * delta
    return advantages


def vtrace_by_definition(
    r: Rollout, rho_clip: float, c_clip: float, pg_rho_clip: float, lambda_: float
) -> tuple[Tensor, Tensor]:
    targets, advantages = r.values.clone(), torch.zeros_like(r.values)
    ratios = r.log_rhos.exp()
    for env in range(r.values.shape[1]):
        for start in range(len(r.values)):
            for t in range(start, episode_end(r.cuts, start, env) + 1):
                weight = math.prod(
                    float(r.discounts[i, env]) * lambda_ * min(c_clip, float(ratios[i, env])) for i in range(start, t)
                )
                delta = r.rewards[t, env] + r.discounts[t, env] * r.next_values[t, env] - r.values[t, env]
                targets[start, env] += weight * min(rho_clip, float(ratios[t, env])) * delta
        for t in range(len(r.values)):
            if r.cuts[t, env] or t == len(r.values) - 1:
                q_next = r.next_values[t, env]
            else:
                q_next = lambda_ * targets[t + 1, env] + (1 - lambda_) * r.values[t + 1, env]
            error = r.rewards[t, env] + r.discounts[t, env] * q_next - r.values[t, env]
            advantages[t, env] = min(pg_rho_clip, float(ratios[t, env])) * error
    return targets, advantages


# rlax/_src/vtrace_test.py
MU = torch.tensor(
    [[[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]]]
).log_softmax(-1)
PI = torch.tensor(
    [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]]]
).log_softmax(-1)
ACTIONS = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]]).unsqueeze(-1)
VALUES = rows([[2.1, 1.1, -3.1, 0], [3.1, 0.1, -1.1, 7.4]])


def published_vtrace(**options: float) -> tuple[Tensor, Tensor]:
    targets, advantages = vtrace(
        log_rhos=(PI - MU).gather(-1, ACTIONS).squeeze(-1).T,
        discounts=rows([[0, 0.89, 0.85, 0.99], [0.88, 1, 0.83, 0.95]]),
        rewards=rows([[-1.3, -1.3, 2.3, 42], [1.3, 5.3, -3.3, -5]]),
        values=VALUES,
        next_values=successors(VALUES, torch.tensor([8.4, -1.2])),
        cuts=torch.zeros_like(VALUES, dtype=torch.bool),
        **options,
    )
    return targets - VALUES, advantages


def test_vtrace_matches_the_published_numbers() -> None:
    expected = rows([[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.3327e-5, -13.54]])
    corrections, advantages = published_vtrace()
    torch.testing.assert_close(corrections, expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(advantages, expected, rtol=1e-3, atol=1e-6)


def test_vtrace_clips_the_policy_gradient_ratio_on_its_own() -> None:
    corrections, advantages = published_vtrace(pg_rho_clip=5.0)
    torch.testing.assert_close(corrections, published_vtrace()[0])
    expected = rows([[-1.615514, -17.486612, 1.867053, 162.052681], [7.331217, 3.611640, -8.3369e-5, -25.841680]])
    torch.testing.assert_close(advantages, expected, rtol=1e-3, atol=1e-6)


def test_vtrace_lambda_shortens_the_trace() -> None:
    corrections, _ = published_vtrace(lambda_=0.8)
    expected = rows([[-1.615514, -4.065721, 1.535504, 50.316], [0.830618, 3.611673, -5.7687e-5, -13.54]])
    torch.testing.assert_close(corrections, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 12, 13, 33])
@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_gae_is_the_discounted_sum_of_td_errors_up_to_the_episodes_end(
    seed: int, num_steps: int, lambda_: float
) -> None:
    r = random_rollout(seed, num_steps)
    advantages = gae(r.rewards, r.discounts, r.values, r.next_values, r.cuts, lambda_)
    torch.testing.assert_close(advantages, gae_by_definition(r, lambda_), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 12, 13, 33])
@pytest.mark.parametrize(
    ("rho_clip", "c_clip", "pg_rho_clip", "lambda_"),
    [(1.0, 1.0, 1.0, 1.0), (3.7, 2.2, 1.0, 0.7), (0.8, 1.3, 5.0, 0.95), (1.0, 1.0, 2.0, 0.0)],
)
def test_vtrace_is_the_weighted_sum_of_td_errors_up_to_the_episodes_end(
    seed: int, num_steps: int, rho_clip: float, c_clip: float, pg_rho_clip: float, lambda_: float
) -> None:
    r = random_rollout(seed, num_steps)
    clips = {"rho_clip": rho_clip, "c_clip": c_clip, "pg_rho_clip": pg_rho_clip, "lambda_": lambda_}
    actual = vtrace(r.log_rhos, r.discounts, r.rewards, r.values, r.next_values, r.cuts, **clips)
    for result, expected in zip(actual, vtrace_by_definition(r, **clips), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_vtrace_on_policy_equals_gae() -> None:
    r = random_rollout(3, 20)
    targets, _ = vtrace(
        torch.zeros_like(r.rewards), r.discounts, r.rewards, r.values, r.next_values, r.cuts, lambda_=0.9
    )
    advantages = gae(r.rewards, r.discounts, r.values, r.next_values, r.cuts, 0.9)
    torch.testing.assert_close(targets, r.values + advantages)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("num_steps", [8, 20])
def test_rows_before_an_episodes_end_do_not_see_the_rows_after_it(end: str, num_steps: int) -> None:
    r = random_rollout(5, num_steps)
    cuts = torch.zeros_like(r.cuts)
    cuts[3] = True
    discounts = torch.full_like(r.discounts, 0.9)
    if end == "terminated":
        discounts[3] = 0.0

    def advantages(part: slice) -> list[Tensor]:
        log_rhos, rewards, _, values, next_values, _ = (x[part] for x in r)
        ending = discounts[part], cuts[part]
        return [
            gae(rewards, ending[0], values, next_values, ending[1], 0.9),
            *vtrace(log_rhos, ending[0], rewards, values, next_values, ending[1], lambda_=0.9),
        ]

    halves = zip(advantages(slice(0, 4)), advantages(slice(4, None)), strict=True)
    for whole, (first, second) in zip(advantages(slice(None)), halves, strict=True):
        torch.testing.assert_close(whole, torch.cat([first, second]))


def test_a_terminated_row_ignores_its_next_value_and_a_truncated_row_uses_it() -> None:
    one, yes = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    discounts = torch.tensor([[0.0, 0.5]])
    torch.testing.assert_close(gae(one, discounts, one, 8 * one, yes, 0.9), torch.tensor([[0.0, 4.0]]))
    _, advantages = vtrace(0 * one, discounts, one, one, 8 * one, yes)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 4.0]]))


@pytest.mark.parametrize(
    ("lambda_", "expected"),
    [
        (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3, 2, 1, 0, -4.9]]),
        (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1, 0, -4.9]]),
        (0.4, [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1, 0, -4.9]]),
    ],
)
def test_gae_matches_the_published_numbers(lambda_: float, expected: list) -> None:
    values = rows([[1.0, 4, -3, -2, -1, -1], [-3, -2, -1, 0, 5, -1]])
    discounts = rows([[0.99] * 5, [0.9, 0.9, 0.9, 0, 0.9]])
    advantages = gae(
        rewards=rows([[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]]),
        discounts=discounts,
        values=values[:-1],
        next_values=values[1:],
        cuts=discounts == 0,
        lambda_=lambda_,
    )
    torch.testing.assert_close(advantages, rows(expected), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("gamma", "lambda_", "expected"),
    [
        (0.99, 0.99, [4.80492, 3.882176, 2.940696, 1.9801, 1]),
        (1.0, 0.99, [4.900995, 3.940399, 2.9701, 1.99, 1]),
        (0.99, 1.0, [4.900995, 3.940399, 2.9701, 1.99, 1]),
    ],
)
def test_gae_with_a_zero_critic_gives_the_published_ppo_returns(gamma: float, lambda_: float, expected: list) -> None:
    zeros = torch.zeros(5, 1)
    advantages = gae(zeros + 1, zeros + gamma, zeros, zeros, zeros.bool(), lambda_)
    torch.testing.assert_close(advantages.squeeze(1), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_lambda_returns_match_the_published_numbers() -> None:
    returns = lambda_returns(
        rewards=rows([[1.0, 0, -1, 0, 1], [0.5, 0.8, -0.7, 0, 2.1]]),
        discounts=rows([[0.5, 0.9, 1, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]]),
        next_values=rows([[3.0, 1, 5, -5, 3], [-1.7, 1.2, 2.3, 2.2, 2.7]]),
        lambda_=0.75,
    )
    expected = [[1.6460547, 0.72281253, 0.7375, 0.65, 3.4], [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99]]
    torch.testing.assert_close(returns, rows(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 12, 15, 64])
def test_lambda_returns_are_gae_plus_values(num_steps: int) -> None:
    r = random_rollout(2, num_steps)
    terminated = r.discounts == 0
    next_values = torch.cat([r.values[1:], r.next_values[-1:]])
    advantages = gae(r.rewards, r.discounts, r.values, next_values, terminated, 0.9)
    torch.testing.assert_close(lambda_returns(r.rewards, r.discounts, next_values, 0.9), advantages + r.values)


def test_results_carry_no_gradient_and_inputs_are_not_written_to() -> None:
    r = random_rollout(0, 16)
    inputs = Rollout(*(x.clone() for x in r))
    values = inputs.values.requires_grad_()
    log_rhos = inputs.log_rhos.requires_grad_()
    results = [
        gae(inputs.rewards, inputs.discounts, values, inputs.next_values, inputs.cuts, 0.9),
        *vtrace(log_rhos, inputs.discounts, inputs.rewards, values, inputs.next_values, inputs.cuts),
        lambda_returns(inputs.rewards, inputs.discounts, values, 0.9),
    ]
    assert not any(result.requires_grad for result in results)
    for before, after in zip(r, inputs, strict=True):
        assert torch.equal(before, after)


def test_scheduled_scalars_may_be_tensors() -> None:
    r = random_rollout(0, 6)
    arguments = (r.log_rhos, r.discounts, r.rewards, r.values, r.next_values, r.cuts)
    as_floats = vtrace(*arguments, rho_clip=1.5, lambda_=0.5)
    as_tensors = vtrace(*arguments, rho_clip=torch.tensor(1.5), lambda_=torch.tensor(0.5))
    for one, other in zip(as_floats, as_tensors, strict=True):
        torch.testing.assert_close(one, other)


def test_q_learning_errors_match_the_published_numbers() -> None:
    batch = {"rewards": torch.ones(2), "discounts": torch.tensor([0.0, 1.0])}
    chosen = torch.tensor([1.0, 2.0])
    next_q = torch.tensor([[0.0, 1, 0], [1, 2, 0]])
    expected = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(bellman_target(batch, 0.9, next_q.amax(-1)) - chosen, expected)
    selector = torch.tensor([[2.0, 10, 1], [11, 20, 1]])
    values = torch.tensor([[99.0, 1, 98], [91, 2, 66]])
    target = bellman_target(batch, 0.9, double_q_values(q_selector=selector, q_value=values))
    torch.testing.assert_close(target - chosen, expected)
    torch.testing.assert_close(bellman_target(batch, 0.9, next_q), torch.tensor([[1.0, 1, 1], [2, 3, 1]]))


def test_discounts_come_from_the_batch_then_from_terminated_then_from_dones() -> None:
    discounts = torch.tensor([0.3, 0.4])
    terminated, dones = torch.tensor([False, True]), torch.tensor([1.0, 1.0])
    batch = {"discounts": discounts, "terminated": terminated, "dones": dones}
    assert fold_discounts(batch, 0.9) is discounts
    del batch["discounts"]
    torch.testing.assert_close(fold_discounts(batch, 0.9), torch.tensor([0.9, 0.0]))
    del batch["terminated"]
    torch.testing.assert_close(fold_discounts(batch, torch.tensor(0.9)), torch.zeros(2))
