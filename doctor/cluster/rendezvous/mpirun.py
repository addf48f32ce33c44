"""Node of mpirun and first node of its ranks, from the environment of Open MPI.

Releases up to 4 export the address of mpirun's own node, and to processes on other nodes the list of all of them
(orte/mca/schizo/ompi/schizo_ompi.c and orte/mca/regx/fwd/regx_fwd.c); release 5 names mpirun's node in the name of the
run and in that of the daemon that started the process (observed in 5.0.11).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from doctor.collectors.launch.rank_variables import Environ, whole_number

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_NODES = re.compile(rf"([^\[\]]*)(?:\[(\d):({_RANGE}(?:,{_RANGE})*)\]([^\[\]]*))?", re.ASCII)
_NAMESPACE = re.compile(r"[a-z]+-(.+)-\d+@\d+", re.ASCII)


class Mpirun(NamedTuple):
    """mpirun as seen from one of its processes.

    ``names``: of its own node, addresses if known. ``at_home``: this process is on that node. ``first_node``: first
    node with ranks if mpirun's own has none; ``None`` if it has some, empty if unknown.
    """

    names: tuple[str, ...]
    at_home: bool
    first_node: str | None


def mpirun_of(environ: Environ) -> Mpirun | None:
    """Return the mpirun that started this process; ``None`` if its node is unknown."""
    head = environ.get("OMPI_MCA_orte_hnp_uri", "")
    addresses = tuple(_addresses_of_uri(head))
    if addresses:
        # The daemon of mpirun's own node is mpirun itself.
        at_home = environ.get("OMPI_MCA_orte_local_daemon_uri") == head
        return Mpirun(addresses, at_home, None if at_home else _first_node(environ))
    match = _NAMESPACE.fullmatch(environ.get("PMIX_NAMESPACE", ""))
    if match is None or "OMPI_VERSION" not in environ:
        return None
    daemon = environ.get("PMIX_SERVER_URI4") or environ.get("PMIX_SERVER_URI41") or ""
    return Mpirun((match[1],), daemon.partition(";")[0].endswith("@0.0"), "")


def _addresses_of_uri(uri: str) -> list[str]:
    """Return the IP addresses, IPv4 first, of ``1234.0;tcp://10.0.0.1,10.1.0.1:4567;tcp6://[fd00::1]:4568``."""
    found = []
    for transport in ("tcp", "tcp4", "tcp6"):
        for part in uri.split(";"):
            scheme, _, rest = part.partition("://")
            if scheme == transport:
                addresses = rest.rpartition(":")[0].strip("[]")
                found += [address for address in addresses.split(",") if address]
    return found


def _first_node(environ: Environ) -> str | None:
    """Return the node after mpirun's own in its list, if some node has no rank.

    As a rule that is mpirun's own, a login node or the launcher's pod. Empty if Open MPI omits the list because of its
    length.
    """
    daemons, nodes = (whole_number(environ, f"OMPI_MCA_{name}") for name in ("ess_base_num_procs", "orte_num_nodes"))
    if daemons is not None and nodes is not None and nodes >= daemons:  # --map-by seq counts nodes twice
        return None
    listed = expand_nodes(environ.get("OMPI_MCA_orte_node_regex", ""), most=2)
    return listed[1] if len(listed) > 1 else ""


def expand_nodes(text: str, most: int) -> list[str]:
    """Expand the first ``most`` names of an ORTE node list.

    ``node[2:0-1,7].lab,login@0(4)`` is ``node00.lab``, ``node01.lab``, ``node07.lab``, ``login``.
    """
    names: list[str] = []
    for entry in _ENTRY.findall(text.partition("@")[0]):
        match = _NODES.fullmatch(entry)
        if match is None:
            return []
        names += _numbered(match, most) if match[2] else [entry]
    return names[:most]


def _numbered(match: re.Match[str], most: int) -> list[str]:
    prefix, digits, ranges, suffix = match.groups()
    names: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        numbers = range(int(first), int(last or first) + 1)[:most]
        names += [f"{prefix}{number:0{digits}d}{suffix}" for number in numbers]
    return names
