"""The number of each rank: by the variables of its launcher, else by the order in which the processes were started.

Variables are those of the last ``execve``: what a script sets itself (``os.environ``) is not visible from outside. They
are the claims of whoever started the process, so a number that is not plausible, or that two processes of one job
claim, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from doctor.attach.processes import Process, start_order
from doctor.collectors.base import first_known
from doctor.collectors.launch.launcher import launcher_of
from doctor.collectors.launch.rank_variables import claims_of, whole_number
from doctor.core.facts import Claim
from doctor.knowledge.launcher_index import BY_NAME
from doctor.knowledge.launchers import ENVIRONMENT

BY_ORDER = "order of the processes"
"""``rank_from`` of a number that no launcher gave."""
BY_CHILDREN = "LOCAL_RANK of its children"
"""``rank_from`` of the process of a training script that started the other ranks."""
MOST_RANKS = 1 << 24
_LOCAL = ("LOCAL_RANK",)


class RankNumbers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbers of one rank; the fields are those of :class:`~doctor.core.facts.attached.AttachedProcess`."""

    launcher: str = ""
    rank: int | None = None
    rank_from: str = ""
    guessed: bool = False
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    node: int | None = None


def claimed_numbers(environ: Mapping[str, str] | None) -> tuple[RankNumbers, ...]:
    """Return what the variables claim about a process, the claim that torch would use first.

    The plain variables (RANK, WORLD_SIZE) precede those of the launcher, which are the second claim: a stale RANK that
    all processes have inherited is then told by its duplicates. None if there is no plausible rank.
    """
    if not environ:
        return ()
    launcher = launcher_of(environ)
    row = BY_NAME.get(launcher)
    claims = {claim.source: claim for claim in claims_of(environ)}
    own = claims.get(row.claim) if row is not None and not row.counts_hosts else None
    found = []
    plain = claims.get(ENVIRONMENT.claim)
    if plain is not None and (plain.world_size is not None or own is not None):
        found.append(_numbers(launcher, plain, own, "RANK"))
    if row is not None and own is not None:
        names = row.rank or _LOCAL
        found.append(_numbers(launcher, own, plain, next((name for name in names if environ.get(name)), names[0])))
    return tuple(dict.fromkeys(numbers for numbers in found if numbers is not None))


def _numbers(launcher: str, claim: Claim, other: Claim | None, rank_from: str) -> RankNumbers | None:
    size = _within(claim.world_size, 1, MOST_RANKS)
    if size is None and other is not None and claim.world_size is None:
        size = _within(other.world_size, 1, MOST_RANKS)
    rank = _within(claim.rank, 0, (size or MOST_RANKS) - 1)
    if rank is None and (claim.rank is not None or not _counts_on_host(launcher, claim)):
        return None
    other = other or Claim("")
    local_size = _within(first_known(claim.local_world_size, other.local_world_size), 1, size or MOST_RANKS)
    return RankNumbers(
        "" if launcher == "none" else launcher,
        rank,
        rank_from,
        local_rank=_within(first_known(claim.local_rank, other.local_rank), 0, (local_size or MOST_RANKS) - 1),
        world_size=size,
        local_world_size=local_size,
        node=_within(first_known(claim.node_rank, other.node_rank), 0, MOST_RANKS),
    )


def _counts_on_host(launcher: str, claim: Claim) -> bool:
    """Return whether the launcher numbers the processes of a host, so that a rank follows from the number of them."""
    row = BY_NAME.get(launcher)
    return row is not None and row.is_script and claim.source == row.claim and claim.local_rank is not None


def _within(number: int | None, least: int, most: int) -> int | None:
    return number if number is not None and least <= number <= most else None


def node_of(environ: Mapping[str, str] | None) -> int | None:
    """Return the number of the host in a job whose processes are not numbered by variables."""
    return _within(whole_number(environ or {}, "NODE_RANK", "GROUP_RANK", "MACHINE_RANK"), 0, MOST_RANKS)


def number_ranks(
    members: Sequence[tuple[Process, Sequence[RankNumbers]]],
    *,
    first: int | None = None,
    node: int | None = None,
    nodes: int | None = None,
) -> dict[int, RankNumbers]:
    """Return the numbers of the ranks of one job on this host by PID.

    ``members``: the ranks with their claims, most preferred first, each of them possibly none. ``first``: PID of the
    process that is known to be rank 0, if any; ``node`` and ``nodes``: number of this host and count of the hosts, for
    ranks without claims.
    """
    claims = {process.pid: claimed for process, claimed in members}
    ordered = sorted((process for process, _ in members), key=lambda one: (one.pid != first, start_order(one)))
    chosen: dict[int, RankNumbers] = {}
    for choice in (0, -1):
        chosen = {process.pid: claims[process.pid][choice] for process in ordered if claims[process.pid]}
        chosen = {pid: numbers for pid, numbers in chosen.items() if numbers.rank is not None}
        ranks = [numbers.rank for numbers in chosen.values()]
        if len(set(ranks)) == len(ranks):
            break
    else:
        chosen = {}
    return chosen | _guessed([process.pid for process in ordered if process.pid not in chosen], chosen, node, nodes)


def _guessed(
    pids: Sequence[int], known: Mapping[int, RankNumbers], node: int | None, nodes: int | None
) -> dict[int, RankNumbers]:
    """Number the processes without a claim by the numbers that are free on this host, in the order given."""
    if not pids:
        return {}
    some = next(iter(known.values()), RankNumbers())
    here = len(pids) + len(known)
    local_size = max(some.local_world_size or here, here)
    base = (node or 0) * local_size
    if known:
        base = min(numbers.rank - (numbers.local_rank or 0) for numbers in known.values() if numbers.rank is not None)
    taken = {numbers.rank for numbers in known.values()}
    free = (number for number in range(max(base, 0), max(base, 0) + here + local_size) if number not in taken)
    hosts = nodes if nodes is not None or node is not None else 1
    size = some.world_size or (hosts * local_size if hosts else None)
    return {
        pid: RankNumbers(
            some.launcher,
            rank,
            BY_ORDER,
            guessed=True,
            local_rank=rank - max(base, 0),
            world_size=size,
            local_world_size=local_size,
            node=some.node if known else node,
        )
        for pid, rank in zip(pids, free, strict=False)
    }


def common_world_size(numbers: Iterable[RankNumbers]) -> int | None:
    """Return the world size that most ranks state."""
    sizes = [number.world_size for number in numbers if number.world_size is not None]
    return max(sizes, key=sizes.count, default=None)
