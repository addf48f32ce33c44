"""The responder's side of one connection, without any socket: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Callable

from doctor.probes.bandwidth.transfer_wire import HANDSHAKE_BYTES, TransferHandshake, transfer_greeting
from doctor.probes.responder.wire_format import GREETING_BYTES, LARGEST, LENGTH, MOST_BYTES, TIMES, greeting, welcome


class ProtocolViolation(Exception):
    """The other side is no prober of this job, or breaks the rules: the connection is to be closed."""


class ResponderProtocol:
    """Greets who knows the ``word``, then answers every message with ``clock``'s times (seconds since 1970).

    ``visit`` is what a caller came for who wants to transfer bytes: the rest of that talk is not held here.
    """

    visit: TransferHandshake | None = None

    def __init__(self, word: str, clock: Callable[[], float]) -> None:
        self._word = word
        self._clock = clock
        self._begun = bytearray()
        self._body = 0
        self._taken = 0
        self._visits = False
        self.greeted = False

    def receive(self, data: bytes) -> bytes:
        """The answers to ``data``, which may end anywhere.

        Raises:
            Unwelcome: wrong word, or more bytes than a probe sends.
        """
        arrived = self._clock()
        self._taken += len(data)
        if self._taken > MOST_BYTES:
            raise ProtocolViolation
        answers = []
        while data:
            answer, data = self._step(data, arrived)
            answers.append(answer)
        return b"".join(answers)

    def _step(self, data: bytes, arrived: float) -> tuple[bytes, bytes]:
        """The answer to the beginning of ``data``, and what is left of it."""
        if self._body:
            skipped = min(self._body, len(data))
            self._body -= skipped
            return (b"" if self._body else self._times(arrived)), data[skipped:]
        wanted = self._header - len(self._begun)
        self._begun += data[:wanted]
        if len(data) < wanted:
            return b"", b""
        whole = bytes(self._begun)
        self._begun.clear()
        return self._take(whole, arrived), data[wanted:]

    @property
    def _header(self) -> int:
        """Bytes of what has to come next."""
        if self._visits:
            return HANDSHAKE_BYTES
        return LENGTH.size if self.greeted else GREETING_BYTES

    def _take(self, whole: bytes, arrived: float) -> bytes:
        if self.visit is not None:  # Nothing follows before the welcome.
            raise ProtocolViolation
        if self._visits:
            self.visit = TransferHandshake.decode(whole)
            return b""
        return self._open(whole, arrived) if self.greeted else self._greet(whole)

    def _greet(self, words: bytes) -> bytes:
        if words == transfer_greeting(self._word):
            self._visits = True
            return b""
        if words != greeting(self._word):
            raise ProtocolViolation
        self.greeted = True
        return welcome(self._word)

    def _open(self, header: bytes, arrived: float) -> bytes:
        (self._body,) = LENGTH.unpack(header)
        if self._body > LARGEST:
            raise ProtocolViolation
        return b"" if self._body else self._times(arrived)

    def _times(self, arrived: float) -> bytes:
        return TIMES.pack(arrived, self._clock())


class SilentProtocol:
    """Says nothing and takes nothing: on a port that is only held so that others can be seen to reach it."""

    greeted = False
    visit: TransferHandshake | None = None

    def receive(self, data: bytes) -> bytes:
        """Nobody has anything to say here: :class:`ProtocolViolation`."""
        raise ProtocolViolation
