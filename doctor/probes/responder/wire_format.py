"""Messages between a probe and a responder.

The probe sends a greeting and the responder a welcome, which only holders of the secret word can make. Each message of
the probe then is a length and that many arbitrary bytes; the responder answers with its time when the last byte arrived
and its time when it answers.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

MAGIC = b"rankdoc\x01"
"""First bytes of a greeting: no other protocol begins with them."""

LENGTH = struct.Struct("!I")
TIMES = struct.Struct("!dd")

GREETING_BYTES = len(MAGIC) + 16
WELCOME_BYTES = 16

LARGEST = 128 << 10
"""Bytes of the longest message: two packets of the largest MTU in use (65,520, InfiniBand in connected mode)."""

MOST_BYTES = LARGEST + (64 << 10)
"""Bytes that a responder accepts on one connection."""

SEGMENT = 536
"""Bytes of data in a packet that every IPv4 network carries without fragmentation (RFC 9293, section 3.7.1)."""


def new_word() -> str:
    """Return a random token of 128 bits."""
    return secrets.token_hex(16)


def greeting(word: str) -> bytes:
    """Return the greeting of a probe."""
    return MAGIC + proof(b"greeting", word)


def welcome(word: str) -> bytes:
    """Return the welcome of a responder."""
    return proof(b"welcome", word)


def proof(role: bytes, word: str) -> bytes:
    """Return 16 bytes that only a holder of the word can compute for that role."""
    return hashlib.sha256(role + word.encode("utf-8", "replace")).digest()[:16]
