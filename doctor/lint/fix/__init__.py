"""Edits that rules propose, applied to source files."""
