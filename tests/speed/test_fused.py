"""Networks as one kernel per direction: what they compute, and which networks run so.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_training.algorithms.a2c import A2C
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.ppo import PPO
from rl_training.models.blocks import mlp
from rl_training.models.mlp_actor_critic import MLPActorCritic
from rl_training.speed import passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULE = passes.is_fused


def would_fuse(rows: tuple[int, ...], *networks: Any, dtype: torch.dtype = torch.float32) -> bool:
    """What the rule says of rows on a GPU."""
    with FakeTensorMode():
        x = torch.empty(rows, dtype=dtype, device="cuda")
    return RULE(x, networks, 1000)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Networks run as kernels on any number of rows; from how many on they would, for every such call."""
    pytest.importorskip("triton")
    calls: list[int] = []

    def is_fused(x: Tensor, networks: Sequence[Any], least: int) -> bool:
        fits = would_fuse((1000, *x.shape[1:]), *networks)
        calls.extend([least] if fits else [])
        return fits

    monkeypatch.setattr(passes, "CAN_FUSE", True)
    monkeypatch.setattr(passes, "has_room", lambda device: True)
    monkeypatch.setattr(passes, "is_fused", is_fused)
    return calls


@pytest.mark.usefixtures("fused")
def test_kernels_start_on_the_device_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would start them on the current device, which for `device: cuda:1` is another one."""
    from rl_training.speed import mlp_kernels as kernels

    inside: list[Tensor] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        inside.append(x)
        yield
        inside.pop()

    class Kernel:
        def __getitem__(self, programs: Any) -> Any:
            return lambda x, *_, **__: started.append(inside[-1].data_ptr() == x.data_ptr())

    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(kernels, name, Kernel())
    (out,), backward = passes.trace_fused(torch.ones(3, 2), [mlp(2, (4, 4), 1)])
    backward(torch.ones_like(out))
    assert started == [True, True]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((4, 64, 64, 2), 300), ((3, 24, 40, 1), 1), ((17, 8, 64, 20), 64), ((1, 1, 1, 1), 33), ((64, 64, 64, 64), 65),
        ((64, 63, 1, 64), 31), ((1, 1, 63, 63), 32),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fused")
def test_kernels_give_what_autograd_gives(sizes: tuple[int, ...], rows: int, activation: str) -> None:
    torch.manual_seed(0)
    first, *hidden, last = sizes
    networks = [mlp(first, hidden, out, activation).to(DEVICE) for out in (last, 1)]
    for parameter in [p for network in networks for p in network.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(rows, first, device=DEVICE)
    wanted = [network(x) for network in networks]
    grads = [torch.randn_like(out) for out in wanted]
    gradients = torch.autograd.grad(wanted, [p for network in networks for p in network.parameters()], grads)
    outputs, backward = passes.trace_fused(x, networks)
    torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(backward(*grads), list(gradients), rtol=1e-4, atol=1e-4)
    assert not any(out.requires_grad for out in outputs)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.usefixtures("fused")
def test_what_is_not_a_number_stays_so(activation: str) -> None:
    network = mlp(4, (8, 8), 2, activation).to(DEVICE)
    nn.init.constant_(network[0].weight[0], torch.nan)
    (out,), backward = passes.trace_fused(torch.ones(3, 4, device=DEVICE), [network])
    assert out.isnan().all()
    assert backward(torch.ones_like(out))[2].isnan().any()


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.usefixtures("fused")
def test_one_bad_row_spoils_its_own_outputs_and_the_gradients_that_autograd_loses(activation: str) -> None:
    network, x = mlp(4, (8, 8), 2, activation).to(DEVICE), torch.randn(40, 4, device=DEVICE)
    x[7, 2] = torch.nan
    (out,), backward = passes.trace_fused(x, [network])
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
    wanted = torch.autograd.grad(network(x), list(network.parameters()), torch.ones_like(out))
    for grad, own in zip(backward(torch.ones_like(out)), wanted, strict=True):
        assert torch.equal(grad.isnan(), own.isnan())
    clean = torch.zeros(40, 4, device=DEVICE)
    (out,), backward = passes.trace_fused(clean, [network])
    assert all(not grad.any() for grad in backward(torch.zeros_like(out)))


@pytest.mark.usefixtures("fused")
def test_kernels_read_what_is_not_stored_by_rows() -> None:
    network = mlp(4, (8, 16), 2, "tanh").to(DEVICE)
    for i in (0, 2, 4):
        network[i].weight = nn.Parameter(torch.randn(network[i].weight.mT.shape, device=DEVICE).mT)
    wide = torch.randn(8, 50, device=DEVICE)
    for x in (wide.mT[:, ::2], wide[:4].mT, wide[:4, :1].mT.expand(50, 4)):
        wanted, grad = network(x), torch.randn(2, 50, device=DEVICE).mT
        gradients = torch.autograd.grad(wanted, list(network.parameters()), grad)
        (out,), backward = passes.trace_fused(x, [network])
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(backward(grad), list(gradients), rtol=1e-4, atol=1e-4)


def learn_rows(learner: Any, rows: dict[str, Tensor], steps: int) -> list[Tensor]:
    step = learner.minibatch_step if isinstance(learner, PPO) else learner.gradient_step
    results = [step(rows) for _ in range(steps)]
    return [*learner.policy.parameters(), *(results if isinstance(learner, PPO) else [r["loss"] for r in results])]


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("learner_class", [PPO, A2C])
def test_a_learner_learns_the_same(learner_class: type[Algorithm], kind: str, fused: list[int]) -> None:
    torch.manual_seed(0)
    policy = MLPActorCritic(obs_dim=3, action_dim=2, hidden_sizes=(16, 16), action_kind=kind).to(DEVICE)
    plain: Any = learner_class(policy=policy, learning_rate=1e-3, ent_coef=0.01)
    other: Any = learner_class(policy=copy.deepcopy(policy), learning_rate=1e-3, ent_coef=0.01)
    obs, noise = torch.randn(50, 3, device=DEVICE), torch.randn(50, 2, device=DEVICE)
    with torch.no_grad():
        chosen = policy.distribution(obs)
        actions = chosen.sample(noise=noise)
        rows = {"obs": obs, "actions": actions, "logprobs": chosen.log_prob(actions), "values": policy.values(obs)}
    assert fused == [passes.FUSED_OUTPUTS] * 2
    rows |= {"advantages": torch.randn(50, device=DEVICE), "returns": torch.randn(50, device=DEVICE)}
    by_kernels = learn_rows(plain, rows, 3)
    assert fused[2:] == [passes.FUSED_ROWS] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "is_fused", lambda *_: False)
        torch.testing.assert_close(by_kernels, learn_rows(other, rows, 3), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(rows["values"], other.policy.values(obs), rtol=0.1, atol=0.1)


def test_what_is_differentiated_goes_through_autograd(fused: list[int]) -> None:
    policy = MLPActorCritic(obs_dim=3, action_dim=2, hidden_sizes=(8, 8)).to(DEVICE)
    obs = torch.randn(5, 3, device=DEVICE)
    actions = torch.zeros(5, dtype=torch.long, device=DEVICE)
    loss = policy.distribution(obs).log_prob(actions).sum() + policy.values(obs).sum()
    assert all(grad is not None for grad in torch.autograd.grad(loss, list(policy.parameters())))
    assert fused == []


ROWS = (1000, 4)
NETWORK = mlp(4, (64, 64), 2)
CASES: dict[str, tuple[bool, tuple[int, ...], list[nn.Module]]] = {
    "many rows": (True, ROWS, [NETWORK]),
    "two networks": (True, ROWS, [NETWORK, mlp(4, (32, 8), 1)]),
    "few rows": (False, (999, 4), [NETWORK]),
    "a rollout": (False, (2, *ROWS), [NETWORK]),
    "three layers": (False, ROWS, [mlp(4, (64, 64, 64), 2)]),
    "another activation": (False, ROWS, [mlp(4, (64, 64), 2, "elu")]),
    "two activations": (False, ROWS, [NETWORK, mlp(4, (64, 64), 1, "relu")]),
    "a wide layer": (False, ROWS, [NETWORK, mlp(4, (64, 128), 1)]),
    "as many outputs as 32 bits count": (True, (2**25, 4), [NETWORK, mlp(4, (64, 64), 63)]),
    "more outputs than 32 bits count": (False, (2**25, 4), [NETWORK, mlp(4, (64, 64), 64)]),
    "a wide input": (False, (1000, 65), [mlp(65, (64, 64), 1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_two_small_hidden_layers_and_many_rows_are_fused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, rows, networks = CASES[case]
    monkeypatch.setattr(passes, "CAN_FUSE", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert would_fuse(rows, *networks) == wanted
    assert not would_fuse(rows, *networks, dtype=torch.float64)
    assert not RULE(torch.zeros(rows), networks, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not would_fuse(rows, *networks)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(passes, "CAN_FUSE", False)
    assert not would_fuse(rows, *networks)
