"""What a watched run raises."""

from __future__ import annotations

from collections.abc import Sequence


class Findings(RuntimeError):
    """Raised on all ranks before the first batch, with ``on_error="raise"``: what would break the run. ``ids``: of the
    checks that found it."""

    def __init__(self, words: str, ids: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.ids = tuple(ids)


Findings.__module__ = "doctor"  # the name in tracebacks, and the one to catch it by
