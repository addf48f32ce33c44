"""The errors that a user sees as one sentence."""


class UnusableError(Exception):
    """Something that the user gave can't be used; the text is one sentence. Commands exit 2 on it."""
