"""Keeps what ``doctor attach`` read, for a ticket: the stacks of each rank, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from doctor.cli.output import rendered
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import TrustedOwners, UntrustedPath

if TYPE_CHECKING:
    from doctor.attach.read_job import ReadJob
    from doctor.cli.options import CommonOptions
    from doctor.core.report_document import Report

_NAMES = {"html": "report.html", "markdown": "report.md", "junit": "report.xml"}


def keep_attached(folder: Path, read: ReadJob, report: Report, options: CommonOptions, group: int | None) -> None:
    """Write ``rank-3.json`` with the samples of each rank and its data workers, and the report as JSON and in the
    chosen format. Raises ``UnusableError`` if the folder can't be used."""
    files = read.files()
    files["report.json"] = rendered(report, "json", read.ranks).encode()
    if options.form in _NAMES:
        files[_NAMES[options.form]] = rendered(report, options.form, read.ranks).encode()
    own = OwnFolder(folder, owners=TrustedOwners.here(group))
    try:
        for name, data in files.items():
            own.write(name, data)
    except UntrustedPath as refused:
        raise UnusableError(str(refused)) from None
    except OSError as error:
        raise UnusableError(f"cannot write {folder}: {error.strerror or error}") from None
