"""Checks of the family host: limits, clocks, storage of a host."""
