"""Record a terminal session as an animated SVG: real commands in a pseudo-terminal, long waits cut short.

    python scripts/record_session.py [--output docs/images/session.svg]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME as THEME

COLUMNS, ROWS = 100, 28
CELL, LINE, SIZE = 8.4, 19, 14  # pixels
SHORTEST, LONGEST, READ = 0.2, 0.5, 2.5  # seconds of a frame, and of one that shows what a command printed
LENGTH = 20.0  # seconds of the film at most
PREPARED = (  # run before, and not shown: the film begins with what comes out
    "rl-training train ppo/cartpole --total-timesteps 40000 --name first",
    "rl-training train a2c/cartpole --total-timesteps 40000 --seeds 1,2 --jobs 2",
)
COMMANDS = (
    "rl-training eval --checkpoint runs/first --num-episodes 20",
    "rl-training compare runs",
    "rl-training train ppo/cartpole --total-timesteps 40000 --name second",
    "rl-training predict --checkpoint runs/first --obs '[0.0, 0.0, 0.05, 0.0]'",
)
PART = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")
Cell = tuple[str, Style]


@dataclass
class Screen:
    """What a terminal shows: rows of cells, and where its cursor is."""

    rows: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    decoder: AnsiDecoder = field(default_factory=AnsiDecoder)

    def write(self, text: str) -> None:
        """Take in what a program wrote: characters, colors, and the few movements that rich makes."""
        for part in PART.findall(text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self._next_row()
            elif part.startswith("\x1b["):
                self._obey(part)
            else:
                for character in part:
                    self._put(character)

    def _put(self, character: str) -> None:
        if self.column == COLUMNS:
            self.column = 0
            self._next_row()
        row = self.rows[self.row]
        row += [(" ", Style.null())] * (self.column + 1 - len(row))
        row[self.column] = character, self.decoder.style
        self.column += 1

    def _next_row(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
        if len(self.rows) > ROWS:
            self.row -= 1
            del self.rows[0]

    def _obey(self, sequence: str) -> None:
        number = int(found[0]) if (found := re.findall(r"\d+", sequence)) else 1
        if sequence.endswith("m"):
            self.decoder.decode_line(sequence)
        elif sequence.endswith("A"):
            self.row = max(0, self.row - number)
        elif sequence.endswith("K"):
            self.rows[self.row] = [] if "2" in sequence else self.rows[self.row][: self.column]

    def frame(self) -> tuple[str, ...]:
        """Each row as SVG."""
        return tuple(draw_row(row) for row in self.rows)


def draw_row(row: list[Cell]) -> str:
    """A row's characters as runs of one style, each stretched to its cells."""
    spans, column = [], 0
    for style, cells in groupby(row, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in cells)
        if text.strip():
            color = style.color.get_truecolor(THEME).hex if style.color and not style.color.is_default else ""
            looks = (f' fill="{color}"' if color else "") + (' font-weight="bold"' if style.bold else "")
            looks += ' opacity=".6"' if style.dim else ""
            place = f'x="{column * CELL:.1f}" textLength="{len(text) * CELL:.1f}"'
            spans.append(f"<tspan {place}{looks}>{escape(text)}</tspan>")
        column += len(text)
    return "".join(spans)


def play(words: str, folder: Path) -> Iterator[tuple[float, str]]:
    """Run a command in a terminal of its own; what it writes, with the seconds since it began."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvpe("bash", ["bash", "-c", words], {**os.environ, **size, "TERM": "xterm-256color", "PATH": here})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    begun = time.monotonic()
    written = b""
    while True:
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:  # the program has ended
            break
        yield time.monotonic() - begun, written.decode("utf-8", "ignore")
        written = b""
    if os.waitpid(process, 0)[1]:
        raise SystemExit(f"{words} failed")


def record(folder: Path, commands: Sequence[str]) -> list[tuple[float, tuple[str, ...]]]:
    """Frames with the seconds that each is shown."""
    screen, frames = Screen(), []
    for words in commands:
        screen.write("\x1b[1;32m$\x1b[0m ")
        for start in range(0, len(words), 6):
            screen.write(words[start : start + 6])
            frames.append((0.06, screen.frame()))
        screen.write("\r\n")
        shown = 0.0
        for seconds, text in play(words, folder):
            screen.write(text)
            if seconds - shown >= SHORTEST:
                frames.append((min(LONGEST, max(SHORTEST, (seconds - shown) / 4)), screen.frame()))
                shown = seconds
        frames.append((READ, screen.frame()))
        screen.write("\r\n" if screen.column else "")
    merged: list[tuple[float, tuple[str, ...]]] = []
    for seconds, frame in frames:
        if merged and merged[-1][1] == frame:
            merged[-1] = min(merged[-1][0] + seconds, READ), frame
        else:
            merged.append((seconds, frame))
    return merged


def squeeze(frames: list[tuple[float, tuple[str, ...]]]) -> list[tuple[float, tuple[str, ...]]]:
    """The frames in at most LENGTH seconds."""
    factor = min(1.0, LENGTH / sum(seconds for seconds, _ in frames))
    return [(seconds * factor, frame) for seconds, frame in frames]


def draw(frames: list[tuple[float, tuple[str, ...]]]) -> str:
    """One SVG file: every different row once, a group of rows per frame, and the film moved from group to group."""
    width, height = COLUMNS * CELL + 24, ROWS * LINE + 24
    different = dict.fromkeys(row for _, rows in frames for row in rows if row)
    names = {row: f"r{number}" for number, row in enumerate(different)}
    total = sum(seconds for seconds, _ in frames)
    groups, steps, at = [], [], 0.0
    for number, (seconds, rows) in enumerate(frames):
        steps.append(f"{100 * at / total:.3f}%{{transform:translateX({-number * width:.0f}px)}}")
        uses = "".join(f'<use href="#{names[row]}" y="{y * LINE}"/>' for y, row in enumerate(rows) if row)
        groups.append(f'<g transform="translate({number * width:.0f})">{uses}</g>')
        at += seconds
    texts = "".join(f'<text id="{name}" y="{SIZE}">{row}</text>' for row, name in names.items())
    font = f"font:{SIZE}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#e6edf3"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
        f"<title>A session with rl-training</title><style>text{{{font}}}"
        f"#film{{animation:film {total:.1f}s steps(1,end) infinite}}@keyframes film{{{''.join(steps)}}}</style>"
        f'<defs>{texts}</defs><rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
        f'<svg x="12" y="12" width="{COLUMNS * CELL:.0f}" height="{ROWS * LINE}">'
        f'<g id="film">{"".join(groups)}</g></svg></svg>\n'
    )


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/images/session.svg"))
    parser.add_argument("--still", metavar="COMMAND", help="draw what one command leaves on the screen, run here")
    given = parser.parse_args()
    output = given.output
    if given.still:
        output.write_text(draw(record(Path.cwd(), [given.still])[-1:]), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        for words in PREPARED:
            list(play(words, Path(folder)))
        frames = squeeze(record(Path(folder), COMMANDS))
    output.write_text(draw(frames), encoding="utf-8")
    print(f"{output}: {len(frames)} frames, {sum(s for s, _ in frames):.0f} s, {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
