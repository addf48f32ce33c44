"""How many connections this process can afford."""

from __future__ import annotations

import resource


def affordable(most: int) -> int:
    """``most``, or a quarter of the open files that this process is allowed where that is less: probing takes one
    quarter, answering another, and the rest is for whatever else the process does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 4))
