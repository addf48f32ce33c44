"""What sentinels leave for one another: small typed records, as MessagePack. Facts travel as compressed captures."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count, Nonce, Token
from doctor.core.facts import Frame
from doctor.core.message_bounds import MOST_RANKS
from doctor.monitor.watchdog.decision import Decision, Trigger

RunId = Annotated[str, Meta(pattern=r"\A[0-9a-z-]{1,64}\Z")]
"""It becomes the name of a folder."""
Pid = Annotated[int, Meta(ge=1, lt=1 << 22)]
"""Of a process: below PID_MAX_LIMIT of 64-bit Linux (include/linux/threads.h)."""
TOKEN_BYTES = 8
MOST_FRAMES = 256
"""Several times :data:`doctor.core.frames.MOST`."""


class AdmissionToken(msgspec.Struct, frozen=True):
    """Rung by a rank that looks for the others."""

    token: Token
    rank: Count


class MemberList(msgspec.Struct, frozen=True):
    """Whom the leader of a place has heard: their tokens, joined. ``run``: the id of the run."""

    run: RunId
    tokens: Annotated[bytes, Meta(max_length=TOKEN_BYTES * MOST_RANKS)]

    def covers(self, token: str) -> bool:
        """Whether the bell with that ``token`` was heard."""
        wanted, size = bytes.fromhex(token), len(token) // 2
        return any(self.tokens[at : at + size] == wanted for at in range(0, len(self.tokens), size))


class LeaderClaim(msgspec.Struct, frozen=True):
    """The place that is led here; becomes part of names on the board, which may be paths."""

    place: Nonce


class PeerProcess(msgspec.Struct, frozen=True):
    """A process, for the others of its host. ``thread`` and ``signal``: how it is asked for its stacks."""

    rank: Count
    pid: Pid
    started: Annotated[float, Meta(ge=0.0, le=1e12)] | None = None
    thread: Annotated[int, Meta(ge=0, lt=1 << 22)] = 0
    signal: Annotated[int, Meta(ge=0, lt=65)] = 0


class RankPresence(msgspec.Struct, frozen=True):
    """A rank at a hearing. ``came``: its card is on the board; until then it is on its way. ``failed``: an exception
    brings it."""

    rank: Count
    came: bool = False
    failed: bool = False


class PeerObservation(msgspec.Struct, frozen=True):
    """What rank ``by`` saw of a process of its own host that does not answer. ``state`` as in
    :class:`doctor.core.facts.ProgressFacts`; ``letter``: the kernel's. ``asked``: for its stacks, which may be on their
    way."""

    rank: Count
    by: Count
    state: Literal["gone", "stopped", "silent"]
    letter: Annotated[str, Meta(max_length=1)] | None = None
    stack: Annotated[tuple[Frame, ...], Meta(max_length=MOST_FRAMES)] = ()
    asked: bool = False


class RankResumed(msgspec.Struct, frozen=True):
    """A rank that goes on after a stall which was judged sick. ``seconds``: how long it stood."""

    rank: Count
    seconds: Annotated[float, Meta(ge=0.0, le=1e9)]


class DecisionMessage(msgspec.Struct, frozen=True):
    """A ruling, on what occasion and by which rank."""

    by: Count
    occasion: Trigger
    ruling: Decision
