"""Protocol of the responder for one connection, without a socket: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Callable

from doctor.probes.bandwidth.transfer_wire import HANDSHAKE_BYTES, TransferHandshake, transfer_greeting
from doctor.probes.responder.wire_format import GREETING_BYTES, LARGEST, LENGTH, MOST_BYTES, TIMES, greeting, welcome


class ProtocolViolation(Exception):
    """The caller is not a probe of this job, or violates the protocol; the connection is to be closed."""


class ResponderProtocol:
    """Welcome callers that know the ``word``, then answer each message with two times of ``clock``.

    ``handshake`` is set if the caller wants a transfer; the connection then leaves this protocol.
    """

    handshake: TransferHandshake | None = None

    def __init__(self, word: str, clock: Callable[[], float]) -> None:
        self._word = word
        self._clock = clock
        self._header_bytes = bytearray()
        self._body = 0
        self._received = 0
        self._expects_handshake = False
        self.greeted = False

    def receive(self, data: bytes) -> bytes:
        """Return the answers to ``data``, which may end anywhere.

        Raises:
            ProtocolViolation: wrong word, or more bytes than a probe sends.
        """
        arrived = self._clock()
        self._received += len(data)
        if self._received > MOST_BYTES:
            raise ProtocolViolation
        answers = []
        while data:
            answer, data = self._step(data, arrived)
            answers.append(answer)
        return b"".join(answers)

    def _step(self, data: bytes, arrived: float) -> tuple[bytes, bytes]:
        """Return the answer to the beginning of ``data``, and the rest of it."""
        if self._body:
            skipped = min(self._body, len(data))
            self._body -= skipped
            return (b"" if self._body else self._times(arrived)), data[skipped:]
        wanted = self._header - len(self._header_bytes)
        self._header_bytes += data[:wanted]
        if len(data) < wanted:
            return b"", b""
        whole = bytes(self._header_bytes)
        self._header_bytes.clear()
        return self._handle(whole, arrived), data[wanted:]

    @property
    def _header(self) -> int:
        """Number of bytes of the next header."""
        if self._expects_handshake:
            return HANDSHAKE_BYTES
        return LENGTH.size if self.greeted else GREETING_BYTES

    def _handle(self, whole: bytes, arrived: float) -> bytes:
        if self.handshake is not None:  # Nothing follows before the welcome.
            raise ProtocolViolation
        if self._expects_handshake:
            self.handshake = TransferHandshake.decode(whole)
            return b""
        if not self.greeted:
            return self._greet(whole)
        (self._body,) = LENGTH.unpack(whole)
        if self._body > LARGEST:
            raise ProtocolViolation
        return b"" if self._body else self._times(arrived)

    def _greet(self, words: bytes) -> bytes:
        if words == transfer_greeting(self._word):
            self._expects_handshake = True
            return b""
        if words != greeting(self._word):
            raise ProtocolViolation
        self.greeted = True
        return welcome(self._word)

    def _times(self, arrived: float) -> bytes:
        return TIMES.pack(arrived, self._clock())


class SilentProtocol:
    """Accept connections without answering: for a port that is only held so that others can test it."""

    greeted = False
    handshake: TransferHandshake | None = None

    def receive(self, data: bytes) -> bytes:
        """Raise :class:`ProtocolViolation`: no data is expected here."""
        raise ProtocolViolation
