"""Monitoring of a training run: framework integrations, telemetry, watchdog and sinks."""
