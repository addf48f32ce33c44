"""Whether a module that a package lacks may still be there when its program is started."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path, PurePath

from doctor.lint.engine.discovery import LintTarget, UnreadableFile, read_text

_BUILT = r"\.(?:py|pyx|pyi|so|pyd|proto|c|cc|cpp|cu|ipynb|zip)\b"
"""How files end from which a module comes."""
_MAKES_MODULES = re.compile(r"Extension\(|cpp_extension|load_inline|pybind11|sys\.modules|meta_path")


def may_give(name: str, text: str) -> bool:
    """Whether a text with a name may give a module that name: as an attribute, or as a module that is built, written or
    downloaded."""
    word = re.escape(name)
    sets = rf"\.{word}\s*=(?!=)|\bsetattr\([^\n]*['\"]{word}['\"]|\b{word}{_BUILT}"
    return _MAKES_MODULES.search(text) is not None or re.search(sets, text) is not None


@lru_cache(maxsize=512)
def may_appear(folder: Path, root: Path, name: str) -> bool:
    """Whether the folder of a package has something of a module's name, or Git leaves out a file of that name, or
    records it as a submodule."""
    try:
        entries = [one.name for one in folder.iterdir()]
    except OSError:
        return True
    if any(entry.partition(".")[0] == name for entry in entries):
        return True
    above = [folder, *(one for one in folder.parents if one.is_relative_to(root))]
    inner = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
    made = (*inner, name, f"{name}.py")
    ignored = (line for one in above for line in _lines(one / ".gitignore"))
    return any(_ignores(line, made) for line in ignored) or any(
        re.search(rf"\b{re.escape(name)}\b", line) for line in _lines(root / ".gitmodules")
    )


def _ignores(line: str, names: tuple[str, ...]) -> bool:
    pattern = PurePath(re.sub(r"(?:/\*+)+$", "", line.strip().lstrip("!"))).name
    return bool(pattern) and not line.startswith("#") and any(fnmatch(name, pattern) for name in names)


@lru_cache(maxsize=256)
def _lines(file: Path) -> tuple[str, ...]:
    if not file.is_file():
        return ()
    try:
        return tuple(read_text(LintTarget(file, str(file), "config", file)).text.splitlines())
    except UnreadableFile:
        return ("*",)
