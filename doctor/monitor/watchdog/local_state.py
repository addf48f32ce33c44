"""The facts of the local rank, as shared with its peers."""

from __future__ import annotations

import msgspec

from doctor.cluster.transport.codec import pack_member
from doctor.collectors.host.host_identity import Identity
from doctor.core.capture import EncodedSections
from doctor.core.facts import ProgressFacts, RecorderFacts
from doctor.core.job import Member
from doctor.monitor.telemetry.rank_telemetry import Sections


class LocalState:
    """The sections of this rank: the newest ones on top of the startup facts."""

    def __init__(self, rank: int, host: Identity) -> None:
        self._rank = rank
        self._host = host
        self._startup_facts: Sections = {}
        self._position: Sections = {}
        self._newest: Sections = {}
        self._encoded = EncodedSections()

    def set_startup_facts(self, sections: Sections) -> None:
        """Replace everything by the facts known before the first batch."""
        self._startup_facts, self._position, self._newest = sections, {}, {}

    def set_position(self, sections: Sections) -> None:
        """Keep the position of a stalled rank until it resumes: the record has to show it."""
        self._position = self._newest = sections

    def keep_dump(self, path: str) -> None:
        """Note the file that holds the complete flight recorder dump of the current position."""
        recorder = self._position.get(RecorderFacts.key)
        if isinstance(recorder, RecorderFacts):
            self.set_position({**self._position, RecorderFacts.key: msgspec.structs.replace(recorder, dump=path)})

    @property
    def dump(self) -> str | None:
        """Path of the flight recorder dump of the current position, if it was written."""
        recorder = self._position.get(RecorderFacts.key)
        return recorder.dump if isinstance(recorder, RecorderFacts) else None

    def update(self, sections: Sections) -> None:
        """Update the sections; the position is kept while the rank makes no progress."""
        earlier, now = self._position.get(ProgressFacts.key), sections.get(ProgressFacts.key)
        if isinstance(earlier, ProgressFacts) and isinstance(now, ProgressFacts) and earlier.passed == now.passed:
            now = msgspec.structs.replace(
                now,
                stack=earlier.stack,
                stack_from=earlier.stack_from,
                children=earlier.children,
                blocked=now.blocked or earlier.blocked,
                root=earlier.root,
                group=earlier.group,
                awaits=earlier.awaits,
            )
            self._newest = {**self._position, **sections, ProgressFacts.key: now}
            before, recorder = self._position.get(RecorderFacts.key), sections.get(RecorderFacts.key)
            if isinstance(before, RecorderFacts) and isinstance(recorder, RecorderFacts):
                if before.groups == recorder.groups:  # no collective since; the final recorder has no stacks
                    self._newest[RecorderFacts.key] = before
        else:
            self._position, self._newest = {}, sections

    def update_some(self, sections: Sections) -> None:
        """Update these sections of a rank without a position; the others stay as they are."""
        self.update({**self._newest, **sections})

    @property
    def has_position(self) -> bool:
        """Whether the sections are those of a stalled rank, or were when they were updated last."""
        return bool(self._position)

    @property
    def member(self) -> Member:
        """This rank as a member of the job."""
        return Member(self._rank, {**self._startup_facts, **self._newest}, self._host)

    def packed(self) -> bytes:
        """Return this rank as a compressed capture."""
        return pack_member(self.member, self._encoded)
