"""Jobs described by files in place of a factory: a model's ``config.json``, and configurations of trainers.

Files are data here: nothing is imported or run from beside them, and nothing is downloaded. No torch is needed.
"""
