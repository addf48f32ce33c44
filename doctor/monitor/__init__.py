"""What watches a run: integrations, telemetry, watchdog and sinks."""
