"""The backward passes that are written out give autograd's gradients, for every kind of action."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_training.models.mlp_actor_critic import MLPActorCritic

ROWS, OBS = 33, 5
KINDS: dict[str, dict[str, Any]] = {
    "discrete": {"action_dim": 4},
    "continuous": {"action_dim": 3},
    "multi_discrete": {"action_dim": 5, "action_sizes": (2, 3)},
    "multi_binary": {"action_dim": 6, "action_sizes": (2, 2, 2)},
}

CASES = [(kind, masked) for kind in KINDS for masked in (False, True) if kind != "continuous" or not masked]


def make_case(kind: str, activation: str, masked: bool) -> tuple[MLPActorCritic, torch.Tensor, torch.Tensor, Any]:
    torch.manual_seed(0)
    policy = MLPActorCritic(
        obs_dim=OBS, hidden_sizes=(16, 8), activation=activation, action_kind=kind, **KINDS[kind]
    )
    torch.nn.init.normal_(policy.actor[-1].weight)  # type: ignore[arg-type]  # a policy that prefers something
    obs = torch.randn(ROWS, OBS)
    masks = None
    if masked:
        masks = torch.rand(ROWS, KINDS[kind]["action_dim"]) < 0.6
        start = 0
        for size in KINDS[kind].get("action_sizes", (KINDS[kind]["action_dim"],)):
            masks[:, start] = True
            start += size
    actions = policy.act(obs, action_masks=masks).actions.detach()
    return policy, obs, actions, masks


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_gradients_are_those_of_autograd(kind: str, masked: bool, activation: str, with_entropy: bool) -> None:
    policy, obs, actions, masks = make_case(kind, activation, masked)
    on_logprobs, on_values, on_entropy = torch.randn(3, ROWS).unbind()
    expected = policy.evaluate_actions(obs, actions, masks)
    loss = (expected.logprobs * on_logprobs + expected.values * on_values).sum()
    if with_entropy:
        loss = loss + (expected.entropy * on_entropy).sum()
    wanted = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)

    found = policy.evaluate_with_gradients(obs, actions, masks)
    assert found is not None
    evaluation, gradients = found
    for name in ("logprobs", "values", "entropy"):
        torch.testing.assert_close(getattr(evaluation, name), getattr(expected, name).detach(), rtol=1e-5, atol=1e-6)
    given = gradients(on_logprobs, on_values, on_entropy if with_entropy else None)
    for (name, _), mine, theirs in zip(policy.named_parameters(), given, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_the_critic_alone_too() -> None:
    policy, obs, _, _ = make_case("discrete", "tanh", False)
    on_values = torch.randn(ROWS)
    values, gradients = policy.values_with_gradients(obs)
    expected = policy.critic(obs).squeeze(-1)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, list(policy.critic.parameters()), on_values)
    for mine, theirs in zip(gradients(on_values), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
