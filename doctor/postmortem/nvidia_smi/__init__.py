"""Readers of the output formats of nvidia-smi."""
