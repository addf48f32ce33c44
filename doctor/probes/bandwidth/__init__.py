"""Transfers between pairs of hosts."""
