"""The backward passes that are written out give autograd's gradients: actor-critics, critics, actors, Q networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rl_training.algorithms.c51_dqn import C51DQN
from rl_training.algorithms.d4pg import D4PG
from rl_training.algorithms.ddpg import DDPG
from rl_training.algorithms.dqn import DQN
from rl_training.algorithms.fqf import FQF
from rl_training.algorithms.iqn import IQN
from rl_training.algorithms.qr_dqn import QRDQN
from rl_training.algorithms.rlpd import RLPD
from rl_training.algorithms.sac import SAC
from rl_training.algorithms.td3 import TD3
from rl_training.models import ensemble, mlp_iqn_network, passes
from rl_training.models.ensemble import CriticEnsemble
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.models.mlp_d4pg import MLPD4PGModel
from rl_training.models.mlp_ddpg import MLPDDPGModel
from rl_training.models.mlp_fqf_network import MLPFQFNetwork
from rl_training.models.mlp_iqn_network import MLPIQNNetwork
from rl_training.models.mlp_q_network import MLPQNetwork
from rl_training.models.mlp_sac import LOG_STD_RANGE, MLPSACModel
from rl_training.models.mlp_td3 import MLPTD3Model

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


def assert_same_gradients(network: Any, *inputs: torch.Tensor) -> None:
    plain = network(*inputs)
    grad = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, list(network.parameters()), grad)
    with torch.no_grad():
        outputs, backward = network.with_gradients(*inputs)
        given = backward(grad)
    torch.testing.assert_close(outputs, plain.detach(), rtol=1e-5, atol=1e-6)
    for (name, _), mine, theirs in zip(network.named_parameters(), given, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("num_outputs", [None, 5])
def test_q_networks(activation: str, num_outputs: int | None) -> None:
    network = MLPQNetwork(
        obs_dim=OBS, action_dim=3, hidden_sizes=(16, 8), activation=activation, num_outputs=num_outputs
    )
    obs = torch.randn(ROWS, OBS)
    assert_same_gradients(network, obs)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_implicit_quantile_networks(activation: str) -> None:
    network = MLPIQNNetwork(obs_dim=OBS, action_dim=3, hidden_sizes=(16, 8), activation=activation, embedding_dim=7)
    obs, taus = torch.randn(ROWS, OBS), torch.rand(ROWS, 4)
    assert_same_gradients(network, obs, taus)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(("num_critics", "outputs"), [(1, 1), (2, 1), (3, 4)])
def test_critic_ensembles(activation: str, num_critics: int, outputs: int) -> None:
    critics = CriticEnsemble(
        num_critics=num_critics, inputs=OBS + 2, hidden_sizes=(16, 8), outputs=outputs, activation=activation
    )
    obs, actions = torch.randn(ROWS, OBS), torch.randn(ROWS, 2, requires_grad=True)
    assert_same_gradients(critics, obs, actions.detach())
    for subset in (None, slice(0, 1)):
        plain = critics(obs, actions, subset)
        grad = torch.randn_like(plain)
        with torch.no_grad():
            found = critics.with_action_gradients(obs, actions, subset)
            assert found is not None
            values, given = found[0], found[1](grad)
        torch.testing.assert_close(values, plain.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(given, torch.autograd.grad(plain, actions, grad)[0], rtol=1e-4, atol=1e-5)


def test_deterministic_and_squashed_gaussian_actors() -> None:
    actor = MLPDDPGModel(obs_dim=OBS, action_dim=2, hidden_sizes=(16, 8)).actor
    obs, noise = torch.randn(ROWS, OBS), torch.randn(ROWS, 2)
    torch.nn.init.normal_(actor.network[-2].weight)  # type: ignore[arg-type]
    assert_same_gradients(actor, obs)

    gaussian = MLPSACModel(obs_dim=OBS, action_dim=2, hidden_sizes=(16, 8)).actor
    torch.nn.init.normal_(gaussian.network[-1].weight, std=4.0)  # type: ignore[arg-type]
    outputs = gaussian.network(obs)[:, 2:]
    clamped = outputs > LOG_STD_RANGE[1]
    assert clamped.any()
    assert not clamped.all()
    plain = gaussian.sample(obs, noise)
    on_actions, on_logprobs = torch.randn(ROWS, 2), torch.randn(ROWS)
    with torch.no_grad():
        found = gaussian.sample_with_gradients(obs, noise)
        assert found is not None
        sampled, given = found[0], found[1](on_actions, on_logprobs)
    torch.testing.assert_close(sampled.actions, plain.actions.detach())
    torch.testing.assert_close(sampled.logprobs, plain.logprobs.detach(), rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(plain, list(gaussian.parameters()), (on_actions, on_logprobs))
    for mine, theirs in zip(given, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_what_has_no_written_out_form_says_so() -> None:
    obs, actions = torch.randn(ROWS, OBS), torch.randn(ROWS, 2)
    for options in ({"activation": "elu"}, {"dueling": True}, {"noisy": True}):
        assert MLPQNetwork(obs_dim=OBS, action_dim=2, **options).with_gradients(obs) is None  # type: ignore[arg-type]
    for options in ({"activation": "elu"}, {"layer_norm": True}):
        critics = CriticEnsemble(num_critics=2, inputs=OBS + 2, **options)
        assert critics.with_gradients(obs, actions) is None
        assert critics.with_action_gradients(obs, actions) is None


SIZES: dict[str, Any] = {"obs_dim": OBS, "hidden_sizes": (16, 8)}
Q_SIZES: dict[str, Any] = {**SIZES, "action_dim": 3}
LEARNERS: dict[str, Any] = {
    "dqn": lambda: DQN(q_network=MLPQNetwork(**Q_SIZES)),
    "dqn_double": lambda: DQN(q_network=MLPQNetwork(**Q_SIZES), double_q=True, max_grad_norm=0.01),
    "c51": lambda: C51DQN(q_network=MLPQNetwork(num_outputs=11, **Q_SIZES), num_atoms=11),
    "qr": lambda: QRDQN(q_network=MLPQNetwork(num_outputs=6, **Q_SIZES), num_quantiles=6),
    "iqn": lambda: IQN(q_network=MLPIQNNetwork(**Q_SIZES), num_quantiles=6),
    "fqf": lambda: FQF(q_network=MLPFQFNetwork(num_quantiles=6, **Q_SIZES), num_quantiles=6),
    "ddpg": lambda: DDPG(model=MLPDDPGModel(action_dim=2, **SIZES)),
    "ddpg_clipped": lambda: DDPG(model=MLPDDPGModel(action_dim=2, **SIZES), action_gradient_clip=0.05),
    "td3": lambda: TD3(model=MLPTD3Model(action_dim=2, **SIZES), policy_delay=1),
    "d4pg": lambda: D4PG(model=MLPD4PGModel(action_dim=2, **SIZES)),
    "sac": lambda: SAC(model=MLPSACModel(action_dim=2, **SIZES)),
    "rlpd": lambda: RLPD(model=MLPSACModel(action_dim=2, num_critics=4, **SIZES)),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_an_update_is_the_one_of_autograd(name: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    learner = LEARNERS[name]()
    for optimizer in learner._optimizers.values():  # Adam's step is about the gradient's sign; this is the gradient
        optimizer.kind, optimizer.learning_rate = "sgd", 1.0
    twin = copy.deepcopy(learner.state_dict())
    discrete = "dqn" in name or name in ("c51", "qr", "iqn", "fqf")
    batch = {
        "obs": torch.randn(ROWS, OBS), "next_obs": torch.randn(ROWS, OBS), "rewards": torch.randn(ROWS),
        "actions": torch.randint(3, (ROWS,)) if discrete else torch.rand(ROWS, 2) * 2 - 1,
        "dones": (torch.rand(ROWS) < 0.2).float(),
    }  # fmt: skip
    if weighted:
        batch["weights"] = torch.rand(ROWS)
    quick = learner.update(batch)
    updated = {name: value.clone() for name, value in learner.state_dict().items() if isinstance(value, torch.Tensor)}
    learner.load_state_dict(twin)
    learner.num_updates = 0
    for module in (passes, ensemble, mlp_iqn_network):
        monkeypatch.setattr(module, "runs_written_out", lambda x: False)
    plain = learner.update(batch)
    assert quick.metrics == pytest.approx(plain.metrics, rel=1e-3, abs=1e-5)
    for key, value in learner.state_dict().items():
        if isinstance(value, torch.Tensor):
            message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
            torch.testing.assert_close(updated[key], value, rtol=1e-3, atol=1e-5, msg=message)
