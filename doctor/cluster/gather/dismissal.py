"""Exit of a process that does not evaluate the job; single processes load no more than this."""


class Dismissed(Exception):
    """Another process evaluates the job, or none does: this one exits with ``code``.

    ``unreached``: the other processes could not be reached."""

    def __init__(self, code: int, *, unreached: bool = False) -> None:
        super().__init__(code)
        self.code = code
        self.unreached = unreached
