"""Reports of ``doctor estimate``."""
