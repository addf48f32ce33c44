"""Getting to the board: hosting the store, finding the way to it, or opening the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from doctor.analysis.interface_choice import is_loopback
from doctor.cluster.rendezvous.connect_attempt import ConnectAttempt, attempt_connect, names_this_host
from doctor.cluster.rendezvous.endpoint import StoreEndpoint
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.file_store import FileStoreBackend
from doctor.cluster.transport.secret_file import LEAST
from doctor.cluster.transport.signing import Secret
from doctor.cluster.transport.store import (
    PATIENCE,
    DeadlineWorker,
    KeyValueStore,
    StoreLost,
    UntrustedStore,
    first_line,
)
from doctor.cluster.transport.tcp_store import C10dStore, TCPStoreBackend, host_store, join_store, listen
from doctor.core.facts import ReachFacts
from doctor.core.files.own_folder import OwnFolder

ELSEWHERE = 2.0
"""Seconds for which the process that is to host the store looks whether another one does, where MASTER_ADDR is not this
host, or its port is taken."""
BEHIND = 8.0
"""Seconds by which that other one may take longer to import torch, after which what listens there is no store."""


class ConnectedStore(NamedTuple):
    """A board, and what was tried to get there. ``at_a_twin``: this process was to host the store, and another one that
    was told the same does."""

    store: KeyValueStore
    reach: ReachFacts
    via_duplicate_host: bool = False


class RendezvousFailed(Exception):
    """The board could not be reached. ``why``: the sentence for the user; ``discreet``: the same without names of
    users, hosts and paths, if there is one; ``check``: the check that knows the fault."""

    def __init__(self, why: str, check: str = "", reach: ReachFacts | None = None, discreet: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.check = check
        self.discreet = discreet
        self.reach = reach or ReachFacts()


class PortInUse(Exception):
    """This process is to host the store, and its port can't be had; says why."""


class TorchImport:
    """The import of torch, begun early: it takes a second or more, while the way to the master is tried."""

    def __init__(self) -> None:
        # torch's C++ half complains of every connection that ends; it reads this when it is loaded. The environment is
        # this process's own, and its facts hold a copy from before.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        self._error: str | None = None
        self._done = threading.Event()
        threading.Thread(target=self._load, name="doctor-torch", daemon=True).start()

    def _load(self) -> None:
        try:
            import torch.distributed

            if not torch.distributed.is_available():
                self._error = "this torch is built without torch.distributed"
        except ImportError as error:
            self._error = f"torch can't be imported here ({first_line(error)})"
        except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
            self._error = f"torch breaks when it is imported ({type(error).__name__}: {first_line(error)})"
        finally:
            self._done.set()

    def wait(self, until: float) -> None:
        """Wait for it.

        Raises:
            Unreached: it can't be had.
        """
        if not self._done.wait(max(0.0, until - time.monotonic())):
            raise RendezvousFailed(
                "torch was still being imported when the time was up: a longer --timeout, or --share DIR"
            )
        if self._error:
            raise RendezvousFailed(
                f"{self._error}, and the store is torch's: use --share DIR (a folder that all hosts see)"
            )


NOT_OURS = (
    "the shared folder holds files that other users may have made or changed; if ranks of several users share it, name"
    " their group with --share-group"
)
"""Why a folder is not used, without anybody's name."""


def open_file_store(directory: Path | OwnFolder, identity: ProcessIdentity) -> ConnectedStore:
    """The board in a folder.

    Raises:
        Unreached: it can't be used from this host.
    """
    store = KeyValueStore(FileStoreBackend(directory, identity.key))
    try:
        store.get("call")
        store.mailbox("doorbell").fresh()
    except UntrustedStore as refused:
        raise RendezvousFailed(str(refused), discreet=NOT_OURS) from None
    except StoreLost as lost:
        raise RendezvousFailed(str(lost)) from None
    return ConnectedStore(store, ReachFacts())


def secret_of_folder(directory: Path | OwnFolder, identity: ProcessIdentity) -> Secret:
    """The key of a job that meets in a folder: it lies there, for those alone who may use the folder.

    Raises:
        Unreached: it can't be had.
    """
    folder = FileStoreBackend(directory, identity.key)
    try:
        key = DeadlineWorker().run(lambda: folder.agree("secret", secrets.token_bytes(2 * LEAST)), PATIENCE)
    except (OSError, TimeoutError) as error:
        raise RendezvousFailed(
            f"the key of the job can't be had from {folder.description}: {first_line(error)}"
        ) from None
    if len(key) < LEAST:
        raise RendezvousFailed(
            f"the key of the job in {folder.description} is damaged: remove .rankdoctor-{identity.key} there"
        )
    return Secret(key, folder.description)


def open_store(
    endpoint: StoreEndpoint, identity: ProcessIdentity, until: float, torch: TorchImport | None = None
) -> ConnectedStore:
    """The board in the job's store, by the monotonic moment ``until``. ``torch``: its import, where that was begun.

    Raises:
        Unreached: it can't be had.
        Occupied: this process is to host it, and can't.
    """
    torch = torch or TorchImport()
    if endpoint.hosted == "here":
        return _host(endpoint, identity, torch, until)
    return _join(endpoint, identity, torch, until)


def _host(endpoint: StoreEndpoint, identity: ProcessIdentity, torch: TorchImport, until: float) -> ConnectedStore:
    try:
        listener = listen(endpoint.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(RendezvousFailed):
                return _join_duplicate_host(endpoint, identity, torch, until)
        raise PortInUse(f"port {endpoint.port} can't be listened on here: {error.strerror or error}") from None
    with listener:
        if not names_this_host(endpoint.names):
            with contextlib.suppress(RendezvousFailed):
                return _join_duplicate_host(endpoint, identity, torch, until)
        torch.wait(until)
        client = _bounded(lambda: host_store(listener, max(1.0, until - time.monotonic())), until, endpoint)
    backend = TCPStoreBackend(client, identity.key, _description(endpoint), survives_coordinator=identity.number != 0)
    # The host's own process goes by MASTER_ADDR too when the job starts.
    found = attempt_connect(endpoint.names, endpoint.port, until=time.monotonic())
    return ConnectedStore(KeyValueStore(backend), ReachFacts(attempts=found.attempts))


def _join_duplicate_host(
    endpoint: StoreEndpoint, identity: ProcessIdentity, torch: TorchImport, until: float
) -> ConnectedStore:
    """Another process of this job may have been told that it is the one to host: then the two meet in its store."""
    soon = min(until, time.monotonic() + ELSEWHERE)
    if attempt_connect(endpoint.names, endpoint.port, until=soon).open_at is None:
        raise RendezvousFailed("nobody else hosts the store")
    torch.wait(until)
    joined = _join(endpoint, identity, torch, min(until, time.monotonic() + BEHIND))
    soon = min(until, time.monotonic() + ELSEWHERE)
    try:
        while joined.store.get("call") is None:
            if time.monotonic() >= soon:
                raise RendezvousFailed("a store that is not this job's")
            time.sleep(0.05)
    except StoreLost as lost:
        raise RendezvousFailed(str(lost)) from None
    return joined._replace(via_duplicate_host=True)


def _join(endpoint: StoreEndpoint, identity: ProcessIdentity, torch: TorchImport, until: float) -> ConnectedStore:
    found = attempt_connect(endpoint.names, endpoint.port, until=until)
    reach = ReachFacts(attempts=found.attempts)
    if found.open_at is None:
        why, check = failure_sentence(found, spans_hosts=identity.spans_hosts)
        raise RendezvousFailed(why, check, reach)
    torch.wait(until)
    address = found.open_at
    try:
        client = _bounded(
            lambda: join_store(address, endpoint.port, max(1.0, until - time.monotonic())), until, endpoint
        )
    except RendezvousFailed as error:
        raise RendezvousFailed(error.why, error.check, reach) from None
    by_agent = endpoint.hosted == "agent"
    return ConnectedStore(
        KeyValueStore(TCPStoreBackend(client, identity.key, _description(endpoint), survives_coordinator=by_agent)),
        reach,
    )


def _bounded(make: Callable[[], C10dStore], until: float, endpoint: StoreEndpoint) -> C10dStore:
    """A store, made in a thread that may be left behind: what listens there may be no store, or be stopped."""
    seconds = max(1.0, until - time.monotonic())
    try:
        return DeadlineWorker().run(make, seconds)
    except TimeoutError:
        what = "does not answer: it is stopped, waits for a silent name server (NET024), or is no store of torch"
    except (RuntimeError, OSError) as error:
        what = f"is no store of torch that answers ({first_line(error)})"
    raise RendezvousFailed(f"what listens on {endpoint.text} {what}", "ENV008")


def _description(endpoint: StoreEndpoint) -> str:
    return f"the store at {endpoint.text}"


def failure_sentence(found: ConnectAttempt, *, spans_hosts: bool) -> tuple[str, str]:
    """Why there was no way to the store, as one sentence, and the id of the check that knows the fault."""
    last = found.attempts[-1]
    name = last.peer
    if not found.resolved:
        return f"{name} does not resolve here ({found.lookup_error or 'no address'})", "NET004"
    where = name if name == last.address else f"{name} is {last.address} here"
    route = f" by {last.interface} from {last.source_address}" if last.source_address else ""
    tries = f"{found.rounds} tr{'y' if found.rounds == 1 else 'ies'} in {found.seconds:.1f} s"
    outcome = {"refused": "refused", "silent": "no answer", "unroutable": "no route"}[last.outcome]
    itself = is_loopback(last.address) and name.partition(".")[0] != socket.gethostname().partition(".")[0]
    if itself and spans_hosts:
        return f"{where}, which is {socket.gethostname()} itself; port {last.port}: {outcome}, {tries}", "NET005"
    hint = {
        "refused": "nobody listens there: rank 0 is not started, or elsewhere",
        "silent": "a firewall drops it, or it is the wrong network",
        "unroutable": "this host has no way to that network",
    }[last.outcome]
    return f"{where}{route}; port {last.port}: {outcome}, {tries}; {hint}", "NET006"
