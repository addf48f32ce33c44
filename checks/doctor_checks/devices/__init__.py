"""Checks of the family devices: GPUs and what surrounds them."""
