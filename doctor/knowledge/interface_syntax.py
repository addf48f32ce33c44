"""Syntax of settings that name interfaces and devices of NCCL and Gloo, and loopback hosts.

Sources: NCCL ``src/misc/utils.cc`` (parseStringList, matchIfList), ``src/misc/socket.cc`` (ncclFindInterfaces,
ncclEnvSocketFamily), ``src/os/linux.cc`` (ncclOsFindInterfaces), ``src/transport/net_ib/init.cc`` (NCCL_IB_HCA),
``src/misc/param.cc`` (ncclLoadParam); torch ``torch/csrc/distributed/c10d/init.cpp`` (GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from doctor.core.text import lazy_compile

MAX_INTERFACES = 16
"""Interfaces that NCCL keeps, and entries that it reads of NCCL_SOCKET_IFNAME (MAX_IFS in src/include/net.h)."""

MAX_RDMA_DEVICES = 32
"""Ports that NCCL keeps, and entries that it reads of NCCL_IB_HCA (MAX_IB_DEVS in src/transport/net_ib)."""

Entry = tuple[str, "int | None"]

_LEADING_NUMBER = lazy_compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_DECIMAL = lazy_compile(r"\s*([+-]?[0-9]+)")
_INT64 = 1 << 63
_LOOPBACK_NAME = lazy_compile(r"localhost|127(\.\d+){3}|::1|\[::1\]")


class NcclList(msgspec.Struct, frozen=True):
    """A list of names as NCCL parses NCCL_SOCKET_IFNAME and NCCL_IB_HCA.

    ``exclude``: it begins with ``^`` and lists what to exclude. ``exact``: it begins with ``=`` (or ``^=``) and the
    entries are whole names, otherwise prefixes. ``entries``: names with their port, ``None`` without one.
    """

    exclude: bool
    exact: bool
    entries: tuple[Entry, ...]

    def names(self, name: str, port: int | None = None) -> bool:
        """Return whether an entry matches ``name``; a list without entries matches everything."""
        for entry in self.entries:  # of every interface of every host; a generator would cost twice as much
            if self.entry_matches(entry, name, port):
                return True
        return not self.entries

    def entry_matches(self, entry: Entry, name: str, port: int | None = None) -> bool:
        """Return whether this entry matches ``name``. Ports count only if both have one."""
        prefix, wanted = entry
        identical = name == prefix if self.exact else name.startswith(prefix)
        return identical and (wanted is None or port is None or wanted == port)

    def selects(self, name: str, port: int | None = None) -> bool:
        """Return whether NCCL would use the interface or device ``name`` (and its ``port``)."""
        return self.names(name, port) != self.exclude


@lru_cache(maxsize=64)
def parse_nccl_list(text: str, limit: int = MAX_INTERFACES) -> NcclList:
    """Parse a list of interfaces or devices as NCCL does.

    One ``^`` and then one ``=`` may precede the list and apply to all of it; entries are separated by commas and not
    trimmed, so `` eth0`` begins with a space, and case counts. Empty entries are skipped; entries after the first
    ``limit`` are not read.
    """
    exclude = text.startswith("^")
    rest = text[1:] if exclude else text
    exact = rest.startswith("=")
    parsed = (_read_entry(entry) for entry in rest[exact:].split(","))
    return NcclList(exclude, exact, tuple(entry for entry in parsed if entry[0])[:limit])


def _read_entry(text: str) -> Entry:
    """Return a name and its port. Port -1 means any in NCCL; text after the colon that is not a number is 0 (atoi)."""
    name, colon, rest = text.partition(":")
    number = rest.partition(":")[0]
    if not colon or not number:
        return name, None
    match = _DECIMAL.match(number)
    port = int(match[1]) if match else 0
    return name, None if port == -1 else port


def nccl_interface_list(text: str | None) -> NcclList | None:
    """Return NCCL_SOCKET_IFNAME as a list, or ``None`` if NCCL selects by itself: unset or shorter than two characters
    (ncclFindInterfaces)."""
    return parse_nccl_list(text) if text is not None and len(text) > 1 else None


def nccl_device_list(text: str | None) -> NcclList:
    """Return NCCL_IB_HCA as a list; unset and empty mean all devices."""
    return parse_nccl_list(text or "", MAX_RDMA_DEVICES)


def nccl_socket_family(text: str | None) -> str | None:
    """Return NCCL_SOCKET_FAMILY as ``inet`` or ``inet6``; ``None`` for any other text, which has no effect."""
    return {"AF_INET": "inet", "AF_INET6": "inet6"}.get(text or "")


def parse_nccl_integer(text: str | None, default: int) -> int:
    """Return an integer setting as NCCL parses it, by ``strtoll`` with base 0: ``0x10`` is 16, ``010`` is 8, and text
    without a leading number (``true``, ``yes``) is 0. Unset, empty or out of range is ``default``."""
    if not text:
        return default
    match = _LEADING_NUMBER.match(text)
    if match is None:
        return 0
    sign, digits = match.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    value = int(digits, base) * (-1 if sign == "-" else 1)
    return value if -_INT64 <= value < _INT64 else default


def gloo_names(text: str | None) -> tuple[str, ...]:
    """Return GLOO_SOCKET_IFNAME as exact names; empty if Gloo uses the host name.

    A value shorter than two characters counts as unset. Names are separated by commas and not trimmed, and each must be
    an interface with an address: an empty name between commas is an error too (one comma at the end is not).
    """
    if text is None or len(text) < 2:
        return ()
    names = text.split(",")
    return tuple(names[:-1] if names[-1] == "" else names)


def looks_like_nccl_syntax(text: str) -> bool:
    """Return whether a value for Gloo has the syntax of NCCL: an entry begins with ``^`` or ``=``."""
    return any(entry.startswith(("^", "=")) for entry in text.split(","))


def list_fault(value: str) -> str:
    """Why an entry of ``NCCL_SOCKET_IFNAME`` or ``NCCL_IB_HCA`` is not a name; empty if all can be.

    NCCL reads ``^`` and ``=`` before the whole list only (``findInterfaces`` in src/os/linux.cc)."""
    first, *others = value.split(",")
    for entry in (first.removeprefix("^").removeprefix("="), *others):
        if entry != entry.strip():
            return f"the space is part of the name {entry!r}"
        if entry.startswith(("'", '"')):
            return f"the quotation marks are part of the name {entry}"
    wrong = [entry for entry in others if entry.startswith(("^", "="))]
    if not wrong:
        return ""
    return (
        f"entry {wrong[0]} matches nothing" if len(wrong) == 1 else f"entries {' and '.join(wrong[:4])} match nothing"
    )


def misplaced_signs(value: str) -> str:
    """What NCCL does with a list that repeats ``^`` or ``=`` behind a comma; empty for other lists.

    parseStringList (src/misc/utils.cc) keeps the sign as part of the name, which then matches nothing."""
    parsed = nccl_device_list(value)
    kept = [f"{name}:{port}" if port is not None else name for name, port in parsed.entries if name[0] not in "^="]
    ignored = [entry for entry in value.split(",")[1:] if entry.startswith(("^", "="))]
    if not ignored or not kept:
        return ""
    verb, which = "excludes" if parsed.exclude else "uses", "" if parsed.exact else "devices that begin with "
    return (
        f"NCCL {verb} only {which}{', '.join(kept[:4])} and ignores {', '.join(ignored[:4])}, because "
        f"`{ignored[0][0]}` is allowed only at the start of the list."
    )


def has_sound_entry(value: str) -> bool:
    """Whether an entry of a list that :func:`list_fault` refuses can be a name."""
    first, *others = value.split(",")
    entries = (first.removeprefix("^").removeprefix("="), *others)
    return any(entry == entry.strip() != "" and entry[0] not in "^='\"" for entry in entries)


def is_loopback_name(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    return bool(_LOOPBACK_NAME.fullmatch(host.strip()))


def repaired_list(value: str) -> str:
    """Return ``value`` with one ``^`` or ``=`` before the whole list and without spaces and quotation marks.

    Entries that exclude something are left out of a list that selects; empty if nothing remains."""
    bare = value.strip(" '\"")
    exclude, exact = bare.startswith("^"), bare.lstrip("^").startswith("=")
    entries = [entry.strip(" '\"") for entry in bare.split(",")]
    kept = [entry.lstrip("^=").strip() for entry in entries if exclude or not entry.startswith("^")]
    names = ",".join(entry for entry in kept if entry)
    return f"{'^' if exclude else ''}{'=' if exact else ''}{names}" if names else ""
