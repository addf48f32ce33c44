"""Options of the callback, shared by all frameworks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import VARIABLE, TrustedOwners, chosen_group

OnError = Literal["warn", "raise"]
OnHang = Literal["report", "abort"]
Probes = Literal["none", "light"]

_CHOICES = {"on_error": get_args(OnError), "on_hang": get_args(OnHang), "probe": get_args(Probes)}
OWN_FOLDER = "rankdoctor"
LEAST_HANG = 1.0
"""Minimum of ``hang_after`` in seconds: ranks poll twice a second and need time to answer."""


class WatchOptions(msgspec.Struct, frozen=True):
    """Validated arguments of the callback.

    ``hang_after``: seconds without progress, ``None`` for a limit derived from the run's own steps. ``select`` and
    ``ignore``: ids or families of checks. ``share_group``: name or GID of a group that the run's folder is shared with.
    ``html_report``: write report.html beside report.json; ``None``: unless a run of less than 30 s was healthy.
    ``otlp``: send telemetry to this OpenTelemetry collector, or with ``True`` to that of OTEL_EXPORTER_OTLP_ENDPOINT.

    Raises:
        ValueError: an argument is not valid.
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
    html_report: bool | None = None
    otlp: bool | str = False

    def __post_init__(self) -> None:
        """Reject invalid arguments while the user's own line is on the stack."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(map(repr, choices))}")
        if self.hang_after is not None and not self.hang_after >= LEAST_HANG:
            raise ValueError(f"hang_after is {self.hang_after!r}; expected at least {LEAST_HANG:g} s, or None")
        if not isinstance(self.every_n_steps, int) or self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps!r}; expected an integer of at least 1")
        self._require_valid_outputs()
        for name in ("select", "ignore"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a string; expected a list of ids or families, such as ['NET', 'MEM001']")
        self._require_known_checks()
        if self.share_group is not None:
            self._group(self.share_group)

    def _require_valid_outputs(self) -> None:
        if self.prometheus_port is not None and not 0 < self.prometheus_port < 1 << 16:
            raise ValueError(f"prometheus_port is {self.prometheus_port!r}; expected a port number or None")
        if self.prometheus_port is not None and importlib.util.find_spec("prometheus_client") is None:
            raise ValueError("prometheus_port needs prometheus-client: pip install prometheus-client")
        if self.html_report is not None and not isinstance(self.html_report, bool):
            raise ValueError(f"html_report is {self.html_report!r}; expected True, False or None")
        if not isinstance(self.otlp, bool) and not re.fullmatch(r"https?://\S+", str(self.otlp)):
            raise ValueError(f"otlp is {self.otlp!r}; expected an address such as 'http://collector:4318', or True")

    @staticmethod
    def _group(name: str | int) -> int | None:
        try:
            return chosen_group(name)
        except UnusableError as error:
            raise ValueError(f"share_group: {error}") from None

    def _require_known_checks(self) -> None:
        if not (self.select or self.ignore):
            return
        from doctor.core.check_registry import load_registry
        from doctor.core.settings import require_known_patterns

        try:
            require_known_patterns(load_registry(by_index=True), [*self.select, *self.ignore])
        except UnusableError as error:
            raise ValueError(str(error)) from None

    def folder(self, default: Path, write_line: Callable[[str], None]) -> OwnFolder:
        """Return the folder for reports and records.

        It is ``dirpath``, else ``rankdoctor`` below ``default``. A symbolic link is followed if the user named and owns
        it. ``write_line`` gets one line if the environment names a group that does not exist.
        """
        group = None
        if self.share_group is not None:
            group = self._group(self.share_group)
        else:
            try:
                group = chosen_group(os.environ.get(VARIABLE))
            except UnusableError as error:
                write_line(f"{VARIABLE}: {error}; continuing without a group")
        owners = msgspec.structs.replace(TrustedOwners.here(group), option=f"share_group or {VARIABLE}")
        if self.dirpath is not None:
            return OwnFolder(absolute(Path(self.dirpath)), owners=owners, checked=True)
        return OwnFolder(absolute(default), OWN_FOLDER, owners=owners)


def absolute(directory: Path) -> Path:
    """Return the absolute path, or ``directory`` itself if the working directory was removed."""
    with contextlib.suppress(FileNotFoundError):
        return directory.absolute()
    return directory
