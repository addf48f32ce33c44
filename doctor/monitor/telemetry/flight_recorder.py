"""torch's flight recorder of this process: its newest collectives, and where they were called.

There are two recorders: of Gloo and everything else on the CPU (``_dump_fr_trace``, torch >= 2.8), and of NCCL
(``_dump_nccl_trace``, builds for CUDA). Both dump a pickle of plain values; formats 2.1 (torch 2.4) to 2.10 are read.
The dump is asked for with stacks: the first one takes a second, in which the interpreter's lock is held for tenths at
most, and a stall without call sites can't be explained. Facts keep the stacks of the newest entries, and of older ones
what tells one call site from another.

torch keeps the interpreter's lock while it dumps, and NCCL's recorder asks the driver about every entry meanwhile: a
driver that does not answer stops this process's Python, and no deadline of Python's ends that. So a recorder is asked
once for a stall, when nothing is lost by it, and what it answered serves twice: as facts, and whole in a file.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import msgspec

from doctor.collectors.base import NotPresent, NotVisible
from doctor.core.background import start_thread
from doctor.core.facts import ProcessGroup, RecorderFacts
from doctor.core.files.safe_pickle import PlainUnpickler, UnsafePickleError
from doctor.core.recorder_dump import parse_recorder
from doctor.monitor.telemetry.stacks.rank_conditions import with_conditions

DEADLINE = 5.0
"""Seconds for a dump: it takes a lock of the recorder's, and needs the interpreter's."""
LARGEST = 64 << 20
"""Bytes of a dump that is given out whole: a hundred times what the 2,000 entries of torch's default take."""
_whole: dict[str, bytes] = {}
"""What the recorders of this process answered last with stacks, until somebody takes it."""


def read_recorder(most: int = 200, *, stacks: bool = True) -> RecorderFacts:
    """The recorder of this process, with its ``most`` newest collectives and the newest one of each group. Without
    ``stacks`` it takes some milliseconds.

    Raises:
        NotPresent: torch is not loaded, or the process is in no process group.
        NotVisible: the recorder is off, or this torch has none, or it does not answer.
    """
    distributed = _distributed()
    answers = {name: _patiently(dump, stacks=stacks) for name, dump in _dumpers(distributed).items()}
    dumps = {name: load_dump(answer) for name, answer in answers.items()}
    if not dumps:
        raise NotVisible("this torch has no flight recorder", "torch 2.4 or newer for NCCL, 2.8 or newer for Gloo")
    told = [name for name, dump in dumps.items() if any(map(dump.get, ("entries", "pg_config", "pg_status")))]
    if not told:
        raise NotVisible("the flight recorder is off", f"export {_variable(distributed)}=2000")
    if stacks:
        _whole.update({name: answers[name] for name in told})
    known = _known_groups(distributed)
    facts = [parse_recorder(dump, most, known) for dump in dumps.values()]
    return _with_conditions(_joined(facts) if len(facts) > 1 else facts[0])


def take_dumps() -> dict[str, bytes]:
    """What :func:`read_recorder` read last with stacks, whole, as torch itself writes it to files: by recorder, ``cpu``
    and ``nccl``; one that knows of no group is left out. They are given out once: some hundred bytes an entry."""
    taken = {name: dump for name, dump in _whole.items() if len(dump) <= LARGEST}
    _whole.clear()
    return taken


def load_dump(data: bytes) -> Mapping[str, object]:
    """The plain values in a pickle of the recorder.

    Raises:
        NotVisible: it is no such pickle, or it names a class: no dump of a recorder does.
    """
    try:
        found = PlainUnpickler(io.BytesIO(data)).load()
    except UnsafePickleError as error:
        raise NotVisible(f"the flight recorder's dump can't be read: it names {error}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        raise NotVisible(f"the flight recorder's dump can't be read: {error}") from None
    return found if isinstance(found, dict) else {}


# Of this process.


def _distributed() -> ModuleType:
    if "torch" not in sys.modules:
        raise NotPresent("torch is not loaded")
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise NotPresent("no process group")
    return distributed


def _dumpers(distributed: ModuleType) -> dict[str, Callable[..., bytes]]:
    """What dumps, by recorder: private names, and not all of them in every build."""
    library = getattr(sys.modules["torch"]._C, "_distributed_c10d", distributed)
    names = {"cpu": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
    return {kind: dump for kind, name in names.items() if (dump := getattr(library, name, None)) is not None}


def _variable(distributed: ModuleType) -> str:
    library = getattr(sys.modules["torch"]._C, "_distributed_c10d", distributed)
    return "TORCH_FR_BUFFER_SIZE" if hasattr(library, "_dump_fr_trace") else "TORCH_NCCL_TRACE_BUFFER_SIZE"


_ASKING: list[threading.Thread] = []


def _patiently(dump: Callable[..., bytes], *, stacks: bool = True) -> bytes:
    """Ask in a thread that may be given up. None is started beside one that hangs: it holds the recorder's lock."""
    for thread in _ASKING:
        thread.join(DEADLINE)
    if any(thread.is_alive() for thread in _ASKING):
        raise NotVisible("the flight recorder has not answered an earlier question")
    answer: list[bytes] = []
    asking = start_thread("doctor-recorder", lambda: answer.append(dump(True, stacks, False)))
    asking.join(DEADLINE)
    _ASKING[:] = [asking]
    if not answer:
        raise NotVisible(f"the flight recorder did not answer within {DEADLINE:g} s")
    return answer[0]


def _known_groups(distributed: ModuleType) -> dict[str, tuple[int, ...]]:
    """The members of every group that this process is in or made: Gloo's recorder does not tell them."""
    try:
        world = distributed.distributed_c10d._world
        names, ranks = dict(world.pg_names), dict(world.pg_group_ranks)
        found = {names[group]: tuple(sorted(ranks[group])) for group in ranks if group in names}
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return {str(name): members for name, members in found.items()}


# Of facts.


def _joined(facts: Sequence[RecorderFacts]) -> RecorderFacts:
    """Two recorders of one process as one."""
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


def _with_conditions(facts: RecorderFacts) -> RecorderFacts:
    stacks = with_conditions([entry.frames for entry in facts.collectives])
    entries = zip(facts.collectives, stacks, strict=True)
    return msgspec.structs.replace(
        facts, collectives=tuple(msgspec.structs.replace(entry, frames=stack) for entry, stack in entries)
    )
