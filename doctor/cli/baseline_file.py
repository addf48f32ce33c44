"""The job that worked, by its capture: what ``--expect`` names."""

from __future__ import annotations

from pathlib import Path

from doctor.core.capture import merge_captures
from doctor.core.errors import UnusableError
from doctor.core.job import Job
from doctor.postmortem.inputs import read_inputs


def load_baseline(path: Path) -> Job:
    """The job in a capture, or in a folder of captures of its ranks, to be set as ``job.expected``.

    Other files of the folder are passed over. A capture that can't be read is not: with it, what the ranks of that
    job disagree about could look agreed.

    Raises:
        UnusableError: there is no capture, or one of them can't be used; in one sentence.
    """
    inputs = read_inputs([path])
    for file in inputs.files:
        if file.kind == "capture" and file.why is not None:
            raise UnusableError(file.why)
    return merge_captures(inputs.captures)
