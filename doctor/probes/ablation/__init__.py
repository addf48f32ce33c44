"""Trials of ``--why``: probes run again with one setting changed."""
