"""Checks of the family nccl: settings and libraries of NCCL."""
