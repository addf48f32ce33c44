"""The addresses of this network namespace from getifaddrs(3).

psutil lists them, too, but its import takes 10 ms, which every training process would pay.
"""

from __future__ import annotations

import ctypes
import os
import socket

import msgspec

_AT = {socket.AF_INET: (4, 8), socket.AF_INET6: (8, 24)}
"""Where the address begins and ends in ``struct sockaddr_in`` and ``sockaddr_in6``."""


class ListedAddress(msgspec.Struct, frozen=True, gc=False):
    """One entry. ``address`` is empty if it is not an Internet address; ``netmask``: ``None`` without one."""

    interface: str
    family: int
    address: str
    netmask: str | None


class _AddressEntry(ctypes.Structure):
    """The first fields of ``struct ifaddrs``."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
        ("netmask", ctypes.c_void_p),
    )


def listed_addresses() -> list[ListedAddress]:
    """Return all entries by family, and those of a family in the order of the kernel.

    Raises:
        OSError: the kernel returns no list.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = []
    try:
        place = first.value
        while place:
            entry = _AddressEntry.from_address(place)
            if entry.address:  # an interface may have an entry without one
                family = ctypes.c_ushort.from_address(entry.address).value
                address, mask = _text(family, entry.address) or "", _text(family, entry.netmask)
                found.append(ListedAddress(os.fsdecode(entry.name), family, address, mask))
            place = entry.next
    finally:
        libc.freeifaddrs(first)
    return sorted(found, key=lambda one: one.family)


def _text(family: int, place: int | None) -> str | None:
    if not place or family not in _AT:
        return None
    begin, end = _AT[socket.AddressFamily(family)]
    return socket.inet_ntop(family, ctypes.string_at(place + begin, end - begin))
