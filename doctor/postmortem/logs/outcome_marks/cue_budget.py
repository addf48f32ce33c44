"""Cues of lines that may be marks, and limits on the number of lines read because of each.

Some cues are parts of names that a log repeats in every line ("error_rate", "failed_samples"). Such a cue is no longer
searched for after many lines that are not marks; the others still are.
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
        "panicked at",
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
    # After "loss", so that other names such as "number of nan iterations" do not exhaust the budget of all.
    *(before + nan for nan in ("nan", "NaN", "NAN") for before in _BEFORE_NAN),
    *("exit_status", "Exit_status", "omplete", "otential root", "ossible causes", "ossible reasons"),
)
"""Every line that may be a mark contains one of these, except steps, which are searched for separately."""

MOST_MISSES = 200
"""Maximum number of lines read because of one cue that are not marks."""
MOST_READ = 400
"""Maximum number of lines read because of one cue: only the first marks are kept."""


class CueBudget:
    """Limits the lines read because of each cue: ``active`` cues have lines left, ``spent`` ones have none."""

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
