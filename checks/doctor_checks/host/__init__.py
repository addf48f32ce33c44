"""Checks of the family host: limits, clocks and storage of a host."""
