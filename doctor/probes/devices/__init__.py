"""Copies and matrix products on each device."""
