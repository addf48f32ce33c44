"""Checks of host names, their resolution and the master address."""
