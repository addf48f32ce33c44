"""Static analysis of training scripts and launch files: what hangs, diverges or wastes memory on several ranks."""
