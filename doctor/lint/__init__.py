"""Training scripts and launch files, read and never run: what in them hangs, diverges or wastes memory on several
ranks."""
