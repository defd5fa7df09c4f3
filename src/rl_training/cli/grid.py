"""`train --grid`: one run for each combination of the values of `--set`, and a table of all at the end."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from rl_training.cli import screen
from rl_training.errors import UserError, counted

if TYPE_CHECKING:
    from rl_training.config.train_config import TrainConfig

SPLIT = re.compile(r",(?![^\[{(]*[\]})])")  # a comma that is not inside a list or mapping
Combination = Mapping[str, str]  # the values of one run by key
LONGEST_NAME = 80


def read_grid(settings: Iterable[str]) -> tuple[list[str], list[Combination]]:
    """The settings of `--set` that have one value, and every combination of the others' values."""
    fixed, axes = list[str](), dict[str, list[str]]()
    for setting in settings:
        key, _, text = setting.partition("=")
        values = [value.strip() for value in SPLIT.split(text)]
        if len(values) == 1:
            fixed.append(setting)
        elif len(set(values)) < len(values) or "" in values:
            raise UserError(f"--set {setting!r}: each value of a grid may be given only once, and none is empty.")
        else:
            axes[key.strip()] = values
    if not axes:
        raise UserError("--grid needs a setting with several values, such as --set learning_rate=1e-3,3e-4.")
    return fixed, [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


@contextmanager
def hint(settings: Sequence[str]) -> Iterator[None]:
    """Add to an error about a value that is several values that --grid takes them."""
    try:
        yield
    except UserError as error:
        for _, _, text in (setting.partition("=") for setting in settings):
            if SPLIT.search(text) and repr(text) in str(error):
                raise UserError(f"{error} To try each of them, add --grid.") from None
        raise


def grid_configs(
    build: Callable[[list[str]], TrainConfig], settings: Sequence[str], seeds: Sequence[int] | None
) -> tuple[list[TrainConfig], list[Combination]]:
    """The config of each run, and the combination that it belongs to; their folders are in one folder.

    `build` makes a config of settings; without `seeds`, every combination has one run with the config's seed.
    """
    fixed, combinations = read_grid(settings)
    configs: list[TrainConfig] = []
    belong: list[Combination] = []
    folder = ""
    for one in combinations:
        built = build([*fixed, *(f"{key}={value}" for key, value in one.items())])
        folder = folder or f"{built.output_dir}/{built.name or time.strftime('grid-%Y%m%d-%H%M%S')}"
        for seed in seeds or [built.seed]:
            change = {"seed": seed, "output_dir": folder, "name": name_run(one, seed)}
            configs.append(built.model_copy(update=change))
            belong.append(one)
    return configs, belong


def name_run(combination: Combination, seed: int) -> str:
    """The name of a run's folder."""
    words = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in combination.items())
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', words)[:LONGEST_NAME].strip('-')}-s{seed}"


def describe(combination: Combination) -> str:
    """The values of a combination in words."""
    return ", ".join(f"{key}={value}" for key, value in combination.items())


def print_plan(console: Console, configs: Sequence[TrainConfig], belong: Sequence[Combination]) -> None:
    """How many runs there will be, of what, and where."""
    axes, first = " x ".join(belong[0]), configs[0]
    number = len(set(map(describe, belong)))
    seeds = counted(len(configs) // number, "seed")
    what = f"{first.algo} on {first.env_id}: {counted(number, 'combination')} of {axes}, {seeds} each"
    told = f"{escape(what)}, {counted(len(configs), 'run')} in {screen.quote(Path(first.output_dir))}"
    console.print(told, soft_wrap=True)


def print_grid(console: Console, runs: Sequence[tuple[Combination, Any]], folder: str) -> None:
    """A row for each combination, the best mean first, and the command that compares them."""
    from rl_training.run.folder import COMPLETE

    grouped: dict[str, tuple[Combination, list[Any]]] = {}
    for one, result in runs:
        grouped.setdefault(describe(one), (one, []))[1].append(result.metrics)
    finished = [result.metrics for _, result in runs if result.metrics["stop_reason"] in COMPLETE]
    evaluated = any("eval_return_mean" in metrics for metrics in finished)
    measure = "eval_return_mean" if evaluated else "episode_return_mean"

    def score(group: Sequence[Any]) -> tuple[float, list[str]]:
        values = [float(m[measure]) for m in group if m["stop_reason"] in COMPLETE and measure in m]
        done = str(len(values)) if len(values) == len(group) else f"{len(values)} of {len(group)}"
        if not values:
            return -math.inf, [done, "-", "-", "-"]
        mean, half = screen.mean_interval(values)
        interval = "-" if half is None else f"{mean - half:.1f} to {mean + half:.1f}"
        return mean, [done, f"{mean:.1f}", interval, f"{min(values):.1f} to {max(values):.1f}"]

    rows = [(score(group), list(one.values())) for one, group in grouped.values()]
    rows.sort(key=lambda row: -row[0][0])
    axes = list(runs[0][0])
    kind = "return" if evaluated else "return of training episodes"
    head = [*axes, "seeds", f"mean {kind}", "95 % interval", "lowest to highest"]
    screen.print_table(console, head, [[*values, *cells] for (_, cells), values in rows], words=range(len(axes)))
    command = f"rl-training compare {screen.quote(Path(folder))} --by {escape(','.join(axes))}"
    console.print(f"\n{command}", soft_wrap=True)
