"""Loads the baseline job that ``--expect`` names."""

from __future__ import annotations

from pathlib import Path

from doctor.core.capture import merge_captures
from doctor.core.errors import UnusableError
from doctor.core.job import Job
from doctor.postmortem.inputs import read_inputs


def load_baseline(path: Path) -> Job:
    """Return the job in a capture, or in a folder of captures of its ranks, to be set as ``job.expected``.

    Other files of the folder are skipped, but not an unreadable capture: the ranks of the baseline that disagree about
    a value could then look unanimous.
    """
    inputs = read_inputs([path])
    for file in inputs.files:
        if file.kind == "capture" and file.why is not None:
            raise UnusableError(file.why)
    return merge_captures(inputs.captures)
