"""Checks of ranks that hang, fail or call different collectives."""
