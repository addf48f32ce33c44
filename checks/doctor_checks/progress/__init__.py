"""Checks of the family progress: ranks that hang, fail, fall behind or diverge."""
