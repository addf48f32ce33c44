"""What broke a process group, in one line of its own words."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOST = re.compile(
    r"timed?[ -]?out|wait timeout|closed by (remote )?peer|reset by peer|broken pipe|socket closed|"
    r"remote process exited",
    re.IGNORECASE,
)
"""What a rank says that waited for others in vain, or lost them: the fault is theirs (Gloo's transport/tcp/pair.cc and
unbound_buffer.cc; NCCL's ncclRemoteError)."""
MOST = 300
"""Characters."""
_SOURCE = re.compile(r"^\[[^\]\s]+:\d+\]\s*")
_ADVICE = re.compile(r"\.? This is typically caused by .*")
_QUOTED = re.compile(r"Last error:\s*(\S.*)")
_WARNED = re.compile(r"NCCL WARN\s+(\S.*)")
_WATCHDOG = re.compile(r"(Watchdog caught collective operation timeout: .*)")


def error_text(error: Exception) -> str:
    """What an error says: NCCL's own words where torch quotes them, without places in anybody's source and
    without advice."""
    text = str(error).strip()
    quoted = _QUOTED.search(text)
    first = text.splitlines()[0] if text else type(error).__name__
    return (quoted[1].strip() if quoted else _ADVICE.sub("", _SOURCE.sub("", first)))[:MOST]


def informative_line(error: str, lines: Iterable[str]) -> str:
    """An error, with the last warning of NCCL or of torch's watchdog among the ``lines`` that the child wrote, where
    that says more."""
    for line in reversed([*lines]):
        found = _WARNED.search(line) or _WATCHDOG.search(line)
        if found and found[1] not in error:
            return f"{found[1].strip()} ({error})"[:MOST]
    return error[:MOST]
