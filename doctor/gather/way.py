"""Which way a job is gathered: decided from what the user asked for and from the marks of a launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from doctor.collectors.claims import Environ
from doctor.errors import UnusableError
from doctor.facts import LaunchFacts
from doctor.gather.endpoint import Endpoint, NoWay, endpoint_of, parse_master
from doctor.gather.seat import Seat, seat_of
from doctor.owners import TrustedOwners

Gather = Literal["auto", "none", "store", "share", "ray"]


class Wish(NamedTuple):
    """What the user asked for: ``--gather``, ``--share``, ``--ray``, ``--master``, and ``--share-group`` as a GID."""

    gather: Gather = "auto"
    share: Path | None = None
    ray: str | None = None
    master: str | None = None
    group: int | None = None


class Way(NamedTuple):
    """How this process gathers. Alone, where it has no ``seat``. ``endpoint``: where the store is, if there is to be
    one; ``share``: the folder, if there is one; with both, the folder is for those who can't reach the store.
    ``owners``: whose files in it are trusted. ``ray``: the address of the cluster whose nodes are gathered, with this
    process as their driver."""

    seat: Seat | None = None
    endpoint: Endpoint | None = None
    share: Path | None = None
    ray: str | None = None
    owners: TrustedOwners | None = None


def way_of(wish: Wish, environ: Environ, launch: LaunchFacts) -> Way:
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
        return _way_over_ray(wish, environ)
    if wish.gather == "none" or (wish.gather == "auto" and not launch.running_together):
        return Way()
    seat = seat_of(environ, launch)
    if seat is None or seat.world_size < 2:
        if wish.gather == "auto":
            return Way()
        raise UnusableError(f"--gather {wish.gather} needs RANK and WORLD_SIZE, or a launcher that numbers the ranks")
    owners = TrustedOwners.here(wish.group)
    if wish.share is not None and wish.gather != "store":
        return Way(seat, None, wish.share, owners=owners)
    try:
        return Way(seat, endpoint_of(environ, launch.launcher, seat, wish.master), wish.share, owners=owners)
    except NoWay:
        if wish.share is None:
            raise
        return Way(seat, None, wish.share, owners=owners)


def _way_over_ray(wish: Wish, environ: Environ) -> Way:
    from doctor.gather.ray_address import address_of

    if wish.gather not in ("auto", "ray") or wish.share is not None or wish.master is not None:
        raise UnusableError(
            "--ray is for the nodes of a cluster; --share, --master and --gather are for ranks of a job"
        )
    return Way(ray=address_of(wish.ray or "auto", environ))
