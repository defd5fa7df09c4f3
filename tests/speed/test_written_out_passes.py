"""The backward passes that are written out give autograd's gradients: actor-critics and Q networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.fqf import FQF
from rl_training.algorithms.iqn import IQN
from rl_training.algorithms.ppo import PPO
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.models import mlp_fqf_network
from rl_training.models.blocks import mlp
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_fqf_network import MLPFQFNetwork, MLPIQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.speed import passes

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


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, every network runs by autograd alone."""

    def switch() -> None:
        for module in (passes, mlp_fqf_network):
            monkeypatch.setattr(module, "runs_written_out", lambda x: False)

    return switch


def assert_close(found: Any, wanted: Any) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_an_actor_critic_s_way_back_is_autograd_s(
    kind: str, masked: bool, activation: str, with_entropy: bool
) -> None:
    policy, obs, actions, masks = make_case(kind, activation, masked)
    slopes = list(torch.randn(3, ROWS).unbind())
    parameters, count = list(policy.parameters()), 3 if with_entropy else 2
    traced = policy.trace(obs, actions, masks)
    assert traced is not None
    given = traced[1](*slopes[:count], *[None] * (3 - count))
    expected = policy.evaluate_actions(obs, actions, masks)
    wanted = torch.autograd.grad(expected[:count], parameters, slopes[:count], allow_unused=True)
    assert_close(traced[0], [output.detach() for output in expected])
    assert_close(given, wanted)


def test_the_critic_alone_too() -> None:
    policy, obs, _, _ = make_case("discrete", "tanh", False)
    slopes = torch.randn(ROWS)
    values, backward = policy.trace_values(obs)
    expected = policy.critic(obs).squeeze(-1)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-5, atol=1e-6)
    assert_close(backward(slopes), torch.autograd.grad(expected, list(policy.critic.parameters()), slopes))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("num_outputs", [None, 5])
def test_a_network_s_way_back_is_autograd_s(num_outputs: int | None, activation: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"obs_dim": OBS, "action_dim": 3, "hidden_sizes": (16, 8)}
    network, obs = MLPQNetwork(**sizes, activation=activation, num_outputs=num_outputs), torch.rand(ROWS, OBS)
    outputs = network(obs)
    slopes = torch.randn_like(outputs)
    traced = network.trace(obs)
    assert traced is not None
    torch.testing.assert_close(traced[0], outputs.detach(), rtol=1e-5, atol=1e-6)
    assert_close(traced[1](slopes), torch.autograd.grad(outputs, list(network.parameters()), slopes))


def test_gradients_that_somebody_holds_are_not_overwritten() -> None:
    network = MLPQNetwork(obs_dim=OBS, action_dim=3, hidden_sizes=(16, 8))
    slopes = torch.randn(ROWS, 3)

    def gradients(obs: torch.Tensor) -> Any:
        traced = network.trace(obs)
        assert traced is not None
        return traced[1](slopes)

    one, other = torch.randn(ROWS, OBS), torch.randn(ROWS, OBS)
    first = [g.view(-1) for g in gradients(one)]
    kept = [g.clone() for g in first]
    second = gradients(other)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    at = second.flat.data_ptr()
    del second
    assert gradients(one).flat.data_ptr() == at  # the same memory, where nobody holds it
    assert_close(copy.deepcopy(network).trace(one)[1](slopes), network.trace(one)[1](slopes))  # type: ignore[index]


def test_a_replaced_network_is_the_one_that_learns() -> None:
    policy, obs, actions, _ = make_case("discrete", "tanh", False)
    policy.evaluate_actions(obs, actions)
    with torch.no_grad():
        before = policy.distribution(obs).log_prob(actions)
    policy.actor = mlp(OBS, (16, 8), 4, output_gain=1.0)
    policy.critic[-1] = torch.nn.Linear(8, 1)
    with torch.no_grad():
        logprobs = policy.distribution(obs).log_prob(actions)
    assert not torch.allclose(logprobs, before)
    rows = {"obs": obs, "actions": actions, "logprobs": logprobs, "returns": torch.ones(ROWS)}
    rows["advantages"] = torch.randn(ROWS)
    learner = PPO(policy=policy, learning_rate=0.1)
    old = [p.detach().clone() for p in policy.parameters()]
    assert learner.update(rows).metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)  # of the first step
    assert all(not torch.equal(a, b) for a, b in zip(old, policy.parameters(), strict=True))


def test_what_has_no_written_out_form_says_so() -> None:
    obs = torch.randn(ROWS, OBS)
    for options in ({"activation": "elu"}, {"dueling": True}, {"noisy": True}):
        assert MLPQNetwork(obs_dim=OBS, action_dim=2, **options).trace(obs) is None  # type: ignore[arg-type]


Q_SIZES: dict[str, Any] = {"obs_dim": OBS, "hidden_sizes": (16, 8), "action_dim": 3}
LEARNERS: dict[str, Any] = {
    "dqn": lambda: DQN(q_network=MLPQNetwork(**Q_SIZES)),
    "dqn_double": lambda: DQN(q_network=MLPQNetwork(**Q_SIZES), double_q=True, max_grad_norm=0.01),
    "c51": lambda: C51DQN(q_network=MLPQNetwork(num_outputs=11, **Q_SIZES), num_atoms=11),
    "qr": lambda: QRDQN(q_network=MLPQNetwork(num_outputs=6, **Q_SIZES), num_quantiles=6),
    "iqn": lambda: IQN(q_network=MLPIQNNetwork(**Q_SIZES), num_quantiles=6),
    "fqf": lambda: FQF(q_network=MLPFQFNetwork(num_quantiles=6, **Q_SIZES), num_quantiles=6),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_an_update_is_the_one_of_autograd(name: str, weighted: bool, plainly: Callable[[], None]) -> None:
    torch.manual_seed(0)
    learner = LEARNERS[name]()
    for optimizer in learner._optimizers.values():  # Adam's step is about the gradient's sign; this is the gradient
        optimizer.kind = "sgd"
    learner.numbers.update({name: 1.0 for name, rate in learner.numbers.items() if "learning_rate" in name and rate})
    twin = copy.deepcopy(learner.state_dict())
    batch = {
        "obs": torch.randn(ROWS, OBS), "next_obs": torch.randn(ROWS, OBS), "rewards": torch.randn(ROWS),
        "actions": torch.randint(3, (ROWS,)), "dones": (torch.rand(ROWS) < 0.2).float(),
    }  # fmt: skip
    if weighted:
        batch["weights"] = torch.rand(ROWS)
    quick = learner.update(batch)
    updated = {name: value.clone() for name, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    learner.load_state_dict(twin)
    learner.num_updates = 0
    plainly()
    plain = learner.update(batch)
    assert quick.metrics == pytest.approx(plain.metrics, rel=1e-3, abs=1e-5)
    for key, value in learner.state_dict().items():
        if isinstance(value, torch.Tensor):
            message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
            torch.testing.assert_close(updated[key], value, rtol=1e-3, atol=1e-5, msg=message)
