"""How a process leaves a gathering that it does not judge; a lone process loads no more of this room than this."""


class Dismissed(Exception):
    """Another process judges, or nobody does: this one leaves with ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
