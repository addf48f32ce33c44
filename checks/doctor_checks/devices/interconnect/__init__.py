"""Checks of NVLink, NVSwitch and peer-to-peer access."""
