"""Output of nvidia-smi in its forms."""
