"""Limits for hostile inputs: decompression, and child processes."""
