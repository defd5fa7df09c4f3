"""Exceptions for users: each message is one sentence that says what is wrong and what would be right."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

LONGEST = 380  # characters of a sentence
FOUR_VALUES = "not enough values to unpack (expected 5, got 4)"  # Python's message for an old `step`
MISSING = re.compile(r"\breset\(\) got an unexpected keyword argument '(seed|options)'")
SEVERAL = re.compile(r"setting an array element|only .* arrays can be converted")  # numpy's, where one is wanted
RESET = "reset(self, *, seed=None, options=None)"
NAMES_LENGTH = 250  # characters of the names that are listed when none is near
ALSO_CALLED = {"lr": "learning_rate", "env": "env_id"}


# control characters except tab and newline, and marks that change the direction of text
_CONTROLS = [*range(9), *range(11, 32), *range(127, 160)]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_UNPRINTABLE = dict.fromkeys([*_CONTROLS, *_DIRECTIONS])


class UserError(ValueError):
    """A wrong command, config, file or environment; the command line prints the message and exits with 2.

    The message is always one short line, whatever went into it (a path, a value, the text of another error).
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnknownKey(UserError):
    """An unknown key; `data` is the whole mapping in which it was found."""

    def __init__(self, where: str, field: str, hint: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{where}: unknown key {field[:60]!r}; {hint}")
        self.where, self.field, self.data, self.is_near = where, field, data or {}, not hint.startswith("known")

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled error is only its message."""
        return UserError, (str(self),)


class EnvironmentFailure(RuntimeError):
    """An environment failed during a run: a one-line message, and the command line exits with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))

    @classmethod
    def of(cls, env_id: str, what: str) -> EnvironmentFailure:
        """The environment did `what`."""
        look = f"fix the environment (rl-training doctor --env {env_id} steps it alone)."
        return cls(f"the environment {env_id} {what}; {look}")

    @classmethod
    def raised(cls, env_id: str, kind: str, message: str, line: str = "", step: str = "") -> EnvironmentFailure:
        """The environment raised an exception of that kind.

        `line` is the user's line from `user_line`; without one, what the environment's `step` returned is at fault.
        """
        reason = (message.strip().splitlines() or ["no message"])[0].rstrip(".")
        place = line or step
        if kind == "ValueError" and FOUR_VALUES in reason:
            wanted = "it must return observation, reward, terminated, truncated and info"
            return cls.of(env_id, f"returned 4 values from step{place}, but {wanted}")
        if kind == "TypeError" and (missing := MISSING.search(reason)):
            return cls.of(env_id, f"has a reset that takes no {missing[1]}, but it must be {RESET}")
        if not line and (given := re.fullmatch(r".* for \+=: 'float' and '(\w+)'", reason)):  # our sum of rewards
            return cls.of(env_id, f"returned a reward of type {given[1]} from step{place}, but it must be a number")
        if not line and SEVERAL.match(reason):
            return cls.of(env_id, f"returned several numbers as a reward from step{place}, but it must be one number")
        what = f"called sys.exit({reason})" if kind == "SystemExit" else f"raised {kind}: {reason}"
        return cls.of(env_id, f"{what}{place}")

    @classmethod
    def from_error(cls, env_id: str, error: BaseException, step: str = "") -> EnvironmentFailure:
        """The environment raised this error; `step` is where the user defines it."""
        line = user_line(traceback.format_exception(error))
        return cls.raised(env_id, type(error).__name__, str(error), line, step)

    @classmethod
    def not_finite(cls, env_id: str, what: str) -> EnvironmentFailure:
        """The environment returned `what` with a NaN or an infinity in it."""
        return cls.of(env_id, f"returned {what} with a NaN or an infinity in it")


class TrainingFailure(RuntimeError):
    """The run cannot continue (because of a NaN, for example); the last good checkpoint is kept."""


def printable(text: str) -> str:
    """The text without control characters, so that a name from a file cannot control the terminal."""
    return text.translate(_UNPRINTABLE)


class Terminated(SystemExit):
    """SIGTERM stopped a run, and everything is saved; a script that does not catch it exits with code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def one_line(message: str) -> str:
    line = printable(" ".join(message.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 83]}...{line[-80:]}"


def did_you_mean(name: str, known: Iterable[str], value: Any = None) -> str:
    """The end of an "unknown name" sentence: the nearest known name, or a list of names if none is near.

    `value` is what was given under the name, if anything was.
    """
    names = sorted(known)
    if (ours := translate(name, names, value)) is not None:
        return ours
    if (near := near_name(name, names)) is not None:
        return f"did you mean {near!r}?"
    listed = ", ".join(names)
    if len(listed) > NAMES_LENGTH:
        listed = listed[:NAMES_LENGTH].rpartition(", ")[0]
        listed += f" and {len(names) - 1 - listed.count(', ')} more"
    return f"known: {listed}."


@cache
def sb3_hints() -> dict[str, Any]:
    """For users of Stable-Baselines3 and RL Zoo: `names`, `zoo`, `remarks` and `values` of the file in `assets`."""
    from importlib.resources import files

    import yaml

    hints: dict[str, Any] = yaml.safe_load((files("rl_training") / "assets/stable_baselines3.yaml").read_text("utf-8"))
    return hints


def translate(name: str, known: Collection[str], value: Any = None) -> str | None:
    """The end of an error message about an unknown name that Stable-Baselines3 has; None for any other name.

    Of `policy_kwargs`, the names inside are translated if ours are known.
    """
    names, zoo, remarks, _ = sb3_hints().values()
    if name == "policy_kwargs" and isinstance(value, Mapping):
        inside = [translate(key, known) for key in value if isinstance(key, str)]
        if told := list(dict.fromkeys(one.rstrip(".") for one in inside if one is not None)):
            return f"{'; '.join(told)}."
    if name == "policy":
        return policy_remark(value)
    ours = [our for our in names.get(name, ()) if our in known]
    if not ours and "algo_kwargs" in known and "learning_rate" not in known:  # the top of a config file
        ours = [f"algo_kwargs.{our}" for our in names.get(name, ())]
    if zoo.get(name) in known:
        return f"RL Zoo's {name} is {zoo[name]} here."
    return f"Stable-Baselines3's {name} is {ours[0]} here." if ours else remarks.get(name)


def policy_remark(policy: Any) -> str:
    """What there is instead of Stable-Baselines3's policies: the end of a sentence."""
    remarks: dict[str, str] = sb3_hints()["remarks"]
    return remarks["MlpLstmPolicy" if str(policy).endswith("LstmPolicy") else "policy"]


def near_name(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The most similar known name, ignoring case, or None."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(ALSO_CALLED.get(name, name)[:100].lower(), names, n=1, cutoff=likeness)
    return names[near[0]] if near else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has none."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error})"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def kind_and_line(error: BaseException) -> str:
    """The kind of an error, and the first line of its message if it has one."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def user_line(trace: Iterable[str]) -> str:
    """Such as ` (my_envs.py, line 12)`: the innermost line of the user's code in a printed traceback, or nothing."""
    frames = re.findall(r'^  File "(.+)", line (\d+), in ', "".join(trace), re.MULTILINE)
    return next((show_line(file, line) for file, line in reversed(frames) if is_users_file(file)), "")


def is_users_file(file: str) -> bool:
    """Whether a source file is the user's own: not part of Python, an installed package or this one."""
    others = (os.path.dirname(__file__), sysconfig.get_path("stdlib"))
    return os.path.isfile(file) and "site-packages" not in file and not file.startswith(others)


def show_line(file: str, line: int | str) -> str:
    """A place in a file; the path is relative if the file is below the working directory."""
    here = os.path.join(os.getcwd(), "")
    return f" ({file.removeprefix(here)}, line {line})"


def definition(env: Any, method: str) -> str:
    """Where the user's own class defines a method, such as ` (my_envs.py, line 12)`; empty for other classes."""
    code = getattr(inspect.unwrap(getattr(type(env), method, len)), "__code__", None)
    return show_line(code.co_filename, code.co_firstlineno) if code and is_users_file(code.co_filename) else ""


def install(extra: str) -> str:
    """The command that installs an extra: of an installed package, and in a checkout of the source."""
    return f"pip install 'rl-training[{extra}]', in a checkout '.[{extra}]'"


def counted(number: int, noun: str) -> str:
    """`1 environment`, `8 environments`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
