"""Rules about settings, variables and API versions."""
