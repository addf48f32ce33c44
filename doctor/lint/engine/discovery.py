"""Finds the files to lint and reads their text. Nothing is imported or run."""

from __future__ import annotations

import io
import os
import re
import stat
import tokenize
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from doctor.core.text import lazy_compile

MOST_BYTES = {"python": 4 << 20, "notebook": 32 << 20, "shell": 1 << 20, "config": 1 << 20}
"""Larger files are generated; JSON of this size is data, not configuration."""
MOST_FILES = 100_000
_SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", "node_modules", "site-packages", "dist-packages", "__pypackages__", ".ipynb_checkpoints"),
        *("third_party", "thirdparty", "third-party", "vendor", "vendored", "_vendor", "external", "extern"),
    }
)
"""Folders that are entered only if they are given themselves, as virtual environments and hidden folders are: caches,
and copies of other projects, which are corrected there."""
_KINDS = {
    ".py": "python",
    ".pyw": "python",
    ".ipynb": "notebook",
    **dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), "shell"),
    **dict.fromkeys((".yaml", ".yml", ".json"), "config"),
}
_MAY_BE_SCRIPTS = frozenset({"", ".job", ".batch", ".bsub", ".sub", ".run", ".zsh", ".ksh"})
"""Endings of files whose kind the first line decides."""
_SNIFFED = 256
LINE_END = lazy_compile(r"\r\n|\r|\n")
"""Line ends of Python's parser; ``str.splitlines`` has more."""
_SHELL = re.compile(rb"^#!.*sh\b|^\s*(?:#SBATCH|srun|torchrun|mpirun|export|source|module|set -\w)\b", re.MULTILINE)
_PYTHON = re.compile(rb"^#!.*python|^\s*(?:import|from) \w|^\s*(?:def|class) \w[^\n]{0,200}:", re.MULTILINE)
_YAML = re.compile(rb"^(?:---|[A-Za-z_][\w./-]*:(?: |$))", re.MULTILINE)


class LintTarget(NamedTuple):
    """A file to lint. ``shown``: its path in reports; ``kind``: a key of :data:`MOST_BYTES`, or ``unknown``; ``root``:
    the path that the user gave; ``skipped``: why it is not read."""

    path: Path
    shown: str
    kind: str
    root: Path
    skipped: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the user gave this very file."""
        return self.path == self.root


class SourceText(NamedTuple):
    """The content of a file with its original line ends, and its encoding."""

    text: str
    encoding: str


class UnreadableFile(Exception):
    """Why a file is skipped, in a few words."""


def find_files(paths: Iterable[Path]) -> list[LintTarget]:
    """The given files and those below given folders, each once, ordered by name."""
    found: dict[str, LintTarget] = {}
    for target in chain.from_iterable(map(_below, paths)):
        found.setdefault(os.path.abspath(target.path), target)  # noqa: PTH100 - Path.absolute keeps ".."
        if len(found) > MOST_FILES:
            break
    return list(found.values())


def _below(root: Path) -> Iterator[LintTarget]:
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        kind = _KINDS.get(root.suffix.lower(), "unknown")
        yield LintTarget(root, _shown(root), kind, root, f"it can't be read: {reason}")
        return
    if not stat.S_ISDIR(mode):
        unknown = LintTarget(root, _shown(root), "unknown", root, "it is neither Python nor a launch file")
        yield _target(root, root) or unknown
        return
    refused: list[OSError] = []
    for folder, folders, files in os.walk(root, onerror=refused.append):
        folders[:] = sorted(name for name in folders if not _is_skipped_folder(folder, name))
        found = (_target(Path(folder, name), root) for name in sorted(files))
        yield from (target for target in found if target is not None)
    for refusal in refused:
        path = Path(str(refusal.filename))
        yield LintTarget(path, _shown(path), "unknown", root, f"it can't be entered: {refusal.strerror or refusal}")


def _shown(path: Path) -> str:
    """The path as valid UTF-8; the name of a stream."""
    shown: str | None = getattr(path, "shown", None)
    return shown if shown is not None else os.fsencode(path).decode("utf-8", "replace")


def _is_skipped_folder(folder: str, name: str) -> bool:
    if name in _SKIPPED_FOLDERS or (name.startswith(".") and name not in (".", "..")):
        return True
    return os.path.isfile(os.path.join(folder, name, "pyvenv.cfg"))  # noqa: PTH113, PTH118 - for every folder of a tree


def _target(path: Path, root: Path) -> LintTarget | None:
    kind = _KINDS.get(path.suffix.lower()) or (_sniffed(path) if path.suffix.lower() in _MAY_BE_SCRIPTS else None)
    return LintTarget(path, _shown(path), kind, root) if kind else None


def _sniffed(path: Path) -> str | None:
    try:
        with _opened(path) as stream:
            begin = stream.read(_SNIFFED) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else b""
    except (OSError, ValueError):
        return None
    first = begin.partition(b"\n")[0] if begin.startswith(b"#!") else b""
    if b"python" in first:
        return "python"
    return "shell" if first.rstrip().endswith((b"sh", b"sh -l", b"sh -e", b"sh -x")) or b"sh " in first else None


def ending_of(head: bytes) -> str:
    """The ending for the content of a stream, which has no name. ``.py`` if nothing else fits."""
    if head.lstrip().startswith(b"{"):
        return ".ipynb" if b'"cells"' in head else ".json"
    if _PYTHON.search(head):
        return ".py"
    if _SHELL.search(head):
        return ".sh"
    return ".yaml" if _YAML.search(head) else ".py"


def _opened(path: Path) -> BinaryIO:
    """The opened file. A pipe without a writer does not block."""
    return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")


def read_text(target: LintTarget) -> SourceText:
    """The text of a file; raises :class:`UnreadableFile` if it cannot be read."""
    most = MOST_BYTES[target.kind]
    try:
        with _opened(target.path) as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UnreadableFile("it is not a regular file")
            if about.st_size > most:
                raise UnreadableFile(f"it is larger than {most >> 20} MiB")
            content = stream.read(most)
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"it can't be read: {getattr(error, 'strerror', None) or error}") from None
    if target.kind != "python":
        return SourceText(content.decode("utf-8-sig", "replace"), "utf-8")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return SourceText(content.decode(encoding), encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableFile(f"its encoding is unknown: {error}") from None
