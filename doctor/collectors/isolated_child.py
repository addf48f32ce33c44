"""The other end of an isolated collector: a fresh interpreter that reads one section and writes it to stdout."""

from __future__ import annotations

import sys

from doctor.collectors.base import Machine


def main(key: str) -> None:
    """Read the section ``key`` and write its outcome to stdout as bytes."""
    from doctor.collectors import collector_for
    from doctor.collectors.runner import encode_outcome, run_collector

    outcome = run_collector(collector_for(key), Machine(), here=True)
    sys.stdout.buffer.write(encode_outcome(outcome))
