"""Fixes for limits of processes that only an administrator can raise."""

from __future__ import annotations

from doctor.api import Job, Rank, hosts_text
from doctor.facts import HostFacts, LaunchFacts, SlurmFacts

_UNITS = {"kubernetes": "containerd"}


def raise_hard_limit(job: Job, ranks: tuple[int, ...], item: str, directive: str, value: str) -> str:
    """The fix for a hard limit of ``ranks``, by what starts them.

    ``item``: the name in limits.conf(5) and of ``docker run --ulimit``; ``directive``: the name in systemd.exec(5)."""
    chosen = [rank for rank in job.ranks if rank.number in ranks]
    place = hosts_text(rank.host.name for rank in chosen)
    hosts = [host for rank in chosen if (host := rank.find(HostFacts)) is not None]
    container = next((host.container for host in hosts if host.container), None)
    if container in ("docker", "podman"):
        limit = "-1" if value == "unlimited" else f"{value}:{value}"
        return f"Start the container on {place} with `{container} run --ulimit {item}={limit}`."
    unit = _UNITS.get(container or "", "slurmd" if any(map(_in_slurm, chosen)) else "")
    if unit:
        setting = f"{directive}={'infinity' if value == 'unlimited' else value}"
        return f"Set `{setting}` in the systemd unit of {unit} on {place}, and restart {unit}."
    # "-" sets the soft and the hard limit (limits.conf(5)); PAM applies them at login.
    return f"Add `* - {item} {value}` to /etc/security/limits.conf on {place}, and start the job from a new login."


def _in_slurm(rank: Rank) -> bool:
    launch = rank.find(LaunchFacts)
    return rank.find(SlurmFacts) is not None or (launch is not None and "SLURM_JOB_ID" in launch.filled)
