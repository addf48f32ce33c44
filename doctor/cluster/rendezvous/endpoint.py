"""Endpoint of a job's store, derived from the environment alone, the same in all processes."""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

from doctor.analysis.launch_origin import expand_hosts
from doctor.cluster.rendezvous.mpirun import mpirun_of
from doctor.cluster.rendezvous.process_identity import ProcessIdentity
from doctor.collectors.launch.launcher import PORTS
from doctor.collectors.launch.rank_variables import Environ, whole_number
from doctor.core.errors import UnusableError
from doctor.knowledge.launcher_index import BY_NAME, function_of
from doctor.knowledge.launchers import Launcher

FIRST_PORT, PORT_COUNT = 20_000, 8_000
"""Ports for jobs without one: above the well-known ones, and below those that Linux uses for outgoing connections (from
32768) and torch's default (29500)."""


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
            "neither MASTER_ADDR and MASTER_PORT nor the launcher tell where the ranks can meet: add "
            "--master HOST:PORT (a host of rank 0 and a free port) or --share DIR (a folder that all hosts see)"
        )
    return found


def parse_master(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        UnusableError: it is neither.
    """
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+)):(\d{1,5})", text.strip(), re.ASCII)
    if match is None or int(match[3]) not in PORTS:
        raise UnusableError(f"--master {text!r} is no HOST:PORT")
    return match[1] or match[2], int(match[3])


def _port_for(*identity: object) -> int:
    """Return a port derived from this run; neighboring runs get different ones."""
    return FIRST_PORT + zlib.crc32(repr(identity).encode()) % PORT_COUNT


def _launcher_endpoint(environ: Environ, launcher: str, identity: ProcessIdentity) -> StoreEndpoint | None:
    """Return the endpoint that the launcher's variables imply; ``None`` if they name no host."""
    row = BY_NAME.get(launcher)
    if row is None:
        return None
    if row.endpoint:
        derived: StoreEndpoint | None = function_of(row.endpoint)(environ, identity)
        return derived
    return _first_node(environ, row, identity)


def _first_node(environ: Environ, row: Launcher, identity: ProcessIdentity) -> StoreEndpoint | None:
    """Use the first node of the list.

    Rank 0 runs there: with srun in every distribution except arbitrary and plane.
    """
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
