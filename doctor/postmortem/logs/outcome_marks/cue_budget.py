"""Texts of which one stands in every line that may be a mark, and how many lines are read because of each.

Some of them are parts of names that a log repeats in every line ("error_rate", "failed_samples"). Such a text is not
searched for any longer once it has led to many lines that are not marks; the others still are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_BEFORE_NAN = (" ", ": ", "= ", "  ", "\t", ":", "=", "(", "'", '"', "-", "+")

CUES = (
    *("rror", "ERROR", "FATAL", "fatal", "Fatal", "CRITICAL", "ritical", "xception", "panic", "PANIC"),
    *("terminate called", "what():", "Assertion", "core dumped", "Segmentation", "Bus error", "Aborted", "Killed"),
    *("not found", "No such file", "No module named", "annot ", "an't ", "denied", "Illegal instruction", "ailed"),
    *("ailure", "imeout", "imed out", "nable to", "could not", "Could not", "refused", "abort", "NCCL WARN"),
    *("stack smashing", "double free", "out of memory", "exit code", "exit status", "Exit Code"),
    *(
        "exited with",
        "rain_runtime",
        "est metric",
        "raining",
        "RAINING",
        "inished",
        "ompleted",
        "OMPLETED",
        "ucceeded",
        "uccessfully",
    ),
    # After "loss", so that another name such as "number of nan iterations" does not use up the reads of all.
    *(before + nan for nan in ("nan", "NaN", "NAN") for before in _BEFORE_NAN),
    *("exit_status", "Exit_status", "omplete", "otential root", "ossible causes", "ossible reasons"),
)
"""Texts of which one stands in every line that may be a mark, but for steps: these are looked for apart."""

MOST_MISSES = 200
"""Lines with one of these texts that are read although none of them is a mark."""
MOST_READ = 400
"""Lines with one of these texts that are read: of marks, only the first ones are kept."""


class CueBudget:
    """How many lines of one log may still be read because of each cue. ``active``: cues that still lead to lines;
    ``spent``: the others."""

    def __init__(self, cues: Iterable[int]) -> None:
        self.active = set(cues)
        self.spent: set[int] = set()
        self._reads: Counter[int] = Counter()
        self._misses: Counter[int] = Counter()

    def charge(self, cues: Iterable[int], *, is_mark: bool) -> None:
        """Count a line with these cues that was read."""
        for cue in self.active.intersection(cues):
            self._reads[cue] += 1
            self._misses[cue] += not is_mark
            if self._misses[cue] >= MOST_MISSES or self._reads[cue] >= MOST_READ:
                self.active.discard(cue)
                self.spent.add(cue)
