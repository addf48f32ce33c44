"""The Grafana dashboard for what :mod:`doctor.monitor.sinks.prometheus` serves: ``python -m
doctor.monitor.sinks.grafana``.

Import what it prints (Dashboards, New, Import); the data source is asked for by a variable.
"""

from __future__ import annotations

import sys
from importlib.resources import files


def dashboard() -> str:
    """The dashboard as JSON."""
    return (files("doctor.monitor.sinks") / "grafana.json").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(dashboard())
