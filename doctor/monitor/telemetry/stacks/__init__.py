"""Stacks of a process, live or from a file."""
