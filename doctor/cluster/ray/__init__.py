"""Gathers the nodes of a Ray cluster."""
