"""Thin adapters of the monitor: what Lightning, the Hugging Face Trainer and plain loops tell it, and nothing else."""
