"""Launch files, parsed and never run: shell and batch scripts, and the YAML and JSON of schedulers and launchers."""
