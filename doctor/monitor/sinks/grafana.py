"""The Grafana dashboard for the metrics of :mod:`doctor.monitor.sinks.prometheus`.

Run ``python -m doctor.monitor.sinks.grafana`` and import its output (Dashboards, New, Import); the data source is a
variable.
"""

from __future__ import annotations

import sys
from importlib.resources import files


def dashboard() -> str:
    """Return the dashboard as JSON."""
    return (files("doctor.monitor.sinks") / "grafana.json").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(dashboard())
