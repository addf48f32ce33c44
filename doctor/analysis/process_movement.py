"""Whether a process that was read from outside made progress between the samples, and where it stands if not.

A stack alone doesn't tell a rank that computes from one that is asleep: CPU time, bytes and the kernel's state do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from doctor.analysis.call_sites import is_in_backward
from doctor.analysis.step_rate import counted_steps
from doctor.core.facts import AttachedProcess, Frame, KernelView, OpenFile, ProcessSample, StackThread
from doctor.core.frames import waiting_row, waits_for_device, waits_in
from doctor.core.stack_dumps.native_calls import DEVICE_WAIT, native_operation, waiting_thread
from doctor.knowledge.waiting_functions import ANY_COLLECTIVE, rests_for_others

Kind = Literal["moving", "busy", "waiting", "standing", "held", "stopped", "ended", "unread"]
"""``moving``: its stack changed. ``busy``: its stack did not, but it computes, transfers data or is blocked in the
kernel on I/O. ``waiting``: in the same call of a collective. ``standing``: anything else without CPU time. ``held``: a
thread holds the interpreter's lock in native code, without CPU time. ``stopped``: by a signal or a debugger. ``ended``:
the process ended. ``unread``: its stack could not be read."""

_BUSY_SHARE = 0.1
"""CPU time of the main thread, as a share of the time, from which it computes: a poll that sleeps stays below."""
_BUSY_THREADS = 0.5
"""CPU time of all threads, likewise: the watchdogs of a process group take about 0.01."""
_ON_THREADS = re.compile(r"(?:^|/)(?:threading|queue)\.py$|(?:^|/)concurrent/futures/")
"""Files in which a thread waits for others of its process: for these ``_BUSY_SHARE`` suffices, because on a host with
more work than CPUs they get only a part of one."""
_BUSY_BYTES = 256 << 10
"""Bytes per second that a process reads and writes, from which it transfers data. Gloo's transfers are counted; a log
or a progress bar stays below."""
_SWITCHES_OF_A_SAMPLE = 4
"""Voluntary context switches of the main thread for one sample: a process that py-spy pauses has two."""
_STOPPED = ("T", "t")
_SWITCHES_OF_TRANSFER = 5.0
"""Voluntary context switches per second of a main thread that receives or sends: it sleeps for each packet."""
_ON_NETWORK = re.compile(r"(?:^|/)(?:socket|ssl|selectors)\.py$|(?:^|/)(?:http/client\.py|urllib3/|aiohttp/|paramiko/)")
"""Files in which a process reads or writes a connection."""
_NETWORK_FRAMES = 2
_ON_STORAGE = re.compile(
    r"nfs|rpc_|fuse|request_wait_answer|io_schedule|folio|wait_on_page|wait_on_bit|ceph|lustre|ptlrpc|cifs|9p|jbd2|xfs|ext4"
    r"|btrfs|blk_"
)
"""Parts of the names of kernel functions in which a process waits for a file system."""
_ON_DRIVER = re.compile(r"nvidia|^uvm_|^kfd_|amdgpu|dma_fence")
"""Likewise for the driver of a GPU (nvidia.ko, nvidia-uvm.ko, amdgpu.ko, and fences that drivers share)."""
_DEVICES = ("/dev/", "/proc/", "/sys/")
_ON_CHILDREN = re.compile(
    r"torch/utils/data/dataloader\.py|torch/_inductor/"
    r"|(?:^|/)(?:multiprocess(?:ing)?/|subprocess\.py|concurrent/futures/|joblib/)"
)
"""Files in which a process waits for its own children or threads."""
_IN_LOADER = ("torch/utils/data/dataloader.py", ("_next_data", "_get_data", "_try_get_data"))
_IDLE_WORKER = ("torch/utils/data/_utils/worker.py", "_worker_loop")


class Movement(NamedTuple):
    """``seconds``: time between the first and the last sample, over which it stood at least; 0 if it moves, ``None`` if
    there is one sample. ``stack``: of the thread that explains the state, innermost first. ``operation``: the
    collective that it waits in; ``group``: its process group, as the source names it. ``on_device``: native frames show
    that its main thread waits for its device."""

    kind: Kind
    seconds: float | None = None
    stack: tuple[Frame, ...] = ()
    operation: str = ""
    group: str = ""
    on_device: bool = False

    @property
    def is_progress(self) -> bool:
        """Whether the process makes progress."""
        return self.kind in ("moving", "busy")


def movement_of(process: AttachedProcess) -> Movement:
    """Compare the samples of a process."""
    samples = process.samples
    seconds = round(samples[-1].at - samples[0].at, 1) if len(samples) > 1 else None
    if process.ended:
        return Movement("ended")
    mains = [main for sample in samples if (main := main_thread(sample)) is not None]
    stack = mains[-1].frames if mains else ()
    if samples and all(sample.kernel.state in _STOPPED for sample in samples):
        return Movement("stopped", seconds, stack)
    if not mains:
        return _by_kernel(samples, seconds)
    if any(_position(main.frames) != _position(stack) for main in mains) or counted_steps(process) is not None:
        return Movement("moving", 0.0, stack)
    awaits = mains[-1].awaits
    on_device = waits_for_device(stack) or (awaits == DEVICE_WAIT and process.uses_gpu)
    native = native_operation(mains[-1].native) or (DEVICE_WAIT if on_device else "")
    operation = next((one for one in (waits_in(stack), awaits, native) if one not in ("", DEVICE_WAIT)), "")
    computes = _computes(samples, mains[-1])
    row = waiting_row(stack)
    if operation and not (computes and row is not None and not row.only_waits):
        if _calls_again(samples, polls=row is not None and row.polls):
            return Movement("moving", 0.0, stack, operation)
        return Movement("waiting", seconds, stack, operation, mains[-1].group)
    if computes:
        return Movement("busy", seconds, stack, on_device=native == DEVICE_WAIT)
    if holder := _holder_of_lock(samples):
        return Movement("held", seconds, holder.frames)
    return _at_rest(stack, seconds, native)


def _at_rest(stack: tuple[Frame, ...], seconds: float | None, native: str) -> Movement:
    """A process without CPU time: it waits for others in the backward pass, for its device, or stands elsewhere."""
    if is_in_backward(stack):
        return Movement("waiting", seconds, stack, "all_reduce")
    if native == DEVICE_WAIT:
        return Movement("waiting", seconds, stack, DEVICE_WAIT, on_device=True)
    if stack and rests_for_others(stack[0].file):
        return Movement("waiting", seconds, stack, ANY_COLLECTIVE)
    return Movement("standing", seconds, stack)


def main_thread(sample: ProcessSample) -> StackThread | None:
    """The main thread of a sample with the stack that explains where it is, if it has one."""
    main = waiting_thread(sample.threads)
    return main if main is not None and main.frames else None


def waits_for_children(stack: Iterable[Frame]) -> bool:
    """Whether the innermost code of the stack waits for processes or threads of the rank itself."""
    for frame in stack:
        if frame.user:
            return False
        if _ON_CHILDREN.search(frame.file):
            return True
    return False


def waits_for_batch(stack: Iterable[Frame]) -> bool:
    """Whether the stack is in a data loader that waits for its workers."""
    file, functions = _IN_LOADER
    return any(frame.file.endswith(file) and frame.function in functions for frame in stack)


def is_idle_worker(stack: Iterable[Frame]) -> bool:
    """Whether a data worker waits for the next indices: no code of the dataset is on its stack."""
    file, function = _IDLE_WORKER
    for frame in stack:
        if frame.file.endswith(file):
            return frame.function == function
        if frame.user or "torch/utils/data/_utils/fetch.py" in frame.file:
            return False
    return False


def in_worker_loop(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The part of a data worker's stack that is its own: a forked process keeps the frames of its parent."""
    file, function = _IDLE_WORKER
    ends = (at for at, frame in enumerate(stack) if frame.file.endswith(file) and frame.function == function)
    return tuple(stack[: next(ends, len(stack)) + 1])


def _position(stack: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    """A stack without what is inside of the wait for a batch, which wakes up every few seconds."""
    file, functions = _IN_LOADER
    inside = [at for at, frame in enumerate(stack) if frame.file.endswith(file) and frame.function in functions]
    kept = tuple((frame.file, frame.line, frame.function) for frame in stack[max(inside, default=-1) + 1 :])
    return kept if inside else tuple((frame.file, frame.line, frame.function) for frame in stack)


def _calls_again(samples: Sequence[ProcessSample], *, polls: bool) -> bool:
    """Whether a collective transfers data, or has ended and begun again on the same line, between the samples.

    ``polls``: the thread wakes up again and again while it waits."""
    if len(samples) < 2:
        return False
    if polls:
        return _transfers(samples)
    first, last = samples[0].kernel, samples[-1].kernel
    switches = _difference(first.switches, last.switches)
    # A thread that spins in a wait for its device has a CPU of its own and hardly any switches.
    again = switches is not None and switches > _SWITCHES_OF_A_SAMPLE * len(samples)
    return again or _transfers(samples)


def _transfers(samples: Sequence[ProcessSample]) -> bool:
    moved = _difference(samples[0].kernel.transferred, samples[-1].kernel.transferred)
    return moved is not None and moved > _BUSY_BYTES * _span(samples)


def _computes(samples: Sequence[ProcessSample], main: StackThread) -> bool:
    if len(samples) < 2:
        return main.active is True or samples[-1].kernel.state in ("R", "D")
    first, last = samples[0].kernel, samples[-1].kernel
    span = _span(samples)
    own, all_threads = _difference(first.main_cpu, last.main_cpu), _difference(first.cpu, last.cpu)
    for_threads = _waits_for_threads(main)
    share = _BUSY_SHARE if for_threads else _BUSY_THREADS
    if (own or 0.0) >= _BUSY_SHARE * span or (all_threads or 0.0) >= share * span:
        return True
    if own is None and all_threads is None and all(_is_active(sample) for sample in samples):
        return True
    states = [sample.kernel.state for sample in samples]
    runnable = sum(
        state == "R" or (for_threads and _has_active_thread(one)) for one, state in zip(samples, states, strict=True)
    )
    # On a host with more work than CPUs, a thread that computes is runnable and gets hardly any time.
    if all(state == "D" for state in states) or 2 * runnable >= len(states):
        return True
    return _transfers(samples) or _receives(samples, main) or all(_is_on_storage(sample) for sample in samples)


def _has_active_thread(sample: ProcessSample) -> bool:
    """Whether another thread than the main one ran or was runnable."""
    return any(thread.active is True for thread in sample.threads if not thread.is_main)


def _waits_for_threads(main: StackThread) -> bool:
    inner = itertools.takewhile(lambda frame: not frame.user, main.frames)
    return any(_ON_THREADS.search(frame.file) for frame in inner)


def _receives(samples: Sequence[ProcessSample], main: StackThread) -> bool:
    """Whether the main thread exchanges data over a connection, whose bytes the kernel does not count."""
    if not any(_ON_NETWORK.search(frame.file) for frame in main.frames[:_NETWORK_FRAMES] if not frame.user):
        return False
    switches = _difference(samples[0].kernel.switches, samples[-1].kernel.switches) or 0
    return switches - _SWITCHES_OF_A_SAMPLE * len(samples) > _SWITCHES_OF_TRANSFER * _span(samples)


def _is_on_storage(sample: ProcessSample) -> bool:
    return bool(_function_of(sample, _ON_STORAGE) or _function_of(sample, _ON_DRIVER))


def _function_of(sample: ProcessSample, names: re.Pattern[str]) -> str:
    """The innermost function of the kernel with such a name that the main thread is blocked in; empty if none."""
    if sample.kernel.state == "R":
        return ""
    functions = (sample.kernel.wchan, *sample.kernel.stack)
    return next((function for function in functions if names.search(function)), "")


def blocked_call(process: AttachedProcess) -> str:
    """What the main thread was blocked in inside the kernel in all of several samples: ``fuse_simple_request, on
    /data/part-7 (fuse.s3fs) at byte 4096``. Empty if it waits for a file system or a file in none, or got further."""
    samples = process.samples
    files = {sample.kernel.file for sample in samples}
    if len(samples) < 2 or len(files) > 1 or any(sample.kernel.state == "R" for sample in samples):
        return ""
    file = files.pop()
    if not _is_on_data(file) and not all(_waits_for_storage(sample) for sample in samples):
        return ""
    function = _function_of(samples[-1], _ON_STORAGE) or samples[-1].kernel.wchan
    return ", ".join(part for part in (function, _named(file)) if part)


def _is_on_data(file: OpenFile | None) -> bool:
    return file is not None and file.path.startswith("/") and not file.path.startswith(_DEVICES)


def _waits_for_storage(sample: ProcessSample) -> bool:
    return sample.kernel.state == "D" or bool(_function_of(sample, _ON_STORAGE))


def _named(file: OpenFile | None) -> str:
    if file is None:
        return ""
    kind = f" ({file.filesystem})" if file.filesystem else ""
    at = f" at byte {file.position}" if file.position and not file.path.startswith("pipe:") else ""
    return f"on {file.path}{kind}{at}"


def driver_call(process: AttachedProcess) -> str:
    """The function of a GPU driver that the main thread was blocked in, without CPU time, in all of several samples."""
    samples = process.samples
    functions = [_function_of(sample, _ON_DRIVER) for sample in samples]
    if len(functions) < 2 or not all(functions):
        return ""
    used = _difference(samples[0].kernel.main_cpu, samples[-1].kernel.main_cpu) or 0.0
    return functions[-1] if used < _BUSY_SHARE * _span(samples) else ""


def _is_active(sample: ProcessSample) -> bool:
    main = main_thread(sample)
    return main is not None and main.active is True


def _by_kernel(samples: Sequence[ProcessSample], seconds: float | None) -> Movement:
    """Without stacks, CPU time alone shows progress; the lack of it shows nothing."""
    if len(samples) > 1 and _computes(samples, StackThread()):
        return Movement("busy", seconds)
    return Movement("unread", seconds)


def _holder_of_lock(samples: Sequence[ProcessSample]) -> StackThread | None:
    """The thread that holds the interpreter's lock at the same place in all samples."""
    holders = [next((one for one in sample.threads if one.holds_gil), None) for sample in samples]
    first = holders[0] if len(holders) > 1 else None
    if first is None or any(one is None or _identity(one) != _identity(first) for one in holders):
        return None
    return first


def _identity(thread: StackThread) -> tuple[object, ...]:
    return (thread.native_id or thread.name, thread.is_main, thread.frames)


def _span(samples: Sequence[ProcessSample]) -> float:
    return max(samples[-1].at - samples[0].at, 0.001)


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first


def kernel_of(process: AttachedProcess) -> KernelView:
    """The newest view of the kernel."""
    return process.samples[-1].kernel if process.samples else KernelView()
