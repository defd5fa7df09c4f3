"""How a learner declares its numbers: `gamma = Number("in [0, 1]")` in its class is where `self.gamma` is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

BOUNDS: dict[str, Callable[[Any], bool]] = {
    ">= 0": lambda x: x >= 0,
    "> 0": lambda x: x > 0,
    ">= 1": lambda x: x >= 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "any": lambda x: True,
}


def check_bound(name: str, bound: str, value: Any) -> None:
    """Refuse a number that is out of its bounds; None (not set) and strings are skipped."""
    if isinstance(value, (int, float)) and not BOUNDS[bound](value):
        raise ValueError(f"{name} must be {bound}, got {value}")


class Setting:
    """A number of a learner that stays as it is during a run, with its bounds."""

    name: str

    def __init__(self, bound: str) -> None:
        self.bound = bound

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

    def __init__(self, bound: str = "any", *, read: str = "in place", of: str = "") -> None:
        super().__init__(bound)
        self.read, self.key = read, of

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        self.key = self.key or name

    def __get__(self, learner: Any, owner: Any = None) -> Any:
        return self if learner is None else learner.numbers[self.key]

    def __set__(self, learner: Any, value: Any) -> None:
        check_bound(self.name, self.bound, value)
        learner.numbers[self.key] = value


def numbers_read(learner: type, how: str) -> frozenset[str]:
    """Names of a learner's numbers that captured steps read in that way."""
    declared = {name: value for part in reversed(learner.__mro__) for name, value in vars(part).items()}
    return frozenset(name for name, value in declared.items() if isinstance(value, Number) and value.read == how)
