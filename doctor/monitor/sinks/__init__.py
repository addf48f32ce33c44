"""Sinks for findings: console, Python warnings, report.json, loggers' metrics, Prometheus.

Sinks are called in the thread that evaluates, never on the step path.
"""
