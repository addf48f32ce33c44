"""Decides how a job is gathered, and where its store is.

Derived from the user's options and the launcher's environment, the same in all processes.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

from doctor.analysis.launch_origin import expand_hosts
from doctor.cluster.rendezvous.mpirun import mpirun_of
from doctor.cluster.rendezvous.process_identity import ProcessIdentity, process_identity
from doctor.collectors.launch.launcher import PORTS
from doctor.collectors.launch.rank_variables import Environ, whole_number
from doctor.core.errors import UnusableError
from doctor.core.facts import LaunchFacts
from doctor.core.files.trusted_owners import TrustedOwners
from doctor.knowledge.launcher_index import BY_NAME, function_of

FIRST_PORT, PORT_COUNT = 20_000, 8_000
"""Ports for jobs without one: above the well-known ones, and below those that Linux uses for outgoing connections (from
32768) and torch's default (29500)."""


class GatherOptions(NamedTuple):
    """Options ``--gather``, ``--share``, ``--ray``, ``--master``, ``--share-group`` (GID)."""

    gather: Literal["auto", "none", "store", "share", "ray"] = "auto"
    share: Path | None = None
    ray: str | None = None
    master: str | None = None
    group: int | None = None


class NoRendezvous(Exception):
    """No rendezvous is configured; the message says which options provide one."""


class StoreEndpoint(NamedTuple):
    """Host and port of a store.

    ``names``: host names or addresses, of one host or of two that may host it, the likelier first. ``hosted``:
    ``agent`` (the store of torchrun's agent), ``here`` (this process hosts it) or ``there``. ``source``: where this is
    configured.
    """

    names: tuple[str, ...]
    port: int
    hosted: str
    source: str

    @property
    def text(self) -> str:
        """Such as ``node0:29500``."""
        name = self.names[0]
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"


class GatherPlan(NamedTuple):
    """How this process gathers; alone if it has no ``identity``.

    ``endpoint``: of the store, if there is one; ``share``: the folder, if there is one; with both, the folder is for
    ranks that cannot reach the store. ``owners``: whose files in it are trusted. ``ray``: the address of the cluster
    whose nodes are gathered, with this process as their driver.
    """

    identity: ProcessIdentity | None = None
    endpoint: StoreEndpoint | None = None
    share: Path | None = None
    ray: str | None = None
    owners: TrustedOwners | None = None


def gather_plan(
    options: GatherOptions, environ: Environ, launch: LaunchFacts, identity: ProcessIdentity | None = None
) -> GatherPlan:
    """Return the plan for this process.

    ``auto`` gathers only if the launcher's environment says that several processes run now. ``identity``: of a process
    that no launcher numbers.

    Raises:
        NoRendezvous: this is one of several processes, and no meeting point is known.
        UnusableError: options conflict, or need several processes.
    """
    if options.master is not None:
        parse_master(options.master)
    if options.gather == "share" and options.share is None:
        raise UnusableError("--gather share needs --share DIR")
    if options.gather == "ray" or options.ray is not None:
        return _ray_plan(options, environ)
    if options.gather == "none" or (options.gather == "auto" and identity is None and not launch.running_together):
        return GatherPlan()
    identity = identity or process_identity(environ, launch)
    if identity is None or identity.world_size < 2:
        if options.gather == "auto":
            return GatherPlan()
        raise UnusableError(f"--gather {options.gather} needs RANK and WORLD_SIZE, or a launcher that sets them")
    owners = TrustedOwners.here(options.group)
    if options.share is not None and options.gather != "store":
        return GatherPlan(identity, None, options.share, owners=owners)
    try:
        endpoint = store_endpoint(environ, launch.launcher, identity, options.master)
    except NoRendezvous:
        if options.share is None:
            raise
        endpoint = None
    return GatherPlan(identity, endpoint, options.share, owners=owners)


def _ray_plan(options: GatherOptions, environ: Environ) -> GatherPlan:
    from doctor.cluster.ray.cluster_address import ray_head_address

    if options.gather not in ("auto", "ray") or options.share is not None or options.master is not None:
        raise UnusableError(
            "--ray checks the nodes of a cluster; --share, --master and --gather apply to the ranks of a job"
        )
    return GatherPlan(ray=ray_head_address(options.ray or "auto", environ))


def store_endpoint(
    environ: Environ, launcher: str, identity: ProcessIdentity, master: str | None = None
) -> StoreEndpoint:
    """Return the endpoint of this job's store. ``master``: the user's ``HOST:PORT``.

    Raises:
        NoRendezvous: neither the user nor the launcher names one.
        UnusableError: ``master`` is not a valid ``HOST:PORT``.
    """
    here = "here" if identity.number == 0 else "there"
    if master is not None:
        name, port = parse_master(master)
        return StoreEndpoint((name,), port, here, "--master")
    name, named_port = environ.get("MASTER_ADDR", "").strip(), whole_number(environ, "MASTER_PORT")
    if name and named_port in PORTS and named_port is not None:
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "TORCHELASTIC_RUN_ID" in environ
        return StoreEndpoint((name,), named_port, "agent" if by_agent else here, "MASTER_ADDR and MASTER_PORT")
    found = _launcher_endpoint(environ, launcher, identity)
    if found is None:
        raise NoRendezvous(
            "no rendezvous address: MASTER_ADDR and MASTER_PORT are not set, and the launcher provides none; add "
            "--master HOST:PORT (a host of rank 0 and a free port) or --share DIR (a folder that all hosts share)"
        )
    return found


def parse_master(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``. Raises :class:`UnusableError` if it is neither."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+)):(\d{1,5})", text.strip(), re.ASCII)
    if match is None or int(match[3]) not in PORTS:
        raise UnusableError(f"--master {text!r} is not a valid HOST:PORT")
    return match[1] or match[2], int(match[3])


def _port_for(*identity: object) -> int:
    """Return a port derived from this run; neighboring runs get different ones."""
    return FIRST_PORT + zlib.crc32(repr(identity).encode()) % PORT_COUNT


def _launcher_endpoint(environ: Environ, launcher: str, identity: ProcessIdentity) -> StoreEndpoint | None:
    """Return the endpoint that the launcher's variables imply; ``None`` if they name no host.

    That is the first node of a list: rank 0 runs there, with srun in every distribution except arbitrary and plane.
    """
    row = BY_NAME.get(launcher)
    if row is None:
        return None
    if row.endpoint:
        derived: StoreEndpoint | None = function_of(row.endpoint)(environ, identity)
        return derived
    nodes = expand_hosts(next((environ[name] for name in row.node_list if environ.get(name)), None))
    if not nodes:
        return None
    port = _port_for(*(environ.get(name) for name in (*row.job_variables, *row.run_variables)))
    return StoreEndpoint(nodes[:1], port, "here" if identity.number == 0 else "there", row.node_list_source)


def open_mpi_endpoint(environ: Environ, identity: ProcessIdentity) -> StoreEndpoint | None:
    """Use the node of mpirun, where its first local process hosts, which may not be rank 0.

    If that node has no rank, rank 0 hosts on the first node that has one: the others try both.
    """
    place = mpirun_of(environ)
    if place is None or (place.first_node == "" and identity.number == 0 and not place.at_home):
        return None
    at_home = place.at_home and whole_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") == 0
    hosting = at_home or (bool(place.first_node) and identity.number == 0)
    names = (*place.names, place.first_node) if place.first_node else place.names
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE")
    return StoreEndpoint(names, _port_for(job), "here" if hosting else "there", "mpirun's node")
