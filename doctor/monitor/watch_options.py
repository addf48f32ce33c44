"""What a user may say to the callback, whichever framework it is for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import VARIABLE, TrustedOwners, chosen_group

OnError = Literal["warn", "raise"]
OnHang = Literal["report", "abort"]
Probes = Literal["none", "light"]

_CHOICES = {"on_error": get_args(OnError), "on_hang": get_args(OnHang), "probe": get_args(Probes)}
OWN_FOLDER = "rankdoctor"
LEAST_HANG = 1.0
"""Seconds: ranks look at one another twice a second, and have to be given time to answer."""


@dataclass(frozen=True)
class WatchOptions:
    """Arguments of the callback. ``hang_after``: seconds without progress, ``None`` for the run's own pace.

    ``select`` and ``ignore``: ids or families of checks. ``share_group``: a group by its name or GID, whose members the
    run's folder is shared with. ``ValueError`` where one can't be meant.
    """

    dirpath: str | os.PathLike[str] | None = None
    on_error: OnError = "warn"
    on_hang: OnHang = "report"
    hang_after: float | None = None
    every_n_steps: int = 50
    probe: Probes = "none"
    prometheus_port: int | None = None
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    share_group: str | int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be meant, while the user's own line is on the stack."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be {' or '.join(map(repr, choices))}")
        if self.hang_after is not None and not self.hang_after >= LEAST_HANG:
            raise ValueError(f"hang_after is {self.hang_after!r}; it is at least {LEAST_HANG:g} s, or None")
        if not isinstance(self.every_n_steps, int) or self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps!r}; it is a whole number from 1")
        if self.prometheus_port is not None and not 0 < self.prometheus_port < 1 << 16:
            raise ValueError(f"prometheus_port is {self.prometheus_port!r}; it is a port, or None")
        for name in ("select", "ignore"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text; it is a list of ids or families, such as ['NET', 'MEM001']")
        self._require_known_checks()
        if self.share_group is not None:
            self._group(self.share_group)

    @staticmethod
    def _group(named: str | int) -> int | None:
        try:
            return chosen_group(named)
        except UnusableError as error:
            raise ValueError(f"share_group: {error}") from None

    def _require_known_checks(self) -> None:
        if not (self.select or self.ignore):
            return
        from doctor.core.check_registry import load_registry
        from doctor.core.settings import require_known_patterns

        try:
            require_known_patterns(load_registry(), [*self.select, *self.ignore])
        except UnusableError as error:
            raise ValueError(str(error)) from None

    def folder(self, default: Path, tell: Callable[[str], None]) -> OwnFolder:
        """Where reports and records go: ``dirpath``, else ``rankdoctor`` below ``default``. A link is followed where
        the user named it, and owns it. ``tell`` gets one line if the environment names a group that does not exist."""
        owners = TrustedOwners.here(self._chosen_group(tell))._replace(option=f"share_group or {VARIABLE}")
        if self.dirpath is not None:
            return OwnFolder(absolute(Path(self.dirpath)), owners=owners, checked=True)
        return OwnFolder(absolute(default), OWN_FOLDER, owners=owners)

    def _chosen_group(self, tell: Callable[[str], None]) -> int | None:
        if self.share_group is not None:
            return self._group(self.share_group)
        try:
            return chosen_group(os.environ.get(VARIABLE))
        except UnusableError as error:
            tell(f"{VARIABLE}: {error}; going on without a group")
            return None


def absolute(directory: Path) -> Path:
    """It as it is meant now, wherever the program goes; as it is where the working directory was removed."""
    with contextlib.suppress(FileNotFoundError):
        return directory.absolute()
    return directory
