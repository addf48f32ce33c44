"""Where the findings of a run go: the console, Python's warnings, report.json, loggers' metrics, Prometheus.

They are told of what was judged, in the thread that judges, and never on the step path.
"""
