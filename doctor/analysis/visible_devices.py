"""The GPU of a rank: the grammar of CUDA_VISIBLE_DEVICES, and the mapping from a local rank to a device.

Sources: CUDA programming guide, "CUDA environment variables"; torch/cuda/__init__.py ``_parse_visible_devices`` and
``_transform_uuid_to_ordinals``, which repeat the driver's rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from doctor.core.facts import (
    EnvironmentFacts,
    Gpu,
    GpuFacts,
    GpuProcess,
    HiddenField,
    HostFacts,
    LaunchFacts,
    MigDevice,
    NcclFacts,
    ProcessFacts,
    SlurmFacts,
    SoftwareFacts,
    TrainerFacts,
    TrainingFacts,
)
from doctor.core.job import Job, LocalRanks, Rank
from doctor.core.section_table import IdenticalRanks, once_per_rank
from doctor.core.text import lazy_compile

HIDE_ALL = frozenset({"", "-1", "nodevfiles", "none"})
"""Values, in lower case, that hide every GPU on purpose. SLURM sets NoDevFiles for a task without GPUs."""

_LEADING_NUMBER = lazy_compile(r"[+-]?[0-9]{1,9}")


class VisibleListFault(msgspec.Struct, frozen=True):
    """What is wrong with a value of CUDA_VISIBLE_DEVICES.

    ``kind``: ``entry`` is no device and ends the list, is repeated, or is read in part; or no device of the host fits
    it, or several do. ``others``: the entries behind it that are ignored, or the part of it that is read."""

    kind: Literal["ends", "repeated", "partly read", "absent", "ambiguous"]
    entry: str
    others: tuple[str, ...] = ()


class VisibleList(msgspec.Struct, frozen=True):
    """CUDA_VISIBLE_DEVICES as CUDA reads it, without asking the driver; ``is_set``: whether it is set at all.

    ``entries``: the valid ones, in order (index as digits, UUID or its beginning). ``fault``: ``None`` if the value is
    valid, or hides every GPU on purpose."""

    entries: tuple[str, ...] = ()
    is_set: bool = True
    fault: VisibleListFault | None = None

    @property
    def is_by_index(self) -> bool:
        """Whether the entries are indices."""
        return bool(self.entries) and self.entries[0].isdigit()


def parse_visible_devices(text: str | None) -> VisibleList:
    """The list in a value of CUDA_VISIBLE_DEVICES; ``None`` stands for an unset variable.

    Either indices or UUIDs, not both; reading ends at the first entry that is neither, and a repeated entry hides all
    devices."""
    if text is None:
        return VisibleList(is_set=False)
    if text.strip().lower() in HIDE_ALL:
        return VisibleList()
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if text.startswith(prefix)), None)
    return _read_uuids(text, prefix) if prefix else _read_indices(text)


def _read_uuids(text: str, prefix: str) -> VisibleList:
    taken: list[str] = []
    words = text.split(",")
    for position, word in enumerate(words):
        if not word.startswith(prefix):
            return VisibleList(tuple(taken), fault=_cut(word, words[position + 1 :]))
        if word in taken:
            return VisibleList(fault=VisibleListFault("repeated", word))
        taken.append(word)
    return VisibleList(tuple(taken))


def _read_indices(text: str) -> VisibleList:
    taken: list[str] = []
    fault = None
    words = [word.strip() for word in text.split(",")]
    for position, word in enumerate(words):
        number = _LEADING_NUMBER.match(word)
        if number is None or int(number[0]) < 0:
            return VisibleList(tuple(taken), fault=_cut(word, words[position + 1 :]) or fault)
        index = str(int(number[0]))
        if index in taken:
            return VisibleList(fault=VisibleListFault("repeated", index))
        if number[0] != word:
            fault = fault or VisibleListFault("partly read", word, (index,))
        taken.append(index)
    return VisibleList(tuple(taken), fault=fault)


def _cut(word: str, rest: list[str]) -> VisibleListFault | None:
    """An entry that ends the list; an empty or negative one at the end does no harm."""
    lost = tuple(name for name in rest if name.strip())
    if not lost and (not word.strip() or word.strip() == "-1"):
        return None
    return VisibleListFault("ends", word, lost)


class VisibleDevice(msgspec.Struct, frozen=True):
    """A CUDA device of a process: a GPU, or a MIG slice of it."""

    gpu: Gpu
    slice: MigDevice | None = None

    @property
    def uuid(self) -> str:
        """The UUID of the slice, else of the GPU."""
        return self.slice.uuid if self.slice else self.gpu.uuid

    @property
    def label(self) -> str:
        """``GPU 3``, or ``MIG slice 0 of GPU 3``."""
        return f"MIG slice {self.slice.index} of GPU {self.gpu.index}" if self.slice else f"GPU {self.gpu.index}"


class VisibleDevices(msgspec.Struct, frozen=True):
    """The GPUs of a host that are visible in an environment.

    ``devices``: in CUDA's order, ``None`` if unknown, for the reason ``why``. ``size``: the number of devices, ``None``
    if even that is unknown. ``fault``: what is wrong with CUDA_VISIBLE_DEVICES."""

    devices: tuple[VisibleDevice, ...] | None
    size: int | None
    fault: VisibleListFault | None = None
    why: str = ""

    @property
    def gpus(self) -> tuple[Gpu, ...] | None:
        """The GPUs of the devices, in their order."""
        return None if self.devices is None else tuple(device.gpu for device in self.devices)


def visible_gpus(environment: EnvironmentFacts | None, gpus: GpuFacts) -> VisibleDevices:
    """The devices among ``gpus`` that CUDA shows a process with this ``environment``."""
    get = environment.get if environment else lambda _: None
    listed = parse_visible_devices(get("CUDA_VISIBLE_DEVICES"))
    if listed.entries and not listed.is_by_index:
        return _by_uuid(listed, gpus)
    chosen, fault = _by_index(listed, gpus)
    return _in_order(chosen, fault or listed.fault, gpus, get("CUDA_DEVICE_ORDER"))


def visible_to(process: Process) -> VisibleDevices | None:
    """The devices that CUDA shows this process; ``None`` if the GPUs of its host are unknown."""
    gpus = process.find(GpuFacts)
    if gpus is None:
        return None
    environment = process.find(EnvironmentFacts)
    host = process.members[0].host if isinstance(process, IdenticalRanks) else process.host
    # The ranks of a host have the same GPUs and mostly the same environment.
    key = (visible_to, id(environment), id(gpus))
    if key not in host.memo:
        host.memo[key] = visible_gpus(environment, gpus)
    seen: VisibleDevices = host.memo[key]
    return seen


def _by_index(listed: VisibleList, gpus: GpuFacts) -> tuple[list[Gpu], VisibleListFault | None]:
    if not listed.is_set:
        return list(gpus.gpus), None
    for position, entry in enumerate(listed.entries):
        if int(entry) >= len(gpus.gpus):
            kept = [gpus.gpus[int(index)] for index in listed.entries[:position]]
            return kept, VisibleListFault("absent", entry)
    return [gpus.gpus[int(index)] for index in listed.entries], None


def _in_order(chosen: list[Gpu], fault: VisibleListFault | None, gpus: GpuFacts, order: str | None) -> VisibleDevices:
    """Devices by index, which are known if all GPUs are of one model.

    CUDA's default order has the fastest first, NVML's is that of the PCI bus."""
    if any(gpu.mig for gpu in chosen):
        return _slices(chosen, fault)
    if len({gpu.name for gpu in gpus.gpus if gpu.name}) > 1 and (order or "").strip() != "PCI_BUS_ID":
        why = "the GPUs are of different models and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
        return VisibleDevices(None, len(chosen), fault, why)
    return VisibleDevices(tuple(VisibleDevice(gpu) for gpu in chosen), len(chosen), fault)


def _slices(chosen: list[Gpu], fault: VisibleListFault | None) -> VisibleDevices:
    """CUDA shows a process only one MIG slice, the first one (MIG user guide, "CUDA device enumeration")."""
    if not all(gpu.mig for gpu in chosen):
        return VisibleDevices(None, None, fault, "MIG is enabled on some of the GPUs and not on others")
    first = next(((gpu, gpu.mig_devices[0]) for gpu in chosen if gpu.mig_devices), None)
    if first is None:
        return VisibleDevices(None, None, fault, "MIG is enabled and no MIG slice can be seen")
    return VisibleDevices((VisibleDevice(*first),), 1, fault)


def _by_uuid(listed: VisibleList, gpus: GpuFacts) -> VisibleDevices:
    found: list[VisibleDevice] = []
    for entry in listed.entries:
        matches = list(_named(entry, gpus))
        if len(matches) != 1:
            if not matches and any(gpu.lost or not gpu.uuid for gpu in gpus.gpus):
                return VisibleDevices(None, None, listed.fault, "the UUID of a GPU could not be read")
            fault = VisibleListFault("ambiguous" if matches else "absent", entry)
            return VisibleDevices(tuple(found), len(found), fault)
        if matches[0] in found:
            return VisibleDevices((), 0, VisibleListFault("repeated", entry))
        found.append(matches[0])
    taken = found[:1] if found and found[0].slice else found
    return VisibleDevices(tuple(taken), len(taken), listed.fault)


def _named(entry: str, gpus: GpuFacts) -> Iterator[VisibleDevice]:
    """The devices whose UUID begins with ``entry``; ``MIG-GPU-<uuid>/<instance>/<instance>`` is an old form."""
    for gpu in gpus.gpus:
        if entry.startswith("GPU-"):
            if gpu.uuid.startswith(entry):
                yield VisibleDevice(gpu)
        elif entry.startswith("MIG-GPU-"):
            if gpu.uuid and entry[4:].partition("/")[0] == gpu.uuid:
                yield VisibleDevice(gpu, MigDevice(uuid=entry, index=-1))
        else:
            yield from (VisibleDevice(gpu, slice_) for slice_ in gpu.mig_devices if slice_.uuid.startswith(entry))


Process = Rank | IdenticalRanks
"""A rank, or ranks with identical facts."""


@once_per_rank
def backend_asked(process: Process) -> str | None:
    """The backend of torch.distributed in use, else the configured one, in lower case; ``None`` if unknown.

    Only Lightning 1 reads PL_TORCH_DISTRIBUTED_BACKEND; 2.0 removed it (its changelog, "Removed")."""
    for section in (process.find(TrainingFacts), process.find(TrainerFacts)):
        if section and section.backend and section.backend.strip():
            return section.backend.strip().lower()
    environment, software = process.find(EnvironmentFacts), process.find(SoftwareFacts)
    value = environment.get("PL_TORCH_DISTRIBUTED_BACKEND") if environment else None
    lightning = software and (software.version("pytorch-lightning") or software.version("lightning"))
    if not value or not value.strip() or (lightning and not lightning.startswith("1.")):
        return None
    return value.strip().lower()


@once_per_rank
def processor_asked(process: Process) -> str | None:
    """The setting by which these ranks compute on the CPU although the host has GPUs; ``None`` without one.

    A run that has chosen its device has priority."""
    training = process.find(TrainingFacts)
    if training and training.device:
        return None if training.device.startswith("cuda") else f"the run computes on {training.device}"
    trainer = process.find(TrainerFacts)
    if trainer and (trainer.accelerator or "").lower() == "cpu":
        return "the accelerator asked for is cpu"
    environment = process.find(EnvironmentFacts)
    text = environment.get("CUDA_VISIBLE_DEVICES") if environment else None
    if text is not None and text.strip().lower() in HIDE_ALL:
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if environment and (environment.get("ACCELERATE_USE_CPU") or "").lower() in ("1", "true", "yes"):
        return "ACCELERATE_USE_CPU asks for the CPU"
    return None


@once_per_rank
def on_processor(process: Process) -> str | None:
    """Why these ranks compute on the CPU although the host has GPUs; ``None`` if they use GPUs."""
    software = process.find(SoftwareFacts)
    if software and software.torch and not software.torch.cuda and not software.torch.hip:
        return "this torch is built without CUDA"
    return processor_asked(process)


@once_per_rank
def uses_nccl(process: Process) -> bool:
    """Whether these ranks use NCCL: they use GPUs, and no other backend is configured."""
    backend = backend_asked(process)
    return on_processor(process) is None and (backend is None or "nccl" in backend)


def asks_to_share(process: Process) -> bool:
    """Whether settings let several ranks use one GPU: MPS, or NCCL's own switch for it."""
    nccl, environment = process.find(NcclFacts), process.find(EnvironmentFacts)
    by_nccl = nccl is not None and nccl.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return by_nccl or (environment is not None and bool(environment.get("CUDA_MPS_PIPE_DIRECTORY")))


def bound_per_task(process: Process) -> bool:
    """Whether SLURM gives each task its own GPUs.

    Each task may then see them as device 0 in a device cgroup, so equal lists do not mean equal GPUs."""
    launch, slurm = process.find(LaunchFacts), process.find(SlurmFacts)
    if launch and (done := _binding_done(launch)) is not None:
        return done
    if slurm and (slurm.gpus_per_task or (slurm.gpu_binding or "none").lower() not in ("none", "")):
        return True
    return launch is not None and states_binding(launch)


def states_binding(launch: LaunchFacts) -> bool:
    """Whether the variables of a task alone show that SLURM gives each task its own GPUs."""
    if (done := _binding_done(launch)) is not None:
        return done
    stated = [(name, launch.values[name].lower()) for name in _BINDING if launch.values.get(name)]
    return any(
        not value.endswith("none") and (name not in _OF_ANY_RESOURCE or "gpu" in value) for name, value in stated
    )


def _binding_done(launch: LaunchFacts) -> bool | None:
    """The binding that slurmd reports to the task, whatever was requested: ``gpu:per_task:1``, ``gpu:none``."""
    done = (launch.get("SLURMD_TRES_BIND") or "").lower()
    return not done.endswith("none") if "gpu" in done else None


_OF_ANY_RESOURCE = ("SLURM_TRES_BIND", "SLURM_TRES_PER_TASK")
_BINDING = frozenset(("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", *_OF_ANY_RESOURCE))
"""The variables that srun sets from its options (srun(1), "Output environment variables")."""


@once_per_rank
def has_own_gpus(process: Process) -> bool:
    """Whether SLURM gives this rank its own GPUs; ranks that torchrun starts inside a task share those of the task."""
    launch = process.find(LaunchFacts)
    return not (launch and launch.get("TORCHELASTIC_RUN_ID")) and bound_per_task(process)


def local_rank_of(rank: Process) -> int | None:
    """The local rank; 0 for a lone process, ``None`` if the launcher does not set it."""
    launch = rank.find(LaunchFacts)
    if launch is None:
        return None
    if launch.local_rank is not None:
        return launch.local_rank
    return None if launch.running_together else 0


def device_of(rank: Rank) -> VisibleDevice | None:
    """The device that a rank uses according to its run, else that of its local rank, or the only one."""
    return None if on_processor(rank) else cuda_device_of(rank)


DEVICE_SECTIONS = (EnvironmentFacts, SoftwareFacts, TrainerFacts, TrainingFacts)
"""The sections besides those of the host and the launch that decide which device a rank uses."""


@once_per_rank
def cuda_device_of(rank: Process) -> VisibleDevice | None:
    """:func:`device_of` of a rank that does not compute on the CPU."""
    seen, training = visible_to(rank), rank.find(TrainingFacts)
    if seen is None:
        return None
    if training is None or training.device is None:
        return _addressed(seen.devices, local_rank_of(rank))
    named = _identified(training.device_id or "", rank.find(GpuFacts))
    return named or _addressed(seen.devices, ordinal_of(training.device))


def _identified(name: str, gpus: GpuFacts | None) -> VisibleDevice | None:
    for gpu in gpus.gpus if name and gpus else ():
        for device in (VisibleDevice(gpu), *(VisibleDevice(gpu, one) for one in gpu.mig_devices)):
            if _bare(name) == _bare(device.uuid):
                return device
        if gpu.bus_id and bus_key(name) == bus_key(gpu.bus_id) and not gpu.mig:
            return VisibleDevice(gpu)
    return None


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def ordinal_of(device: str) -> int | None:
    """The number in torch's name of a device: 1 for ``cuda:1``, 0 for ``cuda``; ``None`` for other devices."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    return int(number) if number.isdigit() else 0


def _addressed(devices: tuple[VisibleDevice, ...] | None, local_rank: int | None) -> VisibleDevice | None:
    if not devices:
        return None
    if len(devices) == 1:
        return devices[0]
    return devices[local_rank] if local_rank is not None and 0 <= local_rank < len(devices) else None


def gpu_of(rank: Rank) -> Gpu | None:
    """The GPU that a rank will use (see :func:`device_of`)."""
    device = device_of(rank)
    return device.gpu if device else None


class GpuSharers(NamedTuple):
    """A GPU of a host and the ranks that will use it; none if another job uses it, or no process."""

    gpu: Gpu
    ranks: tuple[int, ...]


Devices = Mapping[Rank, "VisibleDevice | None"]


def shares(local: LocalRanks, devices: Devices | None = None) -> list[GpuSharers]:
    """Every GPU of these hosts, with the ranks that will use it, even if they compute on the CPU.

    A lone process may start others by itself, and one with an unknown device may use any: each of them counts for all
    GPUs that it sees. A GPU that several containers of a machine show counts once. ``devices``: as from
    :func:`cuda_devices`, if they are known already."""
    found: dict[str, Gpu] = {}
    users: dict[str, list[int]] = {}
    known: set[tuple[int, int]] = set()
    for rank in local.members:
        facts = rank.find(GpuFacts)
        if facts is None:
            continue
        if (seen := (rank.host.index, id(facts))) not in known:
            known.add(seen)
            for gpu in facts.gpus:
                found.setdefault(_identity(rank, gpu), gpu)
        for gpu in _may_use(rank, facts, cuda_device_of(rank) if devices is None else devices[rank]):
            users.setdefault(_identity(rank, gpu), []).append(rank.number)
    return [GpuSharers(gpu, tuple(users.get(identity, ()))) for identity, gpu in found.items()]


def _identity(rank: Rank, gpu: Gpu) -> str:
    return gpu.uuid or f"{rank.host.index}/{gpu.index}"


def _may_use(rank: Rank, facts: GpuFacts, device: VisibleDevice | None) -> tuple[Gpu, ...]:
    if device and rank.find(TrainingFacts) is None:
        launch = rank.find(LaunchFacts)
        if launch and launch.running_together:
            return (device.gpu,)
        device = None
    visible = visible_to(rank)
    if visible is None or visible.size == 0:
        return ()
    if device:
        return (device.gpu,)
    return facts.gpus if visible.gpus is None else visible.gpus


def bus_key(bus_id: str | None) -> str:
    """A PCI address for comparisons: ``00000000:3B:00.0``, ``0000:3b:00.0`` and ``0000:3b:00`` are one device."""
    domain, _, rest = (bus_id or "").strip().lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


INITIAL_PID_NAMESPACE = 4026531836
"""Inode of the host's own PID namespace, PROC_PID_INIT_INO in Linux include/linux/proc_ns.h."""

_PRIVATE_NAMESPACES = 4026531837
"""Namespaces created later have inodes from this one (proc_ns.h, PROC_DYNAMIC_FIRST and above)."""


def process_ids(local: LocalRanks) -> dict[int, int]:
    """Process id -> rank, as the ranks see their own ids."""
    found = ((rank.find(ProcessFacts), rank.number) for rank in local.members)
    return {process.pid: number for process, number in found if process}


def sees_host_processes(local: LocalRanks) -> bool:
    """Whether the process ids of these ranks are those of the host, as NVML's are; in most containers they are not."""
    process = local.members[0].find(ProcessFacts) if local.members else None
    digits = "".join(filter(str.isdigit, (process.namespace("pid") or "") if process else ""))
    number = int(digits or 0)
    if number == INITIAL_PID_NAMESPACE or number >= _PRIVATE_NAMESPACES:
        return number == INITIAL_PID_NAMESPACE
    host = local.find(HostFacts)
    return host is not None and host.container is None


def is_foreign(process: GpuProcess, own: Mapping[int, int], host_ids: bool) -> bool | None:
    """Whether a process on a GPU is not a rank of the job (``own``: the ids of its ranks); ``None`` if unknown.

    Ranks in a private PID namespace see other ids than NVML (``host_ids`` is false)."""
    if not host_ids and process.name is None:
        return None
    return process.pid not in own


_DATA_CENTRE = lazy_compile(r"\b(?:Tesla|T4|G?[ABHLPV]\d{1,3}[A-Z]?)\b")
_DESKTOP = lazy_compile(r"GeForce|RTX|GTX|Quadro|TITAN|Laptop|Max-Q", re.IGNORECASE)


def is_data_centre(gpu: Gpu) -> bool:
    """Whether the model is a data center one (A100, H100, L40S, GB200, Tesla T4 …), by its name."""
    return bool(_DATA_CENTRE.search(gpu.name)) and not _DESKTOP.search(gpu.name)


def mebibytes(size: int | None) -> str:
    """Bytes in the units of nvidia-smi: ``512 MiB``, ``76.2 GiB``, or ``an unknown size``."""
    if size is None:
        return "an unknown size"
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


GpuSharersByHost = tuple[tuple[LocalRanks, tuple[GpuSharers, ...]], ...]
"""Hosts or machines, each with its GPUs."""

_BY_HOST: WeakKeyDictionary[Job, GpuSharersByHost] = WeakKeyDictionary()
_BY_MACHINE: WeakKeyDictionary[Job, GpuSharersByHost] = WeakKeyDictionary()
_CUDA_DEVICES: WeakKeyDictionary[Job, Devices] = WeakKeyDictionary()
_DEVICES: WeakKeyDictionary[Job, Devices] = WeakKeyDictionary()


def shares_by_host(job: Job) -> GpuSharersByHost:
    """:func:`shares` of every host, computed once for a job."""
    if job not in _BY_HOST:
        devices = cuda_devices(job)
        _BY_HOST[job] = tuple((local, tuple(shares(local, devices))) for local in job.by_host())
    return _BY_HOST[job]


def shares_by_machine(job: Job) -> GpuSharersByHost:
    """:func:`shares` of every machine, computed once for a job: containers of one machine show the same GPUs."""
    if job not in _BY_MACHINE:
        machines, devices = job.by_machine(), cuda_devices(job)
        alone = len(machines) == len(job.hosts)
        of_machines = ((local, tuple(shares(local, devices))) for local in machines)
        _BY_MACHINE[job] = shares_by_host(job) if alone else tuple(of_machines)
    return _BY_MACHINE[job]


def cuda_devices(job: Job) -> Devices:
    """:func:`cuda_device_of` of every rank whose host shows its GPUs, computed once for a job.

    The ranks of a host mostly differ in their local rank alone."""
    if job not in _CUDA_DEVICES:
        found: dict[Rank, VisibleDevice | None] = {}
        for _, same in job.each(GpuFacts, also=DEVICE_SECTIONS):
            training, seen = same.find(TrainingFacts), visible_to(same)
            if seen is None or (training is not None and training.device is not None):
                found.update(dict.fromkeys(same.members, cuda_device_of(same)))
            else:
                found.update((rank, _addressed(seen.devices, local_rank_of(rank))) for rank in same.members)
        _CUDA_DEVICES[job] = found
    return _CUDA_DEVICES[job]


def devices_of(job: Job) -> Devices:
    """:func:`device_of` of every rank, computed once for a job.

    The GPU of a rank that is known from a log only is unknown, though a table of its host may show all GPUs."""
    if job not in _DEVICES:
        devices, found = cuda_devices(job), dict[Rank, "VisibleDevice | None"]()
        for _, same in job.each(GpuFacts, also=DEVICE_SECTIONS):
            seen = any(same.find(section) is not None for section in (EnvironmentFacts, TrainingFacts))
            if seen and on_processor(same) is None:
                found.update((rank, devices[rank]) for rank in same.members)
        _DEVICES[job] = {rank: found.get(rank) for rank in job.ranks}
    return _DEVICES[job]


def hidden_of_gpus(local: LocalRanks, *fields: str) -> HiddenField | None:
    """The first note that NVML refused one of these ``fields``; one that does not exist for the card has no note."""
    facts = local.find(GpuFacts)
    notes = (facts.why_hidden(f"gpus.{field}") for field in fields) if facts else ()
    return next((note for note in notes if note), None)
