"""Logs: lines, prefixes, known messages, tracebacks and clocks."""
