"""Messages between two hosts before and after a transfer.

The caller sends a greeting, which only holders of the word can make, and the handshake. It then waits, for as long as
the round lasts, until the other host has reached the same round and answers with the welcome. Bytes flow one way until
the receiver has enough; its report returns the other way, where the queues are empty.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from doctor.probes.responder.wire_format import MAGIC, proof

_VISIT = struct.Struct("!QIIB")
_REPORT = struct.Struct("!QQddd")

HANDSHAKE_BYTES = _VISIT.size
REPORT_BYTES = _REPORT.size


class TransferHandshake(NamedTuple):
    """The purpose of a connection.

    ``survey``: a number that distinguishes this measurement from earlier ones; ``caller``: its place among the hosts;
    ``sends``: the bytes flow from the caller.
    """

    survey: int
    round: int
    caller: int
    sends: bool

    def encode(self) -> bytes:
        """Encode it."""
        return _VISIT.pack(self.survey, self.round, self.caller, self.sends)

    @classmethod
    def decode(cls, data: bytes) -> TransferHandshake:
        """Decode :data:`HANDSHAKE_BYTES` bytes."""
        survey, turn, caller, sends = _VISIT.unpack(data)
        return cls(survey, turn, caller, bool(sends))


class TransferReport(NamedTuple):
    """What the receiver measured.

    ``size`` bytes in ``seconds``; of these ``steady_size`` in ``steady_seconds`` count. ``waited``: share of the time
    without a processor.
    """

    size: int
    steady_size: int
    seconds: float
    steady_seconds: float
    waited: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 if none arrived."""
        return self.steady_size / self.steady_seconds if self.steady_seconds > 0 else 0.0

    def encode(self) -> bytes:
        """Encode it."""
        return _REPORT.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> TransferReport:
        """Decode :data:`REPORT_BYTES` bytes."""
        return cls(*_REPORT.unpack(data))


def transfer_greeting(word: str) -> bytes:
    """Return the greeting of a caller, as long as that of a light probe."""
    return MAGIC + proof(b"transfer", word)


def transfer_welcome(word: str) -> bytes:
    """Return the answer of the other host when it is ready, as long as the welcome of a light probe."""
    return proof(b"ready", word)
