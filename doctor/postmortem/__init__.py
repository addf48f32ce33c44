"""Readers of what a job left: logs, flight-recorder dumps, memory snapshots. They need no torch."""
