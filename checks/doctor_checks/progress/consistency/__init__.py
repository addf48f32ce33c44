"""Checks of replicas, models, losses and checkpoints that differ between ranks."""
