"""Ranks as threads of the test: each goes through a whole gathering of its own, as the command does.

They meet on boards of the test and bring facts of a healthy job. A rank can die: from then on it does nothing more, as
after SIGKILL. Whatever it does, it takes seconds, and comes to an end.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from doctor.cluster.gather import coordinator, gather_session
from doctor.cluster.gather import member as member_module
from doctor.cluster.gather.dismissal import Dismissed
from doctor.cluster.gather.gather_session import GatherSession
from doctor.cluster.gather.host_lease import HostLease
from doctor.cluster.gather.participant import Participant
from doctor.cluster.gather.plan import GatherPlan
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.rendezvous.store_access import ConnectedStore
from doctor.cluster.transport.signing import Secret
from doctor.cluster.transport.store import PATIENCE, KeyValueStore, StoreBackend
from doctor.collectors.host.host_identity import Identity
from doctor.core.errors import UnusableError
from doctor.core.facts import ReachFacts
from doctor.core.job import Job
from doctor.facts import HostFacts
from doctor.testing import healthy
from tests.cluster.boards import NewBoard
from tests.lab.speed import NEVER, patience, slowness

T = TypeVar("T")

TIMEOUT = 2.0 * slowness()
"""Seconds of a gathering, where somebody is waited for in vain."""
CODE = 1
"""With which ranks leave by default."""
LIMIT = patience(20.0)
"""Seconds after which a rank that has not ended hangs."""

_SHORTER = {
    coordinator: {"GRACE": 0.1, "EXTRA": 0.3, "ON_THE_WAY": 1.0, "ACKNOWLEDGE_SECONDS": 1.5, "HEARTBEAT_EVERY": 0.1},
    member_module: {"EVALUATION_SECONDS": 1.0, "LEAVING": 6.0, "IN_TURN": 0.3, "HEARTBEAT_EVERY": 0.24},
    gather_session: {"TAKE_OVER": 0.6, "CANCEL_SECONDS": 5.0},
}


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is waited for takes a fraction of its time, and more on a slow machine."""
    for module, times in _SHORTER.items():
        for name, seconds in times.items():
            monkeypatch.setattr(module, name, seconds * slowness())


class Killed(BaseException):
    """What a rank sees of the board once it is dead."""


class Mortal:
    """A board of a rank that may die. ``at``: asked before every call, with what is called and its first argument,
    whether the rank dies there. It may also lose the board, or sleep."""

    def __init__(self, carrier: StoreBackend) -> None:
        self.description, self.survives_coordinator = carrier.description, carrier.survives_coordinator
        self.at: Callable[[str, str], bool] = lambda what, name: False
        self.dead = threading.Event()
        self.lost = threading.Event()
        self.awake = threading.Event()
        self.awake.set()
        self._carrier = carrier

    def __getattr__(self, what: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            if self.at(what, str(arguments[0]) if arguments else ""):
                self.dead.set()
            if self.dead.is_set():
                raise Killed
            self.awake.wait(LIMIT)
            if self.lost.is_set():
                raise OSError("Connection reset by peer")
            return getattr(self._carrier, what)(*arguments)

        return call


class Rank(threading.Thread):
    """One rank. ``code``: how it left; ``job``: what it judged; ``told``: what it said on stderr; ``error``: what must
    not be. ``code`` of the verdict: what ``judge`` makes of the job."""

    def __init__(
        self,
        new_board: NewBoard,
        number: int,
        world_size: int,
        *,
        key: str,
        timeout: float = NEVER,
        host: int = 0,
        facts_after: threading.Event | None = None,
        share: Path | None = None,
        judge: Callable[[Job], int] = lambda job: CODE,
        before: Callable[[], None] = lambda: None,
        secret: Secret | None = None,
        own_code: Callable[[Job], int] | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.mortal = Mortal(new_board().backend)
        self.code: int | None = None
        self.job: Job | None = None
        self.error: BaseException | None = None
        self.told: list[str] = []
        self.seconds = 0.0
        self._seat = ProcessIdentity(number, world_size, key, spans_hosts=False)
        self._timeout, self._share = timeout, share
        self._judge, self._before = judge, before
        self._secret, self._own_code = secret, own_code
        self._host, self._facts_after = host, facts_after

    def run(self) -> None:
        """Go to the gathering and leave it."""
        began = time.monotonic()
        try:
            self._gather()
        except Dismissed as dismissed:
            self.code = dismissed.code
        except UnusableError:
            self.code = 2
        except KeyboardInterrupt:
            self.code = 130
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - began

    def _gather(self) -> None:
        opened = GatherSession(
            GatherPlan(self._seat, None, self._share),
            self._seat,
            self._participant(),
            None,
            timeout=self._timeout,
            write_line=self.told.append,
            secret=self._secret,
            own_code=self._own_code,
        )
        opened._join = self._joined  # type: ignore[method-assign]
        with opened as gathering_:
            self._before()
            job = gathering_.gather()
            code = self._judge(job)
            gathering_.announce(code)
            self.job = job
        self.code = code

    def _joined(self) -> ConnectedStore:
        return ConnectedStore(KeyValueStore(self.mortal, patience(PATIENCE)), ReachFacts())  # type: ignore[arg-type]

    def _participant(self) -> Participant:
        def collect(keys: tuple[str, ...]) -> dict[str, object]:
            if self._facts_after is not None:
                self._facts_after.wait(LIMIT)
            member = healthy(hosts=2, per_host=max(2, self._seat.world_size)).members[self._seat.number]
            return {key: value for key, value in member.sections.items() if key in keys}

        identity = self._identity()
        self._speaker = HostLease(self._seat.key_here, identity, "the host")
        return Participant(self._seat, identity, self._speaker, collect)  # type: ignore[arg-type]

    def _identity(self) -> Identity:
        members = healthy(hosts=self._host + 1, per_host=1, gpus=0).members
        facts = members[self._host].sections[HostFacts.key]
        assert isinstance(facts, HostFacts)
        return facts.boot_id, facts.machine_id, facts.hostname


def new_ranks(new_board: NewBoard, numbers: Iterable[int], world_size: int, **more: object) -> list[Rank]:
    """Ranks of one run that have not started yet."""
    key = secrets.token_hex(6)
    return [Rank(new_board, number, world_size, **{"key": key, **more}) for number in numbers]  # type: ignore[arg-type]


def start(*ranks: Rank) -> None:
    """Start them."""
    for rank in ranks:
        rank.start()


def wait_for(*ranks: Rank) -> list[int | None]:
    """Their exit codes; ``None`` for those that died. None of them hangs or raises anything."""
    for rank in ranks:
        rank.join(LIMIT)
        assert not rank.is_alive(), f"rank {rank._seat.number} hangs"
    for rank in ranks:
        if rank.error is not None:
            raise AssertionError(f"rank {rank._seat.number} raised") from rank.error
    return [rank.code for rank in ranks]


def run(*ranks: Rank) -> list[int | None]:
    """Start them and wait for them."""
    start(*ranks)
    return wait_for(*ranks)


def until(holds: Callable[[], T]) -> T:
    """What ``holds`` gives once it is true."""
    end = time.monotonic() + LIMIT
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def judges(ranks: Sequence[Rank]) -> list[int]:
    """The numbers of those that judged."""
    return [rank._seat.number for rank in ranks if rank.job is not None]
