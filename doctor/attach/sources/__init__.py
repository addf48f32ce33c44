"""Sources beside stacks and the kernel: the GPUs, NCCL, and the flight recorders of ranks."""
