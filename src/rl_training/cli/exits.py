"""Exit codes: 0 done, 1 the run failed, 2 wrong input, 128 + n stopped by signal n. Only --debug shows a traceback."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from rl_training import errors

FAILED, WRONG_INPUT, BY_SIGNAL = 1, 2, 128  # plus the number of the signal
STOPPED = BY_SIGNAL + signal.SIGINT


def run_to_exit_code(action: Callable[[], Any], *, debug: bool = False) -> int:
    """Run `action`; any exception becomes one sentence on stderr and an exit code."""
    try:
        action()
        sys.stdout.flush()
        return 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort, errors.Terminated) as stop:
        typer.echo("\nstopped at once.", err=True)
        return BY_SIGNAL + signal.SIGTERM if isinstance(stop, errors.Terminated) else STOPPED
    except BrokenPipeError as error:
        if not _stdout_is_gone():
            return _report(error, debug)
        # `rl-training list | head`: the reader closed the pipe; print nothing more, also at interpreter exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, debug)


def _report(error: Exception, debug: bool) -> int:
    if debug:
        typer.echo(errors.printable("".join(traceback.format_exception(error))), err=True)
    code, sentence = describe(error)
    if code == WRONG_INPUT and not is_first_rank():  # rank 0 prints it
        return code
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {sentence}", err=True)
    if code == FAILED and not debug:
        typer.echo("run with --debug for the traceback", err=True)
    return code


def exit_after_signal(result: Any) -> None:
    """End the command with 128 + n if signal n stopped the run."""
    if result.stop_signal is not None:
        raise typer.Exit(BY_SIGNAL + result.stop_signal)


def is_first_rank() -> bool:
    """Whether this process prints for its run: of those that `torchrun` starts, only rank 0 does."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def describe_warning(message: object) -> str:
    """A Python warning as a line; without the colors and the `WARN: ` of Gymnasium's."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(message))
    return f"warning: {errors.printable(plain).removeprefix('WARN: ')}"


def describe(error: Exception) -> tuple[int, str]:
    """The exit code and the sentence of an exception."""
    if isinstance(error, errors.UnknownKey):
        from rl_training.config.settings import with_full_path

        error = with_full_path(error)
    code, text = WRONG_INPUT, str(error)
    if hasattr(error, "format_message"):  # a usage error of click's, or of typer's own copy of it
        text = _describe_usage(error)
    elif not isinstance(error, errors.UserError):
        code = FAILED
        if not isinstance(error, errors.EnvironmentFailure | errors.TrainingFailure):
            reason = (text.strip().splitlines() or ["no message"])[0]
            text = f"the run failed with {type(error).__name__}: {reason}"
    line = errors.one_line(text)
    return code, line if line.endswith((".", "?", "!", ")")) else f"{line}."


def _describe_usage(error: Any) -> str:
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = "rl-training" if context is None else context.info_name
    if hasattr(error, "possibilities") and context is not None:
        known = [name for option in context.command.params for name in option.opts if name.startswith("--")]
        hint = errors.did_you_mean(error.option_name, known)
        every = f"rl-training {command} --help shows them all." if hint.startswith("known:") else hint
        return f"{command} has no option {error.option_name!r}; {every}"
    if hasattr(error, "option_name"):
        return f"{error.option_name} has no value; give one after it"
    said = error.format_message()
    if parameter is not None and hasattr(error, "param_type"):  # it is missing
        wanted = f"{parameter.opts[-1]} {parameter.metavar or ''}".rstrip()
        return f"{command} needs {wanted}: {parameter.help[0].lower()}{parameter.help[1:]}"
    extra = re.search(r"extra argument.*\((.*)\)", said)
    wrong = f"{command} does not take {extra[1]!r}" if extra else f"{command}: {said[0].lower()}{said[1:].rstrip('.')}"
    return f"{wrong}; rl-training {command} --help shows what it takes"


def _stdout_is_gone() -> bool:
    try:
        sys.stdout.flush()
        watched = select.poll()
        watched.register(sys.stdout, 0)  # with mask 0, poll reports only that the reader has closed
        return bool(watched.poll(0))
    except OSError:
        return True
    except AttributeError:  # this system has no poll
        return False
