"""`Algorithm`: the base class of every learner, and how a learner declares its numbers.

Subclasses write `act` and `learn`; this class has the shared code. `gamma = Number("in [0, 1]", 0.99)` in a learner's
class defines `self.gamma`: its bounds, its default, and that the constructor takes it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.speed.capture import capture_step
from rl_training.speed.eager import leave_eager
from rl_training.speed.optimizer import Optimizer
from rl_training.speed.passes import NumpyPolicy
from rl_training.speed.recurrent_passes import NumpyMemory

Batch = Mapping[str, Tensor]
Carry = Any
Array = NDArray[Any]
BOUNDS: dict[str, Callable[[Any], bool]] = {
    ">= 0": lambda x: x >= 0,
    "> 0": lambda x: x > 0,
    ">= 1": lambda x: x >= 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "any": lambda x: True,
}
NO_DEFAULT: Any = object()


def check_bound(name: str, bound: str, value: Any) -> None:
    """Refuse a number that is out of its bounds; None (not set) and strings are skipped."""
    if isinstance(value, (int, float)) and not BOUNDS[bound](value):
        raise ValueError(f"{name} must be {bound}, got {value}")


class Setting:
    """A number or switch of a learner that stays as it is during a run.

    With a default it is an argument of the learner's constructor too; without one, the learner sets it itself.
    """

    name: str

    def __init__(self, bound: str = "any", default: Any = NO_DEFAULT) -> None:
        self.bound, self.default = bound, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    if TYPE_CHECKING:  # at run time there is no `__get__`: reading it is a plain attribute access

        def __get__(self, learner: Any, owner: Any = None) -> Any: ...

    def __set__(self, learner: Any, value: Any) -> None:
        check_bound(self.name, self.bound, value)
        learner.__dict__[self.name] = value


class Number(Setting):
    """A number of a learner that a schedule may change; None means not set.

    Its value is in the learner's table `numbers`, which comes from the config and is not in `state_dict`. `read` says
    how the captured steps read it: "in place" as a tensor; "by value", where a kernel or Python code needs a float;
    "never"; or "to act", only in acting, which on a CPU is done in numpy. `of` makes it another name of that number.
    """

    def __init__(self, bound: str = "any", default: Any = NO_DEFAULT, *, read: str = "in place", of: str = "") -> None:
        super().__init__(bound, default)
        self.read, self.key = read, of

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self.key = self.key or name

    def __get__(self, learner: Any, owner: Any = None) -> Any:
        return self if learner is None else learner.numbers[self.key]

    def __set__(self, learner: Any, value: Any) -> None:
        check_bound(self.name, self.bound, value)
        learner.numbers[self.key] = value


def declared(learner: type) -> Iterator[tuple[str, Setting]]:
    """The settings and numbers that a learner's classes declare, those of base classes first."""
    for part in reversed(learner.__mro__):
        yield from ((name, value) for name, value in vars(part).items() if isinstance(value, Setting))


class Numbers(dict[str, Any]):
    """A learner's table of numbers: floats, or None for a number that is not set.

    With a `device`, a number that is set becomes a 0-dim tensor there, and later values are written into it, so that a
    captured step reads them. This includes numbers that have not changed yet: a resumed run would otherwise round
    differently. What is read "by value" or "never" stays a float, as does what is read "to act" on a CPU.

    `constants` are the values that a graph cannot read in place: floats, and the addresses of the tensors. A graph is
    valid only for the constants that it was captured with.
    """

    device: torch.device | None = None
    read: Mapping[str, str] = {}  # how captured steps read a number (see `Number`), by its name
    constants: tuple[Any, ...] = ()
    _failures = 0

    def __setitem__(self, name: str, value: float | None) -> None:
        held = self.get(name)
        if isinstance(held, Tensor) and value is not None:
            held.fill_(value)
            return
        if self.device is not None and value is not None and not self._stays_float(name, self.device):
            value = torch.tensor(float(value), device=self.device)  # type: ignore[assignment]
        super().__setitem__(name, value)
        self._find_constants()

    def place(self, name: str, value: Tensor) -> None:
        """Make a 0-dim tensor the number's place, so that whoever holds the tensor changes the number."""
        super().__setitem__(name, value)
        self._find_constants()

    def _stays_float(self, name: str, device: torch.device) -> bool:
        how = self.read.get(name)
        return how in ("by value", "never") or (how == "to act" and device.type == "cpu")

    def _find_constants(self) -> None:
        read = [value for name, value in self.items() if self.read.get(name) != "never"]
        places = [("at", value.data_ptr()) if isinstance(value, Tensor) else value for value in read]
        self.constants = (self._failures, *places)

    def drop_graphs(self) -> None:
        """Invalidate all graphs captured so far: they would draw from an old state of the generator."""
        self._failures += 1
        self._find_constants()

    def __reduce__(self) -> Any:
        """Copy floats as floats; the copy has its own tensors."""
        return Numbers, (dict(self),), {"device": self.device, "read": self.read}

    def update(self, *others: Any, **values: float | None) -> None:
        """Like `dict.update`, but through `__setitem__`."""
        for name, value in dict(*others, **values).items():
            self[name] = value


@dataclass
class UpdateResult:
    """The result of one update.

    Metrics may stay tensors until they are read, since most are never read. A tensor of several numbers is read as its
    mean. `watch` names the metric that is checked for NaN and infinity after every update; it must be one number.
    """

    metrics: dict[str, Any]
    num_gradient_steps: int = 1
    priorities: Tensor | None = None
    watch: str = "loss"

    def __post_init__(self) -> None:
        """Release the autograd graphs of losses."""
        for name, value in self.metrics.items():
            if isinstance(value, Tensor) and value.requires_grad:
                self.metrics[name] = value.detach()


@dataclass(frozen=True)
class ActOutput:
    """Actions [N, ...], the values stored with them (logprobs, values, ...), and recurrent state [N, S].

    The state after the observation is in `extras` too, as "states", if experience stores it (`Facts.state_size`).
    """

    actions: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    carry: Carry = None


def defines_explore(learner: type[Algorithm]) -> bool:
    """Whether a class of learners explores in a way of its own."""
    return learner.explore is not Algorithm.explore


def overrides(learner: type[Algorithm], method: str) -> bool:
    """Whether a class derived from a learner of this package has its own form of a method that this learner has.

    With its own `act`, it does not act in numpy, which is a form of the other learner's `act`.
    """
    ours = next(one for one in learner.__mro__ if one.__module__.startswith("rl_training."))
    theirs = getattr(ours, method, None)
    return theirs is not getattr(Algorithm, method, None) and getattr(learner, method) is not theirs


class Algorithm(nn.Module):
    """A learner: networks, optimizers and random generator in one module whose `state_dict` is complete.

    Its constructor takes by name every declared `Setting` and `Number` that has a default. `numbers` is the table of
    the numbers that a schedule may change; the optimizers read theirs from it at every step.
    """

    learning_rate = Number(">= 0")
    optimizer_eps = Number("> 0", 1e-8, read="by value")
    max_grad_norm = Number("> 0", None)
    adam_beta1 = Setting("in [0, 1)", 0.9)
    weight_decay = Setting(">= 0", 0.01)

    ranks: Any = None  # the other learners of a distributed run (run/ranks.py); None in a run of one process
    steps: tuple[str, ...] = ()  # methods that `accelerate` may compile and capture (see `CapturedStep`)
    graphs: tuple[str, ...] = ()  # methods that call the steps; if there are any, they are captured instead
    reads_logprobs: ClassVar[bool] = True  # of the policy that acted
    reads_values: ClassVar[bool] = True  # of the critic that acted, if a rollout has them; else it values observations
    observes = False  # whether `observe` is called with every step
    eager_part: ClassVar[str] = ""  # describes the part of an update that is neither a step nor a graph

    def __init__(self, *, optimizer: str = "adam", **settings: Any) -> None:
        super().__init__()
        self.numbers = Numbers()
        self.numbers.read = {name: value.read for name, value in declared(type(self)) if isinstance(value, Number)}
        for name, setting in self.settings().items():
            setattr(self, name, settings.pop(name, setting.default))
        if settings:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {next(iter(settings))!r}")
        self.optimizer_kind = optimizer
        self.num_updates = 0
        self._optimizers: dict[str, Optimizer] = {}
        self.generator = torch.Generator()
        self.seed(int(torch.randint(2**31 - 1, (), device="cpu")))

    # what a subclass writes ------------------------------------------------------------------------------------

    def act(
        self, obs: Tensor, carry: Carry = None, *, is_first: Tensor | None = None, deterministic: bool = False,
        action_masks: Tensor | None = None,
    ) -> ActOutput:  # fmt: skip
        """Choose actions for observations [N, ...]."""
        raise NotImplementedError

    def explore(self, actions: Tensor, obs: Tensor, action_masks: Tensor | None = None) -> Tensor:
        """The actions that training takes instead of these deterministic ones [N, ...]; continuous ones are clipped.

        A subclass that learns from replay may define it; then nothing else explores.
        """
        raise NotImplementedError

    def learn(self, batch: Batch) -> UpdateResult:
        """Make one update from one batch."""
        raise NotImplementedError

    def update_model(self, batch: Batch, *, global_step: int = 0) -> UpdateResult:
        """Make one update of the dynamics model; only model-based learners have one."""
        raise NotImplementedError(f"{type(self).__name__} has no dynamics model")

    def observe(self, row: Mapping[str, Any]) -> None:
        """Look at a step of each environment once, before the updates that it makes due; for running statistics.

        It has the columns [N, ...] of `Experience.rows`, of which `envs` are the environments if these are not all.
        """

    def acting(self) -> nn.Module:
        """The modules that acting, evaluation and prediction need: policy and normalizer."""
        raise NotImplementedError

    def acting_tensors(self) -> list[Tensor]:
        """The tensors that acting reads: what is sent to workers."""
        return [value for value in self.acting().state_dict().values() if isinstance(value, Tensor)]

    def numpy_policy(self) -> NumpyPolicy | None:
        """A function that acts on the same weights without torch; None if the network is too large to gain from it."""
        make = getattr(self.acting(), "numpy_policy", None)
        return None if make is None else make()

    def numpy_memory(self) -> NumpyMemory | None:
        """One step of the memory without torch, whose outputs the numpy policy reads; None without a memory."""
        make = getattr(self.acting(), "numpy_memory", None)
        return None if make is None else make()

    def initial_carry(self, n: int) -> Carry:
        """Initial recurrent state of `n` environments; None for a policy without memory."""
        return None

    def exploring_carry(self, n: int) -> Carry:
        """What acting in `n` environments remembers while it explores: the recurrent state, unless there is more."""
        return self.initial_carry(n)

    # what is shared --------------------------------------------------------------------------------------------

    def act_in_training(self, obs: Tensor, carry: Carry = None, **given: Any) -> ActOutput:
        """`act`, or what `explore` makes of its deterministic actions."""
        if not defines_explore(type(self)):
            return self.act(obs, carry, **given)
        found = self.act(obs, carry, deterministic=True, **given)
        actions = self.explore(found.actions, obs, given.get("action_masks"))
        return replace(found, actions=actions.clamp(-1.0, 1.0) if actions.is_floating_point() else actions)

    def update(self, batch: Batch, *, phase: str = "policy", global_step: int = 0, sync: bool = True) -> UpdateResult:
        """Set train mode, call `learn` (or `update_model`) and count the update; with `sync`, metrics become floats."""
        if not self.training:
            self.train()
        result = self.learn(batch) if phase == "policy" else self.update_model(batch)
        self.num_updates += 1
        if sync:
            result.metrics = read_metrics(result.metrics)
        return result

    def accelerate(self, how: str) -> None:
        """Run the `steps` as CUDA graphs ("graph"), or compiled ("compile": on a GPU inside graphs)."""
        if how == "compile":
            leave_eager(self.modules())
        for learner in [module for module in self.modules() if isinstance(module, Algorithm)]:
            learner.numbers.device = learner.device
            for name in learner.steps if how == "compile" else ():
                setattr(learner, name, torch.compile(getattr(learner, name), dynamic=False))
            for name in learner.graphs or learner.steps:
                setattr(learner, name, capture_step(getattr(learner, name), learner.numbers, learner.generator))
            for optimizer in learner._optimizers.values() if how == "compile" else ():
                optimizer.apply_gradients = torch.compiler.disable(optimizer.apply_gradients)  # type: ignore[method-assign]

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """The declared settings and numbers that have a default, by name: arguments of the constructor."""
        return {name: value for name, value in declared(cls) if value.default is not NO_DEFAULT}

    def make_optimizer(
        self, name: str, parameters: nn.Module | Iterable[nn.Parameter], **options: Any
    ) -> Optimizer:
        """Make an optimizer that is part of `state_dict`, under `name`, which error messages use too.

        Its learning rate is that of its name (`critic_learning_rate` for "critic_optimizer") if the learner has one
        that is set, else `learning_rate`. Its other options are the learner's, or those given: names in `numbers`, or
        numbers that stay as they are.
        """
        own = name.removesuffix("optimizer") + "learning_rate"
        options = {
            "learning_rate": (own, "learning_rate") if own in self.numbers else "learning_rate",
            "kind": self.optimizer_kind, "eps": "optimizer_eps", "max_grad_norm": "max_grad_norm",
            "beta1": self.adam_beta1, "weight_decay": self.weight_decay, **options,
        }  # fmt: skip
        optimizer = Optimizer(parameters, numbers=self.numbers, **options)
        self.add_module(name, optimizer)
        self._optimizers[name] = optimizer
        return optimizer

    def joint(self, mean: Tensor) -> Tensor:
        """A batch mean, averaged over all ranks if there are several."""
        return mean if self.ranks is None else self.ranks.mean_(mean.detach().clone())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def seed(self, seed: int) -> None:
        """Restart the learner's random draws."""
        device = next(iter(self.parameters()), torch.empty(0)).device
        if self.generator.device != device:
            self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)  # in place, since a captured step may draw from it

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse `to`, `cuda`, `double` and the like: they would not move optimizers, targets, generator and graphs."""
        if any(fn(parameter.detach()).data_ptr() != parameter.data_ptr() for parameter in self.parameters()):
            raise UserError(
                f"{type(self).__name__} cannot be moved to another device, dtype or memory format; change its networks "
                "before you make it, and load its state_dict."
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def scheduled(self, name: str) -> bool:
        """Whether `name` is a number that a schedule may change."""
        return self._key(name) in self.numbers

    def set_number(self, name: str, value: float) -> None:
        """Change a number during a run, as a schedule does."""
        self.numbers[self._key(name)] = value

    def _key(self, name: str) -> str:
        declared = getattr(type(self), name, None)
        return declared.key if isinstance(declared, Number) else name

    def get_extra_state(self) -> dict[str, Any]:
        """Counters and generator, in addition to the tensors of `state_dict`."""
        device = self.generator.device.type
        return {"num_updates": self.num_updates, "device": device, "generator": self.generator.get_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_extra_state`."""
        self.num_updates = state["num_updates"]
        self.generator.set_state(state["generator"])

    def first_bad_tensor(self) -> str | None:
        """Name of the first parameter or buffer that has a NaN or an infinity; None if all are finite."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return name
        return None


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats (a tensor of several numbers to its mean), with one transfer for all of them."""
    tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
    floats = {name: float(value) for name, value in metrics.items() if name not in tensors}
    if tensors:
        values = torch.stack([value.detach().to(torch.float64).mean() for value in tensors.values()]).tolist()
        floats.update(zip(tensors, values, strict=True))
    return {name: floats[name] for name in metrics}
