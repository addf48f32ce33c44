"""Experiments of ``--why``: which setting to vary, and what the trials show."""
