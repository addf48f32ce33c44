"""Cases of checks that judge logs: the lines themselves, read by the readers that ``doctor diagnose`` uses."""

from __future__ import annotations

from doctor.testing.cases import JobBuilder


def logged(*lines: str, name: str = "job.log") -> JobBuilder:
    """A job of which nothing is left but these lines of one log."""
    from doctor.postmortem.job_assembly import sketch_of_lines

    members, evidence, world = sketch_of_lines(lines, name)
    return JobBuilder(members, world_size=world, evidence=evidence)
