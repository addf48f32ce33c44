"""Rules about collectives that some ranks do not join, or join late."""
