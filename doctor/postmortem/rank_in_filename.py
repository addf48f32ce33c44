"""What the names of files tell of who wrote them."""

from __future__ import annotations

import re
from pathlib import Path

_RANK = re.compile(r"(?:^|[^A-Za-z])rank[-_. ]?(\d{1,6})(?=\D|$)", re.IGNORECASE)


def rank_in_name(path: Path) -> int | None:
    """The rank that a file is named after (``snapshot_rank3.pickle``, ``rank-3.json``), or the folder that it is in."""
    for name in (path.name, path.parent.name):
        if found := _RANK.search(name):
            return int(found[1])
    return None
