"""Checks of the family data: loaders, samplers, and the samples that ranks draw."""
