"""Facts about GPUs and their driver."""
