"""Gathering on a Ray cluster."""
