"""Rounds in which the ranks report to the rank that evaluates."""
