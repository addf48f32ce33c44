"""The Lightning callback."""
