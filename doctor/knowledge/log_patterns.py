"""Messages of NCCL, torch, launchers, schedulers and kernels, and how each is recognized in a log line.

``log_lines/*.json`` hold ``{"kind", "check", "cues", "pattern", "finding", "examples"}``. ``cues``: texts of which
every such line contains at least one, so that other lines are excluded without a regular expression; ``pattern`` is
searched in the line without its prefixes (:mod:`doctor.postmortem.logs.prefixes`), and its named groups are the values
of the message. ``examples`` are lines that it matches, in the wordings of different releases; tests read them.

``check``: the id of the check that reports such a line as the root cause, if a log has nothing else. ``finding``
declares what that check reports (:class:`LogFinding`) where no judgment is needed; otherwise its ``from_logs`` does.

A kind that ends in ``.harmless`` looks like a failure but is not one. A kind may have several entries.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from doctor.core.decoding import prepared

if TYPE_CHECKING:
    from doctor.knowledge.linear_regex import Pattern


class LogFinding(msgspec.Struct, frozen=True):
    """What a check reports for each log with such a message.

    ``summary`` and ``fix`` are templates: ``{name}`` is the value of a named group of the pattern, ``{name|other}`` the
    first of several that has a value, ``{name?text}`` the value if all messages have the same one and else the text.
    ``{on_hosts}``: the hosts that logged the message (`` on node1``), if known; ``{blamed}``: the ranks of ``blames``
    in words. Text in brackets is left out if one of its values is absent. ``evidence``: key -> names of groups.
    Messages with different values of ``by`` are different findings. ``unless``: kinds of which no log may have a
    message. ``names_ranks``: the ranks that logged the message are at fault; ``blames``: those whose numbers are the
    values of these groups. ``severity``: by default the check's. ``explains``: ids of checks whose findings are
    consequences; ``symptoms``: so are those of every failure.
    """

    summary: str
    by: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    names_ranks: bool = True
    blames: tuple[str, ...] = ()
    evidence: dict[str, str] = {}
    fix: str = ""
    severity: str = ""
    confidence: float = 0.9
    explains: tuple[str, ...] = ()
    symptoms: bool = True


class LogPattern(msgspec.Struct, frozen=True):
    """One message; see the module docstring."""

    kind: str
    cues: tuple[str, ...]
    pattern: str
    check: str = ""
    finding: LogFinding | None = None
    examples: tuple[str, ...] = ()

    @property
    def compiled(self) -> Pattern:
        """The compiled pattern, cached."""
        return _compiled(self.pattern)


@functools.cache
def _compiled(pattern: str) -> Pattern:
    from doctor.knowledge.linear_regex import linear  # it loads RE2, which checks do not need

    return linear(pattern)


@functools.cache
def known_patterns() -> tuple[LogPattern, ...]:
    """All patterns, by file and position."""
    folder = files(__package__) / "log_lines"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(
        message
        for entry in found
        for message in msgspec.json.decode(entry.read_bytes(), type=prepared(tuple[LogPattern, ...]))
    )
