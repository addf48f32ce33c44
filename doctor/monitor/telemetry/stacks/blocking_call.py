"""What a thread of this process waits for in the kernel: a lock and its holder, a pipe, a socket, a queue.

From the number of its system call and the first argument, see :mod:`doctor.collectors.host.kernel_view`; nothing is
opened but files of /proc, and no other thread is stopped. Sources: proc(5), proc_locks(5), poll(2), fcntl_locking(2).
"""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from doctor.collectors.base import link_target, listed, parse_int, read_text
from doctor.collectors.host.kernel_view import open_links, plain, system_call
from doctor.core.clock import monotonic
from doctor.core.facts import Frame
from doctor.core.facts.telemetry import A_SLEEP, FAR, OWN_LOCK, PROCESS_EVENT, WITH_TIMEOUT
from doctor.core.text import lazy_compile

_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        17: "read",
        18: "write",
        19: "read",
        20: "write",
        23: "select",
        34: "signal",
        42: "connect",
        43: "accept",
        44: "write",
        45: "read",
        46: "write",
        47: "read",
        61: "child",
        65: "semaphore",
        69: "message",
        70: "message",
        72: "lock",
        73: "lock",
        128: "signal",
        130: "signal",
        202: "futex",
        220: "semaphore",
        232: "select",
        242: "message",
        243: "message",
        247: "child",
        270: "select",
        271: "poll",
        281: "select",
        288: "accept",
        40: "write",
        275: "splice",
        35: "sleep",
        230: "sleep",
    },
    "aarch64": {
        22: "select",
        63: "read",
        64: "write",
        65: "read",
        66: "write",
        67: "read",
        68: "write",
        72: "select",
        73: "poll",
        133: "signal",
        137: "signal",
        182: "message",
        183: "message",
        188: "message",
        189: "message",
        192: "semaphore",
        193: "semaphore",
        203: "connect",
        202: "accept",
        206: "write",
        207: "read",
        211: "write",
        212: "read",
        260: "child",
        25: "lock",
        32: "lock",
        98: "futex",
        95: "child",
        242: "accept",
        71: "write",
        76: "splice",
        101: "sleep",
        115: "sleep",
    },
}
"""Kinds of system calls by number: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h. Glibc's
``send`` and ``recv`` are ``sendto`` and ``recvfrom``; ``sendfile`` waits for room to send."""
_EVENT, _FUTURE = "an event or a condition (threading)", "a future (Future.result)"
_END_OF_THREAD = "the end of a thread (Thread.join)"
OF_THREADS = (_EVENT, _FUTURE, _END_OF_THREAD)
"""What another thread of the process has to bring about."""
_WORDS = {
    "child": "the end of a child process",
    "signal": "a signal",
    "splice": "data from a pipe, or room in one (splice)",
    "semaphore": "a semaphore that other processes share",
    "message": "a message queue that other processes share",
}
"""Words of the kinds that have no file."""
_BY_STACK = (
    ("/grpc/_utilities.py", "_block", "a connection to a server (gRPC)"),
    ("/grpc/_channel.py", "_blocking", "data from a server (gRPC)"),
    ("/grpc/_common.py", "wait", "data from a server (gRPC)"),
    ("/ray/_private/worker.py", "get_objects", "a result of another process (ray.get)"),
    ("/ray/_private/worker.py", "wait", "a result of another process (ray.wait)"),
    ("/torch/futures/__init__.py", "wait", "a future (torch.futures)"),
    ("/socketserver.py", "serve_forever", "a request to its own server (serve_forever)"),  # a loop of short waits
    ("/multiprocessing/synchronize.py", "wait", f"{PROCESS_EVENT} (multiprocessing)"),
    ("/queue.py", "get", "an item of a queue (queue.get)"),
    ("/queue.py", "put", "room in a queue (queue.put)"),
    ("/concurrent/futures/_base.py", "result", _FUTURE),
    ("/threading.py", "join", _END_OF_THREAD),
    ("/threading.py", "_wait_for_tstate_lock", _END_OF_THREAD),
    ("/threading.py", "wait", _EVENT),
    ("/subprocess.py", "_wait", _WORDS["child"]),  # with a timeout it looks twenty times a second
    ("/multiprocessing/queues.py", "get", "an item of a queue (multiprocessing.Queue.get)"),
    ("/multiprocessing/queues.py", "put", "room in a queue (multiprocessing.Queue.put)"),
)
"""File, function and text of waits that the stack shows, before the kernel is asked; the first one that fits counts:
queues, futures and barriers of processes wait in conditions of ``threading``."""
_OPENS_PIPE = "wait_for_partner"
"""The function of the kernel in which ``open`` of a named pipe waits (fs/pipe.c, ``fifo_open``)."""
_EVENT_LOOP = "/asyncio/base_events.py"
"""The file whose ``_run_once`` waits until a file or a socket is ready, or a callback is due."""
_POLL = 7
"""The number of poll(2), which aarch64 does not have."""
_FAR, _MONOTONIC, _ABSOLUTE = 60.0, 1, 1
"""Seconds from which a sleep is long, and CLOCK_MONOTONIC and TIMER_ABSTIME of clock_nanosleep(2)."""
_NEAR = 4
"""Innermost frames that are compared with these."""
_INODE = lazy_compile(r"(?:pipe|socket):\[(\d{1,20})\]")
_LISTENS = "0A"
"""The state of a listening socket (TCP_LISTEN, include/net/tcp_states.h)."""
_LONGEST_SCAN, _MOST_FILES = 0.5, 1024
"""Seconds that the search for the other end of a pipe may take, and files of a process that it looks at."""


def blocking_call(native_id: int, stack: Sequence[Frame], pid: int | None = None, proc: Path = Path("/proc")) -> str:
    """Return what a thread of this process, or the main thread of its child ``pid``, waits for.

    Such as ``a lock on /data/x.lock, held by PID 12 (python)``; empty if unknown.
    """
    for file, function, words in _BY_STACK:
        if any(frame.function == function and frame.file.endswith(file) for frame in stack[:_NEAR]):
            return words
    process = proc / ("self" if pid is None else str(pid))
    number, arguments = system_call(process / "task" / str(native_id) / "syscall")
    argument = arguments[0] if arguments else None
    kind = _CALLS.get(platform.machine(), {}).get(number if number is not None else -1, "")
    if kind == "futex":
        from doctor.monitor.telemetry.stacks.shared_locks import shared_lock  # no healthy step needs it

        shared = shared_lock(arguments, proc) if pid is None else ""
        return shared or f"{OWN_LOCK} (threading.Lock, or a lock in native code)"
    if kind in _WORDS:
        return _WORDS[kind]
    if kind == "select":
        is_of_loop = any(frame.file.endswith(_EVENT_LOOP) for frame in stack[:_NEAR])
        return f"one of several files or sockets (select{', in an event loop of asyncio' if is_of_loop else ''})"
    if _is_at(process / "task" / str(native_id) / "wchan", _OPENS_PIPE):
        return "the other end of a named pipe"
    if kind == "sleep":
        return A_SLEEP + (FAR if _sleeps_for_long(arguments, process) else "")
    if not kind or argument is None:
        return ""
    descriptor = _polled(argument, process) if kind == "poll" else argument
    links = open_links(process / "fd") or {}
    link = links.get(descriptor, "") if descriptor is not None else ""
    words = _of_file(kind, link, native_id, proc) if link else ""
    return words + WITH_TIMEOUT if words and kind == "poll" and _is_limited(number, arguments) else words


def receives_from(native_id: int, proc: Path = Path("/proc")) -> tuple[int, str] | None:
    """Return descriptor and link of the socket that a thread of this process receives from, ``None`` without one."""
    process = proc / "self"
    number, arguments = system_call(process / "task" / str(native_id) / "syscall")
    kind = _CALLS.get(platform.machine(), {}).get(number if number is not None else -1, "")
    if kind not in ("read", "poll") or not arguments or arguments[0] is None:
        return None
    descriptor = _polled(arguments[0], process) if kind == "poll" else arguments[0]
    link = link_target(process / "fd" / str(descriptor)) or ""
    return (descriptor, link) if descriptor is not None and link.startswith("socket:") else None


def sleep_ends_soon(native_id: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a thread of this process is in a sleep that surely ends within :data:`_FAR` seconds."""
    process = proc / "self"
    number, arguments = system_call(process / "task" / str(native_id) / "syscall")
    kind = _CALLS.get(platform.machine(), {}).get(number if number is not None else -1, "")
    left = _left_of_sleep(arguments, process) if kind == "sleep" else None
    return left is not None and left <= _FAR


def _sleeps_for_long(arguments: Sequence[int | None], process: Path) -> bool:
    left = _left_of_sleep(arguments, process)
    return left is not None and left > _FAR


def _left_of_sleep(arguments: Sequence[int | None], process: Path) -> float | None:
    """Return the seconds until clock_nanosleep(2) ends, as ``time.sleep`` calls it; ``None`` if they are unknown.

    Since Python 3.11, with a time of the clock that does not jump.
    """
    if len(arguments) < 3 or arguments[:2] != (_MONOTONIC, _ABSOLUTE) or not arguments[2]:
        return None
    until = _in_memory("qq", arguments[2], process)
    return until[0] - monotonic() if until is not None else None


def _is_limited(number: int | None, arguments: Sequence[int | None]) -> bool:
    """Return whether poll(2) has a timeout, as Python calls it before each transfer of a socket that has one.

    It is an ``int``, which is negative without a limit; of ppoll(2), the pointer to a time, which may be NULL.
    """
    limit = arguments[2] if len(arguments) > 2 else None
    if limit is None:
        return False
    return not limit & 0x80000000 if number == _POLL else limit != 0


def _is_at(path: Path, function: str) -> bool:
    return (read_text(path, limit=256) or "").strip() == function


def _of_file(kind: str, link: str, native_id: int, proc: Path) -> str:
    if kind == "lock":
        return f"a lock on {plain(link)}" + _holder(native_id, proc)
    if link.startswith("pipe:"):
        return ("data from" if kind in ("read", "poll") else "room in") + f" a pipe{_other_end(link, proc)}"
    if link.startswith("socket:"):
        return _of_socket(kind, link, proc)
    if link.startswith(("/dev/pts/", "/dev/tty")):
        stopped = "room in a terminal, whose output is stopped (Ctrl-S) or not read"
        return f"{stopped if kind == 'write' else 'input from a terminal'} ({plain(link)})"
    if link.startswith("anon_inode:"):  # eventfd, inotify, timerfd, signalfd
        return f"data from {plain(link)}"
    return f"the file {plain(link)}" if link.startswith("/") else ""


def _polled(address: int, process: Path) -> int | None:
    """Return the first descriptor of ``struct pollfd[]`` in the memory of a process."""
    found = _in_memory("i", address, process)
    return found[0] if found is not None else None


def _in_memory(form: str, address: int, process: Path) -> tuple[int, ...] | None:
    """Return numbers in the memory of a process, of a form of :mod:`struct`."""
    try:
        memory = os.open(process / "mem", os.O_RDONLY)
        try:
            return struct.unpack(form, os.pread(memory, struct.calcsize(form), address))
        finally:
            os.close(memory)
    except (OSError, struct.error, OverflowError):
        return None


def _holder(native_id: int, proc: Path) -> str:
    """Return who holds the lock that this process waits for: its ``->`` row follows that of the holder."""
    holder: list[str] = []
    for line in (read_text(proc / "locks") or "").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] != "->":
            holder = fields
        elif len(fields) > 6 and fields[5] in (str(os.getpid()), str(native_id)) and len(holder) > 4:
            pid = parse_int(holder[4])
            return f", held by {_process(pid, proc)}" if pid is not None and pid > 0 else ""
    return ""


def _process(pid: int, proc: Path) -> str:
    name = (read_text(proc / str(pid) / "comm") or "").strip()
    return f"PID {pid}" + (f" ({plain(name)})" if name else "")


def _other_end(link: str, proc: Path) -> str:
    owner = _with_file(link, proc)
    return f", which {owner} has open too" if owner else ", whose other end no other process has open"


def _with_file(link: str, proc: Path) -> str:
    """Return the first other process that has a pipe or socket open, as far as it is visible."""
    until = monotonic() + _LONGEST_SCAN
    for pid in (name for name in listed(proc) if name.isdecimal() and int(name) != os.getpid()):
        if monotonic() > until:
            break
        if link in list((open_links(proc / pid / "fd") or {}).values())[:_MOST_FILES]:
            return _process(int(pid), proc)
    return ""


def _of_socket(kind: str, link: str, proc: Path) -> str:
    found = _INODE.fullmatch(link)
    rows = list(_connections(proc))
    row = next((row for row in rows if found and row["inode"] == found[1]), None)
    what = {"connect": "a connection to", "accept": "a connection to", "write": "room to send to"}.get(
        kind, "data from"
    )
    if row is None:
        return f"{what} a socket of this host"
    if kind == "accept" or (kind == "poll" and row["state"] == _LISTENS):
        return f"a connection to its port {row['local'].rpartition(':')[2]}"
    ends = row["remote"], row["local"]
    peer = next((one for one in rows if (one["local"], one["remote"]) == ends), None)
    owner = _with_file(f"socket:[{peer['inode']}]", proc) if peer is not None else ""
    return f"{what} {row['remote']}" + (f" ({owner})" if owner else "")


def _connections(proc: Path) -> Iterator[Mapping[str, str]]:
    for name in ("tcp", "tcp6"):
        for line in (read_text(proc / "self" / "net" / name) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9:
                yield {
                    "local": _address(fields[1]),
                    "remote": _address(fields[2]),
                    "state": fields[3],
                    "inode": fields[9],
                }


def _address(text: str) -> str:
    """Return ``10.0.0.1:29500`` of the kernel's hexadecimal form, whose words have the byte order of this host."""
    host, _, port = text.partition(":")
    try:
        words = [int(host[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(host), 8)]
        family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
        return f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"
    except (ValueError, OverflowError):
        return text
