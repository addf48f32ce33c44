"""Chooses the reader of a launch file by its name and first lines."""

from __future__ import annotations

import re

from doctor.knowledge.launcher_index import COMMANDS
from doctor.lint.launch.manifest import Manifest, read_manifest
from doctor.lint.launch.shell.reader import ShellFile, read_shell

CONFIGS = (".yaml", ".yml", ".json")
SHELLS = (".sh", ".bash", ".sbatch", ".slurm", ".batch", ".job", ".sub", ".bsub", ".run", ".zsh", ".ksh")
_FIRST_LINE = re.compile(r"#!.*\b(?:ba|z|k|da)?sh\b")
_PROGRAMS = {call.split()[0] for command in COMMANDS.values() for call in command.calls}
_MODULES = [re.escape(module) for command in COMMANDS.values() for module in command.modules if "." in module]
_CUES = re.compile(
    rf"^\s*#SBATCH\b|(?<![\w./-])(?:{'|'.join(sorted(_PROGRAMS))})\s|(?:{'|'.join(_MODULES)})\b"
    r"|\.py\b|\bpython[\d.]* "
    r"|\b(?:NCCL|TORCH|GLOO|PYTORCH|CUDA|MASTER|N+[CL]{1,4})_\w+=",
    re.MULTILINE,
)


def read_launch_file(path: str, text: str) -> ShellFile | Manifest | None:
    """What a file starts and sets; ``None`` if it is not a launch file.

    Raises:
        UnreadableFile: it is one, and cannot be read: a template, broken or too large.
    """
    name = path.lower()
    if name.endswith(CONFIGS):
        return read_manifest(path, text)
    if name.endswith(SHELLS) or _FIRST_LINE.match(text):
        return read_shell(path, text) if _CUES.search(text) else None
    return None
