"""Which way a job is gathered: decided from what the user asked for and from the marks of a launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from doctor.cluster.rendezvous.endpoint import NoRendezvous, StoreEndpoint, parse_master, store_endpoint
from doctor.cluster.rendezvous.process_identity import ProcessIdentity, process_identity
from doctor.collectors.launch.rank_variables import Environ
from doctor.core.errors import UnusableError
from doctor.core.facts import LaunchFacts
from doctor.core.files.trusted_owners import TrustedOwners

GatherMode = Literal["auto", "none", "store", "share", "ray"]


class GatherOptions(NamedTuple):
    """What the user asked for: ``--gather``, ``--share``, ``--ray``, ``--master``, and ``--share-group`` as a GID."""

    gather: GatherMode = "auto"
    share: Path | None = None
    ray: str | None = None
    master: str | None = None
    group: int | None = None


class GatherPlan(NamedTuple):
    """How this process gathers. Alone, where it has no ``seat``. ``endpoint``: where the store is, if there is to be
    one; ``share``: the folder, if there is one; with both, the folder is for those who can't reach the store.
    ``owners``: whose files in it are trusted. ``ray``: the address of the cluster whose nodes are gathered, with this
    process as their driver."""

    seat: ProcessIdentity | None = None
    endpoint: StoreEndpoint | None = None
    share: Path | None = None
    ray: str | None = None
    owners: TrustedOwners | None = None


def gather_plan(wish: GatherOptions, environ: Environ, launch: LaunchFacts) -> GatherPlan:
    """The way for this process. ``auto`` gathers only where marks say that it is one of several that run now.

    Raises:
        NoWay: it is one of several, and nothing says where they can meet.
        UnusableError: options contradict one another, or ask for what a lone process can't do.
    """
    if wish.master is not None:
        parse_master(wish.master)
    if wish.gather == "share" and wish.share is None:
        raise UnusableError("--gather share needs --share DIR")
    if wish.gather == "ray" or wish.ray is not None:
        return _ray_plan(wish, environ)
    if wish.gather == "none" or (wish.gather == "auto" and not launch.running_together):
        return GatherPlan()
    seat = process_identity(environ, launch)
    if seat is None or seat.world_size < 2:
        if wish.gather == "auto":
            return GatherPlan()
        raise UnusableError(f"--gather {wish.gather} needs RANK and WORLD_SIZE, or a launcher that numbers the ranks")
    owners = TrustedOwners.here(wish.group)
    if wish.share is not None and wish.gather != "store":
        return GatherPlan(seat, None, wish.share, owners=owners)
    try:
        return GatherPlan(seat, store_endpoint(environ, launch.launcher, seat, wish.master), wish.share, owners=owners)
    except NoRendezvous:
        if wish.share is None:
            raise
        return GatherPlan(seat, None, wish.share, owners=owners)


def _ray_plan(wish: GatherOptions, environ: Environ) -> GatherPlan:
    from doctor.cluster.ray.cluster_address import ray_head_address

    if wish.gather not in ("auto", "ray") or wish.share is not None or wish.master is not None:
        raise UnusableError(
            "--ray is for the nodes of a cluster; --share, --master and --gather are for ranks of a job"
        )
    return GatherPlan(ray=ray_head_address(wish.ray or "auto", environ))
