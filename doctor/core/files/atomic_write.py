"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_whole(path: Path, content: bytes, mode: int) -> None:
    """Put ``content`` into the place of the file at ``path``, no link, with the permissions ``mode``.

    Raises:
        OSError: it can't be written; what was there stays.
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
