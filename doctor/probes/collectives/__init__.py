"""Collectives over the job's backend: speed and correctness."""
