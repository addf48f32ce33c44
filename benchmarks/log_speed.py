"""How fast a log is read: megabytes a second of one core's time, peak memory, and what ``grep -cE`` takes for the same.

    python benchmarks/log_speed.py [MEGABYTES]

Makes a log of eight ranks that write at the same time (1000 MB unless said otherwise), reads it in a process of its
own, and deletes it: 90 % of the lines are of progress bars and the application, 9.5 % of NCCL's INFO, 0.5 % warnings,
errors and tracebacks.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RANKS = 8
PATTERNS = (
    "Watchdog caught collective operation timeout",
    "CUDA out of memory",
    "NCCL WARN .*(error|failed|closed)",
    "Traceback \\(most recent call last\\)",
    "^(\\[rank[0-9]+\\]: )?[A-Za-z_.]+Error:",
    "exitcode *: -?[0-9]+",
    "Connection (reset|refused|closed) by",
    "Xid \\(PCI",
    "Killed process [0-9]+",
    "Last error:",
)


def write_log(path: Path, size: int) -> int:
    """Write a log of ``size`` bytes; its lines."""
    chance = random.Random(7)
    written = lines = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < size:
            batch = "".join(line for _ in range(2000) for line in _said(chance, lines))
            written += stream.write(batch)
            lines += batch.count("\n")
    return lines


def _said(chance: random.Random, number: int) -> Iterator[str]:
    """One line, or a traceback: so many of each that the shares are those of lines."""
    rank = chance.randrange(RANKS)
    drawn = chance.random()
    if drawn < 0.6:
        yield _application(chance, rank)
    elif drawn < 0.903:
        step, loss = chance.randrange(100_000), chance.random()
        bar = f"{step % 100}%|{'█' * (step % 10):10}| {step}/100000 [12:34<56:78, {loss * 9:.2f}it/s, loss={loss:.3f}]"
        yield f"\rEpoch 3:  {bar}\n"
    elif drawn < 0.998:
        yield _nccl(chance, rank)
    else:
        yield from _trouble(chance, rank)


def _application(chance: random.Random, rank: int) -> str:
    kind, number, loss = chance.randrange(4), chance.randrange(10**6), chance.random()
    if kind == 0:
        return (
            f"[rank{rank}]: step {number} loss {loss:.4f} grad_norm {loss * 3:.3f} lr 3.0e-04 tokens/s {number // 9}\n"
        )
    if kind == 1:
        clock = f"{number % 60:02}:{number // 60 % 60:02},{number % 1000:03}"
        return f"2026-01-02 03:{clock} - trainer - INFO - [{rank}] saved {number} samples, error_rate={loss:.3f}\n"
    if kind == 2:
        return f"[rank{rank}]: Mean Absolute Error: {loss:.4f}, Exit criteria: none, Timeout 1800, step {number}\n"
    return f"INFO:data.loader:worker {number % 16} of rank {rank} read shard-{number:06}.tar in {loss:.3f}s\n"


def _nccl(chance: random.Random, rank: int) -> str:
    number, peer, device = chance.randrange(10**6), (rank + 1) % RANKS, rank % 4
    channel = f"Channel {number % 16:02}/0 : {rank}[{rank}] -> {peer}[{peer}]"
    buffers = "sendbuff 0x7f00 recvbuff 0x7f00 count 1048576 datatype 7 op 0 root 0"
    place = f"cudaDev {device} nvmlDev {device} busId {rank}000 commId 0xabc"
    said = (
        f"{channel} via P2P/CUMEM/read",
        f"{channel} [send] via NET/IB/{number % 8}/GDRDMA",
        f"Trees [0] {peer}/-1/-1->{rank}->-1 [1] {peer}/-1/-1->{rank}->-1",
        "Connected all rings, use ring PXN 0 GDR 1",
        f"AllReduce: opCount {number:x} {buffers} comm 0x55 [nranks={RANKS}] stream 0x66",
        "NCCL_SOCKET_IFNAME set by environment to eth0",
        "Using network IB",
        f"ncclCommInitRank comm 0x{number:x} rank {rank} nranks {RANKS} {place} - Init COMPLETE",
    )
    return f"{_nccl_head(rank)} NCCL INFO {chance.choice(said)}\n"


def _nccl_head(rank: int) -> str:
    return f"node{rank // 4}:{4000 + rank}:{5000 + rank} [{rank % 4}]"


def _trouble(chance: random.Random, rank: int) -> Iterator[str]:
    number = chance.randrange(10**6)
    kind = chance.randrange(5)
    c10 = "1218 20:27:21.426415540"
    if kind == 0:
        closed = f"socketProgress: Connection closed by remote peer node9<{number % 60000}>"
        yield f"{_nccl_head(rank)} misc/socket.cc:71 NCCL WARN {closed}\n"
    elif kind == 1:
        work = f"WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
        ran = f"ran for 600{number % 1000:03} milliseconds before timing out."
        caught = f"Watchdog caught collective operation timeout: {work} {ran}"
        yield f"[rank{rank}]:[E{c10} ProcessGroupNCCL.cpp:629] [Rank {rank}] {caught}\n"
    elif kind == 2:
        failed = (
            f"The client socket has failed to connect to [node-1]:{number % 60000} (errno: 111 - Connection refused)."
        )
        yield f"[rank{rank}]:[W{c10} socket.cpp:752] [c10d] {failed}\n"
    elif kind == 3:
        yield f"[rank{rank}]: Traceback (most recent call last):\n"
        for depth in range(4):
            yield f'[rank{rank}]:   File "/home/me/train.py", line {depth + 10}, in step\n'
            yield f"[rank{rank}]:     call({depth})\n"
        state = f"GPU {rank % 4} has a total capacity of 79.10 GiB of which 1.00 MiB is free."
        failed = f"CUDA out of memory. Tried to allocate {number % 900}.00 MiB. {state}"
        yield f"[rank{rank}]: torch.OutOfMemoryError: {failed}\n"
    else:
        yield f"WARNING: rank {rank}: retrying download after ConnectionError: attempt {number % 9}\n"


def read(path: Path) -> None:
    """Read the log, and print seconds of the processor, peak memory in MB, events and lines."""
    from doctor.postmortem.logs.scanner import read_log

    began = time.process_time()
    events, file = read_log(path, path.name)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(seconds, peak, len(events), file.lines, len(file.ranks))


def grep(path: Path) -> float:
    """Seconds of the processor that grep takes for ten patterns, or 0 where there is none."""
    program = shutil.which("grep")
    if program is None:
        return 0.0
    command = [program, "-cE", "|".join(PATTERNS), str(path)]
    before = _children_seconds()
    # Into a pipe: grep stops at the first match where it sees that nobody reads.
    subprocess.run(command, check=False, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    return _children_seconds() - before


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Make the log, read it, and print what that took."""
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]))
        return
    size = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 1_000_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.log"
        lines = write_log(path, size)
        size = path.stat().st_size
        grepped = grep(path)
        command = [sys.executable, __file__, "--read", str(path)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, peak, events, read_lines = float(printed[0]), float(printed[1]), printed[2], printed[3]
    ratio = f"reading takes {seconds / grepped:.2f} times as long" if grepped else "there is no grep"
    print(f"{size / 1e6:.0f} MB, {lines} lines, {RANKS} ranks")
    print(f"read: {seconds:.1f} s, {size / 1e6 / seconds:.0f} MB/s, peak {peak:.0f} MB")
    print(f"{events} events, {read_lines} lines")
    print(f"grep -cE of {len(PATTERNS)} patterns: {grepped:.1f} s; {ratio}")


if __name__ == "__main__":
    main()
