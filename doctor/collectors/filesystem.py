"""Small readings of folders and links that give nothing where there is nothing, instead of raising."""

from __future__ import annotations

import re
from pathlib import Path

_PROTOCOL = re.compile(r"(::|://)")
_LOCAL = ("file", "local")
"""What fsspec calls the file system of this host (fsspec/implementations/local.py)."""


def listed(folder: Path) -> list[str]:
    """The sorted names in ``folder``; none where it is missing or may not be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def local_path(url: str) -> str | None:
    """The path that ``url`` names on this host; ``None`` where it names another file system (``s3://bucket/runs``,
    ``memory://runs``, ``simplecache::gs://…``), by fsspec's own rule (fsspec/utils.py, get_protocol)."""
    protocol, *rest = _PROTOCOL.split(url, maxsplit=1)
    if not rest:
        return url
    return rest[1] if protocol in _LOCAL and rest[0] == "://" else None


def link_target(path: Path) -> str | None:
    """What the symbolic link ``path`` holds, or ``None``."""
    try:
        return str(path.readlink())
    except OSError:
        return None
