"""Main program of an isolated collector: collect one section and write it to stdout."""

from __future__ import annotations

import sys

from doctor.collectors.base import Machine


def main(key: str) -> None:
    """Collect the section ``key`` and write its encoded outcome to stdout."""
    from doctor.collectors import collector_for
    from doctor.collectors.runner import encode_outcome, run_collector

    outcome = run_collector(collector_for(key), Machine(), here=True)
    sys.stdout.buffer.write(encode_outcome(outcome))
