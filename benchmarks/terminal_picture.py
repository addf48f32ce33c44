"""Draw the terminal of a hang that the callback reports: docs/assets/hang.svg.

    python benchmarks/terminal_picture.py

Runs examples/hang_on_one_rank.py on two ranks, keeps the finding, and leaves out the evidence below its first lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "examples" / "hang_on_one_rank.py"
PICTURE = ROOT / "docs" / "assets" / "hang.svg"
COMMAND = ["torchrun", "--nproc-per-node=2", PROGRAM.name]
WIDTH = 104
LEFT_OUT = ("source", "evidence", "more")
"""Rows of the finding that the picture does without."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_REMOTE_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def output_of_the_job() -> str:
    """Run the program until it ends itself, and return what it printed, with colors."""
    torchrun = Path(sys.executable).with_name("torchrun")
    variables = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PROGRAM.name).write_bytes(PROGRAM.read_bytes())
        done = subprocess.run(
            [torchrun, *COMMAND[1:]], cwd=folder, env=variables, capture_output=True, text=True, timeout=120
        )
    return done.stderr + done.stdout


def finding_in(output: str) -> list[str]:
    """The lines of the finding, without the rows in :data:`LEFT_OUT`."""
    lines: list[str] = []
    row = ""
    started = False
    for line in output.splitlines():
        plain = _ESCAPE.sub("", line)
        started = started or bool(re.match(r"rankdoctor \d\d:\d\d:\d\d: \d+ error", plain))
        if started and lines and not plain.startswith((" ", "✗")):
            break
        if started:
            label = re.match(r" {10}(?P<label>[a-z]+)? ", plain)
            row = (label["label"] or row) if label and not plain.startswith(" " * 19) else row
            if row not in LEFT_OUT:
                lines.append(line)
    if not lines:
        raise SystemExit(f"the job reported no finding:\n{output}")
    return lines


def picture_of(lines: list[str]) -> str:
    """An SVG of the terminal, which loads no font."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {' '.join(COMMAND)}", style="bold"))
        for line in lines:
            console.print(Text.from_ansi(line))
        return _REMOTE_FONT.sub("", console.export_svg(title="rankdoctor", theme=MONOKAI))


if __name__ == "__main__":
    PICTURE.write_text(picture_of(finding_in(output_of_the_job())), encoding="utf-8")
