"""Optimizers over flat parameters: torch's own step for step, clipping, state, and parameters that stay views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.blocks import mlp
from rl_training.speed import optimizer as optimization
from rl_training.speed.optimizer import OPTIMIZERS, Optimizer, flatten_parameters, split_evenly

torch.set_num_threads(1)  # networks this small only wait for each other's threads

TORCH: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-5),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01, eps=1e-5),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, alpha=0.9, eps=1e-5),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(3, (8, 4), 2)


def losses(module: nn.Module, count: int = 8) -> Any:
    """A few losses on fresh data, each computed when it is asked for; RAdam rectifies its steps from the sixth on."""
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        inputs, wanted = torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)
        yield (1 + 10 * step) * (module(inputs) - wanted).square().mean()


def run(module: nn.Module, optimizer: Optimizer, count: int = 8) -> list[float]:
    return [float(optimizer.step(loss)) for loss in losses(module, count)]


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 100.0])
@pytest.mark.parametrize("kind", TORCH)
def test_steps_are_those_of_torch(kind: str, max_grad_norm: float | None) -> None:
    """Clipping included: some gradients are within the norm and some beyond it."""
    ours, theirs = network(), network()
    optimizer = Optimizer(
        ours.parameters(), learning_rate=0.01, kind=kind, eps=1e-5, decay=0.9, max_grad_norm=max_grad_norm
    )
    norms = run(ours, optimizer)
    reference = TORCH[kind](theirs.parameters())
    for loss, norm in zip(losses(theirs), norms, strict=True):
        reference.zero_grad()
        loss.backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm or torch.inf)
        assert norm == pytest.approx(float(expected), rel=1e-4)
        reference.step()
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("count", [1, 1_023, 1_025, 40_000, 140_007, 2**21])
def test_pieces_of_parameters_are_all_of_them_and_few(count: int) -> None:
    flat = torch.arange(count)
    pieces = split_evenly(flat)
    assert torch.equal(torch.cat(list(pieces)), flat)
    assert len(pieces) <= 32
    assert all(piece.storage_offset() % 4 == 0 for piece in pieces)
    assert max(map(len, pieces)) <= max(1_024, count / 32 + 4)
    assert len(split_evenly(torch.zeros(2**21 + 1))) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_adam_in_pieces_is_adam_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for split in (split_evenly, lambda flat: [flat]):
        monkeypatch.setattr(optimization, "split_evenly", split)
        torch.manual_seed(0)
        module = mlp(17, (256, 256), 6).cuda()
        optimizer = Optimizer(module.parameters(), learning_rate=0.01)
        for _ in range(5):
            optimizer.step(module(torch.randn(64, 17, device="cuda")).square().mean())
        found.append(optimizer.flat)
    assert torch.equal(*found)


def test_rmsprop_of_tensorflow_starts_at_one_and_has_its_epsilon_inside_the_root() -> None:
    ours, theirs = network(), network()
    run(ours, Optimizer(ours.parameters(), learning_rate=0.01, kind="rmsprop_tf", eps=1e-3, decay=0.9))
    squares = [torch.ones_like(p) for p in theirs.parameters()]
    for loss in losses(theirs):
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        with torch.no_grad():
            for parameter, square, gradient in zip(theirs.parameters(), squares, gradients, strict=True):
                square.mul_(0.9).add_(0.1 * gradient**2)
                parameter.sub_(0.01 * gradient / (square + 1e-3).sqrt())
    assert_same_parameters(ours, theirs)


def test_rmsprop_of_tensorflow_is_that_of_stable_baselines3() -> None:
    like = pytest.importorskip("stable_baselines3.common.sb2_compat.rmsprop_tf_like")
    ours, theirs = network(), network()
    run(ours, Optimizer(ours.parameters(), learning_rate=0.01, kind="rmsprop_tf", eps=1e-5, decay=0.99))
    reference = like.RMSpropTFLike(theirs.parameters(), lr=0.01, alpha=0.99, eps=1e-5)
    for loss in losses(theirs):
        reference.zero_grad()
        loss.backward()
        reference.step()
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_stay_views_of_the_flat_tensor(kind: str) -> None:
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = Optimizer(module.parameters(), learning_rate=0.01, kind=kind)
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(old, new)  # flattening changes no number
    run(module, optimizer)
    assert torch.equal(optimizer.flat, torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    storage = optimizer.flat.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == storage for p in module.parameters())
    module.load_state_dict(network(seed=3).state_dict())  # and loading writes through
    assert torch.equal(optimizer.flat, torch.cat([p.detach().reshape(-1) for p in network(seed=3).parameters()]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    module = network()
    optimizer = Optimizer(module.parameters(), learning_rate=0.01, kind=kind, max_grad_norm=0.5)
    run(module, optimizer)
    other = network(seed=4)
    restored = Optimizer(other.parameters(), learning_rate=0.01, kind=kind, max_grad_norm=0.5)
    other.load_state_dict(module.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    assert run(module, optimizer, 3) == run(other, restored, 3)
    assert torch.equal(optimizer.flat, restored.flat)
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name]), name


def test_a_parameter_that_the_loss_does_not_reach_stays() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = Optimizer([used, unused], learning_rate=0.1)
    optimizer.step(used.sum())
    assert torch.equal(unused, torch.ones(3))
    torch.testing.assert_close(used, torch.full((2,), 0.9))


def test_frozen_parameters_are_left_out() -> None:
    module = network()
    frozen = module[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    before = frozen.clone()
    run(module, Optimizer(module.parameters(), learning_rate=0.1))
    assert torch.equal(frozen, before)


def test_apply_gradients_takes_gradients_made_elsewhere() -> None:
    ours, theirs = network(), network()
    mine, other = (Optimizer(m.parameters(), learning_rate=0.01, max_grad_norm=0.5) for m in (ours, theirs))
    for one, two in zip(losses(ours), losses(theirs), strict=True):
        gradients: tuple[Tensor, ...] = torch.autograd.grad(one, list(ours.parameters()))
        assert torch.equal(mine.apply_gradients(gradients), other.step(two))
    assert torch.equal(mine.flat, other.flat)


def test_learning_rate_zero_moves_nothing_and_may_change_between_steps() -> None:
    module = network()
    numbers = {"rate": 0.0}
    optimizer = Optimizer(module.parameters(), learning_rate="rate", kind="sgd", numbers=numbers)
    before = optimizer.flat.clone()
    run(module, optimizer, 1)
    assert torch.equal(optimizer.flat, before)
    numbers["rate"] = 0.1
    run(module, optimizer, 1)
    assert not torch.equal(optimizer.flat, before)


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="optimizer is 'lion'"):
        Optimizer(network().parameters(), learning_rate=0.1, kind="lion")
    with pytest.raises(UserError, match=r"learning_rate is -0\.1"):
        Optimizer(network().parameters(), learning_rate=-0.1)
    with pytest.raises(UserError, match="no trainable parameters"):
        flatten_parameters([])


@pytest.mark.parametrize(
    ("kind", "of_torch", "options"),
    [
        ("adam", torch.optim.Adam, {}), ("radam", torch.optim.RAdam, {}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)  # fmt: skip
def test_beta_and_weight_decay_are_those_of_torch(kind: str, of_torch: Any, options: dict[str, float]) -> None:
    ours, theirs = network(), network()
    run(ours, Optimizer(ours.parameters(), learning_rate=0.01, kind=kind, eps=1e-5, beta1=0.5, **options))
    reference = of_torch(theirs.parameters(), lr=0.01, eps=1e-5, betas=(0.5, 0.999), **options)
    for loss in losses(theirs):
        reference.zero_grad()
        loss.backward()
        reference.step()
    assert_same_parameters(ours, theirs)


def test_parameters_are_put_back_after_every_step() -> None:
    class Unit(nn.Linear):
        @torch.no_grad()
        def project_(self) -> None:
            self.weight.div_(self.weight.norm())

    module = Unit(3, 2)
    optimizer = Optimizer(module, learning_rate=0.1)
    for _ in range(3):
        optimizer.step(module(torch.ones(4, 3)).square().sum())
        assert float(module.weight.detach().norm()) == pytest.approx(1.0)
    torch.testing.assert_close(optimizer.flat[:6].view(2, 3), module.weight.detach(), rtol=0, atol=0)
