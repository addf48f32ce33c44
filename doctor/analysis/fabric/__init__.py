"""Measured paths, transfers and collectives: which host, link or group is slow or loses packets."""
