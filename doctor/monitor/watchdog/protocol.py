"""Messages between watchdogs, as MessagePack. Facts travel as compressed captures."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from doctor.cluster.transport.codec import Count
from doctor.core.facts import Frame
from doctor.core.message_bounds import MOST_RANKS
from doctor.monitor.watchdog.decision import Decision, Trigger

RunId = Annotated[str, Meta(pattern=r"\A[0-9a-z-]{1,64}\Z")]
"""Id of a run; it becomes the name of a folder."""
Pid = Annotated[int, Meta(ge=1, lt=1 << 22)]
"""Process id: below PID_MAX_LIMIT of 64-bit Linux (include/linux/threads.h)."""
TOKEN_BYTES = 8
MOST_FRAMES = 256
"""Several times :data:`doctor.core.frames.MOST`."""


class MemberList(msgspec.Struct, frozen=True):
    """The joined tokens that the leader of a namespace has admitted, and the id of the run."""

    run: RunId
    tokens: Annotated[bytes, Meta(max_length=TOKEN_BYTES * MOST_RANKS)]


class PeerProcess(msgspec.Struct, frozen=True):
    """A process, for its local peers. ``thread`` and ``signal``: how its stacks are requested."""

    rank: Count
    pid: Pid
    started: Annotated[float, Meta(ge=0.0, le=1e12)] | None = None
    thread: Annotated[int, Meta(ge=0, lt=1 << 22)] = 0
    signal: Annotated[int, Meta(ge=0, lt=65)] = 0


class RankPresence(msgspec.Struct, frozen=True):
    """A rank in a round. ``came``: its facts are posted; ``failed``: with an exception."""

    rank: Count
    came: bool = False
    failed: bool = False


class PeerObservation(msgspec.Struct, frozen=True):
    """What rank ``by`` observed of an unresponsive process on its own host.

    ``state``: as in :class:`doctor.core.facts.ProgressFacts`; ``letter``: state code of the kernel; ``asked``: stacks
    were requested and may follow; ``signal``: what killed it, and ``code``: that of the error that it ended with, if
    that can still be read.
    """

    rank: Count
    by: Count
    state: Literal["gone", "stopped", "silent"]
    letter: Annotated[str, Meta(max_length=1)] | None = None
    stack: Annotated[tuple[Frame, ...], Meta(max_length=MOST_FRAMES)] = ()
    asked: bool = False
    signal: Annotated[int, Meta(ge=0, lt=65)] = 0
    code: Annotated[int, Meta(ge=0, lt=256)] = 0


class RankResumed(msgspec.Struct, frozen=True):
    """A rank that resumed after a confirmed stall of ``seconds``."""

    rank: Count
    seconds: Annotated[float, Meta(ge=0.0, le=1e9)]


class DecisionMessage(msgspec.Struct, frozen=True):
    """A decision, its trigger and the rank that made it."""

    by: Count
    occasion: Trigger
    ruling: Decision
