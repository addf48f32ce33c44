"""Checks of the connections and paths between hosts."""
