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

from doctor.errors import UnusableError
from doctor.folders import OwnFolder
from doctor.gather.attending import Attendant, NobodyKeeps
from doctor.gather.board import PATIENCE, Board, BoardLost, Worker
from doctor.gather.both import mirrored
from doctor.gather.joining import (
    NOT_OURS,
    Joined,
    Occupied,
    Torch,
    Unreached,
    open_folder,
    open_store,
    secret_of_folder,
)
from doctor.gather.keeping import Keeper, Superseded
from doctor.gather.leaving import Dismissed
from doctor.gather.own_verdict import BY_WEIGHT, OwnVerdict, worse_of
from doctor.gather.party import Party
from doctor.gather.seat import Seat
from doctor.gather.signing import Rejected, Secret, Signed
from doctor.gather.way import Way
from doctor.job import Job, build_job
from doctor.owners import UntrustedPath

if TYPE_CHECKING:
    from doctor.gather.survey import Survey

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


class Gathering:
    """A gathering, as a context: whoever leaves it by an exception lets the others go too.

    ``timeout``: seconds within which all must come. ``tell`` gets lines for stderr; ``discreet``: without names of
    hosts, addresses and users. ``secret``: the key of the job; where there is none, ``own_code`` gives the exit code of
    this process alone, and what another process says can only make it worse.
    """

    def __init__(
        self,
        way: Way,
        seat: Seat,
        party: Party,
        survey: Survey | None,
        *,
        timeout: float,
        tell: Callable[[str], None],
        discreet: bool = False,
        secret: Secret | None = None,
        own_code: Callable[[Job], int] | None = None,
    ) -> None:
        self._secret = secret
        self._rejected = Rejected("call")
        self._opinion = OwnVerdict(own_code, self._alone) if own_code is not None and secret is None else None
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
        self._torch: Torch | None = None
        self._board: Board | None = None
        self._keeper: Keeper | None = None
        self._announced = False

    @property
    def judges(self) -> bool:
        """Whether this process is the one to judge, as long as nobody is lost."""
        return self._seat.number == 0

    def __enter__(self) -> Gathering:
        """Begin to import torch, if it is needed. Nothing is opened before :meth:`gather`."""
        self._torch = Torch() if self._way.endpoint is not None else None
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
        with contextlib.suppress(Unreached, Occupied, BoardLost):
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
        except Occupied as occupied:
            self._tell(str(occupied))
            return self._alone()
        except Unreached as lost:
            raise self._leave_unreached(lost) from None
        keeps = self._seat.number == 0 and not joined.at_a_twin
        for _ in range(ROUNDS):
            try:
                return self._keep(joined.board) if keeps else self._attend_or_take_over(joined.board)
            except Superseded:
                keeps, self._was_replaced = False, True
            except NobodyKeeps:
                break
            except BoardLost as lost:
                raise self._leave_unreached(_how_lost(lost, joined.board, keeps=keeps)) from None
        nobody = f"{joined.board.words} answers, but nobody keeps a gathering there"
        raise self._leave_unreached(Unreached(nobody, "ENV005"))

    def _alone(self) -> Job:
        """The job as this process alone sees it."""
        return build_job([self._party.member()], world_size=self._seat.world_size)

    def _join(self) -> Joined:
        joined = self._join_the_store() if self._way.endpoint is not None else self._join_the_folder()
        self._take_board(joined.board)
        self._party.tried(joined.reach)
        return joined

    def _take_board(self, board: Board) -> None:
        board.wrap(lambda carrier: Signed(carrier, self._seat.key, self._secret, self._rejected))
        self._board = board

    def _join_the_folder(self) -> Joined:
        assert self._way.share is not None  # a way has one or the other
        folder = OwnFolder(self._way.share, owners=self._way.owners)
        joined = open_folder(folder, self._seat)
        if self._way.endpoint is None and self._secret is None:
            # Beside a store there may be ranks that do not see the folder.
            self._secret = secret_of_folder(folder, self._seat)
        return joined

    def _join_the_store(self) -> Joined:
        assert self._way.endpoint is not None
        if self._way.share is None:
            return open_store(self._way.endpoint, self._seat, self._close_at, self._torch)
        until = self._began + (self._close_at - self._began) * TO_THE_FOLDER
        try:
            joined = open_store(self._way.endpoint, self._seat, until, self._torch)
        except Occupied as occupied:
            self._tell(str(occupied))
            return self._join_the_folder()
        except Unreached as lost:
            self._tell_unreached(lost)
            return self._join_the_folder()._replace(reach=lost.reach)
        if self._seat.number != 0:
            return joined
        try:
            return joined._replace(board=mirrored(joined.board, self._join_the_folder().board, self._tell))
        except Unreached as lost:
            self._tell_unreached(lost)
            return joined

    def _new_keeper(self, board: Board) -> Keeper:
        overtime = self._survey.overtime if self._survey else 0.0
        return Keeper(
            board,
            self._seat,
            secrets.token_hex(8),
            close_at=self._close_at,
            tell=self._tell,
            overtime=overtime,
            rejected=self._rejected,
        )

    def _keep(self, board: Board) -> Job:
        keeper = self._new_keeper(board)
        keeper.open(self._party.hello)
        return self._gather_as(keeper, self._survey)

    def _gather_as(self, keeper: Keeper, survey: Survey | None) -> Job:
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

    def _attend_or_take_over(self, board: Board) -> Job:
        try:
            return self._attend(board)
        except NobodyKeeps as silence:
            if not board.outlives_its_keeper:
                raise
            return self._take_over(board, silence.call)

    def _take_over(self, board: Board, after: bytes | None) -> Job:
        """Keep a gathering of those who are still there, unless another one does so first."""
        self._close_at = time.monotonic() + TAKE_OVER
        keeper = self._new_keeper(board)
        if not keeper.take_over(after):
            raise Superseded
        return self._gather_as(keeper, None)

    def _attend(self, board: Board) -> Job:
        attendant = Attendant(
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
            raise self._leave_unreached(Unreached("came when the roll was closed, and was not judged", "ENV004"))
        raise Dismissed(self._code(verdict.code))

    def _code(self, told: int) -> int:
        """The code to leave with, by what another process told."""
        code = told if told in BY_WEIGHT else INCONCLUSIVE
        if self._secret is not None or self._opinion is None:
            return code
        own = self._opinion.wait()
        if own is None or (self._was_replaced and self.judges):
            own = worse_of(own or 0, INCONCLUSIVE)
            if code == 0:
                self._tell(f"rank {self._seat.number}: {UNCONFIRMED}")
        return worse_of(own, code)

    def announce(self, code: int) -> None:
        """Let the others know the exit code with which all leave."""
        self._announced = True
        if self._keeper is not None:
            self._keeper.announce(code)

    def _tell_unreached(self, lost: Unreached) -> None:
        more = f" (doctor explain {lost.check})" if lost.check else ""
        if self._discreet:
            self._tell(f"rank {self._seat.number}: {lost.discreet or UNREACHED}{more}")
        else:
            self._tell(f"rank {self._seat.number} on {self._party.hello.host}: {lost.why}{more}")

    def _leave_unreached(self, lost: Unreached) -> Dismissed:
        self._tell_unreached(lost)
        self._tell_rejected()
        self._party.tried(lost.reach)
        if self._way.share is not None:
            self._leave_capture(self._way.share)
        return Dismissed(INCONCLUSIVE)

    def _leave_capture(self, folder: Path) -> None:
        """Leave the facts in the shared folder, for ``doctor diagnose``."""
        from doctor.capture import encode_document, file_name, to_document
        from doctor.redaction import redact

        job = self._alone()
        document = redact(to_document(job)) if self._discreet else to_document(job)
        name = file_name(job, redacted=self._discreet)
        try:
            own = OwnFolder(folder, owners=self._way.owners)
            Worker().run(lambda: own.write(name, encode_document(document)), PATIENCE)
            self._tell(f"its facts are in {folder / name}: doctor diagnose {folder}")
        except OSError as error:
            refused = self._discreet and isinstance(error, UntrustedPath)
            why = NOT_OURS if refused else error.strerror or str(error) or "no answer"
            self._tell(f"its facts can't be left in {folder}: {why}")


def _how_lost(lost: BoardLost, board: Board, *, keeps: bool) -> Unreached:
    if keeps or board.outlives_its_keeper:
        return Unreached(str(lost))
    return Unreached(f"{lost}: rank 0 ended or stopped before there was a verdict", "ENV005")
