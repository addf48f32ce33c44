"""Task that runs on each node of a Ray cluster, which is a rank of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from doctor.cluster.gather.member import GatherMember, NoCoordinator
from doctor.cluster.gather.participant import start_participant
from doctor.cluster.gather.probe_schedule import ProbeOptions
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.cluster.transport.ray_store import RayStoreBackend
from doctor.cluster.transport.secret_file import VARIABLE, secret_from_environ
from doctor.cluster.transport.signing import RejectedMessages, SignedBackend
from doctor.cluster.transport.store import KeyValueStore, StoreLost
from doctor.collectors.base import Machine
from doctor.collectors.launch.rank_variables import any_set
from doctor.core.clock import monotonic
from doctor.core.errors import UnusableError
from doctor.knowledge.launcher_index import BY_NAME, function_of


def join_from_node(
    number: int,
    world_size: int,
    run: str,
    timeout: float,
    probe_options: ProbeOptions | None,
    directories: tuple[tuple[str, str], ...],
    secret_file: str = "",
    collector: str = "",
    request: str = "",
) -> str:
    """Take part in the gather ``run`` as the node of that ``number``.

    ``secret_file``: path of the job's key on this node. ``collector``: ``module:function`` that takes ``request`` and
    returns what collects the facts, in place of the collectors. Returns why it failed; empty on success.
    """
    try:
        secret = secret_from_environ({VARIABLE: secret_file})
    except UnusableError as error:
        return str(error)
    identity = ProcessIdentity(number, world_size, run)
    machine = Machine(environ=given_environ(), directories=directories)
    participant, schedule = start_participant(
        identity,
        machine,
        timeout=timeout,
        probe_options=probe_options,
        write_line=lambda line: None,  # the driver reports for all nodes
        collect=function_of(collector)(request) if collector else None,
    )
    rejected = RejectedMessages()
    store = KeyValueStore(SignedBackend(RayStoreBackend(run), run, secret, rejected))
    close_at = monotonic() + timeout
    try:
        GatherMember(store, participant, schedule, close_at=close_at).participate()
    except NoCoordinator:
        return rejected.warning or "the driver stopped responding"
    except StoreLost as lost:
        return str(lost)
    return ""


def given_environ(proc: Path = Path("/proc")) -> Mapping[str, str]:
    """Return the environment that this process was started with, as every worker gets it.

    Ray changes it while a task runs: CUDA_VISIBLE_DEVICES is empty for one without GPUs, and OMP_NUM_THREADS is the
    number of its CPUs. A rank would see other values. If the initial environment cannot be read, the current one is
    returned.
    """
    try:
        entries = (proc / "self" / "environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    given = {name: value for name, _, value in pairs}
    # A process that sets its title may overwrite its environment (setproctitle without SPT_NOENV).
    return given if any_set(given, BY_NAME["ray"].marks) else dict(os.environ)
