"""Where the rank-seconds of a run went: ``waits.py`` compares ranks, ``summary.py`` adds up and words it."""
