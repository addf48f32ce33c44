"""Checks of the family launch: who started the processes, as what."""
