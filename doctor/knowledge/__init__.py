"""Data on releases, variables, XIDs and log messages, loaded when first used, and the functions that read it."""
