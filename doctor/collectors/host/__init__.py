"""Facts about the host: memory, limits, mounts, clocks, control groups."""
