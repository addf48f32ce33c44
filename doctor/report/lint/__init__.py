"""Reports of ``doctor lint``."""
