"""Reads torch's flight recorder of this process: newest collectives and call sites.

There are two recorders: for Gloo and everything else on the CPU (``_dump_fr_trace``, torch >= 2.8), and for NCCL
(``_dump_nccl_trace``, CUDA builds). Both dump a pickle of plain values; formats 2.1 (torch 2.4) to 2.10 are supported.
Dumps are requested with stacks: the first one takes a second and holds the GIL for tenths of it at most, and a stall
without call sites cannot be explained. Facts keep the stacks of the newest entries, and of older ones what
distinguishes call sites.

torch holds the GIL while it dumps, and NCCL's recorder queries the driver for every entry meanwhile: an unresponsive
driver blocks all Python code of this process, and no Python deadline ends that. So a recorder is read once per stall,
when nothing is lost by it, and the dump is used twice: as facts, and complete in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import msgspec

from doctor.collectors.base import NotPresent, NotVisible
from doctor.core.background import start_thread
from doctor.core.facts import ProcessGroup, RecorderFacts
from doctor.core.files.safe_pickle import PlainUnpickler, UnsafePickleError
from doctor.core.stack_dumps.recorder_dump import parse_recorder
from doctor.monitor.telemetry.stacks.rank_conditions import with_conditions

DEADLINE = 5.0
"""Seconds for a dump: it needs the recorder's lock and the GIL."""
LARGEST = 64 << 20
"""Maximum size in bytes of a dump that is kept: a hundred times that of the 2,000 entries of torch's default."""
_raw_dumps: dict[str, bytes] = {}
"""The newest dumps with stacks, by recorder, until they are taken."""


def read_recorder(most: int = 200, *, stacks: bool = True) -> RecorderFacts:
    """Read the ``most`` newest collectives of this process and the newest one of each group.

    Without ``stacks`` it takes some milliseconds.

    Raises:
        NotPresent: torch is not loaded, or the process is in no process group.
        NotVisible: the recorder is off, missing in this torch, or does not answer.
    """
    distributed = _distributed()
    # The dump functions have private names, and not every build has all of them.
    library = getattr(sys.modules["torch"]._C, "_distributed_c10d", distributed)
    dumpers = {"cpu": getattr(library, "_dump_fr_trace", None), "nccl": getattr(library, "_dump_nccl_trace", None)}
    answers = {name: _dump_with_deadline(dump, stacks=stacks) for name, dump in dumpers.items() if dump is not None}
    dumps = {name: load_dump(answer) for name, answer in answers.items()}
    if not dumps:
        raise NotVisible("this torch has no flight recorder", "torch 2.4 or newer for NCCL, 2.8 or newer for Gloo")
    active = [name for name, dump in dumps.items() if any(map(dump.get, ("entries", "pg_config", "pg_status")))]
    if not active:
        variable = "TORCH_FR_BUFFER_SIZE" if dumpers["cpu"] is not None else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        raise NotVisible("the flight recorder is off", f"export {variable}=2000")
    if stacks:
        _raw_dumps.update({name: answers[name] for name in active})
    from doctor.monitor.telemetry.group_names import group_descriptions

    known = _known_groups(distributed)
    described = group_descriptions() if known else {}
    facts = [parse_recorder(dump, most, known, described) for dump in dumps.values()]
    joined = _joined(facts) if len(facts) > 1 else facts[0]
    entries = zip(joined.collectives, with_conditions([entry.frames for entry in joined.collectives]), strict=True)
    collectives = tuple(msgspec.structs.replace(entry, frames=stack) for entry, stack in entries)
    return msgspec.structs.replace(joined, collectives=collectives)


def take_dumps() -> dict[str, bytes]:
    """Return the complete dumps that :func:`read_recorder` read last with stacks, once.

    In torch's own file format, by recorder: ``cpu`` and ``nccl``. Recorders without a group are left out. Some hundred
    bytes per entry.
    """
    taken = {name: dump for name, dump in _raw_dumps.items() if len(dump) <= LARGEST}
    _raw_dumps.clear()
    return taken


def load_dump(data: bytes) -> Mapping[str, object]:
    """Return the plain values in a pickle of the recorder.

    Raises:
        NotVisible: it is not a valid pickle, or it names a class, which no dump does.
    """
    try:
        found = PlainUnpickler(io.BytesIO(data)).load()
    except UnsafePickleError as error:
        raise NotVisible(f"cannot read the flight-recorder dump: it refers to {error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        raise NotVisible(f"cannot read the flight-recorder dump: {error}") from None
    return found if isinstance(found, dict) else {}


def _distributed() -> ModuleType:
    if "torch" not in sys.modules:
        raise NotPresent("torch is not loaded")
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise NotPresent("no process group")
    return distributed


_DUMP_THREADS: list[threading.Thread] = []


def _dump_with_deadline(dump: Callable[..., bytes], *, stacks: bool = True) -> bytes:
    """Dump in a thread that may be abandoned, unless a blocked one holds the recorder's lock."""
    for thread in _DUMP_THREADS:
        thread.join(DEADLINE)
    if any(thread.is_alive() for thread in _DUMP_THREADS):
        raise NotVisible("the flight recorder has not responded to an earlier request")
    answer: list[bytes] = []

    def take() -> None:
        with _inductor_left_alone():
            answer.append(dump(True, stacks, False))

    started = start_thread("doctor-recorder", take)
    started.join(DEADLINE)
    _DUMP_THREADS[:] = [started]
    if not answer:
        raise NotVisible(f"the flight recorder did not respond within {DEADLINE:g} s")
    return answer[0]


class _NotImported:
    """Stands for ``torch._inductor``: other threads get the module, which they import then."""

    def __init__(self, module: str) -> None:
        self._module, self._thread = module, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


@contextlib.contextmanager
def _inductor_left_alone() -> Iterator[None]:
    """Keep this thread from importing ``torch._inductor``, which takes seconds.

    To name frames of generated code, torch asks whether ``torch`` has that attribute, and ``torch.__getattr__`` then
    imports it (torch/csrc/profiler/python/combined_traceback.cpp). The training thread may import the same modules at
    that moment: of modules that import each other, the import system gives one of two threads an unfinished one.
    """
    torch, name = sys.modules.get("torch"), "_inductor"
    if torch is None or name in vars(torch) or f"torch.{name}" in sys.modules:
        yield
        return
    stand_in = _NotImported(f"torch.{name}")
    setattr(torch, name, stand_in)
    try:
        yield
    finally:
        if vars(torch).get(name) is stand_in:
            delattr(torch, name)


def _known_groups(distributed: ModuleType) -> dict[str, tuple[int, ...]]:
    """Return the members of every group of this process, which Gloo's recorder does not contain."""
    try:
        world = distributed.distributed_c10d._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)
        found = {names[group]: tuple(sorted(ranks[group])) for group in ranks if group in names}
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return {str(name): members for name, members in found.items()}


def _joined(facts: Sequence[RecorderFacts]) -> RecorderFacts:
    groups: dict[str, ProcessGroup] = {}
    for group in (group for one in facts for group in one.groups):
        if group.name not in groups or groups[group.name].enqueued is None:
            groups[group.name] = group
    collectives = sorted((entry for one in facts for entry in one.collectives), key=lambda entry: entry.at or 0.0)
    versions = [one.version for one in facts if one.collectives] or [one.version for one in facts]
    return RecorderFacts(
        version=versions[0],
        groups=tuple(groups.values()),
        collectives=tuple(collectives),
        wrapped=any(one.wrapped for one in facts),
    )
