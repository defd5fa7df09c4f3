"""Hyper-parameters that every algorithm has, and schedules for any of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from rl_training.errors import UserError, did_you_mean
from rl_training.validation import StrictModel, validate

Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]
WIDEST = 16384  # two such layers hold a gigabyte of weights between them
OptimizerKind = Literal["adam", "rmsprop", "rmsprop_tf", "sgd"]


class EarlyStopping(StrictModel):
    """Stop when a metric has been at its threshold for some evaluations in a row."""

    metric: str = Field("eval_return_mean", description="Metric to watch.")
    threshold: float = Field(description="Value at which the task counts as solved.")
    patience: int = Field(1, ge=1, description="Evaluations in a row at the threshold.")


class Schedule(StrictModel):
    """A value that moves with the share of the budget that is spent."""

    type: Literal["linear", "cosine", "constant"] = Field("linear", description="Shape of the way from start to end.")
    start: float = Field(description="Value at the first step.")
    end: float | None = Field(None, description="Value when the budget is spent; constant needs none.")
    fraction: float = Field(1.0, gt=0, le=1, description="Share of the budget after which `end` is reached.")

    @model_validator(mode="after")
    def _needs_end(self) -> Schedule:
        if self.type != "constant" and self.end is None:
            raise ValueError(f"end is missing; a {self.type} schedule must give it")
        return self

    def value(self, progress: float) -> float:
        """The value when `progress` (0 to 1) of the budget is spent."""
        if self.type == "constant" or self.end is None:
            return self.start
        share = min(1.0, progress / self.fraction)
        if share >= 1.0:
            return self.end
        if self.type == "cosine":
            share = 0.5 * (1.0 - math.cos(math.pi * share))
        return self.start + (self.end - self.start) * share


class Params(StrictModel):
    """Accepted by every algorithm."""

    learning_rate: float = Field(3e-4, ge=0, le=10, description="Step size of the optimizer.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per environment step.")
    hidden_sizes: tuple[int, ...] = Field((64, 64), max_length=16, description="Widths of the hidden layers.")
    activation: Activation = Field("tanh", description="Activation of the hidden layers.")
    optimizer: OptimizerKind = Field("adam", description="Optimizer; rmsprop_tf has its epsilon inside the root.")
    optimizer_eps: float = Field(1e-5, gt=0, le=1, description="Epsilon of the optimizer.")
    max_grad_norm: float | None = Field(0.5, gt=0, description="Largest gradient norm; null does not clip.")
    eval_interval: int = Field(0, ge=0, description="Environment steps between evaluations; 0 is at the end only.")
    early_stopping: EarlyStopping | None = Field(None, description="Stop when an evaluation metric is good enough.")
    max_updates: int | None = Field(None, ge=1, description="Stop after this many updates, counted across resumes.")
    schedules: dict[str, Schedule] = Field(
        default_factory=dict, exclude=True, description="From the <name>_schedule keys."
    )

    @model_validator(mode="after")
    def _positive_widths(self) -> Params:
        if any(width < 1 or width > WIDEST for width in self.hidden_sizes):
            raise ValueError(f"hidden_sizes is {list(self.hidden_sizes)}; every width must be from 1 to {WIDEST}")
        return self

    @model_validator(mode="after")
    def _early_stopping_is_evaluated(self) -> Params:
        if self.early_stopping is not None and not self.eval_interval:
            raise ValueError("eval_interval is 0; early_stopping looks at evaluations, so it must be at least 1")
        return self

    def built_in_schedules(self) -> dict[str, Schedule]:
        """Schedules that an algorithm has by its nature, such as epsilon's; `<name>_schedule` keys win over them."""
        return {}

    def arguments_of(self, learner: type) -> dict[str, Any]:
        """The hyper-parameters that the learner's constructor takes, by name."""
        accepted = {name for part in learner.__mro__ for name in _keywords(part)}
        return {name: getattr(self, name) for name in type(self).model_fields if name in accepted}


def _keywords(part: type) -> list[str]:
    own = part.__dict__.get("__init__")
    return list(inspect.signature(own).parameters) if inspect.isfunction(own) else []


AnyParams = TypeVar("AnyParams", bound=Params)


def read_params(model: type[AnyParams], algo_kwargs: Mapping[str, Any]) -> AnyParams:
    """`algo_kwargs` as parameters of an algorithm, its `<name>_schedule` keys gathered under `schedules`."""
    suffix = "_schedule"
    numeric = [name for name, info in model.model_fields.items() if _is_number(info.annotation)]
    plain, schedules = {}, {}
    for key, value in algo_kwargs.items():
        name = key.removesuffix(suffix) if isinstance(key, str) else key
        if name == key or key in model.model_fields:
            plain[key] = value
        elif name not in numeric:
            raise UserError(f"algo_kwargs: {key!r} schedules no number; {did_you_mean(name, numeric)}")
        else:
            schedules[name] = validate(Schedule, value, f"algo_kwargs.{key}")
            for end in (schedules[name].start, schedules[name].end):
                if end is not None:
                    _check_bounds(model, name, end, key)
    if "schedules" in plain:
        raise UserError("algo_kwargs: unknown key 'schedules'; a schedule is given as <name>_schedule.")
    known = [name + suffix for name in numeric]
    params = validate(model, plain, "algo_kwargs", also_known=known)
    return params.model_copy(update={"schedules": schedules})


def _is_number(annotation: Any) -> bool:
    return annotation is float or annotation == (float | None)


def _check_bounds(model: type[Params], name: str, value: float, key: str) -> None:
    try:
        model.__pydantic_validator__.validate_assignment(model.model_construct(), name, value)
    except ValueError as error:
        reason = str(error).splitlines()[2].strip().split(" [")[0].removeprefix("Input ")
        raise UserError(f"algo_kwargs.{key}: {name} would be {value}; it {reason}.") from None


def dump_params(params: Params) -> dict[str, Any]:
    """Plain data that `read_params` reads back to the same parameters."""
    plain = params.model_dump(mode="json", exclude={"schedules"})
    return plain | {f"{name}_schedule": s.model_dump(mode="json") for name, s in params.schedules.items()}
