"""Connections between the hosts of a job: reachability, latency, clocks."""
