"""Run collectors concurrently, each with its deadline; a failure becomes a :class:`~doctor.core.facts.Missing` section.

One of the few places that catch every exception: a collector may raise, block or die.
"""

from __future__ import annotations

import math
import subprocess
import threading
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from doctor.collectors import collector_for
from doctor.collectors.base import Collector, Machine, NotPresent, NotVisible
from doctor.core.background import start_thread
from doctor.core.clock import monotonic
from doctor.core.decoding import prepared
from doctor.core.facts import SECTIONS, Missing, MissingReason, Section
from doctor.core.facts.section import in_unicode
from doctor.core.process import abandon_child, start_python

Outcome = Section | Missing


PATIENCE = 1.0
"""Seconds after which ``announce`` lists the collectors that still run."""


def collect_facts(
    keys: Iterable[str],
    machine: Machine,
    *,
    timeout: float = math.inf,
    announce: Callable[[str], None] | None = None,
) -> dict[str, Outcome]:
    """Return the outcome of the collectors of ``keys``, each within ``timeout`` seconds."""
    collectors: list[Collector] = []
    broken: dict[str, Outcome] = {}
    for key in keys:
        try:
            collectors.append(collector_for(key).within(timeout))
        except Exception as error:
            broken[key] = _broken(key, error)
    return {**collect_sections(collectors, machine, announce=announce), **broken}


def _broken(key: str, error: Exception) -> Missing:
    return Missing(MissingReason.FAILED, f"the {key} collector broke: {type(error).__name__}: {error}")


def collect_sections(
    collectors: Iterable[Collector], machine: Machine, *, announce: Callable[[str], None] | None = None
) -> dict[str, Outcome]:
    """Return the outcome of every collector by key, soon after the largest deadline.

    ``announce`` is called once, after :data:`PATIENCE`, with the collectors that still run.
    """
    started = monotonic()
    outcomes: dict[str, Outcome] = {}

    def work(collector: Collector) -> None:
        outcomes[collector.key] = run_collector(collector, machine)

    threads = [(one, start_thread(f"doctor-{one.key}", partial(work, one))) for one in collectors]
    _wait(threads, started, announce)
    for collector, thread in threads:
        thread.join(max(0.0, started + collector.deadline - monotonic()))
    # A thread that is still blocked may write later: copy what is there now, once.
    done = dict(outcomes)
    return {collector.key: done.get(collector.key) or _overdue(collector) for collector, _ in threads}


def _wait(
    threads: list[tuple[Collector, threading.Thread]], started: float, announce: Callable[[str], None] | None
) -> None:
    for collector, thread in threads:
        thread.join(max(0.0, started + min(PATIENCE, collector.deadline) - monotonic()))
    slow = [collector for collector, thread in threads if thread.is_alive() and collector.deadline > PATIENCE]
    if slow and announce is not None:
        most = max(collector.deadline for collector in slow)
        announce(f"still reading {', '.join(collector.key for collector in slow)} (at most {most:g} s)")


def run_collector(collector: Collector, machine: Machine, *, here: bool = False) -> Outcome:
    """Return the outcome of one collector, with a deadline if it is isolated; ``here`` overrides the isolation."""
    try:
        if collector.present is not None:
            collector.present(machine)
        if collector.isolated and not here:
            return _run_isolated(collector, machine)
        return in_unicode(collector.collect(machine))
    except NotPresent as absence:
        return Missing(MissingReason.ABSENT, str(absence))
    except NotVisible as barrier:
        return Missing(MissingReason.HIDDEN, barrier.reason, barrier.unhide)
    except Exception as error:
        return _broken(collector.key, error)


def _overdue(collector: Collector) -> Missing:
    return Missing(
        MissingReason.TIMEOUT,
        f"reading {collector.key} took longer than {collector.deadline:g} s",
        "something below it does not answer (driver, mount or name service); see the kernel log",
    )


def _run_isolated(collector: Collector, machine: Machine) -> Outcome:
    """Run the collector in a new interpreter: no fork of a process that may hold CUDA or pinned RDMA memory."""
    child = start_python("doctor.collectors.isolated_child", [collector.key], env=dict(machine.environ))
    try:
        output, _ = child.communicate(timeout=collector.deadline * 0.9)
    except subprocess.TimeoutExpired:
        abandon_child(child)
        return _overdue(collector)
    if child.returncode != 0:
        return Missing(
            MissingReason.FAILED, f"the process that reads {collector.key} ended with code {child.returncode}"
        )
    return decode_outcome(collector.key, output)


def encode_outcome(outcome: Outcome) -> bytes:
    """Encode an outcome for another process."""
    return msgspec.msgpack.encode((isinstance(outcome, Missing), outcome))


def decode_outcome(key: str, data: bytes) -> Outcome:
    """Decode an outcome of the section ``key``."""
    is_missing, raw = msgspec.msgpack.decode(data, type=prepared(tuple[bool, msgspec.Raw]))
    if is_missing:
        return msgspec.msgpack.decode(raw, type=prepared(Missing))
    return msgspec.msgpack.decode(raw, type=prepared(SECTIONS[key]))
