"""Export a short run of every algorithm and write how far its actions are from `predict` into docs/export.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "export.md"
START, END = "<!-- parity: scripts/measure_export.py -->\n", "<!-- /parity -->\n"
ENVS = {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}


def measure() -> list[str]:
    """One line of the table for each algorithm and kind of action."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from resume_cases import SPECS, tiny
    from rl_training.run.workflows import train
    from rl_training.tools.export import export_policy

    lines = []
    for name, spec in SPECS.items():
        for kind in (kind for kind in ENVS if kind in spec.action_kinds):
            with tempfile.TemporaryDirectory() as folder:
                run = train(tiny(name, Path(folder), env_id=ENVS[kind]), console=False)
                made = [export_policy(run.checkpoint_path, form).facts["parity"] for form in ("onnx", "torch")]
            differ = " | ".join(f"{parity['max_abs_difference']:.1e} | {parity['different']}" for parity in made)
            lines.append(f"| `{name}` | {kind} | {made[0]['distinct_actions']} | {differ} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Put the table between the markers of the page."""
    head = "| Algorithm | Actions | distinct | ONNX: largest difference | differ | torch: largest difference | differ |"
    table = "\n".join([head, "|" + " --- |" * 7, *measure(), ""])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
