"""Rules about DataParallel, DDP and FSDP wrappers."""
