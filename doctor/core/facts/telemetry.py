"""Facts about a run: the Trainer, progress, collectives, data loaders, steps, memory, model.

The monitor of a running job fills these sections, and so do readers of the files of a finished run. Times named ``at``
are seconds since the epoch (UTC); all other times are durations in seconds. Sizes are bytes.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import msgspec

from doctor.core.facts.devices import GpuProcess
from doctor.core.facts.section import Level, Origin, Section, Variable
from doctor.core.facts.time_spans import TimeSpan
from doctor.core.text import lazy_compile

TORCH_SEED = "torch.initial_seed()"
"""The argument of a plain loop that holds the seed of torch's generator when the model is passed."""


class WatchedSection(Section, frozen=True, kw_only=True):
    """Base of the sections that only a run can fill."""

    origin: ClassVar[Origin] = "watched"


class Frame(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A line of Python on a stack. ``user``: it is in neither the standard library nor an installed package.
    ``condition``: the condition that only some ranks meet, if the source shows one (``if self.global_rank == 0, line
    56``, ``else of if rank == 0, line 56``, ``@rank_zero_only``); branches of one ``if`` name the same line.
    ``answered``: the line sends or receives, and its function also makes the other of the two calls. ``loop``:
    first and last line of the innermost loop around it in its function, where its source was read for that;
    ``loop_data``: what that loop iterates over, if it is not a range of numbers and only its end leaves the loop."""

    file: str
    line: int
    function: str = ""
    user: bool = False
    condition: str = ""
    answered: bool = False
    loop: tuple[int, ...] = ()
    loop_data: str = ""


class TrainingFacts(WatchedSection, frozen=True, kw_only=True):
    """The training framework, and how the ranks share the work.

    ``framework``: ``lightning``, ``pytorch_lightning``, ``transformers`` or ``plain``. ``mixed``: describes a mixture
    of objects from both Lightning packages in this process. ``device``: torch's name of the device in use (``cuda:0``,
    ``cpu``), ``device_id`` its UUID or PCI bus id. ``data_parallel_rank`` and ``data_parallel_size``: its position
    among the ranks that should read different data; ``data_parallel_root``: the first of them, if the model's wrapper
    shows which they are: ranks with the same root hold replicas, or shards, of one model. ``backend`` of the default
    process group. ``joins``: uneven inputs are joined. ``arguments``: settings of the Trainer that differ from their
    defaults (``max_steps``, ``limit_val_batches`` …), as text. ``checkpoints``: their directory.
    """

    key: ClassVar[str] = "training"

    framework: str = "plain"
    release: str | None = None
    mixed: str | None = None
    strategy: str | None = None
    backend: str | None = None
    device: str | None = None
    device_id: str | None = None
    world_size: int = 1
    data_parallel_rank: int | None = None
    data_parallel_size: int | None = None
    data_parallel_root: int | None = None
    accumulate: int = 1
    precision: str | None = None
    max_steps: int | None = None
    max_epochs: int | None = None
    joins: bool = False
    seed: int | None = None
    checkpoints: str | None = None
    arguments: tuple[Variable, ...] = ()

    def argument(self, name: str) -> str | None:
        """The setting ``name``, or ``None`` if it has its default."""
        return next((one.value for one in self.arguments if one.name == name), None)

    @property
    def waits_within_step(self) -> bool:
        """Whether the strategy shards parameters, so that ranks wait for one another in the middle of a forward and a
        backward pass, where only their stacks show it."""
        return bool(_SHARDED.search(self.strategy or ""))


_SHARDED = lazy_compile(r"fsdp|fully_shard|deepspeed|zero", re.IGNORECASE)


class Failure(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An exception that ended a rank. ``frames``: innermost first."""

    kind: str
    message: str = ""
    at: float | None = None
    frames: tuple[Frame, ...] = ()


class PointInTime(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A point that a rank passed: ``stage`` and ``point`` as in :class:`ProgressFacts`."""

    stage: str
    point: str
    batch: int | None = None
    at: float | None = None


class EpochEnd(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A data loader that was exhausted after ``batches`` in ``epoch``."""

    stage: str
    loader: int
    epoch: int
    batches: int


class LeftLoop(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A pass over a data loader that the loop left in its batch number ``batches`` (from 1), before the loader was
    exhausted. ``frame``: the line that left it; ``statement``: its first word (``break``, ``return``), if its source
    shows it."""

    stage: str
    loader: int
    epoch: int
    batches: int
    frame: Frame | None = None
    statement: str = ""


class ChildProcess(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A child of a rank, such as a data loader worker. ``state``: the kernel's letter (R, S, D, T, Z); ``memory``:
    resident bytes, including those shared with its parent since the fork; ``private``: without memory that others map
    too. ``stack``: of a data worker that its rank waits for, innermost first; ``waits``: what it waits for, as the
    kernel shows. ``still``: seconds for which none of its threads has run, ``None`` if unknown."""

    pid: int
    state: str = ""
    name: str = ""
    memory: int | None = None
    private: int | None = None
    stack: tuple[Frame, ...] = ()
    waits: str = ""
    still: float | None = None


GpuKind = Literal["", "waits", "computes", "idle"]


class GpuActivity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What the GPU of a rank did while the rank was read. ``busy``: mean utilization in percent; ``power`` and
    ``power_limit`` in watts; ``memory``: bytes in use. ``kind``: all samples show that it ``computes``, ``waits`` (busy
    all the time at a power at which it can only poll, as a collective of NCCL does) or is ``idle``; empty if they do
    not. ``assumed_by``: the variable that it follows from that the rank uses this GPU, empty if the driver lists it.
    ``xids``: in the kernel log since the job started."""

    index: int
    kind: GpuKind = ""
    busy: int | None = None
    power: int | None = None
    power_limit: int | None = None
    memory: int | None = None
    assumed_by: str = ""
    xids: tuple[int, ...] = ()


class ProgressFacts(WatchedSection, frozen=True, kw_only=True):
    """The progress of a rank.

    ``run``: the id of the run. ``state``: ``running``, ``stalled`` (no progress for longer than ``limit``), ``ended``,
    ``failed``; or the state that a local peer observed, or that nobody could observe: ``silent`` (it does not
    respond), ``stopped`` (SIGSTOP, a debugger), ``gone`` (no such process). ``seen_by``: the rank that observed it, if
    it was another one. ``stage``: ``setup``, ``sanity``, ``train``, ``validate``, ``test``, ``predict``, ``teardown``.
    ``point``, the last one entered: ``setup``, ``data`` (waiting for the next batch), ``step`` (training step),
    ``forward``, ``backward``, ``optimizer``, ``batch-end``, ``checkpoint``, ``epoch-start``, ``epoch-end``, ``ended``.
    ``epoch``, ``batch``, ``loader`` count from 0, ``step`` counts optimizer steps. ``left``: passes that the loop left
    before their end, newest last; only loops of the user's own record them. ``still``: seconds for which its training
    thread has been in one instruction while its process used no CPU time, if the pace of the run is not known yet.
    ``loops``: seconds for which it has been in a loop of the user's code without an end in sight, if nothing is known
    of its work.
    ``idle``: seconds since the last progress; ``limit``: the timeout of this point in seconds, derived from the run's
    own pace; ``patience``: the timeout while the rank is busy, which is longer while it waits for others. ``stack`` of
    the main thread, innermost first; ``stack_from``: ``interpreter``, or ``signal`` if the interpreter could not
    respond. ``ended``: data loaders that were exhausted, newest last. ``recent``: the last points that it passed.
    ``kernel_state``: of the process.
    ``sampled``: the process was read from outside, so that ``idle`` is the least time and no point is known.
    ``awaits``: the operation that it waits in, if its stack alone does not show it; ``group``: the process group that
    it waits in, as the source of its call names it. ``guessed``: the number of the rank is not one that a launcher or
    the user gave. ``driver``: the function of a GPU driver that its main thread is blocked in; ``blocked``: the file
    system or file that the kernel blocks it in. ``root``: the source or destination of the call that it waits in,
    numbered within the group. ``gpu``: what its GPU did. ``reported``: what NCCL's RAS service
    reports of it (``launched 41 of 42 AllReduce``); ``behind``: the service shows that it launched fewer collectives
    than the others.
    """

    key: ClassVar[str] = "progress"

    run: str = ""
    state: str = "running"
    seen_by: int | None = None
    pid: int | None = None
    at: float | None = None
    stage: str = "setup"
    point: str = "setup"
    epoch: int | None = None
    step: int | None = None
    batch: int | None = None
    loader: int | None = None
    passed: int = 0
    idle: float | None = None
    still: float | None = None
    loops: float | None = None
    limit: float | None = None
    patience: float | None = None
    stack: tuple[Frame, ...] = ()
    stack_from: str = ""
    kernel_state: str | None = None
    failure: Failure | None = None
    ended: tuple[EpochEnd, ...] = ()
    left: tuple[LeftLoop, ...] = ()
    recent: tuple[PointInTime, ...] = ()
    children: tuple[ChildProcess, ...] = ()
    sampled: bool = False
    awaits: str = ""
    group: str = ""
    guessed: bool = False
    gpu: GpuActivity | None = None
    driver: str = ""
    blocked: str = ""
    root: int | None = None
    reported: tuple[str, ...] = ()
    behind: bool = False


class ProcessGroup(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A process group: its name, global ranks (empty: unknown), and its counters of collectives, ``None`` before the
    first one."""

    name: str
    description: str = ""
    members: tuple[int, ...] = ()
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None


DEFAULT_GROUPS = frozenset({"", "0", "default_pg"})
"""Names that torch gives the default process group."""


def group_in_words(name: str, description: str = "") -> str:
    """``the default group``, ``group 12 (mesh_cp)`` or ``group 12``."""
    if name in DEFAULT_GROUPS:
        return "the default group"
    return f"group {name} ({description})" if description else f"group {name}"


OWN_LOCK = "a lock of its own process"
"""Start of :attr:`ProgressFacts.blocked` for locks of threads and of native code."""
PROCESS_EVENT = "an event or a condition of several processes"
"""The same for what a process of ``multiprocessing`` has to bring about."""
SHARED_LOCK = "a lock that other processes share"
"""The same for a lock of ``multiprocessing``."""
LOST = ", taken by a process that has ended"
"""End of the same if no living process can release it."""
WITH_TIMEOUT = ", until a timeout"
"""End of the same for a wait that has a limit of its own."""
TRICKLES = ", which has sent only "
"""The same goes on with this for a connection on which next to nothing arrives."""
A_SLEEP = "the end of a sleep"
"""The same of a thread that sleeps, or naps in a loop at one place."""
FAR = " of minutes"
"""End of the same for a sleep that goes on so long."""
ENDLESS = ", which no other thread can bring about"
"""End of the same for an event, a future or the end of a thread: all other threads wait, too."""
IDLE = ", and no other thread of its process runs"
"""The same: all other threads wait or sleep, perhaps until a timeout or an answer, and compute and save nothing."""
WALK = "the end of a walk through "
"""Start of the same for a thread that lists folders below folders, with the folder that it is in."""
SEARCH = "the end of a search: "
"""The same for a thread that computes in one (:mod:`doctor.monitor.telemetry.stacks.searches`), and where it is."""
REPEATS = "a different answer: each one names the same "
"""The same for a loop that asks with what it was answered, and is answered the same each time."""
AT_WORK = ", while another process of its node computes"
"""End of the same for a result that this process may be about to give."""
FAILING = ", while its child processes fail and are replaced"
"""End of the same if processes that a pool starts end with an error, one after the other, so that no result comes."""
WHOSE_THREAD = ", whose thread waits for "
"""What the same goes on with for a future or the end of a thread: then what that thread waits for."""


class Collective(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An entry of torch's flight recorder. ``sequence`` counts within its group, separately for sends and receives.
    ``operation`` without the name of the backend (``all_reduce``). ``peer``: the other rank of a send or receive,
    numbered within the group; ``source`` likewise. ``root``: the rank of the job that a broadcast, scatter, reduce or
    gather names, if the stack of the rank showed it. ``state``: ``scheduled``, ``started`` or ``completed`` (Gloo never
    goes beyond scheduled); ``retired``: the recorder has closed it. ``frames``: the call site, innermost first."""

    group: str
    sequence: int
    operation: str
    backend: str = ""
    is_p2p: bool = False
    source: int | None = None
    peer: int | None = None
    root: int | None = None
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()
    state: str = "scheduled"
    retired: bool = False
    at: float | None = None
    seconds: float | None = None
    timeout: float | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def group_words(self) -> str:
        """``the default group``, ``group 3``."""
        return group_in_words(self.group)


class RecorderFacts(WatchedSection, frozen=True, kw_only=True):
    """torch's flight recorder of a rank: its newest collectives, oldest first. ``version``: of the dump's format.
    ``wrapped``: older entries were overwritten. ``dump``: the file that a complete dump was written to."""

    key: ClassVar[str] = "flight-recorder"

    version: str | None = None
    groups: tuple[ProcessGroup, ...] = ()
    collectives: tuple[Collective, ...] = ()
    wrapped: bool = False
    dump: str | None = None

    def group(self, name: str) -> ProcessGroup | None:
        """The process group called ``name``."""
        return next((group for group in self.groups if group.name == name), None)


class Sampler(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A sampler. ``distributed``: it divides the dataset among ``replicas``, of which this is ``rank``. ``pads``: it
    repeats samples so that all replicas get equally many. ``generator_seed``: of the generator passed to it, or to its
    inner sampler ``inner``. ``independent``: its samples do not depend on those of other replicas (with replacement,
    or a random part of the dataset). ``repeats``: it repeats samples on purpose."""

    name: str
    distributed: bool = False
    replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    pads: bool | None = None
    generator_seed: int | None = None
    inner: str | None = None
    independent: bool = False
    repeats: bool = False


class LoaderEpoch(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One epoch of a data loader. ``drawn``: a hash of the first indices that its sampler drew; ``content``: a hash of
    the first batch; ``first``: those indices themselves, as far as they are kept; ``contents``: hashes of the first
    batches, each of several parts (tensors) joined by ``-``. ``sampler_epoch``: the epoch of the sampler then, by
    which it shuffles (``set_epoch``). ``sizes``: distinct batch sizes without that of the last
    batch. ``ended``: it was exhausted."""

    epoch: int
    drawn: str | None = None
    content: str | None = None
    first: tuple[int, ...] = ()
    batches: int = 0
    samples: int | None = None
    sizes: tuple[int, ...] = ()
    ended: bool = False
    contents: tuple[str, ...] = ()
    sampler_epoch: int | None = None


class Loader(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A data loader of one stage. ``kind``: ``map``, ``iterable`` or ``other``. ``length``: batches per epoch as it
    reports them, ``None`` if it can't; ``limit``: maximum number of batches that the Trainer takes. ``sharded``: an
    iterable dataset that declares how it is divided (``None``: unknown). ``dynamic``: a custom batch sampler decides
    the sizes. ``fingerprint``: a digest of the content of the dataset and of the sampler's input, ``None`` if they
    can't be fully observed. ``part``: a digest of the indices of a ``Subset``. ``combined``: when data loaders of the
    stage that are iterated together end (``min_size``, ``max_size``, ``max_size_cycle``, ``sequential``). ``by_next``:
    the program takes batches by ``next()``, or from a generator that repeats the loader, so that it may start the
    loader anew where it ends, and go on."""

    stage: str
    index: int = 0
    loader: str = ""
    dataset: str = ""
    kind: str = "map"
    length: int | None = None
    limit: int | None = None
    loop_limit: int | None = None
    has_exits: bool = False
    dataset_length: int | None = None
    batch_size: int | None = None
    batch_sampler: str | None = None
    dynamic: bool = False
    drop_last: bool | None = None
    sampler: Sampler | None = None
    sharded: bool | None = None
    workers: int | None = None
    persistent: bool | None = None
    fingerprint: str | None = None
    part: str | None = None
    combined: str | None = None
    by_next: bool = False
    epochs: tuple[LoaderEpoch, ...] = ()

    @property
    def batches(self) -> int | None:
        """Batches per epoch, from the length and the Trainer's limit; ``None`` if the length is unknown."""
        return self.length if self.length is None or self.limit is None else min(self.length, self.limit)


class LoaderFacts(WatchedSection, frozen=True, kw_only=True):
    """The data loaders of a rank."""

    key: ClassVar[str] = "loaders"

    loaders: tuple[Loader, ...] = ()

    def of(self, stage: str) -> tuple[Loader, ...]:
        """The data loaders of a stage, by index."""
        return tuple(loader for loader in self.loaders if loader.stage == stage)


class Window(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Medians over ``steps`` training batches from ``first_step`` on, in seconds per batch: ``total`` from the start
    of one batch to that of the next; ``data``: waiting for it; ``forward``, ``backward``, ``optimizer``: host time;
    ``other``: the remainder; ``device``: between device events, if there is a device. Collectives count in the part
    that calls them. ``gradients``: of ``backward``, until the gradients of this rank are computed, before a wrapper
    waits for those of others, and ``waited``: of ``other``, for another rank; of some of the batches, and not on a GPU.
    ``mean`` of the totals: equal on ranks that synchronize, even if only in every eighth batch because of gradient
    accumulation. ``means``: of data, forward, backward, optimizer and other, which also show rare long steps."""

    first_step: int
    steps: int
    total: float
    data: float = 0.0
    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    other: float | None = None
    device: float | None = None
    slowest: float | None = None
    mean: float | None = None
    means: tuple[float, ...] = ()  # and of the known waits within other
    gradients: float | None = None
    waited: float | None = None


class StepFacts(WatchedSection, frozen=True, kw_only=True):
    """Durations of steps, in windows of equally many batches, newest last. ``seen``: batches so far. ``spans``: all of
    the time since the first training batch, ``span_batches`` batches each."""

    key: ClassVar[str] = "steps"

    windows: tuple[Window, ...] = ()
    seen: int = 0
    spans: tuple[TimeSpan, ...] = ()
    span_batches: int = 0


class RankPausesFacts(WatchedSection, frozen=True, kw_only=True):
    """What kept a rank from running in the last ``seconds`` of a run. ``cpu_quota``: the CPUs that its control group
    grants, ``None`` without a quota; ``periods`` of that quota, those in which it was throttled, and the seconds for
    which it was. ``delays``: how often its watchdog's thread continued late, for ``delayed_seconds`` in all, because it
    got neither the interpreter's lock nor a CPU. ``waiting``: the share of some seconds of training each, newest last,
    in which its stack showed that it waited for other ranks."""

    key: ClassVar[str] = "pauses"

    seconds: float = 0.0
    cpu_quota: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_seconds: float | None = None
    delays: int = 0
    delayed_seconds: float = 0.0
    waiting: tuple[float, ...] = ()


class MemorySample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Memory after step ``step``. ``allocated``, ``reserved`` and ``peak`` (since the previous sample) of torch's
    allocator on its device; ``device_used``: of the whole device; ``resident``: of this process, ``workers``: of its
    children together; ``host_available``: of the host. ``units``: the largest size of a batch since the previous
    sample (tokens, else samples)."""

    step: int
    at: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    device_used: int | None = None
    resident: int | None = None
    workers: int | None = None
    host_available: int | None = None
    units: int | None = None


class RunMemoryFacts(WatchedSection, frozen=True, kw_only=True):
    """Memory of a rank during a run. Device numbers are of torch's allocator; ``None`` without a device.

    ``total``: of the device; ``device_free``: according to the driver; ``foreign``: device memory held by anything but
    this process's allocator. ``retries`` and ``failures``: allocations that had to empty the cache first, and that
    failed. ``inactive``: reserved, split and unused. ``processes``: processes that hold memory of the device,
    according to the driver. ``utilization``: the percentage of time for which the device was busy, according to the
    driver, in the latest readings since training began. ``samples``: oldest first. ``estimated_floor``: a lower bound
    for the memory of training in bytes, known before its first step (parameters, gradients, optimizer state);
    ``estimate_error``: its relative deviation from the measured peak so far (-0.4: 40 % of the peak are not in the
    bound), ``None`` before a measurement.
    """

    key: ClassVar[str] = "run-memory"

    device: str | None = None
    device_id: str | None = None
    allocator: str | None = None
    total: int | None = None
    device_free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    inactive: int | None = None
    foreign: int | None = None
    retries: int | None = None
    failures: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    resident: int | None = None
    children: tuple[ChildProcess, ...] = ()
    utilization: tuple[int, ...] = ()
    samples: tuple[MemorySample, ...] = ()
    estimated_floor: int | None = None
    estimate_error: float | None = None


class TensorShape(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A parameter of a model. ``frozen``: it needs no gradient."""

    name: str
    shape: tuple[int, ...]
    type: str
    frozen: bool = False


class ModelFacts(WatchedSection, frozen=True, kw_only=True):
    """The model as it is wrapped. ``parameters``: total number of elements; ``digest`` of all names, shapes, types
    and frozen parameters in order; ``tensors``: the first of them. ``replicated``: all data-parallel ranks hold the
    same values (DDP, not FSDP). ``initial``: checksum of the values before the first step; ``broadcast``: the wrapper
    synchronizes the values itself."""

    key: ClassVar[str] = "model"

    name: str = ""
    parameters: int = 0
    trainable: int = 0
    count: int = 0
    digest: str = ""
    tensors: tuple[TensorShape, ...] = ()
    replicated: bool | None = None
    broadcast: bool | None = None
    initial: str | None = None


Counted = Literal["step", "batch"]


class Checksum(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A checksum of parameters after ``step``: ``value`` as exact text; ``part``: the tensors, the same on all ranks
    at that step. ``counted``: what ``step`` counts, ``step`` (of the optimizer) or ``batch`` (of training); ranks that
    take different numbers of batches per optimizer step hold equal parameters only at equal optimizer steps.
    ``moved``: whether the value differs from the one before the first step. ``local``: the optimizer stepped within
    ``no_sync()`` of the wrapper, which leaves the gradients of each rank its own."""

    step: int
    value: str
    part: str = "all"
    counted: Counted = "step"
    moved: bool | None = None
    local: bool = False


class NonFinite(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The first NaN or infinite value: ``what`` is ``loss`` or ``gradient``."""

    step: int
    what: str
    name: str = ""
    value: str = ""


class StepSettings(msgspec.Struct, frozen=True, gc=False):
    """Settings of a rank after optimizer step ``step``, as text: hyperparameters of its optimizers (``lr``), its
    modules in eval mode, and the parameters that were frozen since its model was attached."""

    step: int
    values: tuple[Variable, ...] = ()


class ReplicaFacts(WatchedSection, frozen=True, kw_only=True):
    """The state of a replica. ``losses``: number of losses checked, of which the newest ``non_finite_losses`` are NaN
    or infinite. ``unfrozen``: parameters that are trained and were frozen when the model was wrapped.
    ``without_gradient``: those without gradient while others have one, if the rank stands still."""

    key: ClassVar[str] = "replica"

    checksums: tuple[Checksum, ...] = ()
    non_finite: tuple[NonFinite, ...] = ()
    losses: int = 0
    non_finite_losses: int = 0
    settings: tuple[StepSettings, ...] = ()
    unfrozen: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()


class HostUseFacts(WatchedSection, frozen=True, kw_only=True):
    """Changes on a host over the last ``seconds`` of a run: periods of the CPU quota and how many were throttled; TCP
    segments sent and retransmitted; errors and drops of its interfaces, by name, and of these the received packets that
    were dropped."""

    key: ClassVar[str] = "host-use"
    level: ClassVar[Level] = "host"

    seconds: float = 0.0
    cpu_periods: int | None = None
    cpu_throttled_periods: int | None = None
    segments: int | None = None
    retransmitted: int | None = None
    interface_errors: tuple[tuple[str, int], ...] = ()
    receive_drops: tuple[tuple[str, int], ...] = ()
