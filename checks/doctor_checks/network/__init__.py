"""Checks of the family network: names, interfaces, paths between hosts."""
