"""Opens the store of a job: hosts it, connects to it, or opens the shared folder."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from doctor.analysis.interface_choice import is_loopback
from doctor.cluster.gather.plan import StoreEndpoint
from doctor.cluster.rendezvous.connect_attempt import ConnectAttempt, attempt_connect, names_this_host
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
from doctor.core.background import BackgroundCall
from doctor.core.clock import monotonic, sleep
from doctor.core.facts import ReachFacts
from doctor.core.files.own_folder import OwnFolder

ELSEWHERE = 2.0
"""Seconds for which the hosting process looks for another host of the store, if MASTER_ADDR is not this host or the
port is in use."""
BEHIND = 8.0
"""Seconds that the other host may take longer to import torch, after which its listener is not a store."""


class ConnectedStore(NamedTuple):
    """An open store, and the attempts to reach it.

    ``fallback``: a second store, for ranks that cannot reach the first. ``via_duplicate_host``: another process was
    also configured to host the store, and does.
    """

    store: KeyValueStore
    reach: ReachFacts
    fallback: KeyValueStore | None = None
    via_duplicate_host: bool = False


class RendezvousFailed(Exception):
    """The store could not be reached.

    ``why``: the sentence for the user; ``discreet``: the same without names of users, hosts and paths, if there is one;
    ``check``: the check that explains the fault.
    """

    def __init__(self, why: str, check: str = "", reach: ReachFacts | None = None, discreet: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.check = check
        self.discreet = discreet
        self.reach = reach or ReachFacts()


class PortInUse(Exception):
    """This process is to host the store and cannot listen on its port."""


class TorchImport:
    """Background import of torch, started early: it takes a second or more."""

    def __init__(self) -> None:
        # torch's C++ code logs every connection that ends; it reads this when it is loaded. The environment is this
        # process's own, and its facts hold an earlier copy.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        self._error = BackgroundCall(_import_torch)

    def wait(self, until: float) -> None:
        """Wait for the import. Raises :class:`RendezvousFailed` if torch is not available."""
        try:
            error = self._error.result(max(0.0, until - monotonic()))
        except TimeoutError:
            raise RendezvousFailed(
                "importing torch took longer than --timeout: increase it, or use --share DIR"
            ) from None
        if error:
            raise RendezvousFailed(f"{error}, and the store needs it: use --share DIR (a folder that all hosts share)")


def _import_torch() -> str:
    """Import torch; return why it cannot be used, empty if it can."""
    try:
        import torch.distributed

        return "" if torch.distributed.is_available() else "this PyTorch build has no torch.distributed"
    except ImportError as error:
        return f"cannot import torch ({first_line(error)})"
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        return f"importing torch failed ({type(error).__name__}: {first_line(error)})"


NOT_OURS = (
    "the shared folder holds files that other users may have made or changed; if ranks of several users share it, name"
    " their group with --share-group"
)
"""Reason for not using a folder, without names."""


def open_file_store(directory: Path | OwnFolder, identity: ProcessIdentity) -> ConnectedStore:
    """Open the store in a folder. Raises :class:`RendezvousFailed` if this host cannot use it."""
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
    """Return the key of a job that gathers in a folder, readable by users of the folder.

    Raises:
        RendezvousFailed: it cannot be read.
    """
    folder = FileStoreBackend(directory, identity.key)
    try:
        key = DeadlineWorker().run(lambda: folder.agree("secret", secrets.token_bytes(2 * LEAST)), PATIENCE)
    except (OSError, TimeoutError) as error:
        raise RendezvousFailed(f"cannot read the job key from {folder.description}: {first_line(error)}") from None
    if len(key) < LEAST:
        raise RendezvousFailed(
            f"the job key in {folder.description} is damaged: remove .rankdoctor-{identity.key} there"
        )
    return Secret(key, folder.description)


def open_store(
    endpoint: StoreEndpoint, identity: ProcessIdentity, until: float, torch: TorchImport | None = None
) -> ConnectedStore:
    """Open the job's store by the monotonic time ``until``.

    ``torch``: its import, if that has started.

    Raises:
        RendezvousFailed: the store is not available.
        PortInUse: this process is to host it and cannot.
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
        reason = os.strerror(error.errno) if error.errno else error
        raise PortInUse(f"cannot listen on port {endpoint.port} on this host: {reason}") from None
    with listener:
        if not names_this_host(endpoint.names):
            with contextlib.suppress(RendezvousFailed):
                return _join_duplicate_host(endpoint, identity, torch, until)
        torch.wait(until)
        client = _bounded(partial(host_store, listener), until, endpoint)
    where = f"the store at {endpoint.text}"
    backend = TCPStoreBackend(client, identity.key, where, survives_coordinator=identity.number != 0)
    # When the job starts, the host's own process uses MASTER_ADDR too.
    found = attempt_connect(endpoint.names, endpoint.port, until=monotonic())
    return ConnectedStore(KeyValueStore(backend), ReachFacts(attempts=found.attempts))


def _join_duplicate_host(
    endpoint: StoreEndpoint, identity: ProcessIdentity, torch: TorchImport, until: float
) -> ConnectedStore:
    """Connect to the store of another process that was also configured to host it."""
    soon = min(until, monotonic() + ELSEWHERE)
    if attempt_connect(endpoint.names, endpoint.port, until=soon).open_at is None:
        raise RendezvousFailed("no other process hosts the store")
    torch.wait(until)
    joined = _join(endpoint, identity, torch, min(until, monotonic() + BEHIND))
    soon = min(until, monotonic() + ELSEWHERE)
    try:
        while joined.store.get("call") is None:
            if monotonic() >= soon:
                raise RendezvousFailed("a store that is not this job's")
            sleep(0.05)
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

    try:
        client = _bounded(partial(join_store, found.open_at, endpoint.port), until, endpoint)
    except RendezvousFailed as error:
        raise RendezvousFailed(error.why, error.check, reach) from None
    where, by_agent = f"the store at {endpoint.text}", endpoint.hosted == "agent"
    backend = TCPStoreBackend(client, identity.key, where, survives_coordinator=by_agent)
    return ConnectedStore(KeyValueStore(backend), reach)


def _bounded(make: Callable[[float], C10dStore], until: float, endpoint: StoreEndpoint) -> C10dStore:
    """Create a client in a thread that is abandoned if the listener does not answer."""
    seconds = max(1.0, until - monotonic())
    try:
        return DeadlineWorker().run(partial(make, seconds), seconds)
    except TimeoutError:
        what = "does not respond: it is stopped, waits for a DNS server (NET024), or is not a PyTorch TCPStore"
    except (RuntimeError, OSError) as error:
        what = f"is not a PyTorch TCPStore ({first_line(error)})"
    raise RendezvousFailed(f"what listens on {endpoint.text} {what}", "ENV008")


def failure_sentence(found: ConnectAttempt, *, spans_hosts: bool) -> tuple[str, str]:
    """Return why the store was unreachable, as a sentence, and the check for that fault."""
    last = found.attempts[-1]
    name = last.peer
    if not found.resolved:
        return f"{name} does not resolve on this host ({found.lookup_error or 'no address'})", "NET004"
    where = name if name == last.address else f"{name} resolves to {last.address}"
    route = f" by {last.interface} from {last.source_address}" if last.source_address else ""
    tries = f"{found.rounds} tr{'y' if found.rounds == 1 else 'ies'} in {found.seconds:.1f} s"
    outcome = {"refused": "refused", "silent": "no answer", "unroutable": "no route"}[last.outcome]
    itself = is_loopback(last.address) and name.partition(".")[0] != socket.gethostname().partition(".")[0]
    if itself and spans_hosts:
        return f"{where}, which is {socket.gethostname()} itself; port {last.port}: {outcome}, {tries}", "NET005"
    hint = {
        "refused": "nothing listens there: rank 0 is not running, or runs elsewhere",
        "silent": "a firewall drops the packets, or it is the wrong network",
        "unroutable": "this host has no route to that network",
    }[last.outcome]
    return f"{where}{route}; port {last.port}: {outcome}, {tries}; {hint}", "NET006"
