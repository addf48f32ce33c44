"""Checks of the family memory: device and host memory."""
