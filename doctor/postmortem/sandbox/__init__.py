"""Hostile inputs: unpickling, decompression, and child processes with limits."""
