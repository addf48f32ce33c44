"""What a prober and a responder say to each other: a greeting each, then messages of the one and times of the other.

A prober sends the greeting that only the word makes, and the responder answers with the welcome that only the word
makes, so both know whom they talk to. Then each message is its length and so many bytes of whatever content; when the
last has come, the answer is the clock of the responder at that moment and at the moment of its answer.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

MAGIC = b"rankdoc\x01"
"""Opens a greeting: no other protocol begins like this."""

LENGTH = struct.Struct("!I")
TIMES = struct.Struct("!dd")

GREETING_BYTES = len(MAGIC) + 16
WELCOME_BYTES = 16

LARGEST = 128 << 10
"""Bytes of the longest message: two packets of the largest MTU in use (65,520, InfiniBand in connected mode)."""

MOST_BYTES = LARGEST + (64 << 10)
"""Bytes that a responder takes on one connection."""

SEGMENT = 536
"""Bytes of data in a packet that every IPv4 network passes whole (RFC 9293, section 3.7.1)."""


def new_word() -> str:
    """A random token of 128 bits."""
    return secrets.token_hex(16)


def greeting(word: str) -> bytes:
    """What a prober says first."""
    return MAGIC + proof(b"greeting", word)


def welcome(word: str) -> bytes:
    """What a responder answers."""
    return proof(b"welcome", word)


def proof(role: bytes, word: str) -> bytes:
    """16 bytes that only who knows the word can say in that role."""
    return hashlib.sha256(role + word.encode("utf-8", "replace")).digest()[:16]
