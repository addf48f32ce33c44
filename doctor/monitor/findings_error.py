"""The exception that a watched run raises."""

from __future__ import annotations

from collections.abc import Sequence


class Findings(RuntimeError):
    """Raised on all ranks before the first batch if ``on_error="raise"`` and an error was found.

    ``ids``: the checks that found it.
    """

    def __init__(self, words: str, ids: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.ids = tuple(ids)


Findings.__module__ = "doctor"  # the public name, as shown in tracebacks and caught by users
