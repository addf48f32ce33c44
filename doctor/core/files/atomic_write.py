"""Replaces files atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_whole(path: Path, content: bytes, mode: int) -> None:
    """Replace the file at ``path``, which must not be a link, by ``content`` with the permissions ``mode``.

    Raises:
        OSError: it can't be written; the previous file is kept.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".rankdoctor-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
