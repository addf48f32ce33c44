"""The peak memory of a rank before the run, from one training step that needs neither a GPU nor the weights."""
