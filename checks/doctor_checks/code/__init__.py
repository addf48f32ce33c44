"""Rules of the family code: what in a training script hangs, diverges or wastes memory on several ranks."""
