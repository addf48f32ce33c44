"""Small readings of folders and links that give nothing where there is nothing, instead of raising."""

from __future__ import annotations

from pathlib import Path


def listed(folder: Path) -> list[str]:
    """The sorted names in ``folder``; none where it is missing or may not be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def link_target(path: Path) -> str | None:
    """What the symbolic link ``path`` holds, or ``None``."""
    try:
        return str(path.readlink())
    except OSError:
        return None
