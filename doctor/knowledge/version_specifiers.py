"""Compare versions with version specifiers, as pip does (the packaging library)."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version


def fits(version: str, specifier: str) -> bool | None:
    """Return whether ``version`` is in the range of ``specifier`` (``>=2.1.0,<4.0``); ``None`` if one cannot be parsed.

    A pre-release or vendor build such as ``2.6.0a0+ecf3bae40a.nv25.01`` also fits if its release does: it is built from
    the sources of that release.
    """
    try:
        allowed, parsed = SpecifierSet(specifier), Version(version)
    except (InvalidSpecifier, InvalidVersion):
        return None
    return allowed.contains(parsed, prereleases=True) or allowed.contains(parsed.base_version)


def minor_release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, ``None`` if it cannot be parsed."""
    try:
        return (Version(version).major, Version(version).minor)
    except InvalidVersion:
        return None
