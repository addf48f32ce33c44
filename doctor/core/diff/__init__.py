"""Differences between two captures, two reports or two runs."""
