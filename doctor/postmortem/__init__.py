"""Readers of the logs, flight-recorder dumps and memory snapshots of a job, without torch."""
