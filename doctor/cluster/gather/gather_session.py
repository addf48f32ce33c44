"""One process in the gather of its job, from start to exit: collect, connect, gather, leave."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from doctor.cluster.gather.coordinator import Coordinator, Superseded
from doctor.cluster.gather.dismissal import Dismissed
from doctor.cluster.gather.local_verdict import EXIT_CODES_BY_SEVERITY, LocalVerdict, worse_exit_code
from doctor.cluster.gather.member import GatherMember, NoCoordinator
from doctor.cluster.gather.participant import Participant
from doctor.cluster.gather.plan import GatherPlan
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
from doctor.cluster.transport.failover import FailoverStore, Store, StoreConnection
from doctor.cluster.transport.signing import RejectedMessages, Secret, SignedBackend
from doctor.cluster.transport.store import PATIENCE, DeadlineWorker, StoreLost
from doctor.core.clock import monotonic
from doctor.core.errors import UnusableError
from doctor.core.files.own_folder import OwnFolder
from doctor.core.files.trusted_owners import UntrustedPath
from doctor.core.job import Job, build_job

if TYPE_CHECKING:
    from doctor.cluster.gather.probe_schedule import ProbeSchedule

INCONCLUSIVE, UNUSABLE = 3, 2
"""Exit codes for ranks that could not be gathered, and for unusable input."""
ROUNDS = 3
"""Gathers that one process takes part in: the first, and those after a coordinator was lost."""
TAKE_OVER = 1.0
"""Seconds that a replacement coordinator gives the remaining members to join."""
CANCEL_SECONDS = 5.0
"""Seconds for all ranks to join and learn that the gather is cancelled."""
TO_THE_FOLDER = 0.5
"""Share of the timeout after which a rank that cannot reach the store uses the shared folder."""
UNREACHED = "the other ranks are unreachable"
"""The whole message if names must not be shown."""
UNCONFIRMED = "its part of the verdict could not be confirmed, because messages are not signed (DOCTOR_SECRET_FILE)"


class GatherSession:
    """Context of a gather: leaving it by an exception releases the other members too.

    ``timeout``: seconds within which all must join. ``write_line`` gets lines for stderr; ``discreet``: without names
    of hosts, addresses and users. ``secret``: the key of the job; without one, ``own_code`` returns the exit code of
    this process alone, and messages of other processes can only make it worse.
    """

    def __init__(
        self,
        plan: GatherPlan,
        identity: ProcessIdentity,
        participant: Participant,
        schedule: ProbeSchedule | None,
        *,
        timeout: float,
        write_line: Callable[[str], None],
        discreet: bool = False,
        secret: Secret | None = None,
        own_code: Callable[[Job], int] | None = None,
    ) -> None:
        self._secret = secret
        self._rejected = RejectedMessages()
        self._local_verdict = LocalVerdict(own_code, self._alone) if own_code is not None and secret is None else None
        self._was_replaced = False
        self._plan = plan
        self._identity = identity
        self._participant = participant
        self._schedule = schedule
        self._overtime = schedule.overtime if schedule is not None else 0.0
        self._max_seconds = timeout + self._overtime if secret is None else math.inf
        self._began = monotonic()
        self._close_at = self._began + timeout
        self._write_line = write_line
        self._discreet = discreet
        self._torch: TorchImport | None = None
        self._store: Store | None = None
        self._coordinator: Coordinator | None = None
        self._announced = False

    @property
    def judges(self) -> bool:
        """Whether this process evaluates the job, as long as no process is lost."""
        return self._identity.number == 0

    def __enter__(self) -> GatherSession:
        """Start to import torch if it is needed. Connects only in :meth:`gather`."""
        self._torch = TorchImport() if self._plan.endpoint is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the other members and all resources."""
        if error is not None and not self._announced:
            is_unusable = isinstance(error, UnusableError)
            if self._coordinator is not None:
                self.announce(UNUSABLE if is_unusable else INCONCLUSIVE)
            elif self.judges and is_unusable:
                self._cancel_gather()
        if self._coordinator is not None and self._announced:
            self._coordinator.dismiss()
        if self._schedule is not None:
            self._schedule.close()
        if self._store is not None:
            self._store.close()
        self._participant.release()

    def _cancel_gather(self) -> None:
        """Tell all ranks, which may still be starting, that the gather is cancelled."""
        with contextlib.suppress(RendezvousFailed, PortInUse, StoreLost):
            coordinator = self._new_coordinator(self._use(self._join()))
            coordinator.open()
            coordinator.announce(UNUSABLE)
            coordinator.dismiss(self._identity.world_size - 1, CANCEL_SECONDS)

    def gather(self) -> Job:
        """Gather, and return the job to the process that evaluates it; :class:`Dismissed` makes the others exit."""
        try:
            joined = self._join()
            store = self._use(joined)
        except PortInUse as occupied:
            self._write_line(str(occupied))
            return self._alone()
        except RendezvousFailed as lost:
            raise self._leave_unreached(lost) from None
        is_coordinator = self._identity.number == 0 and not joined.via_duplicate_host
        for _ in range(ROUNDS):
            try:
                if is_coordinator:
                    coordinator = self._new_coordinator(store)
                    coordinator.open(self._participant.join_request)
                    return self._gather_as(coordinator, self._schedule)
                return self._participate_or_take_over(store)
            except Superseded:
                is_coordinator, self._was_replaced = False, True
            except NoCoordinator:
                break
            except StoreLost as lost:
                failure = RendezvousFailed(str(lost))
                if not is_coordinator and not store.survives_coordinator:
                    failure = RendezvousFailed(
                        f"{lost}: rank 0 exited or stopped before it reached a verdict", "ENV005"
                    )
                raise self._leave_unreached(failure) from None
        reason = f"{store.description} is reachable, but no coordinator is running there"
        raise self._leave_unreached(RendezvousFailed(reason, "ENV005"))

    def _alone(self) -> Job:
        return build_job([self._participant.member()], world_size=self._identity.world_size)

    def _join(self) -> ConnectedStore:
        return self._join_the_store() if self._plan.endpoint is not None else self._join_the_folder()

    def _use(self, joined: ConnectedStore) -> Store:
        """Use the store, with its fallback if it has one, for signed messages."""
        self._participant.set_reach(joined.reach)
        store, fallback = joined.store, joined.fallback
        for one in (store, fallback):
            if one is not None:
                one.wrap(lambda backend: SignedBackend(backend, self._identity.key, self._secret, self._rejected))
        self._store = store
        if fallback is not None:
            patience = store.patience / 3  # a blocked folder must not delay the heartbeat on the store
            warning = "lost the shared folder: ranks that cannot reach the store can no longer join"
            connection = StoreConnection.over(fallback.backend, patience, lambda _: self._write_line(warning))
            self._store = FailoverStore((connection,), store)
        return self._store

    def _join_the_folder(self) -> ConnectedStore:
        assert self._plan.share is not None  # a plan has one or the other
        folder = OwnFolder(self._plan.share, owners=self._plan.owners)
        joined = open_file_store(folder, self._identity)
        if self._plan.endpoint is None and self._secret is None:
            # With a store as well, some ranks may not see the folder.
            self._secret = secret_of_folder(folder, self._identity)
        return joined

    def _join_the_store(self) -> ConnectedStore:
        assert self._plan.endpoint is not None
        if self._plan.share is None:
            return open_store(self._plan.endpoint, self._identity, self._close_at, self._torch)
        until = self._began + (self._close_at - self._began) * TO_THE_FOLDER
        try:
            joined = open_store(self._plan.endpoint, self._identity, until, self._torch)
        except PortInUse as occupied:
            self._write_line(str(occupied))
            return self._join_the_folder()
        except RendezvousFailed as lost:
            self._report_unreached(lost)
            return self._join_the_folder()._replace(reach=lost.reach)
        if self._identity.number != 0:
            return joined
        try:
            return joined._replace(fallback=self._join_the_folder().store)
        except RendezvousFailed as lost:
            self._report_unreached(lost)
            return joined

    def _new_coordinator(self, store: Store) -> Coordinator:
        return Coordinator(
            store,
            self._identity,
            secrets.token_hex(8),
            close_at=self._close_at,
            write_line=self._write_line,
            overtime=self._overtime,
            rejected=self._rejected,
        )

    def _gather_as(self, coordinator: Coordinator, schedule: ProbeSchedule | None) -> Job:
        self._coordinator = coordinator
        try:
            job = coordinator.gather(self._participant.member_facts, schedule)
        except Superseded:
            self._coordinator = None
            raise
        self._report_rejected()
        return job

    def _report_rejected(self) -> None:
        if warning := self._rejected.warning:
            self._write_line(f"rank {self._identity.number}: {warning}")

    def _participate_or_take_over(self, store: Store) -> Job:
        try:
            self._participate(store)
        except NoCoordinator as missing:
            if not store.survives_coordinator:
                raise
            announcement = missing.announcement
        # Coordinate a gather of the remaining processes, unless another one does so first.
        self._close_at = monotonic() + TAKE_OVER
        coordinator = self._new_coordinator(store)
        if not coordinator.take_over(announcement):
            raise Superseded
        return self._gather_as(coordinator, None)

    def _participate(self, store: Store) -> NoReturn:
        member = GatherMember(
            store,
            self._participant,
            self._schedule,
            close_at=self._close_at,
            max_seconds=self._max_seconds,
            rejected=self._rejected,
        )
        if self._local_verdict is not None and self._secret is None:
            self._local_verdict.begin()
        verdict = member.participate()
        if verdict.judged and not verdict.covers(self._participant.join_request.token):
            raise self._leave_unreached(
                RendezvousFailed("joined after collection had finished; not included in the report", "ENV004")
            )
        raise Dismissed(self._code(verdict.code))

    def _code(self, received: int) -> int:
        """Return the exit code, given the code that the coordinator published."""
        code = received if received in EXIT_CODES_BY_SEVERITY else INCONCLUSIVE
        if self._secret is not None or self._local_verdict is None:
            return code
        own = self._local_verdict.wait()
        if own is None or (self._was_replaced and self.judges):
            own = worse_exit_code(own or 0, INCONCLUSIVE)
            if code == 0:
                self._write_line(f"rank {self._identity.number}: {UNCONFIRMED}")
        return worse_exit_code(own, code)

    def announce(self, code: int) -> None:
        """Publish the exit code with which all leave."""
        self._announced = True
        if self._coordinator is not None:
            self._coordinator.announce(code)

    def _report_unreached(self, lost: RendezvousFailed) -> None:
        more = f" (doctor explain {lost.check})" if lost.check else ""
        if self._discreet:
            self._write_line(f"rank {self._identity.number}: {lost.discreet or UNREACHED}{more}")
        else:
            self._write_line(f"rank {self._identity.number} on {self._participant.join_request.host}: {lost.why}{more}")

    def _leave_unreached(self, lost: RendezvousFailed) -> Dismissed:
        self._report_unreached(lost)
        self._report_rejected()
        self._participant.set_reach(lost.reach)
        if self._plan.share is not None:
            self._leave_capture(self._plan.share)
        return Dismissed(INCONCLUSIVE, unreached=True)

    def _leave_capture(self, folder: Path) -> None:
        """Write the facts to the shared folder, for ``doctor diagnose``."""
        from doctor.core.capture import encode_document, file_name, to_document
        from doctor.core.redact.placeholders import redact

        job = self._alone()
        document = redact(to_document(job)) if self._discreet else to_document(job)
        name = file_name(job, redacted=self._discreet)
        try:
            own = OwnFolder(folder, owners=self._plan.owners)
            DeadlineWorker().run(lambda: own.write(name, encode_document(document)), PATIENCE)
            self._write_line(f"its facts are in {folder / name}; run: doctor diagnose {folder}")
        except OSError as error:
            refused = self._discreet and isinstance(error, UntrustedPath)
            why = NOT_OURS if refused else error.strerror or str(error) or "no answer"
            self._write_line(f"cannot write its facts to {folder}: {why}")
