"""The Grafana dashboard and the alert rules for the metrics of :mod:`doctor.monitor.sinks.prometheus`.

Run ``python -m doctor.monitor.sinks.grafana`` and import its output (Dashboards, New, Import); the data source is a
variable. With ``alerts``, it prints the rules for Prometheus (``rule_files``).
"""

from __future__ import annotations

import sys
from importlib.resources import files


def dashboard() -> str:
    """Return the dashboard as JSON."""
    return (files("doctor.monitor.sinks") / "grafana.json").read_text(encoding="utf-8")


def alert_rules() -> str:
    """Return the alert rules as YAML."""
    return (files("doctor.monitor.sinks") / "alerts.yml").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(alert_rules() if sys.argv[1:] == ["alerts"] else dashboard())
