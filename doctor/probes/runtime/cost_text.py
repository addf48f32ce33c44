"""Format the cost of a step."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """Format bytes such as ``68 MB`` or ``3.8 GB``, rounded up because they are a maximum."""
    unit, size = next(((unit, size) for unit, size in (("GB", 10**9), ("MB", 10**6)) if count >= size), ("KB", 1000))
    tenths = -(-10 * count // size)
    return f"{tenths / 10:g} {unit}" if tenths < 100 else f"{-(-count // size)} {unit}"


def in_seconds(seconds: float) -> str:
    """Format seconds such as ``18 s``, rounded up."""
    return f"{-(-seconds // 1):.0f} s"
