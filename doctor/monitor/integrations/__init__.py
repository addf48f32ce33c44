"""Adapters that feed telemetry from Lightning, the Hugging Face Trainer and plain loops."""
