"""Checks of collectives over the network, and of NCCL's network plugins."""
