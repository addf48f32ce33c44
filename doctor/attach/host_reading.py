"""Reads the training processes of this host: one job, its ranks in several samples, and its data workers if needed.

A data worker is read only if its rank waits for it, so that eight ranks with many workers are read in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from doctor.analysis.process_movement import main_thread, waits_for_children
from doctor.attach.debug_server import ask_debug_server
from doctor.attach.job_sources import recorded_step_rate
from doctor.attach.processes import process_table
from doctor.attach.sampler import SamplingOptions, sample
from doctor.attach.source_conditions import with_source_conditions
from doctor.attach.sources.gpu_sampling import GpuSampler, with_gpus, with_xids
from doctor.attach.sources.nccl_ras import RasReader, RasReport, RasService, find_service, ras_address
from doctor.attach.sources.recorder_pipe import read_recorders
from doctor.attach.targets import TargetJob, TargetList, TargetRequest, find_targets
from doctor.collectors.base import Machine
from doctor.collectors.launch.launcher import running_together
from doctor.collectors.runner import collect_facts
from doctor.core.background import BackgroundCall
from doctor.core.decoding import prepared
from doctor.core.errors import UnusableError
from doctor.core.facts import (
    AttachedGpu,
    AttachedProcess,
    AttachFacts,
    GpuFacts,
    HostFacts,
    Missing,
    ProcessSample,
    Section,
)
from doctor.core.job import Sections

MOST_WORKERS = 64
MOST_BYTES = 3 << 20
"""Data workers of a host that are read, and bytes of its facts as JSON: below the limit of a message."""
_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that may belong to the job that is read: in a container or an allocation, this process inherits them. Its
store must never be used to gather."""
_OF_HOST = (HostFacts.key, GpuFacts.key)
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_LEAST_SECONDS = 1.0
_RECORDS_SECONDS = 0.5
_GPU_SECONDS = 2.0
"""Seconds that the sampler of GPUs may take to end: it takes a second sample if it has only one."""
_MOST_DESCRIPTORS = 4096


class HostTargets(NamedTuple):
    """The processes of the job that is read, without samples, and sentences about what is not read.

    ``chosen``: the user named its processes."""

    job: TargetJob | None
    processes: tuple[AttachedProcess, ...] = ()
    unreadable: int = 0
    chosen: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[AttachedProcess, ...]:
        """The ranks of this host."""
        return tuple(process for process in self.processes if process.role == "rank")

    @property
    def leads(self) -> bool:
        """Whether rank 0 is on this host, or may be."""
        return any(rank.rank in (0, None) or rank.guessed for rank in self.ranks)

    def environs(self, *, here: bool = False) -> Mapping[int, Mapping[str, str]]:
        """The environments of its processes that could be read, by PID. ``here``: only those of this PID namespace."""
        found = (target.process for target in self.job.targets) if self.job else ()
        return {one.pid: one.environ for one in found if one.environ and not (here and one.inner_pid != one.pid)}


def targets_of(request: TargetRequest, *, alone: bool = True) -> HostTargets:
    """Find the job to read.

    ``alone``: no other host is read. Otherwise a host without such processes, or with several jobs, is no error.

    Raises:
        UnusableError: there is no such process or job, or several jobs and the request names none.
    """
    found = find_targets(process_table(), request)
    if alone:
        _require_named(found, request)
    jobs = _likely(found.jobs)
    if len(jobs) > 1 and alone:
        listed = "; ".join(_in_words(job) for job in jobs[:8])
        raise UnusableError(f"several jobs run on this host: name one with --job ID or --pid PID ({listed})")
    job = jobs[0] if jobs else None
    return HostTargets(
        job,
        tuple(target.facts for target in job.targets) if job else (),
        found.unreadable,
        bool(request.pids),
        (*found.notes, *_notes(found, jobs, request)),
    )


def _require_named(found: TargetList, request: TargetRequest) -> None:
    if found.missing:
        raise UnusableError(f"there is no process {', '.join(map(str, found.missing))}")
    if request.job and not found.jobs:
        raise UnusableError(f"there is no process of job {request.job} on this host")


def _likely(jobs: Sequence[TargetJob]) -> Sequence[TargetJob]:
    """Without those that only have torch loaded, if there are others."""
    return [job for job in jobs if job.found_by != "libraries"] or jobs


def _in_words(job: TargetJob) -> str:
    pids = [str(target.process.pid) for target in job.ranks]
    name = f"job {job.id}" if job.id else f"PID {', '.join(pids[:2])}"
    return f"{job.program or 'a program'}, {len(pids)} rank{'' if len(pids) == 1 else 's'}, {name}"


def _notes(found: TargetList, jobs: Sequence[TargetJob], request: TargetRequest) -> Iterable[str]:
    if len(jobs) > 1:
        yield f"not read: {'; '.join(_in_words(job) for job in jobs[1:8])}"
    if found.others and not request.pids:
        count = f"{found.others} training process{'' if found.others == 1 else 'es'}"
        yield f"not read: {count} of other users (root reads them with --all-users)"


def read_targets(targets: HostTargets, options: SamplingOptions, *, alone: bool = True) -> AttachFacts:
    """Sample the ranks, then the data workers of ranks that wait for them; within ``options.seconds``.

    ``alone``: no other host is read. Otherwise the host of rank 0 asks what knows the whole job."""
    until = time.monotonic() + options.seconds
    targeted = tuple(map(_with_gpu, targets.ranks))
    uses_gpus = any(rank.uses_gpu for rank in targeted)
    sampler = GpuSampler() if uses_gpus else None
    ras = _ras_reader(targets, options) if (alone or targets.leads) and (uses_gpus or options.nccl_ras) else None
    ranks, notes = ask_debug_server(sample(targeted, options), options.debug_server)
    waiting = {rank.pid for rank in ranks if _waits(rank)}
    workers = [one for one in targets.processes if one.parent in waiting][:MOST_WORKERS]
    left = until - time.monotonic()
    if workers and left > _LEAST_SECONDS:
        interval = min(options.interval, left / (2 * options.rounds))
        workers = list(sample(workers, options._replace(seconds=left, interval=interval)))
    gpus = _gpus(sampler, ranks)
    ranks = with_gpus(ranks, gpus, targets.environs(here=True))
    if options.flight_recorder:
        ranks, refused = read_recorders(ranks, targets.environs())
        notes = (*notes, *refused)
    read = with_source_conditions([*_with_step_rates(ranks), *workers])
    kept = {process.pid: process for process in read}
    processes = tuple(kept.get(process.pid, process) for process in targets.processes)
    report = ras.result() if ras is not None else RasReport()
    return _bounded(
        AttachFacts(
            processes=processes,
            unreadable=targets.unreadable,
            chosen=targets.chosen,
            notes=(*targets.notes, *notes, *report.notes),
            gpus=gpus,
            ras=report.events,
        )
    )


def _ras_reader(targets: HostTargets, options: SamplingOptions) -> RasReader:
    ranks = [target.process for target in targets.job.ranks] if targets.job else []
    service = RasService(ras_address(options.nccl_ras)) if options.nccl_ras else find_service(ranks)
    pids = {pid for rank in ranks for pid in (rank.pid, rank.inner_pid)} or {rank.pid for rank in targets.ranks}
    size = targets.job.world_size if targets.job else None
    return RasReader(service, pids, size, options.seconds, twice=options.rounds > 1)


def _gpus(sampler: GpuSampler | None, ranks: Sequence[AttachedProcess]) -> tuple[AttachedGpu, ...]:
    """The GPUs that were sampled, with their Xids since the job started."""
    gpus = sampler.result(_GPU_SECONDS) if sampler is not None else ()
    return with_xids(gpus, min(rank.started for rank in ranks)) if gpus else ()


class HostRequest(NamedTuple):
    """What each host of a gather reads. ``timeout``: seconds that the collectors of its facts may take."""

    request: TargetRequest
    sampling: SamplingOptions
    timeout: float


def collector_of(request: str) -> Callable[[tuple[str, ...]], dict[str, Section | Missing]]:
    """Return what collects on a node of a Ray cluster; ``request``: a :class:`HostRequest` as JSON."""
    wanted = msgspec.json.decode(request, type=prepared(HostRequest))
    return lambda keys: dict(collect_host(keys, wanted))


def collect_host(keys: Collection[str], wanted: HostRequest, targets: HostTargets | None = None) -> Sections:
    """Return the sections of an attaching process; ``keys`` include those of the host only if it is to read it."""
    if HostFacts.key not in keys:
        return {}
    found = targets or targets_of(wanted.request, alone=False)
    return read_host(found, wanted.sampling, timeout=wanted.timeout, alone=False)


def read_host(targets: HostTargets, sampling: SamplingOptions, *, timeout: float, alone: bool = True) -> Sections:
    """Return the facts of the host and its GPUs, and what was read of the job."""
    facts = BackgroundCall(lambda: collect_facts(_OF_HOST, Machine(), timeout=timeout))
    attached = read_targets(targets, sampling, alone=alone)
    return {**facts.result(timeout + 1), AttachFacts.key: attached}


def identity_of(targets: HostTargets, hosts: int | None = None) -> tuple[int, int, str] | None:
    """Return the number of this host, which has ranks, among those of the job, their number, and a key that all of them
    share; ``None`` if the job has one host.

    Raises:
        UnusableError: the ranks do not show it.
    """
    rank = next((rank for rank in targets.ranks if rank.rank is not None), targets.ranks[0])
    size, here = rank.world_size, rank.local_world_size
    count = hosts or (-(-size // here) if size and here else None)
    if count is None:
        raise UnusableError("the job does not state how many hosts it has: add --hosts N")
    number = rank.node if rank.node is not None else (rank.rank or 0) // here if here else None
    if number is None or number >= count:
        raise UnusableError("the ranks on this host do not show which of the hosts it is")
    stated = json.dumps([rank.job, rank.launcher, rank.program, size, count])
    return (number, count, hashlib.sha256(f"attach {stated}".encode()).hexdigest()[:12]) if count > 1 else None


def own_environ() -> Mapping[str, str]:
    """The environment of this process without what the job that is read may have left in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_JOB and not name.startswith("TORCHELASTIC_")
    }


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of several."""
    return bool(running_together(environ))


def _waits(rank: AttachedProcess) -> bool:
    mains = [main_thread(sample) for sample in rank.samples]
    return any(main is not None and waits_for_children(main.frames) for main in mains)


def _with_step_rates(ranks: Sequence[AttachedProcess]) -> Sequence[AttachedProcess]:
    """With the pace in the record of each rank that runs the doctor's callback, as far as it was read in time."""
    rates: dict[int, float | None] = {}

    def read() -> None:
        for rank in ranks:
            rates[rank.pid] = recorded_step_rate(rank.pid)

    with contextlib.suppress(TimeoutError):
        BackgroundCall(read).result(_RECORDS_SECONDS)
    known = dict(rates)
    return [msgspec.structs.replace(rank, step_rate=known.get(rank.pid)) for rank in ranks]


def _with_gpu(rank: AttachedProcess) -> AttachedProcess:
    return msgspec.structs.replace(rank, uses_gpu=_has_gpu_open(rank.pid))


def _has_gpu_open(pid: int) -> bool:
    folder = Path(f"/proc/{pid}/fd")
    try:
        with os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(_MOST_DESCRIPTORS), strict=False):
                if os.readlink(entry.path).startswith(_DEVICES):  # noqa: PTH115 - an entry of scandir
                    return True
    except OSError:
        pass
    return False


def _bounded(facts: AttachFacts) -> AttachFacts:
    """Without the stacks of threads that are least needed, until the facts fit into a message."""
    slim = msgspec.structs.replace(facts, processes=tuple(map(_slim, facts.processes)))
    if len(msgspec.json.encode(slim)) <= MOST_BYTES:
        return slim
    return msgspec.structs.replace(facts, processes=tuple(_slim(one, keep_last=False) for one in facts.processes))


def _slim(process: AttachedProcess, *, keep_last: bool = True) -> AttachedProcess:
    """With all threads in the newest sample, and in the others the main thread and the one that holds the lock;
    without ``keep_last`` so in all samples, and without the flight recorder."""
    last = process.samples[-1:] if keep_last else ()
    first = process.samples[: len(process.samples) - len(last)]
    recorder = process.recorder if keep_last else None
    return msgspec.structs.replace(process, samples=(*map(_needed, first), *last), recorder=recorder)


def _needed(one: ProcessSample) -> ProcessSample:
    needed = tuple(thread for thread in one.threads if thread.is_main or thread.holds_gil)
    return msgspec.structs.replace(one, threads=needed)
