"""Models of user input: strict about names, types and bounds, and able to say in one sentence what is wrong."""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rl_training.errors import UserError, did_you_mean

Model = TypeVar("Model", bound="StrictModel")
LARGEST = 2**63
LARGEST_TREE = 10_000  # values; a few lines of YAML aliases can stand for billions
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 60


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown keys, booleans as numbers, and NaN; reads `1e5` as a whole number."""

    # constants: an infinity in env_kwargs must not come back from a checkpoint as None
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, ser_json_inf_nan="constants"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_numbers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: _read_number(key, value, cls.model_fields.get(key)) for key, value in data.items()}


def check_plain(data: Any, where: str) -> None:
    """Refuse what a YAML or JSON file cannot give back as it is: other types, other keys, endless nesting."""
    left = [(data, where)]
    for _ in range(LARGEST_TREE):
        if not left:
            return
        value, place = left.pop()
        if isinstance(value, Mapping):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"{place} has the key {_show(odd[0])}; every key must be a word")
            left += [(part, f"{place}.{key}") for key, part in value.items()]
        elif isinstance(value, list | tuple):
            left += [(part, f"{place}[{position}]") for position, part in enumerate(value)]
        elif type(value) not in (bool, int, float, str, type(None)):
            raise ValueError(f"{place} is a {type(value).__name__}; a config holds numbers, words, lists and mappings")
    raise ValueError(f"{where} holds more than {LARGEST_TREE} values")


def _read_number(key: Any, value: Any, field: Any) -> Any:
    kinds = _plain_types(field.annotation) if field is not None else set()
    if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
        raise ValueError(f"{key} is {value}; it must be a number")
    if isinstance(value, str) and int in kinds and str not in kinds:
        with contextlib.suppress(ValueError, OverflowError):  # pydantic says what is wrong with other words
            value = int(number) if (number := float(value)) == int(number) else value
    if isinstance(value, int) and abs(value) >= LARGEST and kinds & {int, float}:
        raise ValueError(f"{key} is too large; it must be below 2**63")
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
        raise UserError(f"{where}: the key {_show(odd[0])} is not a word.")
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{where}: {_first_problem(error, [*model.model_fields, *also_known])}") from None


def _first_problem(error: ValidationError, known: list[str]) -> str:
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {_show(field)}; {did_you_mean(field, known)}"
    if problem["type"] == "missing":
        return f"{field} is missing; it must be given."
    message = re.sub(r"^(Value error,|Input|String|Tuple|List|Dictionary) ", "", problem["msg"])
    if problem["type"] == "value_error":
        return f"{message}."
    return f"{field} is {_show(problem['input'])}; it {message}."


def _show(value: Any) -> str:
    """The value for a sentence, never long."""
    try:
        text = _shorten.repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
