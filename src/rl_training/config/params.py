"""Hyper-parameters that every algorithm has, and schedules for any of them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import Field, PlainSerializer, PlainValidator, PrivateAttr, WithJsonSchema, create_model, model_validator

from rl_training.config.networks import UserNetwork
from rl_training.errors import UserError, did_you_mean
from rl_training.models.memory import state_size
from rl_training.validation import StrictModel, validate

Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]
# the widths of hidden layers; the weights between two of the widest take a gigabyte
Widths = Annotated[tuple[Annotated[int, Field(ge=1, le=16384)], ...], Field(max_length=16)]
OwnNetwork = Annotated[
    Any,
    PlainValidator(UserNetwork.read),
    PlainSerializer(lambda network: None if network is None else network.name),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
OptimizerKind = Literal["adam", "adamw", "radam", "rmsprop", "rmsprop_tf", "sgd"]
OF_EPSILON = ("epsilon_start", "epsilon_end", "exploration_fraction", "epsilon_ladder")
SCHEDULE = "_schedule"  # how the key of a schedule ends


class EarlyStopping(StrictModel):
    """Stop when a metric has been at its threshold for some evaluations in a row."""

    metric: str = Field("eval_return_mean", description="Metric to watch.")
    threshold: float = Field(description="Value at which the task counts as solved.")
    patience: int = Field(1, ge=1, description="Evaluations in a row at the threshold.")


class Schedule(StrictModel):
    """A number that changes with progress, the share of the budget used (0 to 1); any scalar can have a schedule."""

    type: Literal["linear", "cosine", "constant"] = Field("linear", description="Shape of the curve from start to end.")
    start: float = Field(description="Value at the first step.")
    end: float | None = Field(None, description="Value at the end of the budget; not needed for constant.")
    fraction: float = Field(1.0, ge=0, le=1, description="Share of the budget after which `end` is reached.")
    begin: float = Field(0.0, ge=0, le=1, description="Share of the budget until which `start` holds.")

    @model_validator(mode="after")
    def _needs_end(self) -> Schedule:
        if self.type != "constant" and self.end is None:
            raise ValueError(f"end is missing; a {self.type} schedule must give it")
        if self.begin > self.fraction:
            raise ValueError(f"begin is {self.begin}; it must be at most fraction ({self.fraction})")
        return self

    def value(self, progress: float) -> float:
        """The value at `progress` (0 to 1) of the budget."""
        if self.type == "constant" or self.end is None:
            return self.start
        if progress >= self.fraction:
            return self.end
        if progress <= self.begin:
            return self.start
        share = (progress - self.begin) / (self.fraction - self.begin)
        if self.type == "cosine":
            share = 0.5 * (1.0 - math.cos(math.pi * share))
        return self.start + (self.end - self.start) * share


REVERSED = "Stable-Baselines3's falls from 1 to 0: f there is lambda p: f(1 - p) here"


class FunctionSchedule(Schedule):
    """A function of progress (0 to 1); a file stores only its name and end values, so a resume needs it again."""

    type: Literal["function"] = "function"  # type: ignore[assignment]
    name: str
    _function: Callable[[float], float] | None = PrivateAttr(None)

    @classmethod
    def of(cls, function: Callable[[float], float], key: str) -> FunctionSchedule:
        """The schedule that a function makes; one of Stable-Baselines3's, by the name of its argument, is refused."""
        name = getattr(function, "__name__", type(function).__name__)
        code = getattr(function, "__code__", None)
        if code is not None and "remaining" in (first := next(iter(code.co_varnames), "")):
            raise UserError(f"{key} is a function of {first}; it must be one of the progress from 0 to 1 ({REVERSED}).")
        ends = {"start": function(0.0), "end": function(1.0)}
        made = validate(cls, {"name": name, **ends}, f"algo_kwargs.{key}, a function")
        made._function = function
        return made

    def value(self, progress: float) -> float:
        """The value of the function at `progress` (0 to 1) of the budget."""
        assert self._function is not None, "which check_schedules sees to"
        value = float(self._function(progress))
        if not math.isfinite(value):
            where = f"at {progress:.3f} of the budget"
            raise UserError(f"the schedule {self.name!r} returned {value} {where}; it must be a finite number.")
        return value

    def check_given(self, key: str) -> None:
        """Refuse a run whose function was not passed again."""
        if self._function is None:
            again = f'resume(changes={{"algo_kwargs": {{"{key}": {self.name}}}}})'
            raise UserError(f"{key} is the function {self.name!r}, which no file stores; give it again, as in {again}.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the function, which only the learner's process calls."""
        return type(self).model_validate, (self.model_dump(),)


class Reason(NamedTuple):
    """Why settings have no effect, or cannot be scheduled.

    It holds if `when` is true of the parameters and `where`, if given, of the spaces. `why` is the end of a sentence;
    `{p.name}` in it stands for the value of a setting.
    """

    names: tuple[str, ...]
    why: str
    when: Callable[[Any], bool] = lambda params: True
    where: Callable[[Any], bool] | None = None  # of the spaces


LINEAR_HEADS = Reason(  # of `make_policy` in config/networks.py
    ("hidden_sizes", "activation"), "actor and critic are linear heads on the convolutions of an image",
    lambda p: p.network is None, lambda spaces: spaces.obs_kind == "image",
)  # fmt: skip


Reasons = tuple[Reason, ...]
Limits = tuple[tuple[str, str], ...]  # a setting, and the one that it must not exceed


class Facts(NamedTuple):
    """What the rest of the package asks about the settings of any algorithm, whatever they are called there."""

    rows: int = 0  # of one gradient step; 0: as many as a rollout has
    widest: int = 0  # hidden layer, by which the number of threads and the device are chosen
    members: int = 1  # networks side by side
    captured: str = "step"  # what `accelerate` captures: each gradient step, a whole "update", or "" (nothing)
    replay_rows: int = 0  # that the replay buffer keeps
    replay_on_device: bool = False  # whether it must
    random_steps: int = 0  # before learning starts
    pretrain_updates: int = 0  # before the first step
    steps_environments: bool = True  # False: these settings learn from recorded data alone
    has_support: bool = False  # of a categorical distribution
    store_numbers: tuple[str, ...] = ()  # that the store reads, so a schedule changes them there too
    critic_obs: tuple[str, ...] = ()  # parts of an observation that only the critic sees
    state_size: int = 0  # numbers of the policy's memory that experience stores with every observation
    fits_every: float = 0.0  # steps between fits of a dynamics model; infinity: one fit; 0: there is no model


AnySchedule = Schedule | Mapping[str, Any] | Callable[[float], float]


class Params(StrictModel):
    """Hyper-parameters that every algorithm accepts."""

    synonyms: ClassVar[Mapping[str, str]] = {}  # a field -> another name for it, with the same default
    unused: ClassVar[Reasons] = (  # settings without effect; a subclass adds its own
        Reason(("optimizer_eps",), "optimizer is sgd, which has no epsilon", lambda p: p.optimizer == "sgd"),
        Reason(
            ("adam_beta1",), "optimizer is {p.optimizer}, and only adam, adamw and radam use it",
            lambda p: p.optimizer not in ("adam", "adamw", "radam"),
        ),
        Reason(
            ("weight_decay",), "optimizer is {p.optimizer}, and only adamw uses it", lambda p: p.optimizer != "adamw"
        ),
    )  # fmt: skip
    fixed: ClassVar[Reasons] = (  # numbers that cannot be scheduled; a subclass adds its own
        Reason(("adam_beta1", "weight_decay"), "the optimizers are made with it"),
    )
    at_most: ClassVar[Limits] = ()  # likewise

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Learning rate of the optimizer.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per environment step.")
    hidden_sizes: Widths = Field((64, 64), description="Widths of the hidden layers.")
    activation: Activation = Field("tanh", description="Activation of the hidden layers.")
    network: OwnNetwork = Field(
        None, description="Your own torch.nn.Module before the hidden layers, or module:name of what makes one."
    )
    optimizer: OptimizerKind = Field("adam", description="Optimizer; rmsprop_tf has its epsilon inside the root.")
    optimizer_eps: float = Field(1e-5, gt=0, le=1, description="Epsilon of the optimizer.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first beta: how much of the mean gradient stays.")
    weight_decay: float = Field(0.01, ge=0, le=10, description="Decay of adamw's weights, times the learning rate.")
    max_grad_norm: float | None = Field(0.5, gt=0, description="Maximum gradient norm; null: no clipping.")
    eval_interval: int | None = Field(
        None, ge=0, description="Environment steps between evaluations; 0: only at the end; null: ten evaluations per "
        "run, all but the last with at most five episodes.",
    )  # fmt: skip
    early_stopping: EarlyStopping | None = Field(None, description="Stop when an evaluation metric is good enough.")
    max_updates: int | None = Field(
        None, ge=1, description="Stop after the turn that reaches this many updates, counted across resumes."
    )
    schedules: dict[str, Schedule] = Field({}, exclude=True, description="From the <name>_schedule keys.")

    @model_validator(mode="before")
    @classmethod
    def _fill_synonyms(cls, data: dict[str, Any]) -> dict[str, Any]:
        for other, name in cls.synonyms.items():
            default = cls.model_fields[other].default
            if name in data and data.get(other, default) == default:  # earlier versions stored the default as well
                data = {**data, other: data[name]}
            elif other in data and name not in data:
                data = {**data, name: data[other]}
        return data

    @model_validator(mode="after")
    def _early_stopping_is_evaluated(self) -> Params:
        if self.early_stopping is not None and self.eval_interval == 0:
            raise ValueError("eval_interval is 0; early_stopping looks at evaluations, so it must be at least 1")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Params:
        for name, limit in self._declared("at_most"):
            value, most = getattr(self, name), getattr(self, limit)
            if value is not None and value > most:
                raise ValueError(f"{name} is {value}; it must be at most {limit} ({most})")
        return self

    @property
    def facts(self) -> Facts:
        """Facts about these values; a subclass adds its own."""
        return Facts(widest=max(self.hidden_sizes, default=0))

    @property
    def lag(self) -> int | None:
        """How many updates the acting policy lags behind; None if it cannot lag."""
        return None

    @property
    def ladder(self) -> float:
        """How much less each worker explores than the previous one."""
        return 0.0

    def settle(self, recipe: Any, spaces: Any, seed: int) -> Any:
        """A copy in which every value that depends on the environment is set."""
        return self

    def check_new_run(self) -> None:
        """Refuse values that only a checkpoint of an earlier version may have."""

    def largest(self, name: str) -> float:
        """The largest value that a number has in a run."""
        schedule = self.schedules.get(name)
        return float(getattr(self, name)) if schedule is None else max(schedule.value(0.0), schedule.value(1.0))

    def fixed_numbers(self) -> dict[str, str]:
        """Numbers that cannot be scheduled, for example because they are read once, each with the reason."""
        return self._reasons("fixed")

    def find_unused(self, spaces: Any = None) -> dict[str, str]:
        """The settings that have no effect with these values, in any environment or in these spaces, and why."""
        return self._reasons("unused", spaces)

    def _declared(self, table: str) -> list[Any]:
        """What this class and its bases declare in a table, the most specific first."""
        return [entry for part in type(self).__mro__ for entry in part.__dict__.get(table, ())]

    def _reasons(self, table: str, spaces: Any = None) -> dict[str, str]:
        found: list[Reason] = self._declared(table)
        holds = [r for r in found if r.when(self) and (r.where is None or (spaces is not None and r.where(spaces)))]
        reasons = {name: reason.why.format(p=self) for reason in reversed(holds) for name in reason.names}
        return {name: why for name, why in reasons.items() if name in type(self).model_fields}

    def built_in_schedules(self) -> dict[str, Schedule]:
        """Schedules that are part of the algorithm, such as that of epsilon; `<name>_schedule` keys override them."""
        return {}

    def arguments_of(self, learner: type) -> dict[str, Any]:
        """The hyper-parameters that the constructor of the learner or of a base class takes by name."""
        accepted: set[str] = set()
        for part in learner.__mro__:
            own = part.__dict__.get("__init__")
            if inspect.isfunction(own):
                arguments = inspect.signature(own).parameters
                accepted.update(arguments)
                if all(argument.kind != argument.VAR_KEYWORD for argument in arguments.values()):
                    break
        else:  # the base class of learners takes all of their settings
            accepted.update(getattr(learner, "settings", dict)())
        return {name: getattr(self, name) for name in type(self).model_fields if name in accepted}


class CriticWidths(StrictModel):
    """The widths of critics that are networks of their own; a part of `Params`."""

    critic_hidden_sizes: Widths | None = Field(None, description="Widths of the critics' layers; null: hidden_sizes.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the critics' widths."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        return inherited._replace(widest=max(inherited.widest, *self.critic_hidden_sizes or (0,)))


class EpsilonParams(StrictModel):
    """Exploration by an epsilon that falls; a part of `Params`."""

    fixed: ClassVar[Reasons] = (Reason(OF_EPSILON, "it is a part of epsilon's own schedule"),)

    epsilon_start: float = Field(1.0, ge=0, le=1, description="Initial probability of a random action.")
    epsilon_end: float = Field(0.05, ge=0, le=1, description="Final probability of a random action.")
    exploration_fraction: float = Field(0.2, ge=0, le=1, description="Share of the budget over which epsilon falls.")
    epsilon_ladder: float = Field(
        0.0, ge=0, le=100, description="Ape-X: worker i of n acts with epsilon ** (1 + this * i / (n - 1))."
    )

    @property
    def ladder(self) -> float:
        """`epsilon_ladder`."""
        return self.epsilon_ladder

    def built_in_schedules(self) -> dict[str, Schedule]:
        """Epsilon falls."""
        inherited: dict[str, Schedule] = super().built_in_schedules()  # type: ignore[misc]
        falls = Schedule(start=self.epsilon_start, end=self.epsilon_end, fraction=self.exploration_fraction)
        return inherited | {"epsilon": falls}


class MemoryParams(StrictModel):
    """A memory in the policy's network; a part of `Params`."""

    unused: ClassVar[Reasons] = (
        Reason(("memory_size", "memory_layers"), "memory is none", lambda p: p.memory == "none"),
    )

    memory: Literal["none", "gru", "lstm"] = Field(
        "none", description="Memory of the policy within an episode, between encoder and hidden layers."
    )
    memory_size: int = Field(128, ge=1, le=16_384, description="Units per layer of the memory.")
    memory_layers: int = Field(1, ge=1, le=16, description="Layers of the memory.")

    @property
    def facts(self) -> Facts:
        """As the base class, plus the memory."""
        inherited: Facts = super().facts  # type: ignore[misc]  # of the Params that this is a part of
        size = state_size(self.memory, self.memory_size, self.memory_layers)
        return inherited._replace(state_size=size, widest=max(inherited.widest, self.memory_size if size else 0))


AnyParams = TypeVar("AnyParams", bound=Params)


def with_defaults(params: type[AnyParams], class_name: str, **defaults: Any) -> type[AnyParams]:
    """The same hyper-parameters with other defaults, for an algorithm that is a setting of another one's axes."""
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        info = copy.copy(params.model_fields[name])
        info.default = default
        fields[name] = (info.annotation, info)
    return create_model(f"{class_name}Params", __base__=params, __doc__=f"Hyper-parameters of {class_name}.", **fields)


def read_params(model: type[AnyParams], algo_kwargs: Mapping[str, Any]) -> AnyParams:
    """`algo_kwargs` as parameters of an algorithm, its `<name>_schedule` keys gathered under `schedules`."""
    numeric = _numbers_of(model)
    plain: dict[str, Any] = {}
    schedules: dict[str, Schedule] = {}
    for key, value in algo_kwargs.items():
        name = key.removesuffix(SCHEDULE) if isinstance(key, str) else key
        if name == key or key in model.model_fields:
            plain[key] = value
        elif name not in numeric:
            if name in model.model_fields and model.model_fields[name].annotation in (int, int | None):
                raise UserError(f"algo_kwargs.{key}: {name} is a whole number, which cannot change during a run.")
            raise UserError(f"algo_kwargs: {key!r} schedules no number; {did_you_mean(name, numeric)}")
        elif value is not None:  # removes a preset's schedule
            schedules[name] = _read_schedule(value, key)
    if "schedules" in plain:
        raise UserError("algo_kwargs: unknown key 'schedules'; a schedule is given as <name>_schedule.")
    params = validate(model, plain, "algo_kwargs", also_known=[name + SCHEDULE for name in numeric])
    for name, schedule in schedules.items():
        same = {other: getattr(params, other) for other in (model.synonyms.get(name),) if other}  # has its own bounds
        for end in {schedule.start, schedule.end} - {None}:
            validate(model, {**plain, **same, name: end}, f"algo_kwargs.{name}{SCHEDULE}")
    for other, name in model.synonyms.items():
        one, two = getattr(params, other), getattr(params, name)
        if one != two:
            raise UserError(f"algo_kwargs: {other} is {one} and {name} {two}; they mean the same, give one of them.")
        if other in schedules and name in schedules:
            raise UserError(f"algo_kwargs: {other}{SCHEDULE} and {name}{SCHEDULE} mean the same, give one of them.")
    return params.model_copy(update={"schedules": schedules})


def _read_schedule(value: Any, key: str) -> Schedule:
    if callable(value):
        return FunctionSchedule.of(value, key)
    if isinstance(value, Schedule):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"algo_kwargs: {key} is {value!r}; it should be such as {{type: linear, start: 0.1, end: 0}}.")
    model = FunctionSchedule if value.get("type") == "function" else Schedule
    return validate(model, value, f"algo_kwargs.{key}")


def parameter_names(model: type[Params]) -> list[str]:
    """Names that `algo_kwargs` may contain, including schedules."""
    plain = [name for name in model.model_fields if name != "schedules"]
    return [*plain, *(name + SCHEDULE for name in _numbers_of(model))]


def _numbers_of(model: type[Params]) -> list[str]:
    """Names of the fields that may have a schedule."""
    return [name for name, info in model.model_fields.items() if _is_number(info.annotation)]


def _is_number(annotation: Any) -> bool:
    return annotation is float or any(_is_number(part) for part in get_args(annotation))


def dump_params(params: Params) -> dict[str, Any]:
    """Plain data that `read_params` reads back to the same parameters."""
    plain = params.model_dump(mode="json", exclude={"schedules"})
    return plain | {f"{name}{SCHEDULE}": s.model_dump(mode="json") for name, s in params.schedules.items()}


def check_schedules(algo: str, params: Params, algorithm: Any) -> None:
    """Refuse the schedule of a number that neither the algorithm nor its store can change."""
    fixed, changed_by_store = params.fixed_numbers() | params.find_unused(), params.facts.store_numbers
    for name, schedule in params.schedules.items():
        if isinstance(schedule, FunctionSchedule):
            schedule.check_given(f"{name}{SCHEDULE}")
    for name in (*params.schedules, *params.built_in_schedules()):
        if name in fixed or not (algorithm.scheduled(name) or name in changed_by_store):
            why = f"; {fixed[name]}" if name in fixed else ""
            raise UserError(f"algo_kwargs.{name}{SCHEDULE}: {algo} cannot change {name} during a run{why}.")


def change_params(model: type[Params], stored: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Stored `algo_kwargs` with changes; of two keys with the same meaning, the changed one stays.

    A number given without a schedule replaces its previous schedule.
    """
    changed = {key for key, value in changes.items() if key not in stored or stored[key] != value}
    pairs = [(other + end, name + end) for other, name in model.synonyms.items() for end in ("", SCHEDULE)]
    stale = {old for pair in pairs for old, new in (pair, pair[::-1]) if new in changed and old not in changed}
    stale |= set(replaced_schedules(model, stored, changes))
    return {key: value for key, value in {**stored, **changes}.items() if key not in stale}


def replaced_schedules(model: type[Params], kwargs: Mapping[str, Any], given: Iterable[str]) -> dict[str, str]:
    """Schedules in `kwargs` that the given names replace, each with that name, unless the schedule is given too."""
    names = set(given)
    same = [pair for other, name in model.synonyms.items() for pair in ((other, name), (name, other))]
    meant = [(name, name) for name in names] + [(other, name) for other, name in same if name in names]
    found = {f"{scheduled}{SCHEDULE}": name for scheduled, name in meant}
    return {key: name for key, name in found.items() if key in kwargs and key not in names}
