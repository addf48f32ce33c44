"""One training step on fake tensors, recorded storage by storage."""
