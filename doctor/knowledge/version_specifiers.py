"""Versions against version specifiers, as pip compares them (the packaging library)."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version


def fits(version: str, specifier: str) -> bool | None:
    """Whether ``version`` is in the range of ``specifier`` (``>=2.1.0,<4.0``); ``None`` where one can't be parsed.

    A pre-release or vendor build such as ``2.6.0a0+ecf3bae40a.nv25.01`` also fits where its release does: it is built
    from that release's sources.
    """
    try:
        allowed, parsed = SpecifierSet(specifier), Version(version)
    except (InvalidSpecifier, InvalidVersion):
        return None
    return allowed.contains(parsed, prereleases=True) or allowed.contains(parsed.base_version)


def minor_release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, ``None`` where it can't be parsed."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return (parsed.major, parsed.minor)
