"""Dumps of the flight recorder of torch.distributed."""
