"""Comparisons as text for a paper or a program: CSV, JSON, LaTeX and Markdown.

CSV and JSON hold every number, one entry per group and environment. LaTeX and Markdown have a row per group and a
column per environment, with the interquartile mean and its interval.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_training.tools.compare import LEVEL, Comparison, Estimate, GroupScores, PairScores, describe_estimate

KINDS = {"csv": ".csv", "json": ".json", "latex": ".tex", "markdown": ".md"}  # and the ends of their files
MARKS = re.compile(r"([|<>*_`\\])")  # of Markdown
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def write_table(results: Sequence[Comparison], kind: str, threshold: float | None = None) -> str:
    """The comparisons, one per environment or one of several, in that format."""
    if kind == "csv":
        rows = [facts for result in results for facts in group_facts(result, threshold)]
        writer = csv.DictWriter(file := io.StringIO(), list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()
    if kind == "json":
        return json.dumps([describe(result, threshold) for result in results], indent=1) + "\n"
    return as_latex(results) if kind == "latex" else as_markdown(results)


def number(value: Any) -> float | None:
    """A number for JSON, which has none that is not finite."""
    return float(value) if math.isfinite(value) else None


def ends(found: Estimate, name: str) -> dict[str, float | None]:
    """An estimate and the ends of its interval by name."""
    return {name: number(found.value), f"{name}_low": number(found.low), f"{name}_high": number(found.high)}


def group_facts(result: Comparison, threshold: float | None) -> list[dict[str, Any]]:
    """The scores of each group by name."""

    def scores(group: GroupScores) -> dict[str, Any]:
        facts: dict[str, Any] = {"environment": " ".join(result.envs), "group": group.name, "runs": group.runs}
        facts |= {"measure": result.scored_by, **ends(group.iqm, "iqm")}
        facts |= {"mean": group.final, "best": group.best, "mean_over_steps": group.area}
        if threshold is not None:
            reached = group.to_threshold
            facts |= {"threshold": threshold, "runs_at_threshold": len(reached)}
            facts["median_steps_to_threshold"] = float(np.median(reached)) if reached else None
        return facts

    return [scores(group) for group in result.groups]


def describe(result: Comparison, threshold: float | None) -> dict[str, Any]:
    """Everything in a comparison: groups with their curves, pairs, notes."""
    groups = group_facts(result, threshold)
    for facts, group in zip(groups, result.groups, strict=True):
        if group.curve is not None:
            curve = zip(("iqm", "low", "high"), group.curve, strict=True)
            facts["curve"] = {name: [number(value) for value in values] for name, values in curve}

    def pair_facts(pair: PairScores) -> dict[str, Any]:
        facts = {"first": pair.name, "second": pair.other, "verdict": pair.verdict}
        return facts | ends(pair.difference, "difference") | ends(pair.improvement, "probability_of_improvement")

    return {
        "environments": result.envs, "measure": result.scored_by, "level": LEVEL, "groups": groups,
        "curve_of": result.curve_of or None, "steps": None if result.steps is None else result.steps.tolist(),
        "pairs": [pair_facts(pair) for pair in result.pairs], "notes": result.notes,
    }  # fmt: skip


def matrix(results: Sequence[Comparison]) -> tuple[list[str], list[list[str]], str]:
    """Head, a row per group with the runs and the interquartile mean on each environment, and what the numbers are."""
    names = dict.fromkeys(group.name for result in results for group in result.groups)
    tasks = [{group.name: group for group in result.groups} for result in results]
    rows = []
    for name in names:
        counts = sorted({task[name].runs for task in tasks if name in task})
        shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rows.append([name, shown, *(describe_estimate(task[name].iqm) if name in task else "–" for task in tasks)])
    head = ["", "runs", *(", ".join(result.envs) for result in results)]
    return head, rows, f"Interquartile mean of the final return [{LEVEL:.0%} stratified bootstrap interval]."


def all_notes(results: Sequence[Comparison]) -> list[str]:
    """The notes of the comparisons; those of one environment among several begin with its name."""
    return [f"{', '.join(r.envs)}: {note}" if len(results) > 1 else note for r in results for note in r.notes]


def as_markdown(results: Sequence[Comparison]) -> str:
    """The matrix as a Markdown table, and notes below."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(MARKS.sub(r"\\\1", cell) for cell in cells) + " |"

    head, rows, told = matrix(results)
    lines = [line(head), f"| --- |{' --: |' * (len(head) - 1)}", *map(line, rows), "", told]
    return "\n".join([*lines, "", *(f"- {note}" for note in all_notes(results)), ""])


def as_latex(results: Sequence[Comparison]) -> str:
    """The matrix as a tabular for the package booktabs, with the notes as comments."""

    def line(cells: Sequence[str]) -> str:
        name, *numbers = map(escape, cells)
        return " & ".join([name, *(re.sub(r"-(?=\d)", "$-$", one) for one in numbers)]) + r" \\"

    def escape(text: str) -> str:
        return "".join(SPECIAL.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text).replace("–", "--")

    head, rows, told = matrix(results)
    columns = f"l{'r' * (len(head) - 1)}"
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(head), r"\midrule", *map(line, rows), r"\bottomrule"]
    remarks = [f"% {' '.join(note.split())}" for note in (f"{told} Needs the package booktabs.", *all_notes(results))]
    return "\n".join([*remarks, *body, r"\end{tabular}", ""])
