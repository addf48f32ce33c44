"""What ``doctor attach`` reads of the processes of a running job, from outside of them.

Everything here was read from a process of somebody's, who may be hostile: names, arguments and stacks are masked and
bounded where they are read. Times named ``at`` are seconds since the epoch (UTC); all other times are durations in
seconds.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.devices import GpuProcess
from doctor.core.facts.log_events import Event
from doctor.core.facts.telemetry import Frame, RecorderFacts, WatchedSection

StackSource = Literal[
    "py-spy", "callback", "recorder", "debug-server", "interpreter", "pystack", "gdb", "faulthandler", "ray", ""
]


class LocalVariable(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A local variable: index of its frame in :attr:`StackThread.frames`, name, and its value as text."""

    frame: int
    name: str
    value: str = ""


class StackThread(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A thread of a process. ``native_id``: the kernel's id, 0 if unknown; ``active``: it ran at the time of the
    sample, ``None`` if unknown; ``is_main``: it is the main thread, or the one in which a framework runs the training
    function (Ray Train); ``holds_gil``: it held the interpreter's lock; ``frames`` and ``native`` (names of
    functions of native code, only where it was asked for): innermost first; ``locals``: variables of the user's
    frames, only where they were asked for; ``group``: the process group that the call in its innermost user frame is
    made in, as the source names it; ``awaits``: the collective whose handle the innermost frame waits for, where the
    source shows ``wait()`` in its line, or the device, where it shows ``item()`` or the like."""

    name: str = ""
    native_id: int = 0
    is_main: bool = False
    active: bool | None = None
    holds_gil: bool = False
    frames: tuple[Frame, ...] = ()
    native: tuple[str, ...] = ()
    locals: tuple[LocalVariable, ...] = ()
    group: str = ""
    awaits: str = ""


class OpenFile(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A file or pipe that a process has open: the path as the kernel names it (``pipe:[123]``, ``/data/x (deleted)``),
    the kind of its file system, and the position in it in bytes, ``None`` if the kernel does not show it."""

    path: str
    filesystem: str = ""
    position: int | None = None


class KernelView(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What ``/proc`` shows of a process, and of its main thread, or the one that trains instead, where it says so.

    ``state``: the kernel's letter of the main thread (R, S, D, T, t, Z); ``wchan``: the kernel function in which it
    sleeps; ``syscall``: number of its system call, ``None`` if it is in none or access is denied; ``cpu``: seconds of
    all threads, ``main_cpu`` of the main thread; ``switches``: voluntary context switches of the main thread;
    ``transferred``: bytes that the process read and wrote by system calls; ``queued``: bytes in the receive queues of
    its sockets. ``None``: not readable. ``stack``: kernel functions that the main thread is in, innermost first; empty
    if it runs or if this process is not privileged. ``file``: that its system call reads or writes; ``files``: regular
    files that are open."""

    state: str = ""
    wchan: str = ""
    syscall: int | None = None
    cpu: float | None = None
    main_cpu: float | None = None
    switches: int | None = None
    transferred: int | None = None
    queued: int | None = None
    stack: tuple[str, ...] = ()
    file: OpenFile | None = None
    files: tuple[OpenFile, ...] = ()


class ProcessSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One reading of a process. ``paused``: seconds for which it was stopped; ``threads`` is empty where stacks could
    not be read."""

    at: float
    kernel: KernelView = KernelView()
    threads: tuple[StackThread, ...] = ()
    paused: float | None = None


class GpuSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One reading of a GPU: ``utilization`` in percent, ``power`` in milliwatts, ``memory`` in bytes that are used.
    ``None``: NVML does not report it."""

    at: float
    utilization: int | None = None
    power: int | None = None
    memory: int | None = None


class AttachedGpu(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A GPU of the host, read while the ranks were: ``index`` and ``uuid`` of NVML, ``bus_id`` as the kernel writes it,
    ``power_limit`` in milliwatts, ``samples`` oldest first. ``processes``: those that hold memory of it, ``None`` where
    their PIDs are not those of this PID namespace. ``xids``: that the kernel logged for it since the job started."""

    index: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    mig: bool = False
    power_limit: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    samples: tuple[GpuSample, ...] = ()
    xids: tuple[int, ...] = ()


class AttachedProcess(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A training process, or a process that belongs to one.

    ``role``: ``rank``, ``worker`` (of a data loader), ``agent`` (a launcher), ``other``. ``rank``: its global rank,
    ``None`` if unknown, and always for other roles; ``parent``: PID of the rank that a child belongs to. ``rank_from``
    says what numbered it (``RANK``, ``SLURM_PROCID``, ``order of the processes``); ``guessed``: not by a launcher's
    variable. ``world_size``, ``local_rank`` and ``node`` as the launcher states them. ``job``: id of the scheduler's
    job; ``launcher``: name of a row of :mod:`doctor.knowledge.launchers`. ``program``: the script or module that it
    runs, without arguments. ``pid`` is that of this PID namespace; ``started``: seconds since boot, by which a reused
    PID is told. ``samples``: oldest first. ``step_rate``: training steps per second in the newest record of the
    doctor's callback in the process, ``None`` without one. ``stack_source``: how its stacks were read; ``refused``:
    why they could not be, in one sentence, and ``remedy`` how to allow it; ``native_refused``: why their native
    frames, which were asked for, could not be. ``uses_gpu``: it has a device of NVIDIA open. ``ended``: it ended while
    it was read (``ended``), or was already a zombie (``zombie``). ``exit_code``: how a zombie ended, negative for a
    signal; ``None`` if unknown. ``gpu``: index of the GPU that it uses, ``None`` if unknown; ``gpu_from`` says what
    showed it (``processes of the GPU``, ``LOCAL_RANK``). ``recorder``: its flight recorder, where it was asked for."""

    pid: int
    started: float
    role: Literal["rank", "worker", "agent", "other"] = "rank"
    parent: int | None = None
    rank: int | None = None
    rank_from: str = ""
    guessed: bool = False
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    node: int | None = None
    job: str = ""
    launcher: str = ""
    program: str = ""
    user: int | None = None
    samples: tuple[ProcessSample, ...] = ()
    stack_source: StackSource = ""
    refused: str = ""
    remedy: str = ""
    ended: Literal["", "ended", "zombie"] = ""
    exit_code: int | None = None
    step_rate: float | None = None
    uses_gpu: bool = False
    gpu: int | None = None
    gpu_from: str = ""
    recorder: RecorderFacts | None = None
    native_refused: str = ""


class AttachFacts(WatchedSection, frozen=True, kw_only=True):
    """The training processes that one attaching process found on its host, and what it read of each.

    ``processes``: ranks first, by rank and PID; ``unreadable``: processes of the job whose environment or command line
    could not be read. ``chosen``: only processes that the user named were looked at. ``notes``: sentences for the user
    about what was left out and why. ``gpus``: of the host, if ranks use them. ``ras``: what NCCL's RAS service reports
    of the job (events ``ras.`` of :mod:`doctor.postmortem.ras.events`)."""

    key: ClassVar[str] = "attached"

    processes: tuple[AttachedProcess, ...] = ()
    unreadable: int = 0
    chosen: bool = False
    notes: tuple[str, ...] = ()
    gpus: tuple[AttachedGpu, ...] = ()
    ras: tuple[Event, ...] = ()
