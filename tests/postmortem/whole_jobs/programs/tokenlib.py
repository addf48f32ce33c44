def prepare():
    """Do nothing."""
