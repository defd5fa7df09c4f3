"""`Algorithm`: what every learner is. An author writes `act` and `learn`; the rest is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.algorithms.optimization import Optimizer

Batch = Mapping[str, Tensor]
Carry = Any
Array = NDArray[Any]
# obs [N, ...], masks [N, A] or None, generator, deterministic -> actions [N, ...]: acting without torch
NumpyPolicy = Callable[[Array, "Array | None", np.random.Generator, bool], Array]


@dataclass
class UpdateResult:
    """What one update did; metrics may stay tensors until somebody reads them, and but for the first, which is
    watched for NaN, tensors of any shape whose mean they are: most updates are never looked at."""

    metrics: dict[str, Any]
    num_gradient_steps: int = 1
    priorities: Tensor | None = None

    def __post_init__(self) -> None:
        """Let go of the graphs behind losses."""
        self.metrics = {name: x.detach() if isinstance(x, Tensor) else x for name, x in self.metrics.items()}


@dataclass(frozen=True)
class ActOutput:
    """Actions [N, ...], what is stored beside them (logprobs, values, ...), and recurrent state."""

    actions: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    carry: Carry = None


def option_of_optimizers(option: str) -> Any:
    """An attribute of a learner that is an option of those of its optimizers that were made with it."""

    def read(learner: Algorithm) -> Any:
        if option not in learner._made_with:
            raise AttributeError(f"no optimizer of {type(learner).__name__} was made with {option}")
        return getattr(learner._made_with[option][0], option)

    def write(learner: Algorithm, value: Any) -> None:
        for optimizer in learner._made_with[option]:
            setattr(optimizer, option, value)

    return property(read, write)


class Algorithm(nn.Module):
    """A learner: networks, optimizers and random generator in one module whose `state_dict` is complete."""

    max_grad_norm = option_of_optimizers("max_grad_norm")
    optimizer_eps = option_of_optimizers("eps")

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0
        self._optimizers: dict[str, Optimizer] = {}
        self._made_with: dict[str, list[Optimizer]] = {}  # an option -> the optimizers that were given it
        self.generator = torch.Generator()
        self.seed(int(torch.randint(2**31 - 1, (), device="cpu")))

    # what an author writes -------------------------------------------------------------------------------------

    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        step: int = 0, action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """Actions for observations [N, ...]."""
        raise NotImplementedError

    def learn(self, batch: Batch, *, step: int) -> UpdateResult:
        """One update from one batch."""
        raise NotImplementedError

    def update_model(self, batch: Batch) -> UpdateResult:
        """One update of a dynamics model; only model-based learners have one."""
        raise NotImplementedError(f"{type(self).__name__} has no dynamics model")

    def acting(self) -> nn.Module:
        """Policy and normaliser only: what acting, evaluation and prediction need."""
        raise NotImplementedError

    def numpy_policy(self) -> NumpyPolicy | None:
        """Acting on the same weights without torch, where the network is small enough to gain by it."""
        return None

    def initial_carry(self, n: int) -> Carry:
        """Recurrent state of `n` environments at the start; None for a policy without memory."""
        return None

    # what is shared --------------------------------------------------------------------------------------------

    def update(self, batch: Batch, *, phase: str = "policy", global_step: int = 0, sync: bool = True) -> UpdateResult:
        """Train mode, `learn` (or `update_model`), counting, and with `sync` metrics as floats."""
        if not self.training:
            self.train()
        result = self.learn(batch, step=global_step) if phase == "policy" else self.update_model(batch)
        self.num_updates += 1
        if sync:
            result.metrics = read_metrics(result.metrics)
        return result

    def make_optimizer(
        self, name: str, parameters: Iterable[nn.Parameter], learning_rate: float, **options: Any
    ) -> Optimizer:
        """An optimizer that is part of the state; `name` is its place in the state and in error messages.

        `eps` and `max_grad_norm`, where they are given, are the learner's own: a schedule moves them.
        """
        optimizer = Optimizer(parameters, learning_rate=learning_rate, **options)
        self.add_module(name, optimizer)
        self._optimizers[name] = optimizer
        for option in options:
            self._made_with.setdefault(option, []).append(optimizer)
        return optimizer

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def seed(self, seed: int) -> None:
        """Restart the learner's random draws."""
        device = next(iter(self.parameters()), torch.empty(0)).device
        self.generator = torch.Generator(device).manual_seed(seed)

    def scheduled(self, name: str) -> bool:
        """Whether `name` is a number that a schedule may move; None is one that is not set."""
        value = getattr(self, name, False)
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first optimizer; setting it sets them all."""
        return next(iter(self._optimizers.values())).learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for optimizer in self._optimizers.values():
            optimizer.learning_rate = value

    def get_extra_state(self) -> dict[str, Any]:
        """Counters and generator, beside the tensors of `state_dict`."""
        device = self.generator.device.type
        return {"num_updates": self.num_updates, "device": device, "generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_extra_state`."""
        self.num_updates = state["num_updates"]
        self.generator.set_state(state["generator"])

    def first_bad_tensor(self) -> str | None:
        """Name of a parameter or buffer that holds a NaN or an infinity."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return name
        return None


def attribute_of(part: str, name: str) -> Any:
    """An attribute of a learner that is the attribute `name` of its `part`, so that a schedule moves it there."""

    def read(learner: Algorithm) -> Any:
        return getattr(getattr(learner, part), name)

    def write(learner: Algorithm, value: Any) -> None:
        setattr(getattr(learner, part), name, value)

    return property(read, write)


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as floats, a tensor of several numbers as their mean, with one transfer for all of them."""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    floats = {name: float(value) for name, value in metrics.items() if name not in tensors}
    if tensors:
        values = torch.stack([value.detach().to(torch.float64).mean() for value in tensors.values()]).tolist()
        floats.update(zip(tensors, values, strict=True))
    return {name: floats[name] for name in metrics}
