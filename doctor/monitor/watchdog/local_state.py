"""What this rank knows of itself, and brings to the others."""

from __future__ import annotations

import msgspec

from doctor.cluster.transport.codec import pack_member
from doctor.collectors.host.host_identity import Identity
from doctor.core.facts import ProgressFacts, RecorderFacts
from doctor.core.job import Member
from doctor.monitor.watchdog.decision import Sections


class LocalState:
    """The sections of this rank: the newest ones over those of its opening."""

    def __init__(self, rank: int, host: Identity) -> None:
        self._rank = rank
        self._host = host
        self._opening: Sections = {}
        self._position: Sections = {}
        self._newest: Sections = {}

    def open(self, sections: Sections) -> None:
        """What is known before the first batch; what was known before is older."""
        self._opening, self._position, self._newest = sections, {}, {}

    def stand(self, sections: Sections) -> None:
        """Where it stands now. Kept until it goes on: the record is to show it whenever the process ends."""
        self._position = self._newest = sections

    def keep_dump(self, path: str) -> None:
        """What the flight recorder held where this rank stands is in a file, whole."""
        held = self._position.get(RecorderFacts.key)
        if isinstance(held, RecorderFacts):
            self.stand({**self._position, RecorderFacts.key: msgspec.structs.replace(held, dump=path)})

    @property
    def dump(self) -> str | None:
        """That file."""
        held = self._position.get(RecorderFacts.key)
        return held.dump if isinstance(held, RecorderFacts) else None

    def renew(self, sections: Sections) -> None:
        """What is known now."""
        then, now = self._position.get(ProgressFacts.key), sections.get(ProgressFacts.key)
        if isinstance(then, ProgressFacts) and isinstance(now, ProgressFacts) and then.passed == now.passed:
            now = msgspec.structs.replace(now, stack=then.stack, stack_from=then.stack_from, children=then.children)
            self._newest = {**self._position, **sections, **self._recorded(sections), ProgressFacts.key: now}
        else:
            self._position, self._newest = {}, sections

    def _recorded(self, sections: Sections) -> Sections:
        """The recorder as it was read with stacks, where it has not gone on since: at the end it is read without."""
        then, now = self._position.get(RecorderFacts.key), sections.get(RecorderFacts.key)
        same = isinstance(then, RecorderFacts) and isinstance(now, RecorderFacts) and then.groups == now.groups
        return {RecorderFacts.key: then} if same and then is not None else {}

    @property
    def member(self) -> Member:
        """This rank as a member of the job."""
        return Member(self._rank, {**self._opening, **self._newest}, self._host)

    def packed(self) -> bytes:
        """The same as a compressed capture."""
        return pack_member(self.member)
