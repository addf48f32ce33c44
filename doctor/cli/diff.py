"""Compares the two arguments of ``doctor diff``: captures and records, or reports."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from doctor.core.capture import FILE_LIMIT, merge_captures
from doctor.core.decoding import prepared
from doctor.core.diff.captures import Difference, compare
from doctor.core.diff.reports import compare_reports
from doctor.core.errors import UnusableError
from doctor.core.masking import mask_record
from doctor.core.report_document import SCHEMA, Report
from doctor.postmortem.file_kinds import kind_of
from doctor.postmortem.inputs import read_inputs


def difference(before: Path, after: Path) -> list[Difference]:
    """Return what changed, the most likely causes of trouble first."""
    # Path.is_file raises if a parent folder is not accessible.
    kinds = [os.path.isfile(path) and kind_of(path) == "report" for path in (before, after)]  # noqa: PTH113
    if all(kinds):
        return compare_reports(read_report(before), read_report(after))
    if any(kinds):
        report, other = (before, after) if kinds[0] else (after, before)
        raise UnusableError(f"cannot compare {report}, a report, with {other}, which is not a report")
    return compare(*(merge_captures(read_inputs([path]).captures) for path in (before, after)))


def read_report(path: Path) -> Report:
    """Read a report; raises ``UnusableError`` if it is not readable, malformed, or of another schema."""
    try:
        if path.stat().st_size > FILE_LIMIT:
            raise UnusableError(f"{path} is larger than {FILE_LIMIT >> 30} GiB")
        report = mask_record(msgspec.json.decode(path.read_bytes(), type=prepared(Report)))
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnusableError(f"cannot read {path}: not a valid rankdoctor report ({error})") from None
    if report.schema != SCHEMA:
        raise UnusableError(f"{path} has schema {report.schema}; this release reads schema {SCHEMA}")
    return report
