"""Errors that a user sees as one sentence."""


class UnusableError(Exception):
    """An input of the user can't be used; the message is one sentence. Commands exit with 2."""
