"""Reads the CUDA contexts that the full probes measured, for ``doctor estimate --context-from``."""

from __future__ import annotations

from pathlib import Path

from doctor.cli.diff import read_report
from doctor.core.capture import read_capture
from doctor.core.report_document import DeviceContext
from doctor.core.report_summary import measured_contexts
from doctor.postmortem.file_kinds import kind_of


def contexts_in(path: Path) -> tuple[DeviceContext, ...]:
    """Return the contexts in a report or a capture.

    Raises:
        UnusableError: it can't be read, is neither of the two, or malformed.
    """
    if kind_of(path) == "report":
        return read_report(path).contexts
    return measured_contexts(read_capture(path).job())
