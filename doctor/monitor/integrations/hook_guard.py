"""Isolates a run from failures of the doctor; a few failures disable it.

One of the few places that catch every exception: the training must not be affected.
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
"""The variable that disables everything."""

MOST_FAILURES = 3
"""Number of failed hooks after which the doctor is disabled."""


def is_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether :data:`SWITCH` is set, and not to ``0``, ``false``, ``no`` or ``off``."""
    return environ.get(SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off")


def value_or_default(read: Callable[[], T], default: T) -> T:
    """Return a value read from a framework; ``default`` if that fails, as names differ."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - see the module
        return default


class HookGuard:
    """Counts internal failures. ``off``: permanently disabled."""

    def __init__(self) -> None:
        self.failures = 0
        self.off = False

    def count(self, where: str, error: Exception) -> None:
        """Count a failure of ``where``."""
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            self.switch_off(where, error)

    def switch_off(self, where: str, error: Exception) -> None:
        """Disable the doctor for the rest of the run and report that once."""
        if not self.off:
            self.off = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed
                place = traceback.extract_tb(error.__traceback__)[-1:]
                at = f" ({place[0].filename}:{place[0].lineno})" if place else ""
                count = f" after {self.failures} failures" if self.failures > 1 else ""
                words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                sys.stderr.write(
                    f"rankdoctor: disabled{count}; training continues without it. {where}: {words}{at}. "
                    f"Please report this line as a bug of rankdoctor {__version__}\n"
                )
                sys.stderr.flush()
