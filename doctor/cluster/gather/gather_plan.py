"""Decides how a job is gathered, from the user's options and the launcher's environment."""

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
    """Options ``--gather``, ``--share``, ``--ray``, ``--master``, ``--share-group`` (GID)."""

    gather: GatherMode = "auto"
    share: Path | None = None
    ray: str | None = None
    master: str | None = None
    group: int | None = None


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


def gather_plan(options: GatherOptions, environ: Environ, launch: LaunchFacts) -> GatherPlan:
    """Return the plan for this process.

    ``auto`` gathers only if the launcher's environment says that several processes run now.

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
    if options.gather == "none" or (options.gather == "auto" and not launch.running_together):
        return GatherPlan()
    identity = process_identity(environ, launch)
    if identity is None or identity.world_size < 2:
        if options.gather == "auto":
            return GatherPlan()
        raise UnusableError(
            f"--gather {options.gather} needs RANK and WORLD_SIZE, or a launcher that numbers the ranks"
        )
    owners = TrustedOwners.here(options.group)
    if options.share is not None and options.gather != "store":
        return GatherPlan(identity, None, options.share, owners=owners)
    try:
        return GatherPlan(
            identity, store_endpoint(environ, launch.launcher, identity, options.master), options.share, owners=owners
        )
    except NoRendezvous:
        if options.share is None:
            raise
        return GatherPlan(identity, None, options.share, owners=owners)


def _ray_plan(options: GatherOptions, environ: Environ) -> GatherPlan:
    from doctor.cluster.ray.cluster_address import ray_head_address

    if options.gather not in ("auto", "ray") or options.share is not None or options.master is not None:
        raise UnusableError(
            "--ray is for the nodes of a cluster; --share, --master and --gather are for ranks of a job"
        )
    return GatherPlan(ray=ray_head_address(options.ray or "auto", environ))
