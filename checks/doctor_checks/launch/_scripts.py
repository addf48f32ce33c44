"""Cases of rules that read shell scripts."""

from __future__ import annotations

from doctor.api import FileFails, FilePasses
from doctor.testing import lines


def script_fails(title: str, *text: str) -> FileFails:
    """A batch script of these lines; the rule hits those that end with ``# !``."""
    return FileFails(title, lines(*text), name="job.sbatch")


def script_passes(title: str, *text: str) -> FilePasses:
    """A batch script of these lines, in which the rule finds nothing."""
    return FilePasses(title, lines(*text), name="job.sbatch")
