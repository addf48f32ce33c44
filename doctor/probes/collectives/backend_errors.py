"""Shorten the error of a process group to one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOST = re.compile(
    r"timed?[ -]?out|wait timeout|closed by (remote )?peer|reset by peer|broken pipe|socket closed|"
    r"remote process exited",
    re.IGNORECASE,
)
"""Errors of a rank that waited for others in vain, or lost them: the fault is theirs (transport/tcp/pair.cc and
unbound_buffer.cc of Gloo; ncclRemoteError of NCCL)."""
MOST = 300
"""Maximum of characters."""
_SOURCE = re.compile(r"^\[[^\]\s]+:\d+\]\s*")
_ADVICE = re.compile(r"\.? This is typically caused by .*")
_QUOTED = re.compile(r"Last error:\s*(\S.*)")
_WARNED = re.compile(r"NCCL WARN\s+(\S.*)")
_WATCHDOG = re.compile(r"(Watchdog caught collective operation timeout: .*)")


def error_text(error: Exception) -> str:
    """Return the text of an error: that of NCCL if torch quotes it, without source locations and advice."""
    text = str(error).strip()
    quoted = _QUOTED.search(text)
    first = text.splitlines()[0] if text else type(error).__name__
    return (quoted[1].strip() if quoted else _ADVICE.sub("", _SOURCE.sub("", first)))[:MOST]


def informative_line(error: str, lines: Iterable[str]) -> str:
    """Return an error, with the last warning of NCCL or of the watchdog of torch in the output ``lines`` of the child
    if that says more."""
    for line in reversed([*lines]):
        found = _WARNED.search(line) or _WATCHDOG.search(line)
        if found and found[1] not in error:
            return f"{found[1].strip()} ({error})"[:MOST]
    return error[:MOST]
