"""Bounds of values that another process sends. A value outside its bound makes the whole message unreadable.

Sizes are several times what the largest job sends: a world of :data:`MOST_RANKS`, 64 KiB for a list of names.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_RANKS = 1 << 22
"""As in :data:`doctor.core.capture.WORLD_LIMIT`."""

Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
"""A rank, a place or a count."""
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
Rate = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Bytes, segments or operations a second; 1e18 is an exaFLOP."""
Size = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Bytes."""
Mtu = Annotated[int, Meta(ge=68, le=1 << 17)]
"""Bytes of a packet: 68 is the least of IPv4 (RFC 791), 65,520 the largest in use (InfiniBand)."""
Name = Annotated[str, Meta(max_length=255)]
"""Of a host, an interface, an axis: 255 is the most of DNS (RFC 1035, section 2.3.4)."""
Word = Annotated[str, Meta(max_length=64)]
"""Of a responder; only its hash is sent."""
Path = Annotated[str, Meta(max_length=4096)]
"""PATH_MAX of Linux."""
Text = Annotated[str, Meta(max_length=4096)]
"""A sentence, an error, a command to be pasted."""
Ranks = Annotated[tuple[Number, ...], Meta(max_length=MOST_RANKS)]
Processors = Annotated[tuple[Number, ...], Meta(max_length=1 << 13)]
"""CPU_SETSIZE of the kernel's largest configuration (CONFIG_NR_CPUS, 8192)."""


def shortened(text: str, most: int = 4096) -> str:
    """The text, cut to what a message may hold: an error of somebody else's library has no bound of its own."""
    return text if len(text) <= most else f"{text[: most - 2]} …"
