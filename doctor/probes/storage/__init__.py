"""Reads and writes on the storage of a job."""
