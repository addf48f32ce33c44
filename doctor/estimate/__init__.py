"""An estimate of the peak memory of a rank, from one traced training step that needs neither a GPU nor the weights."""
