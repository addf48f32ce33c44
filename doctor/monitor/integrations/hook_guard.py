"""Keeps what breaks in the doctor away from the run: failures are counted, and after a few of them it is switched off.

One of the few places that forgive every exception: whatever goes wrong here, the training must not notice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from doctor.version import __version__

T = TypeVar("T")

SWITCH = "DOCTOR_DISABLE"
"""The variable that turns everything off."""

MOST_FAILURES = 3
"""Hooks that may fail before the doctor leaves the run alone."""


def is_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether :data:`SWITCH` is set to anything but nothing, ``0``, ``false``, ``no`` or ``off``."""
    return environ.get(SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off")


def value_or_default(question: Callable[[], T], default: T) -> T:
    """The answer of a framework, or ``default`` where it has none: its inner names differ from release to release."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - see the module
        return default


class HookGuard:
    """Counts failures of the doctor's own. ``off``: it has been switched off, once and for good."""

    def __init__(self) -> None:
        self.failures = 0
        self.off = False

    def count(self, where: str, error: Exception) -> None:
        """``where`` has failed."""
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            self.switch_off(where, error)

    def switch_off(self, where: str, error: Exception) -> None:
        """Leave the run alone from now on, and say so once."""
        if not self.off:
            self.off = True
            _say(_farewell(where, error, self.failures))


def _farewell(where: str, error: Exception, failures: int) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" ({place[0].filename}:{place[0].lineno})" if place else ""
    often = f" after {failures} failures" if failures > 1 else ""
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"rankdoctor: switched itself off{often}; the run goes on without it. {where}: {words}{at}. "
        f"Please report this line to the authors of rankdoctor {__version__}"
    )


def _say(line: str) -> None:
    """One line on stderr; where nobody can be told, the run goes on all the same."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
