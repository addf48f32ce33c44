"""What two hosts say to each other before and after bytes flow between them.

The caller sends the greeting of a transfer, which only the word makes, and the visit: what it came for. It then waits,
for as long as the round lasts, until the other host has come to the same round and answers with the welcome. Bytes flow
one way until the receiver has seen enough; its report comes back the other way, where nothing stands in a queue.
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
    """What a caller came for. ``survey``: a number that tells this measurement from earlier ones; ``caller``: its place
    among the hosts; ``sends``: the bytes flow from the caller."""

    survey: int
    round: int
    caller: int
    sends: bool

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return _VISIT.pack(self.survey, self.round, self.caller, self.sends)

    @classmethod
    def decode(cls, data: bytes) -> TransferHandshake:
        """From :data:`HANDSHAKE_BYTES` bytes."""
        survey, turn, caller, sends = _VISIT.unpack(data)
        return cls(survey, turn, caller, bool(sends))


class TransferReport(NamedTuple):
    """What the receiver saw: ``size`` bytes in ``seconds``, and of these what counts, ``steady_size`` bytes in
    ``steady_seconds``; ``waited``: the share of the time for which it had no processor."""

    size: int
    steady_size: int
    seconds: float
    steady_seconds: float
    waited: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second; 0 where none came."""
        return self.steady_size / self.steady_seconds if self.steady_seconds > 0 else 0.0

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return _REPORT.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> TransferReport:
        """From :data:`REPORT_BYTES` bytes."""
        return cls(*_REPORT.unpack(data))


def transfer_greeting(word: str) -> bytes:
    """What a caller says first; as long as the greeting of a light probe."""
    return MAGIC + proof(b"transfer", word)


def transfer_welcome(word: str) -> bytes:
    """What the other host answers when it is ready; as long as the welcome of a light probe."""
    return proof(b"ready", word)
