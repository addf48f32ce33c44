"""Diagnosis of a stall: which rank failed to reach the collective that the others wait in, and why."""
