"""Rules about the GPU that each rank uses."""
