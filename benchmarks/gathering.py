"""What gathering costs: whole checks on hosts of the lab, and large jobs whose ranks are simulated.

    python benchmarks/gathering.py [lab|large] [--part | --write]

``lab``: 8 hosts (network namespaces; needs root) of one rank. The check over torch's store against eight concurrent
``import torch`` of the same round, the check over a shared folder, and the verdict on a rank that never comes against
``--timeout``. ``large``: jobs of up to 1,024 ranks over a store and up to 16,384 over a folder, one thread a dozen
ranks; what they say is the real protocol, and what they bring is the capture of a healthy rank of its own. ``--part``:
two hosts, once, and jobs of up to 32 ranks.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from evidence_pages import add_part, write_between  # noqa: E402 - the path comes first

from doctor.cluster.transport.store import KeyValueStore  # noqa: E402
from doctor.core.job import Member  # noqa: E402
from tests.lab.hosts import LabHost, hosts, together  # noqa: E402
from tests.lab.needs import CannotPlay, require_namespaces  # noqa: E402

TIMEOUT = 4.0
PER_HOST = 8
CLIENTS = 64


class Extent(NamedTuple):
    """How much is measured: hosts and rounds of the lab, ranks of the jobs over a store and over a folder."""

    hosts: int = 8
    rounds: int = 5
    store: tuple[int, ...] = (128, 256, 512, 1024)
    folder: tuple[int, ...] = (1024, 4096, 16384)


ALL, PART = Extent(), Extent(2, 1, (8, 32), (32,))


# -- the lab


def _ranks(lab: Sequence[LabHost], world: int, *options: str) -> tuple[float, list[int]]:
    """Seconds until the last of the ranks has ended, and their exit codes."""
    command = [sys.executable, "-m", "doctor", "check", "--probe", "none", "--format", "json", *options]
    runs = [(host, command, _environ(rank, world, lab[0].name)) for rank, host in enumerate(lab)]
    began = time.perf_counter()
    done = together(runs, timeout=120)
    return time.perf_counter() - began, [one.returncode for one in done]


def _environ(rank: int, world: int, master: str) -> dict[str, str]:
    here = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**here, "WORLD_SIZE": str(world), "MASTER_ADDR": master, "MASTER_PORT": "29500"}


def _import_torch(lab: Sequence[LabHost]) -> float:
    began = time.perf_counter()
    together([(host, [sys.executable, "-c", "import torch.distributed"], {}) for host in lab], timeout=120)
    return time.perf_counter() - began


def measure_lab(extent: Extent) -> list[tuple[str, str, str]]:
    """Rows: what, measured, limit."""
    imports, stores, shares, absents = [], [], [], []
    count = extent.hosts
    with hosts(count) as lab, tempfile.TemporaryDirectory() as folder:
        if extent is ALL:
            _import_torch(lab)  # files into the page cache
        for _ in range(extent.rounds):
            imports.append(_import_torch(lab))
            seconds, codes = _ranks(lab, count)
            stores.append(seconds)
            shared, shared_codes = _ranks(lab, count, "--share", folder)
            shares.append(shared)
            assert codes == shared_codes == [0] * count, (codes, shared_codes)
        for _ in range(extent.rounds):
            seconds, codes = _ranks(lab[:2], 3, "--share", folder, "--timeout", f"{TIMEOUT:g}")
            absents.append(seconds - TIMEOUT)
            assert codes == [1, 1], codes
    above = statistics.median(store - one for store, one in zip(stores, imports, strict=True))
    ratio = statistics.median(store / one for store, one in zip(stores, imports, strict=True))
    return [
        (
            f"{count} hosts x 1 rank, store, against {count} concurrent `import torch`",
            f"{statistics.median(stores):.2f} s: {above:+.2f} s, {ratio:.2f} times",
            "+1.5 s",
        ),
        (f"{count} hosts x 1 rank, shared folder, no torch", f"{statistics.median(shares):.2f} s", "3 s"),
        (
            "verdict on an absent rank (2 of 3 came), from the start of the command",
            f"`--timeout` {statistics.median(absents):+.2f} s (largest {max(absents):+.2f} s)",
            "+2 s",
        ),
    ]


# -- large jobs


def _posted(ranks: int) -> Iterator[tuple[str, int, bytes]]:
    """Token, rank and facts of every rank. They bring what was collected here just now, under names of their own: the
    facts of the host with its first rank, as the speaker of a host does."""
    from doctor.cluster.gather.protocol import MemberFacts
    from doctor.cluster.transport.codec import encode, pack_member
    from doctor.core.facts import SECTIONS, HostFacts
    from doctor.session import collect
    from doctor.testing.cases import healthy

    here = collect()
    real = {**here.hosts[0].sections, **here.ranks[0].sections}
    for member in healthy(hosts=ranks // PER_HOST, per_host=PER_HOST).members:
        host = member.sections[HostFacts.key]
        assert isinstance(host, HostFacts)
        identity = (host.boot_id, host.machine_id, host.hostname)
        sections = {**real, "launch": member.sections["launch"], "process": member.sections["process"], "host": host}
        speaks = member.rank % PER_HOST == 0
        brought = {key: value for key, value in sections.items() if speaks or SECTIONS[key].level == "rank"}
        capture = pack_member(Member(member.rank, brought, identity))
        facts = MemberFacts(f"{member.rank:016x}", member.rank, host.hostname, capture)
        yield facts.token, facts.number, encode(facts)


def gather(ranks: int, boards: Callable[[], KeyValueStore], keeper_board: KeyValueStore) -> tuple[float, int]:
    """Seconds from the call until the job is built, and bytes of the facts."""
    from doctor.cluster.gather.coordinator import Coordinator
    from doctor.cluster.gather.protocol import MemberFacts
    from doctor.cluster.membership.protocol import JoinRequest
    from doctor.cluster.rendezvous.process_identity import ProcessIdentity
    from doctor.cluster.transport.codec import decode, encode

    posted = list(_posted(ranks))
    keeper = Coordinator(
        keeper_board, ProcessIdentity(0, ranks, "bench"), "nonce", close_at=time.monotonic() + 300, write_line=print
    )
    local = threading.local()

    def post(facts: tuple[str, int, bytes]) -> None:
        if not hasattr(local, "board"):
            local.board = boards()
        token, number, data = facts
        local.board.append("nonce/hello", encode(JoinRequest(token, number, f"node{number // PER_HOST}")))
        local.board.append("nonce/facts", data)

    began = time.perf_counter()
    keeper.open()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for facts in posted[1:]:
            pool.submit(post, facts)
        own = decode(posted[0][2], MemberFacts)
        job = keeper.gather(lambda: own, None)
    ended = time.perf_counter()
    if len(job.ranks) != ranks:
        raise RuntimeError(f"{len(job.ranks)} of {ranks} ranks came")
    return ended - began, sum(len(data) for _, _, data in posted)


@contextmanager
def _store() -> Iterator[tuple[KeyValueStore, Callable[[], KeyValueStore]]]:
    from doctor.cluster.transport.tcp_store import TCPStoreBackend, host_store, join_store, listen

    listener = listen(0)
    port = listener.getsockname()[1]
    server = KeyValueStore(TCPStoreBackend(host_store(listener, 60), "bench", "the store", survives_coordinator=False))

    def client() -> KeyValueStore:
        return KeyValueStore(
            TCPStoreBackend(join_store("127.0.0.1", port, 60), "bench", "the store", survives_coordinator=False)
        )

    yield server, client
    server.close()


def measure_store(sizes: Sequence[int]) -> list[tuple[str, str, str]]:
    """Rows for jobs over the store, in a host of the lab where they may have one: every client of torch's store looks
    up its peer's name, and a name server that is slow to say that it knows nothing would be what is measured."""
    try:
        require_namespaces()
    except CannotPlay:
        return _store_rows(sizes, [_measure_store(ranks) for ranks in sizes])
    with hosts(1) as (host,):
        done = host.run([sys.executable, __file__, "--store", *map(str, sizes)], timeout=300)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    pairs = (line.split() for line in done.stdout.splitlines())
    return _store_rows(sizes, [(float(took), int(size)) for took, size in pairs])


def _measure_store(ranks: int) -> tuple[float, int]:
    with _store() as (server, client):
        return gather(ranks, client, server)


def _store_rows(sizes: Sequence[int], measured: Sequence[tuple[float, int]]) -> list[tuple[str, str, str]]:
    rows = [
        (f"{ranks:,} simulated ranks over a store", f"{took:.2f} s, {size / 1e6:.1f} MB of facts", "")
        for ranks, (took, size) in zip(sizes, measured, strict=True)
    ]
    exponent = math.log(measured[-1][0] / measured[0][0]) / math.log(sizes[-1] / sizes[0])
    return [*rows, ("growth over the store (exponent; 1 is linear)", f"{exponent:.2f}", "1.2")]


def _board_in(folder: Path) -> KeyValueStore:
    from doctor.cluster.transport.file_store import FileStoreBackend

    return KeyValueStore(FileStoreBackend(folder, "bench"))


def measure_folder(sizes: Sequence[int]) -> list[tuple[str, str, str]]:
    """Rows for jobs over the shared folder."""
    rows = []
    for ranks in sizes:
        folder = Path(tempfile.mkdtemp(prefix="rankdoctor-bench-"))
        try:
            took, size = gather(ranks, partial(_board_in, folder), _board_in(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        limit = "30 s" if ranks == ALL.folder[-1] else ""
        words = f"{took:.1f} s while {CLIENTS} writers share its cores, {size / 1e6:.1f} MB of facts"
        rows.append((f"{ranks:,} simulated ranks through a folder, read into one job", words, limit))
    return rows


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = ["| what | measured | limit |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {what} | {measured} | {limit} |" for what, measured, limit in rows])


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and write the table into docs/evidence if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("lab", "large"), help="default: both")
    parser.add_argument("--write", action="store_true", help="write the table into docs/evidence")
    parser.add_argument("--store", type=int, nargs="+", help=argparse.SUPPRESS)
    add_part(parser, "two hosts, once, and jobs of up to 32 ranks")
    options = parser.parse_args(arguments)
    gc.disable()  # as the command does
    if options.store:
        for ranks in options.store:
            print(*_measure_store(ranks))
        return
    extent = PART if options.part else ALL
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    rows: list[tuple[str, str, str]] = []
    if options.what != "large":
        try:
            require_namespaces()
            rows += measure_lab(extent)
        except CannotPlay as reason:
            print(f"skipped: the lab ({reason})")
    if options.what != "lab":
        rows += measure_store(extent.store) + measure_folder(extent.folder)
    print(_table(rows))
    if options.write and not options.part:
        write_between("gathering", _table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
