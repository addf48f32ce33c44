"""Training scripts: names, loops, ranks, loaders and collectives."""
