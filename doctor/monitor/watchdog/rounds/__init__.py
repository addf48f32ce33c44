"""Rounds in which the ranks report to the one that judges."""
