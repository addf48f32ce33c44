"""Decides whose folders and files are trusted where several users can write, and explains why others are not."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from doctor.core.background import start_daemon
from doctor.core.errors import UnusableError

VARIABLE = "DOCTOR_SHARE_GROUP"
"""Names the group, as ``--share-group`` and the callback's ``share_group`` do."""
LOOKUP = 1.0
"""Timeout in seconds for looking up the name of a user or group, because a directory service may block."""
_PROC = Path("/proc")
_ALL = ["0", "0", str(0xFFFFFFFF)]
"""The map of a user namespace in which every id maps to itself; see user_namespaces(7)."""


class UntrustedPath(OSError):
    """A folder or file that another user may have created or changed. Its text is one sentence for the user."""


class TrustedOwners(msgspec.Struct, frozen=True):
    """The trusted owners: this process's user, and the members of ``group``, a GID, if there is one.

    ``doubt``: why owners can't be told apart here, if they can't. ``option``: how the user names the group.
    """

    uid: int
    group: int | None = None
    doubt: str = ""
    option: str = f"--share-group or {VARIABLE}"

    @classmethod
    def here(cls, group: int | None = None) -> TrustedOwners:
        """The owners that this process trusts."""
        uid = os.geteuid()
        doubt = ""
        if _is_unmapped("uid", uid):
            doubt = (
                f"this process runs as uid {uid}, which represents every user that its user namespace does not map, so"
                " owners of files cannot be distinguished; run it as a mapped user"
            )
        elif group is not None and _is_unmapped("gid", group):
            doubt = (
                f"gid {group} represents every group that this user namespace does not map, so members cannot be"
                " distinguished from others; map the group into the container"
            )
        return cls(uid, group, doubt)

    @property
    def folder_mode(self) -> int:
        """Permissions of a folder that the doctor creates."""
        return 0o700 if self.group is None else 0o2770

    @property
    def file_mode(self) -> int:
        """Permissions of a file that the doctor creates."""
        return 0o600 if self.group is None else 0o660

    def trusts(self, seen: os.stat_result) -> bool:
        """Whether only this user, or members of the group, can have created and changed it."""
        if self.group is not None and seen.st_gid == self.group:
            return not seen.st_mode & stat.S_IWOTH
        return seen.st_uid == self.uid

    def require_folder(self, seen: os.stat_result, path: Path, *, private: bool) -> None:
        """Accept a folder. ``private``: others can't write to it.

        Raises:
            UntrustedPath: it is a link, belongs to another user, or is open to others.
        """
        if stat.S_ISLNK(seen.st_mode):
            raise UntrustedPath(_link_in_words(seen, path))
        if not stat.S_ISDIR(seen.st_mode):
            return  # the system call fails with a clear error
        if not self.trusts(seen):
            raise UntrustedPath(self._foreign(seen, path))
        if private:
            self._require_closed(seen, path)

    def _require_closed(self, seen: os.stat_result, path: Path) -> None:
        mode = f"{stat.S_IMODE(seen.st_mode):o}"
        if self.group is None:
            if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UntrustedPath(
                    f"{path} is writable by other users (mode {mode}): remove it, or use a folder on a file system"
                    f" that keeps permissions; if ranks of several users share it, name their group with {self.option}"
                )
        elif seen.st_gid != self.group:
            raise UntrustedPath(
                f"{path} belongs to {group_in_words(seen.st_gid)} (mode {mode}), and {self.option} names"
                f" {group_in_words(self.group)}: remove it, or name its group"
            )

    def require_file(self, seen: os.stat_result, path: Path) -> None:
        """Accept a file.

        Raises:
            UntrustedPath: it is not a regular file, or belongs to another user.
        """
        if stat.S_ISLNK(seen.st_mode):
            raise UntrustedPath(_link_in_words(seen, path))
        if not stat.S_ISREG(seen.st_mode):
            raise UntrustedPath(f"{path} is not a regular file: remove it or use another folder")
        if not self.trusts(seen):
            raise UntrustedPath(self._foreign(seen, path))

    def _foreign(self, seen: os.stat_result, path: Path) -> str:
        if self.group is not None and seen.st_gid == self.group:
            return f"{path} is writable by every user (mode {stat.S_IMODE(seen.st_mode):o}): remove it"
        if self.group is not None:
            whose = f"{user_in_words(seen.st_uid)} and {group_in_words(seen.st_gid)}"
            return (
                f"{path} belongs to {whose}, and {self.option} names {group_in_words(self.group)}: remove it, or name"
                " the group that it belongs to"
            )
        unmapped = ", whom this user namespace does not map," if _is_unmapped("uid", seen.st_uid) else ""
        return (
            f"{path} belongs to {user_in_words(seen.st_uid)}{unmapped} and this process runs as"
            f" {user_in_words(self.uid)}: use another folder; if ranks of several users share it, name their group with"
            f" {self.option}"
        )


def _link_in_words(seen: os.stat_result, path: Path) -> str:
    return (
        f"{path} is a symbolic link of {user_in_words(seen.st_uid)}, and links at names that the doctor chose are not"
        " followed: remove it, or use another folder"
    )


def mapped_in_words(made: os.stat_result, path: Path, owners: TrustedOwners) -> str:
    """The sentence for a file system that assigns the files of this process to another user."""
    return (
        f"what {user_in_words(owners.uid)} makes in {path} belongs to {user_in_words(made.st_uid)} (an NFS export with"
        f" root_squash, or a map of user ids): run as another user, use another folder, or name the group of these"
        f" files, {made.st_gid}, with {owners.option}"
    )


def chosen_group(named: str | int | None) -> int | None:
    """The GID of a group, by its name or number; ``None`` if none is specified.

    Raises:
        UnusableError: there is no such group.
    """
    word = "" if named is None else str(named).strip()
    if not word:
        return None
    if word.isascii() and word.isdigit() and int(word) < 0xFFFFFFFF:
        return int(word)
    found = _looked_up(lambda: grp.getgrnam(word).gr_gid)
    if not isinstance(found, int):
        raise UnusableError(f"the share group {word!r} is not a group on this host: use its name or its number (GID)")
    return found


def user_in_words(uid: int) -> str:
    """``user alice (uid 1000)``, or only the number if it has no name here."""
    name = _looked_up(lambda: pwd.getpwuid(uid).pw_name)
    return f"user {name} (uid {uid})" if name else f"uid {uid}"


def group_in_words(gid: int) -> str:
    """``group ml (gid 2000)``, or only the number if it has no name here."""
    name = _looked_up(lambda: grp.getgrgid(gid).gr_name)
    return f"group {name} (gid {gid})" if name else f"gid {gid}"


def _looked_up(look: Callable[[], str | int]) -> str | int | None:
    """The answer of a directory service, requested in a thread that is abandoned if the service does not respond."""
    found: list[str | int] = []

    def work() -> None:
        try:
            found.append(look())
        except (KeyError, ValueError, OSError):
            return

    start_daemon("doctor-lookup", work).join(LOOKUP)
    return found[0] if found else None


def _is_unmapped(kind: str, identity: int) -> bool:
    return identity == _overflow(kind) and not _maps_all(kind)


@functools.cache
def _overflow(kind: str) -> int:
    """The id that the kernel shows for ids without a mapping."""
    try:
        return int((_PROC / "sys/kernel" / f"overflow{kind}").read_bytes())
    except (OSError, ValueError):
        return 65534


def _maps_all(kind: str) -> bool:
    try:
        return (_PROC / "self" / f"{kind}_map").read_text().split() == _ALL
    except OSError:  # a kernel without user namespaces
        return True
