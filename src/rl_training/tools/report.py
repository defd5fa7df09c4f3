"""A report on runs: one HTML file that contains its charts and pictures, loads nothing and runs no script.

Everything read from a run's files is escaped.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import warnings
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.errors import UserError, counted
from rl_training.record.logger import format_duration
from rl_training.record.metrics_file import is_number
from rl_training.tools.compare import (
    Comparison,
    compare_groups,
    describe_estimate,
    describe_groups,
    describe_pairs,
    describe_value,
    learning_curves,
    metric_name,
)
from rl_training.tools.drawing import Series, chart_style, draw_png, draw_svg
from rl_training.tools.records import EVALUATED, TRAINED, Groups, RunRecord, select_runs

WIDE, NARROW = 720, 360  # widths of the two drawings of a chart; a screen shows one
MOST_STEPS, MOST_FRAMES, FRAME_WIDTH = 1_000, 120, 320  # of an episode
MOST_EPISODES = 4
VERSIONS = ("rl_training", "python", "torch", "gymnasium", "numpy", "platform")
OWN_TO_A_RUN = ("algo", "env_id", "seed", "output_dir", "name")
STYLE = (
    ":root{color-scheme:light dark;--page:#fff;--ink:#1c1e21;--soft:#5f6670;--rule:#dfe2e6;--code:#f3f4f6}"
    "@media(prefers-color-scheme:dark){:root{--page:#15181c;--ink:#e4e6e9;--soft:#9aa3ad;--rule:#333941;--code:#1f242a}}"
    "body{margin:0 auto;padding:1rem;max-width:60rem;background:var(--page);color:var(--ink);"
    "font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;line-height:1.2;overflow-wrap:anywhere}"
    "h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-bottom:1px solid var(--rule)}"
    "h3{font-size:1rem;margin:1.2rem 0 .3rem}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}"
    "th,td{padding:.3rem .9rem .3rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}"
    "th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}"
    ".soft{color:var(--soft);font-size:.9rem}"
    "pre{background:var(--code);padding:.7rem;font-size:.85rem;border-radius:.3rem;white-space:pre-wrap;"
    "overflow-wrap:anywhere}"
    ".words td{white-space:normal;overflow-wrap:anywhere;text-align:left}.words th{text-align:left}"
    ".words td:first-child{white-space:nowrap}"
    "li{overflow-wrap:anywhere}svg,img{max-width:100%;height:auto}"
    f".w{NARROW}{{display:none}}@media(max-width:560px){{th,td{{padding-right:.6rem}}"
    f".w{WIDE}{{display:none}}.w{NARROW}{{display:inline}}}}"
)


def build_report(groups: Groups, episodes: Sequence[str] = (), *, shared_steps: bool = False) -> str:
    """The page; `episodes` are pieces of HTML, as `show_episodes` gives them; `shared_steps` is for `select_runs`."""
    runs = [run for group in groups.values() for run in group]
    envs = list(dict.fromkeys(run.env_id for run in runs))
    title = f"{', '.join(groups)} on {', '.join(envs)}"
    compared = {env: compare_on(env, groups, shared_steps) for env in envs}
    named = [
        (f"{name}, {f'{run.env_id}, ' if len(envs) > 1 else ''}seed {run.config.get('seed', '-')}", run)
        for name, group in groups.items()
        for run in group
    ]
    body = [
        f"<h1>{escape(title)}</h1>", summarize(runs, compared),
        *(part for env, (own, result) in compared.items() for part in describe_environment(env, own, result)),
        "<h2>Runs</h2>", describe_runs(named),
        "<h2>Settings that differ from the defaults</h2>", *describe_settings(groups),
        "<h2>Where the time went</h2>", describe_time(named), "<h2>Warnings</h2>", describe_warnings(runs),
        *(["<h2>Episodes</h2>", *episodes] if episodes else ()), "<h2>Versions</h2>", describe_versions(runs),
        "<h2>Run it again</h2>", describe_commands(runs),
    ]  # fmt: skip
    content = "\n".join(body)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}{chart_style()}</style></head>'
        f"<body>\n{content}\n</body></html>\n"
    )


def compare_on(env: str, groups: Groups, shared_steps: bool) -> tuple[Groups, Comparison | str]:
    """The selected runs on one environment, and their comparison, or a sentence with why they cannot be compared."""
    own = {name: [run for run in group if run.env_id == env] for name, group in groups.items()}
    own = {name: group for name, group in own.items() if group}
    selected, _ = select_runs(own, shared_steps=shared_steps)
    try:
        return selected, compare_groups(own, shared_steps=shared_steps)
    except UserError as error:
        return selected, str(error)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "numbers") -> str:
    """A table of numbers, which scrolls on a narrow screen, or of words, which wraps."""
    top = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    whole = f"<table class={kind}><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return f"<div class=scroll tabindex=0>{whole}</div>"


def bullets(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def summarize(runs: Sequence[RunRecord], compared: dict[str, tuple[Groups, Comparison | str]]) -> str:
    """The number of runs and steps, and the result on each environment."""
    steps, seconds = sum(run.last_step for run in runs), sum(wall_seconds(run) for run in runs)
    lines = []
    for env, (_, result) in compared.items():
        if isinstance(result, str):
            continue
        lines.append(f"{env}: {', '.join(f'{g.name} {describe_estimate(g.iqm)}' for g in result.groups)}")
        lines += [f"{env}: {p.name} against {p.other}: {p.verdict}" for p in result.pairs]
    amount = f"{counted(len(runs), 'run')}, {steps:,} steps, {format_duration(seconds)} (h:mm:ss)"
    return f"<p class=soft>{amount}; final returns as interquartile mean [95 % interval]:</p>{bullets(lines)}"


def describe_environment(env: str, own: Groups, result: Comparison | str) -> list[str]:
    """Learning curves, scores and verdicts of the runs on one environment."""
    metric, lines, _ = learning_curves(own)  # the comparison has the notes
    parts = [f"<h2>{escape(env)}</h2>"]
    if lines:
        missing = ", ".join(name for name in own if name not in {line.name for line in lines})
        left = f" Too few points of {missing}." if missing else ""
        band = "the band is its 95 % bootstrap interval" if any(len(g) > 1 for g in own.values()) else "one run each"
        parts += [
            draw_twice(lines, f"Learning curves on {env}", "steps", metric_name(metric)),
            f"<p class=soft>Interquartile mean over runs of the {metric_name(metric)}; {band}.{escape(left)}</p>",
        ]
    else:
        parts.append("<p class=soft>No learning curve: too few evaluations and finished training episodes.</p>")
    if isinstance(result, str):
        return [*parts, f"<p>{escape(result)}</p>"]
    parts += [f"<h3>Final {metric_name(result.scored_by)}</h3>", table(*describe_groups(result))]
    parts.append("<p class=soft>IQM: interquartile mean of the runs; mean and best are means over runs.</p>")
    if result.pairs:
        parts += ["<h3>Differences</h3>", table(*describe_pairs(result))]
        if result.thresholds[0] < result.thresholds[-1]:
            by_name = {group.name: Series(group.name, result.thresholds, *group.profile) for group in result.groups}
            labels = (f"Performance profiles on {env}", "final return", "share of runs above")
            parts += ["<h3>Performance profiles</h3>", draw_twice([by_name[name] for name in own], *labels)]
    return [*parts, f"<h3>Read with care</h3>{bullets(result.notes)}" if result.notes else ""]


def plot_curves(groups: Groups, ending: str, *, shared_steps: bool = False) -> tuple[str | bytes, list[str]]:
    """The learning curves of runs on one environment as an `.svg` or a `.png` file, and notes on what is drawn."""
    selected, notes = select_runs(groups, shared_steps=shared_steps)
    envs = list(dict.fromkeys(run.env_id for group in selected.values() for run in group))
    if len(envs) > 1:
        raise UserError(f"the runs are on {' and '.join(envs[:3])}; plot runs on one environment.")
    metric, lines, more = learning_curves(selected)
    if not lines:
        raise UserError("the runs have too few evaluations and finished training episodes to draw a curve.")
    labels = f"Learning curves on {envs[0]}", "steps", metric_name(metric)
    drawn = draw_png(lines, *labels) if ending == ".png" else draw_svg(lines, *labels, standalone=True)
    return drawn, [*notes, *more]


def draw_twice(lines: Sequence[Series], title: str, x_label: str, y_label: str) -> str:
    """A chart for wide and for narrow screens."""
    drawn = (draw_svg(lines, title, x_label, y_label, width=w, height=h) for w, h in ((WIDE, 340), (NARROW, 280)))
    return f"<figure style='margin:0'>{''.join(drawn)}</figure>"


def last_row(run: RunRecord, metric: str) -> dict[str, Any]:
    """The last row with a number for this metric; empty if there is none."""
    return next((row for row in reversed(run.rows) if is_number(row.get(metric))), {})


def wall_seconds(run: RunRecord) -> float:
    """Seconds from the run's start to its last row."""
    return max((float(row["time"]) for row in run.rows if is_number(row.get("time"))), default=0.0)


def starts(run: RunRecord) -> list[dict[str, Any]]:
    """The manifests of a run's starts, oldest first."""
    earlier = run.manifest.get("earlier")
    told = [*earlier, run.manifest] if isinstance(earlier, list) else [run.manifest]
    return [start for start in told if isinstance(start, dict)]


def describe_runs(named: Sequence[tuple[str, RunRecord]]) -> str:
    """The evaluation table: a row per run."""
    rows = []
    for name, run in named:
        (steps, values), trained = run.curve(EVALUATED), run.curve(TRAINED)[1]
        last = last_row(run, EVALUATED)
        spread = f" ± {last['eval_return_std']:.4g}" if is_number(last.get("eval_return_std")) else ""
        rows.append((
            name, f"{values[-1]:.4g}{spread}" if len(values) else "-", last.get("eval_episodes", "-"),
            f"{values.max():.4g} at {steps[values.argmax()]:,.0f}" if len(values) else "-",
            f"{trained[-1]:.4g}" if len(trained) else "-", f"{run.last_step:,}{run.unspent}",
        ))  # fmt: skip
    return table(["run", "last evaluation", "episodes", "best evaluation", "in training", "steps"], rows)


def describe_settings(groups: Groups) -> list[str]:
    """For each group, the settings that differ from its algorithm's defaults."""
    parts = []
    for name, group in groups.items():
        try:
            defaults = default_settings(group[0].algo)
        except UserError as error:  # an algorithm of a plugin that is not installed here
            parts.append(f"<p>{escape(name)}: {escape(str(error))}</p>")
            continue
        rows = []
        for setting in dict.fromkeys(key for run in group for key in run.settings if key not in OWN_TO_A_RUN):
            values = dict.fromkeys(describe_value(run.settings.get(setting)) for run in group)
            default = defaults.get(setting, "-")
            if list(values) != [default] and default != "auto":  # a resolved `auto` is not the user's choice
                rows.append((setting, " / ".join(values), default))
        parts += [f"<h3>{escape(name)}</h3>", table(["setting", "value", "default"], rows, "words")]
    return parts


def default_settings(algo: str) -> dict[str, str]:
    """The settings that `train --algo` would use, as `describe_value` writes them."""
    from pydantic_core import PydanticUndefined, to_jsonable_python

    from rl_training.config.spec import get_algorithm_spec
    from rl_training.config.train_config import TrainConfig

    spec = get_algorithm_spec(algo)
    fields = {**TrainConfig.model_fields, **spec.params.model_fields}
    found = {name: info.get_default(call_default_factory=True) for name, info in fields.items()} | dict(spec.defaults)
    return {key: describe_value(to_jsonable_python(v)) for key, v in found.items() if v is not PydanticUndefined}


def describe_time(named: Sequence[tuple[str, RunRecord]]) -> str:
    """Time of training and of everything else, one row per run; `bench` shows more."""
    rows = []
    for name, run in named:
        total, training, last = wall_seconds(run), training_seconds(run), last_row(run, "steps_per_second")
        waiting = last.get("learner_waiting")
        waits = f" ({waiting:.0%} waiting for workers)" if is_number(waiting) else ""
        rows.append((
            name, f"{total:.1f} s", "-" if training is None else f"{training:.1f} s{waits}",
            "-" if training is None else f"{total - training:.1f} s",
            f"{last['steps_per_second']:,.0f}" if last else "-",
        ))  # fmt: skip
    command = f"rl-training bench --config {quote_config(named[0][1])}"
    head = ["run", "in all", "training", "evaluation, checkpoints, start", "steps/s"]
    return f"{table(head, rows)}<p class=soft>By part of the loop:</p><pre>{escape(command)}</pre>"


def training_seconds(run: RunRecord) -> float | None:
    """Seconds of training without evaluations and checkpoints; unknown for a resumed run."""
    last = last_row(run, "steps_per_second")
    if len(starts(run)) != 1 or not last or last["steps_per_second"] <= 0:
        return None
    return min(last["step"] / last["steps_per_second"], wall_seconds(run))


def describe_warnings(runs: Sequence[RunRecord]) -> str:
    """The messages of the runs when they started, and the problems that their rows show."""
    found: dict[str, list[str]] = {}
    for run in runs:
        lists = [start.get("messages") for start in starts(run)]
        told = [message for messages in lists if isinstance(messages, list) for message in messages[1:]]
        numbers = ((key, value) for row in run.rows for key, value in row.items() if isinstance(value, float))
        told += [f"{key} was not finite in some row" for key in sorted({k for k, v in numbers if not np.isfinite(v)})]
        if run.status != "done":
            told.append(f"{run.status} at step {run.last_step:,}{run.unspent}")
        for message in told:
            found.setdefault(str(message).removeprefix("warning: "), []).append(run.folder.name)
    more = {text: f" and {len(names) - 1} more" if len(names) > 1 else "" for text, names in found.items()}
    return bullets(f"{text} ({found[text][0]}{more[text]})" for text in found) if found else "<p>None.</p>"


def describe_versions(runs: Sequence[RunRecord]) -> str:
    """The versions that runs were made with."""

    def commit(run: RunRecord) -> str:
        git = run.manifest.get("git")
        state = git if isinstance(git, dict) else {}
        return f"{state.get('commit', '-')}{'' if state.get('clean', True) else ', with uncommitted changes'}"

    rows = [(name, " / ".join(dict.fromkeys(str(run.manifest.get(name, "-")) for run in runs))) for name in VERSIONS]
    return table(["", "version"], [*rows, ("git", " / ".join(dict.fromkeys(commit(run) for run in runs)))], "words")


def describe_commands(runs: Sequence[RunRecord]) -> str:
    """The commands that were typed, then, for each run, one that repeats it from its own config."""
    typed = dict.fromkeys(command for run in runs for start in starts(run) if (command := typed_command(start)))
    again = [f"rl-training train --config {quote_config(run)}" for run in runs]
    shown = "\n".join(["# as it was typed", *typed, "", "# each run alone, every setting spelled out", *again])
    return f"<pre>{escape(shown)}</pre>"


def typed_command(start: dict[str, Any]) -> str:
    """The command in a manifest; empty if there is none."""
    words = start.get("command")
    if not isinstance(words, list) or not words:
        return ""
    program, *rest = map(str, words)
    known = Path(program).name in ("rl-training", "__main__.py")
    return shlex.join(["rl-training", *rest] if known else ["python", program, *rest])


def quote_config(run: RunRecord) -> str:
    """The path of a run's config, for a shell."""
    return shlex.quote(str(run.folder / "config.yaml"))


def show_episodes(groups: Groups, env: Any = None) -> list[str]:
    """An episode of each group on each environment, for the first few of these pairs."""
    pairs = [(name, env_id) for name, group in groups.items() for env_id in dict.fromkeys(run.env_id for run in group)]
    with without_screen():
        return [
            show_episode(f"{name} on {env_id}", [run for run in groups[name] if run.env_id == env_id], env)
            for name, env_id in pairs[:MOST_EPISODES]
        ]


@contextmanager
def without_screen() -> Iterator[None]:
    """Make renderers draw into memory, unless the user's environment variables say otherwise."""
    wanted = {"SDL_VIDEODRIVER": "dummy"}
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        wanted["MUJOCO_GL"] = "egl"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def show_episode(name: str, runs: Sequence[RunRecord], env: Any = None) -> str:
    """An animated episode of the best run of a group, or a sentence that says why there is none."""
    scored = [(values.max(), run) for run in runs if len(values := run.curve(EVALUATED)[1])]
    run = max(scored, key=lambda pair: pair[0])[1] if scored else runs[0]
    found = [run.folder / "checkpoints" / file for file in ("best.ckpt", "latest.ckpt")]
    try:
        checkpoint = next(path for path in found if path.is_file())
        picture, played = record_episode(checkpoint, env)
    except StopIteration:
        return f"<p>{escape(name)}: no episode, because {escape(str(run.folder))} has no checkpoint.</p>"
    except Exception as error:  # whatever an environment or its renderer raises, the report is written
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return f"<p>{escape(name)}: no episode, because {escape(kind + reason)}</p>"
    told = escape(f"{name}: {played}, by {checkpoint.name} of {run.folder.name}")
    data = b64encode(picture).decode()
    return f'<details open><summary>{told}</summary><img alt="{told}" src="data:image/gif;base64,{data}"></details>'


def record_episode(checkpoint: Path, env: Any = None) -> tuple[bytes, str]:
    """The first evaluation episode of a checkpoint's policy as a GIF, and a few words about it."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("an animated episode needs the extra 'results' (pip install 'rl-training[results]').") from None
    from rl_training.envs.episodes import episode_seed
    from rl_training.envs.factory import make_env
    from rl_training.envs.probe import probe_spaces
    from rl_training.envs.recipe import read_recipe
    from rl_training.play import closed_after, play
    from rl_training.run.evaluation import EVALUATION_STREAM
    from rl_training.run.learner import ActingSession, check_same_spaces, load_algorithm, read_checkpoint

    names = env if isinstance(env, tuple) else None
    algorithm, spaces, config = load_algorithm(checkpoint, read_checkpoint(checkpoint), names)
    recipe = read_recipe(config.env_id, config.env_kwargs, env)
    check_same_spaces(spaces, probe_spaces(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an environment that cannot render: the report says so
        played = make_env(recipe, evaluation=True, render_mode="rgb_array")
    frames: list[Any] = []
    steps, total, stride, ended = 0, 0.0, 1, False
    with closed_after([played], spaces.env_id):
        act = ActingSession(algorithm, 1, config.seed).in_environments(spaces)
        seed = episode_seed(config.seed, EVALUATION_STREAM, 0)
        for step in islice(play([played], act, lambda _: seed, spaces.env_id, 1), MOST_STEPS):
            if steps % stride == 0:
                pixels = np.asarray(played.render())
                if pixels.ndim != 3:
                    raise UserError(f"{config.env_id} does not render to rgb_array.")
                picture = Image.fromarray(pixels.astype(np.uint8))
                picture.thumbnail((FRAME_WIDTH, FRAME_WIDTH))
                frames.append(picture.quantize(64))
            if len(frames) > MOST_FRAMES:
                frames, stride = frames[::2], 2 * stride
            steps, total, ended = steps + 1, total + step.reward, bool(step.terminated or step.truncated)
    buffer, rate = io.BytesIO(), played.metadata.get("render_fps") or 30
    pause = max(20, round(1000 * stride / rate))
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=pause, loop=0)
    return buffer.getvalue(), f"{'' if ended else 'the first '}{counted(steps, 'step')}, return {total:.4g}"
