"""Models of user input: strict about names, types and bounds, and able to say in one sentence what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rl_training.errors import UserError, did_you_mean

Model = TypeVar("Model", bound="StrictModel")


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown keys, booleans as numbers, and NaN; reads `1e5` as a whole number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _read_numbers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: _read_number(key, value, cls.model_fields.get(key)) for key, value in data.items()}


def _read_number(key: Any, value: Any, field: Any) -> Any:
    kinds = _plain_types(field.annotation) if field is not None else set()
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise ValueError(f"{key} is {value}; it must be a number")
    if isinstance(value, str) and int in kinds and str not in kinds:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if math.isfinite(number) and number == int(number) else value
    return value


def _plain_types(annotation: Any) -> set[Any]:
    if isinstance(annotation, type):
        return {annotation}
    return {kind for part in get_args(annotation) for kind in _plain_types(part)}


def validate(model: type[Model], data: Any, where: str, *, also_known: Iterable[str] = ()) -> Model:
    """`model` made from `data`, or a UserError of one sentence that names field, value and what would be right."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a mapping of names to values, not {type(data).__name__}.")
    if odd := [key for key in data if not isinstance(key, str)]:
        raise UserError(f"{where}: the key {odd[0]!r} is not a word.")
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error, [*model.model_fields, *also_known])}") from None


def _first_problem(error: ValidationError, known: list[str]) -> str:
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {field!r}; {did_you_mean(field, known)}"
    if problem["type"] == "missing":
        return f"{field} is missing; it must be given."
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] == "value_error":
        return f"{message}."
    value = repr(problem["input"])
    return f"{field} is {value if len(value) <= 60 else value[:57] + '...'}; it {message}."
