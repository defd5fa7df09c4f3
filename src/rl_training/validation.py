"""Models of user input: strict about names, types and bounds, with one-sentence error messages."""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rl_training.errors import UnknownKey, UserError, did_you_mean, sb3_hints

Model = TypeVar("Model", bound="StrictModel")
READ = {"read": True}  # pydantic's context of what `validate` makes: a file may have said it, not the user's code
LARGEST = 2**63
LARGEST_TREE = 10_000  # values; a few lines of YAML aliases can expand to billions
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 60
_WANTED = {  # by the kind of complaint or its first word, in words that are not Python's
    "bool": "true or false", "int": "a whole number", "float": "a number", "tuple": "a list", "list": "a list",
    "dict": "a mapping of names to values", "model": "a mapping of names to values", "string_type": "a word",
}  # fmt: skip


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown keys, booleans as numbers, and NaN; reads `1e5` as a whole number.

    A `pathlib.Path` is read as text, also in a mapping of names to values.
    """

    # constants: an infinity in env_kwargs must not come back from a checkpoint as None
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, ser_json_inf_nan="constants",
        protected_namespaces=(),  # before 2.10, pydantic warned of names such as model_updates
    )

    @model_validator(mode="before")
    @classmethod
    def _read_numbers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: _read_number(key, _read_path(value), cls.model_fields.get(key)) for key, value in data.items()}


def check_plain(data: Any, where: str) -> None:
    """Refuse what a YAML or JSON file cannot store exactly: other types, other keys, endless nesting."""
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


def _read_path(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: os.fspath(part) if isinstance(part, os.PathLike) else part for key, part in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


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
    """Make `model` from `data`; a UserError names the field, the value and what would be right."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a mapping of names to values, not {type(data).__name__}.")
    if odd := [key for key in data if not isinstance(key, str)]:
        raise UserError(f"{where}: the key {_show(odd[0])} is not a word.")
    try:
        return model.model_validate(dict(data), context=READ)
    except ValidationError as error:
        problems = [_Problem(_keys_of(found, data), found) for found in error.errors(include_url=False)]
        # a misspelled key is often reported as a missing one too
        if found := next((one for one in problems if one.found["type"] == "extra_forbidden"), None):
            unknown = found.path
            owner = _model_at(model, unknown[:-1])
            known = [*owner.model_fields, *(also_known if owner is model else ())]
            hint = did_you_mean(unknown[-1], known, found.found["input"])
            raise UnknownKey(where, ".".join(unknown), hint, data) from None
        raise UserError(f"{where}: {_describe(problems)}") from None


def whole_number(name: str, value: Any, *, least: int) -> int:
    """The value as a whole number; `1e5` is one."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.5
    if not number.is_integer() or number < least:
        raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return int(value)


class _Problem(NamedTuple):
    """One error of pydantic, and the keys that lead to it."""

    path: list[str]
    found: Any


def _keys_of(found: Any, data: Any) -> list[str]:
    """The keys that lead to an error; the other parts of its location are pydantic's names for members of a union."""
    path: list[str] = []
    *_, last = found["loc"] or (None,)
    for place in found["loc"]:
        listed = isinstance(data, list | tuple) and isinstance(place, int)
        present = place < len(data) if listed else isinstance(data, Mapping) and place in data
        if listed or present or (found["type"] == "missing" and place == last):
            path.append(str(place))
            data = data[place] if present else None
    return path


def _model_at(model: type[BaseModel], path: Iterable[str]) -> type[BaseModel]:
    """The model of the mapping to which these keys lead."""
    for name in path:
        kinds = _plain_types(field.annotation) if (field := model.model_fields.get(name)) else set()
        model = next((kind for kind in kinds if issubclass(kind, StrictModel)), model)
    return model


def _describe(problems: list[_Problem]) -> str:
    # every member of a union reports errors; the best match is the one that was meant
    of_field = [one for one in problems if one.path[:1] == problems[0].path[:1]]
    path, found = max(of_field, key=lambda one: len(one.path))
    field, value = ".".join(path), found["input"]
    if found["type"] == "missing" and isinstance(value, Mapping):
        return f"{field} is missing; it must be given."
    if found["type"] == "missing":
        return f"{field.rpartition('.')[0]} is {_show(value)}; it should have more entries."
    if found["type"] == "value_error":
        message = found["msg"].removeprefix("Value error, ")
        return f"{field}: {message}." if field else f"{message}."
    wanted = dict.fromkeys(_in_words(one.found) for one in of_field if one.path == path)
    hint = sb3_hints()["values"].get(path[-1]) if path else None
    return f"{field} is {_show(value)}; it should {', or '.join(wanted)}{f' ({hint})' if hint else ''}."


def _in_words(found: Any) -> str:
    """What follows "it should" in a sentence."""
    known = _WANTED.get(found["type"], _WANTED.get(found["type"].partition("_")[0]))
    message = re.sub(r"^(Input|String|Tuple|List|Dictionary) should ", "", found["msg"])
    return message.replace(" after validation", "") if known is None else f"be {known}"


def _show(value: Any) -> str:
    """The value for a message, shortened."""
    try:
        text = _shorten.repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
