"""Rules about samplers, data loaders and evaluation data."""
