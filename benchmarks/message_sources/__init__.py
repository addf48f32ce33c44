"""Readers of the messages that other software logs when it fails, from its source code."""
