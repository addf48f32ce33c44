"""One process in the gathering of its job, from the first step to the last: collect, join, keep or attend, leave."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from doctor.cluster.gather.coordinator import Coordinator, Superseded
from doctor.cluster.gather.dismissal import Dismissed
from doctor.cluster.gather.gather_plan import GatherPlan
from doctor.cluster.gather.local_verdict import EXIT_CODES_BY_SEVERITY, LocalVerdict, worse_exit_code
from doctor.cluster.gather.member import GatherMember, NoCoordinator
from doctor.cluster.gather.participant import Participant
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.rendezvous.store_access import (
    NOT_OURS,
    ConnectedStore,
    PortInUse,
    RendezvousFailed,
    TorchImport,
    open_file_store,
    open_store,
    secret_of_folder,
)
from doctor.cluster.transport.mirrored_store import mirrored
from doctor.cluster.transport.signing import RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import PATIENCE, DeadlineWorker, KeyValueStore, StoreLost
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import UntrustedPath
from doctor.core.job import Job, build_job

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeSchedule

INCONCLUSIVE, UNUSABLE = 3, 2
"""Exit codes of the design: for ranks that could not be gathered, and for input that can't be used."""
ROUNDS = 3
"""Gatherings that one process goes to: the first, and those after a keeper was lost."""
TAKE_OVER = 1.0
"""Seconds that a keeper in another's place gives those who are there already to answer."""
CALLING_OFF = 5.0
"""Seconds for all ranks to come and hear that there will be no gathering."""
TO_THE_FOLDER = 0.5
"""The share of the time after which a rank that can't reach the store goes to the shared folder."""
UNREACHED = "the other ranks can't be reached"
"""All that is said of it where nobody may be named."""


UNCONFIRMED = "its part of the verdict could not be confirmed, because messages are not signed (DOCTOR_SECRET_FILE)"


class GatherSession:
    """A gathering, as a context: whoever leaves it by an exception lets the others go too.

    ``timeout``: seconds within which all must come. ``tell`` gets lines for stderr; ``discreet``: without names of
    hosts, addresses and users. ``secret``: the key of the job; where there is none, ``own_code`` gives the exit code of
    this process alone, and what another process says can only make it worse.
    """

    def __init__(
        self,
        way: GatherPlan,
        seat: ProcessIdentity,
        party: Participant,
        survey: ProbeSchedule | None,
        *,
        timeout: float,
        tell: Callable[[str], None],
        discreet: bool = False,
        secret: Secret | None = None,
        own_code: Callable[[Job], int] | None = None,
    ) -> None:
        self._secret = secret
        self._rejected = RejectedMessages("call")
        self._opinion = LocalVerdict(own_code, self._alone) if own_code is not None and secret is None else None
        self._was_replaced = False
        self._way = way
        self._seat = seat
        self._party = party
        self._survey = survey
        overtime = survey.overtime if survey is not None else 0.0
        self._longest = timeout + overtime if secret is None else math.inf
        self._began = time.monotonic()
        self._close_at = self._began + timeout
        self._tell = tell
        self._discreet = discreet
        self._torch: TorchImport | None = None
        self._board: KeyValueStore | None = None
        self._keeper: Coordinator | None = None
        self._announced = False

    @property
    def judges(self) -> bool:
        """Whether this process is the one to judge, as long as nobody is lost."""
        return self._seat.number == 0

    def __enter__(self) -> GatherSession:
        """Begin to import torch, if it is needed. Nothing is opened before :meth:`gather`."""
        self._torch = TorchImport() if self._way.endpoint is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the others go, and give back what is held."""
        if error is not None and not self._announced:
            self._call_off(UNUSABLE if isinstance(error, UnusableError) else INCONCLUSIVE)
        if self._keeper is not None and self._announced:
            self._keeper.dismiss()
        if self._survey is not None:
            self._survey.close()
        if self._board is not None:
            self._board.close()

    def _call_off(self, code: int) -> None:
        if self._keeper is not None:
            self.announce(code)
        elif self.judges and code == UNUSABLE:
            self._send_home(code)

    def _send_home(self, code: int) -> None:
        """Tell all ranks, who may be on their way still, that there will be no gathering."""
        with contextlib.suppress(RendezvousFailed, PortInUse, StoreLost):
            keeper = self._new_keeper(self._join().board)
            keeper.open()
            keeper.announce(code)
            keeper.dismiss(self._seat.world_size - 1, CALLING_OFF)

    def gather(self) -> Job:
        """The job, for the process that judges it.

        Raises:
            Dismissed: this process is to leave.
        """
        try:
            joined = self._join()
        except PortInUse as occupied:
            self._tell(str(occupied))
            return self._alone()
        except RendezvousFailed as lost:
            raise self._leave_unreached(lost) from None
        keeps = self._seat.number == 0 and not joined.at_a_twin
        for _ in range(ROUNDS):
            try:
                return self._keep(joined.board) if keeps else self._attend_or_take_over(joined.board)
            except Superseded:
                keeps, self._was_replaced = False, True
            except NoCoordinator:
                break
            except StoreLost as lost:
                raise self._leave_unreached(_how_lost(lost, joined.board, keeps=keeps)) from None
        nobody = f"{joined.board.words} answers, but nobody keeps a gathering there"
        raise self._leave_unreached(RendezvousFailed(nobody, "ENV005"))

    def _alone(self) -> Job:
        """The job as this process alone sees it."""
        return build_job([self._party.member()], world_size=self._seat.world_size)

    def _join(self) -> ConnectedStore:
        joined = self._join_the_store() if self._way.endpoint is not None else self._join_the_folder()
        self._take_board(joined.board)
        self._party.tried(joined.reach)
        return joined

    def _take_board(self, board: KeyValueStore) -> None:
        board.wrap(lambda carrier: SignedBackend(carrier, self._seat.key, self._secret, self._rejected))
        self._board = board

    def _join_the_folder(self) -> ConnectedStore:
        assert self._way.share is not None  # a way has one or the other
        folder = OwnFolder(self._way.share, owners=self._way.owners)
        joined = open_file_store(folder, self._seat)
        if self._way.endpoint is None and self._secret is None:
            # Beside a store there may be ranks that do not see the folder.
            self._secret = secret_of_folder(folder, self._seat)
        return joined

    def _join_the_store(self) -> ConnectedStore:
        assert self._way.endpoint is not None
        if self._way.share is None:
            return open_store(self._way.endpoint, self._seat, self._close_at, self._torch)
        until = self._began + (self._close_at - self._began) * TO_THE_FOLDER
        try:
            joined = open_store(self._way.endpoint, self._seat, until, self._torch)
        except PortInUse as occupied:
            self._tell(str(occupied))
            return self._join_the_folder()
        except RendezvousFailed as lost:
            self._tell_unreached(lost)
            return self._join_the_folder()._replace(reach=lost.reach)
        if self._seat.number != 0:
            return joined
        try:
            return joined._replace(board=mirrored(joined.board, self._join_the_folder().board, self._tell))
        except RendezvousFailed as lost:
            self._tell_unreached(lost)
            return joined

    def _new_keeper(self, board: KeyValueStore) -> Coordinator:
        overtime = self._survey.overtime if self._survey else 0.0
        return Coordinator(
            board,
            self._seat,
            secrets.token_hex(8),
            close_at=self._close_at,
            tell=self._tell,
            overtime=overtime,
            rejected=self._rejected,
        )

    def _keep(self, board: KeyValueStore) -> Job:
        keeper = self._new_keeper(board)
        keeper.open(self._party.hello)
        return self._gather_as(keeper, self._survey)

    def _gather_as(self, keeper: Coordinator, survey: ProbeSchedule | None) -> Job:
        self._keeper = keeper
        try:
            job = keeper.gather(self._party.card, survey)
        except Superseded:
            self._keeper = None
            raise
        self._tell_rejected()
        return job

    def _tell_rejected(self) -> None:
        if words := self._rejected.words:
            self._tell(f"rank {self._seat.number}: {words}")

    def _attend_or_take_over(self, board: KeyValueStore) -> Job:
        try:
            return self._attend(board)
        except NoCoordinator as silence:
            if not board.outlives_its_keeper:
                raise
            return self._take_over(board, silence.call)

    def _take_over(self, board: KeyValueStore, after: bytes | None) -> Job:
        """Keep a gathering of those who are still there, unless another one does so first."""
        self._close_at = time.monotonic() + TAKE_OVER
        keeper = self._new_keeper(board)
        if not keeper.take_over(after):
            raise Superseded
        return self._gather_as(keeper, None)

    def _attend(self, board: KeyValueStore) -> Job:
        attendant = GatherMember(
            board,
            self._seat,
            self._party.hello,
            self._party.card,
            self._survey,
            close_at=self._close_at,
            longest=self._longest,
            rejected=self._rejected,
        )
        if self._opinion is not None and self._secret is None:
            self._opinion.begin()
        verdict = attendant.attend()
        if verdict.judged and not verdict.covers(self._party.hello.token):
            raise self._leave_unreached(RendezvousFailed("came when the roll was closed, and was not judged", "ENV004"))
        raise Dismissed(self._code(verdict.code))

    def _code(self, told: int) -> int:
        """The code to leave with, by what another process told."""
        code = told if told in EXIT_CODES_BY_SEVERITY else INCONCLUSIVE
        if self._secret is not None or self._opinion is None:
            return code
        own = self._opinion.wait()
        if own is None or (self._was_replaced and self.judges):
            own = worse_exit_code(own or 0, INCONCLUSIVE)
            if code == 0:
                self._tell(f"rank {self._seat.number}: {UNCONFIRMED}")
        return worse_exit_code(own, code)

    def announce(self, code: int) -> None:
        """Let the others know the exit code with which all leave."""
        self._announced = True
        if self._keeper is not None:
            self._keeper.announce(code)

    def _tell_unreached(self, lost: RendezvousFailed) -> None:
        more = f" (doctor explain {lost.check})" if lost.check else ""
        if self._discreet:
            self._tell(f"rank {self._seat.number}: {lost.discreet or UNREACHED}{more}")
        else:
            self._tell(f"rank {self._seat.number} on {self._party.hello.host}: {lost.why}{more}")

    def _leave_unreached(self, lost: RendezvousFailed) -> Dismissed:
        self._tell_unreached(lost)
        self._tell_rejected()
        self._party.tried(lost.reach)
        if self._way.share is not None:
            self._leave_capture(self._way.share)
        return Dismissed(INCONCLUSIVE)

    def _leave_capture(self, folder: Path) -> None:
        """Leave the facts in the shared folder, for ``doctor diagnose``."""
        from doctor.core.capture import encode_document, file_name, to_document
        from doctor.core.redact.placeholders import redact

        job = self._alone()
        document = redact(to_document(job)) if self._discreet else to_document(job)
        name = file_name(job, redacted=self._discreet)
        try:
            own = OwnFolder(folder, owners=self._way.owners)
            DeadlineWorker().run(lambda: own.write(name, encode_document(document)), PATIENCE)
            self._tell(f"its facts are in {folder / name}: doctor diagnose {folder}")
        except OSError as error:
            refused = self._discreet and isinstance(error, UntrustedPath)
            why = NOT_OURS if refused else error.strerror or str(error) or "no answer"
            self._tell(f"its facts can't be left in {folder}: {why}")


def _how_lost(lost: StoreLost, board: KeyValueStore, *, keeps: bool) -> RendezvousFailed:
    if keeps or board.outlives_its_keeper:
        return RendezvousFailed(str(lost))
    return RendezvousFailed(f"{lost}: rank 0 ended or stopped before there was a verdict", "ENV005")
