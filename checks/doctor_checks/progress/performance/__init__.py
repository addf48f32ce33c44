"""Checks of slow ranks, and of time spent in communication and in waiting for data."""
