"""Cases that test a check: healthy jobs, and the same jobs with one fault.

``healthy()`` builds a plausible job (torchrun, H100 hosts or hosts without GPU); the methods of :class:`JobBuilder`
return altered copies. Only tests and benchmarks build cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from doctor.core import facts
from doctor.core.facts import (
    EnvironmentFacts,
    GpuFacts,
    HostFacts,
    LaunchFacts,
    Missing,
    MissingReason,
    NcclFacts,
    Section,
    Variable,
)
from doctor.core.finding import Severity
from doctor.core.job import Job, LastSeen, Member, build_job

GIB = 1 << 30

T = TypeVar("T", Variable, facts.Setting)


class JobBuilder(msgspec.Struct, frozen=True):
    """Builds a job from its processes and from facts of the whole job."""

    members: tuple[Member, ...]
    world_size: int | None = None
    absent: tuple[int, ...] = ()
    last_seen: tuple[LastSeen, ...] = ()
    expected: JobBuilder | None = None
    evidence: facts.LogEvidence | None = None

    def job(self) -> Job:
        """Return the job as checks get it."""
        expected = self.expected.job() if self.expected else None
        return build_job(
            self.members,
            world_size=self.world_size,
            absent=self.absent,
            last_seen=self.last_seen,
            expected=expected,
            evidence=self.evidence,
        )

    def expecting(self, worked: JobBuilder) -> JobBuilder:
        """Return the same job with the baseline ``worked``."""
        return msgspec.structs.replace(self, expected=worked)

    def put(
        self, section: Section, *, ranks: Iterable[int] | None = None, hosts: Iterable[str] | None = None
    ) -> JobBuilder:
        """Return the same job with this section on ``ranks`` (host section: on their hosts) or ``hosts``, or on all."""
        return self._map(type(section), lambda _: section, ranks, hosts)

    def alter(
        self,
        section: type[Section],
        *,
        ranks: Iterable[int] | None = None,
        hosts: Iterable[str] | None = None,
        **changes: object,
    ) -> JobBuilder:
        """Return the same job with fields of a section changed. A callable value gets the old value of its field."""

        def changed(old: Section | Missing | None) -> Section:
            base = old if isinstance(old, section) else section()
            values = {name: new(getattr(base, name)) if callable(new) else new for name, new in changes.items()}
            return msgspec.structs.replace(base, **values)

        return self._map(section, changed, ranks, hosts)

    def drop(
        self,
        section: type[Section],
        lack: MissingReason = MissingReason.ABSENT,
        reason: str = "not there",
        *,
        ranks: Iterable[int] | None = None,
        hosts: Iterable[str] | None = None,
    ) -> JobBuilder:
        """Return the same job without a section."""
        return self._map(section, lambda _: Missing(lack, reason), ranks, hosts)

    def environ(self, *, ranks: Iterable[int] | None = None, **variables: str) -> JobBuilder:
        """Return the same job with environment variables set on ``ranks``; NCCL_* ones also as effective settings."""
        added = tuple(Variable(name, value) for name, value in variables.items())
        sketch = self.alter(EnvironmentFacts, ranks=ranks, variables=lambda old: _replaced(old, added))
        settings = tuple(facts.Setting(name, value) for name, value in variables.items() if name.startswith("NCCL_"))
        if not settings:
            return sketch
        return sketch.alter(NcclFacts, ranks=ranks, settings=lambda old: _replaced(old, settings))

    def launched(
        self, *, ranks: Iterable[int] | None = None, without: tuple[str, ...] = (), **variables: str
    ) -> JobBuilder:
        """Return the same job with launch variables (RANK, SLURM_…) set on ``ranks``, and ``without`` removed."""
        added = tuple(Variable(name, value) for name, value in variables.items())

        def change(old: tuple[Variable, ...]) -> tuple[Variable, ...]:
            return _replaced(tuple(variable for variable in old if variable.name not in without), added)

        return self.alter(LaunchFacts, ranks=ranks, variables=change)

    def by_srun(self) -> JobBuilder:
        """Return the same job started by srun, one task per rank: with SLURM's variables instead of torchrun's."""
        hosts = len({_host_name(member) for member in self.members})
        return self._map(LaunchFacts, lambda old: _as_task(old, len(self.members), hosts), None, None)

    def gpu(self, index: int, *, hosts: Iterable[str] | None = None, **changes: object) -> JobBuilder:
        """Return the same job with fields of one GPU changed on ``hosts`` (else on all)."""

        def change(gpus: tuple[facts.Gpu, ...]) -> tuple[facts.Gpu, ...]:
            return tuple(msgspec.structs.replace(gpu, **changes) if gpu.index == index else gpu for gpu in gpus)

        return self.alter(GpuFacts, hosts=hosts, gpus=change)

    def only(self, ranks: Iterable[int], *, absent: Iterable[int] = ()) -> JobBuilder:
        """Return the same job of which only ``ranks`` reported; ``absent`` were waited for, the others were not."""
        kept = set(ranks)
        world = self.world_size or len(self.members)
        members = tuple(member for member in self.members if member.rank in kept)
        return msgspec.structs.replace(self, members=members, world_size=world, absent=tuple(absent))

    def fell_silent(self, rank: int, host: str, step: str) -> JobBuilder:
        """Return the same job, of which ``rank`` reported last at ``step``; see :class:`doctor.core.job.LastSeen`."""
        return msgspec.structs.replace(self, last_seen=(*self.last_seen, LastSeen(rank, host, step)))

    def renumbered(self, old: int, new: int) -> JobBuilder:
        """Return the same job in which the process of rank ``old`` claims to be rank ``new``."""
        members = tuple(member._replace(rank=new) if member.rank == old else member for member in self.members)
        return msgspec.structs.replace(self, members=members)

    def _map(
        self,
        section: type[Section],
        change: Callable[[Section | Missing | None], Section | Missing],
        ranks: Iterable[int] | None,
        hosts: Iterable[str] | None,
    ) -> JobBuilder:
        chosen = self._chosen(section, ranks, hosts)
        members = tuple(
            member._replace(sections={**member.sections, section.key: change(member.sections.get(section.key))})
            if position in chosen
            else member
            for position, member in enumerate(self.members)
        )
        return msgspec.structs.replace(self, members=members)

    def _chosen(self, section: type[Section], ranks: Iterable[int] | None, hosts: Iterable[str] | None) -> set[int]:
        names = None if hosts is None else set(hosts)
        if ranks is not None:
            numbers = set(ranks)
            if section.level == "rank":
                return {position for position, member in enumerate(self.members) if member.rank in numbers}
            names = {_host_name(member) for member in self.members if member.rank in numbers}
        return {
            position for position, member in enumerate(self.members) if names is None or _host_name(member) in names
        }


class Passes(msgspec.Struct, frozen=True):
    """A healthy case: the check must yield no finding of severity error or warning; ``silent``: none at all."""

    name: str
    sketch: JobBuilder
    silent: bool = True


class Fails(msgspec.Struct, frozen=True):
    """A faulty case: the check must find the fault and name exactly ``ranks`` (or ``hosts``), with at least its
    declared severity, unless ``severity`` is set."""

    name: str
    sketch: JobBuilder
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    severity: Severity | None = None


def _as_task(old: Section | Missing | None, world: int, hosts: int) -> Section:
    """Return the launch facts of a task of srun, with MASTER_ADDR and MASTER_PORT as a batch script sets them."""
    old = old if isinstance(old, LaunchFacts) else LaunchFacts()
    rank, local_rank, node, per_host = old.rank or 0, old.local_rank or 0, old.node_rank or 0, world // hosts
    numbers = {"SLURM_JOB_ID": 4242, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": local_rank}
    numbers |= {"SLURM_NODEID": node, "SLURM_NTASKS": world, "SLURM_STEP_NUM_TASKS": world, "SLURM_NNODES": hosts}
    numbers |= {"SLURM_NTASKS_PER_NODE": per_host, "SLURM_STEP_NUM_NODES": hosts}
    words = {"SLURM_JOB_NAME": "train", "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{hosts})"}
    words["SLURM_STEP_NODELIST"] = f"node[0-{hosts - 1}]" if hosts > 1 else "node0"
    kept = {name: value for name in ("MASTER_ADDR", "MASTER_PORT") if (value := old.get(name)) is not None}
    variables = {**{name: str(number) for name, number in numbers.items()}, **words, **kept}
    return LaunchFacts(
        launcher="slurm",
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=per_host,
        node_rank=node,
        running_together="SLURM_STEP_ID" if world > 1 else "",
        claims=(facts.Claim("slurm", rank, world, local_rank, per_host, node, hosts),),
        variables=tuple(Variable(name, variables[name]) for name in sorted(variables)),
        ancestors=("slurmstepd",),
    )


def _host_name(member: Member) -> str:
    host = member.sections.get(HostFacts.key)
    return host.hostname if isinstance(host, HostFacts) else ""


def _replaced(old: tuple[T, ...], added: tuple[T, ...]) -> tuple[T, ...]:
    by_name = {item.name: item for item in old + added}
    return tuple(by_name[name] for name in sorted(by_name))


def healthy(hosts: int = 1, per_host: int = 2, *, gpus: int | None = None, rdma: int = 0) -> JobBuilder:
    """Return a healthy torchrun job of ``hosts`` x ``per_host`` ranks (one process: without launcher).

    ``gpus`` per host: as many as ranks by default, 0 for hosts without GPU; ``rdma``: InfiniBand ports per host. Hosts
    are named node0, node1 …"""
    gpus = per_host if gpus is None else gpus
    world = hosts * per_host
    shared = _shared_sections(gpus)
    members = []
    for host in range(hosts):
        local = {**shared, **_host_sections(host, hosts, gpus, rdma)}
        for local_rank in range(per_host):
            rank = host * per_host + local_rank
            own = _rank_sections(rank, local_rank, host, world, per_host, hosts)
            members.append(Member(rank, {**local, **own}))
    return JobBuilder(tuple(members))


def logged(*lines: str, name: str = "job.log") -> JobBuilder:
    """Return a job of which only these lines of one log remain, read as ``doctor diagnose`` reads them."""
    from doctor.postmortem.job_assembly import sketch_of_lines

    members, evidence, world = sketch_of_lines(lines, name)
    return JobBuilder(members, world_size=world, evidence=evidence)


def _shared_sections(gpus: int) -> dict[str, Section | Missing]:
    packages = {"lightning": "2.6.1", "torch": "2.8.0", "nvidia-nccl-cu12": "2.27.3"}
    nccl_path = "/opt/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
    nccl = facts.NcclLibrary(nccl_path, "2.27.3", "wheel nvidia-nccl-cu12", chosen=True)
    torch = facts.TorchBuild("2.8.0", backends=("gloo",))
    if gpus:
        torch = facts.TorchBuild("2.8.0", cuda="12.8", nccl="2.27.3", backends=("gloo", "nccl"))
    return {
        **{key: section() for key, section in facts.SECTIONS.items() if section.origin == "collected"},
        EnvironmentFacts.key: EnvironmentFacts(variables=(Variable("OMP_NUM_THREADS", "4"),)),
        facts.SoftwareFacts.key: facts.SoftwareFacts(
            python="3.11.7",
            prefix="/opt/env",
            packages=tuple(facts.Package(name, release) for name, release in packages.items()),
            requirements=(facts.Requirement("lightning", "torch", ">=2.1.0,<4.0"),),
            torch=torch,
            nccl_libraries=(nccl,) if gpus else (),
        ),
        "trainer": Missing(MissingReason.ABSENT, "no Trainer variable is set"),
        "slurm": Missing(MissingReason.ABSENT, "not inside a SLURM job"),
    }


def _host_sections(host: int, hosts: int, gpus: int, rdma: int) -> dict[str, Section | Missing]:
    name = f"node{host}"
    address = f"10.0.0.{host + 1}" if host < 250 else f"10.0.{host // 250}.{host % 250 + 1}"
    loopback = facts.Address("inet", "127.0.0.1", 8)
    nothing = Missing(MissingReason.ABSENT, "no NVIDIA driver")
    return {
        HostFacts.key: HostFacts(
            hostname=name,
            fqdn=name,
            machine_id=f"machine-{host}",
            boot_id=f"boot-{host}",
            kernel="6.8.0-45-generic",
            architecture="x86_64",
            distribution="Ubuntu 24.04 LTS",
            names=(facts.NameLookup(name, "hostname", (address,), seconds=0.001),),
            reverse=(facts.ReverseLookup(address, name, seconds=0.001),),
            cpu_count=96,
            cpu_governor="performance",
            ram_total=1024 * GIB,
            ram_available=1000 * GIB,
            shm=facts.Filesystem("/dev/shm", 512 * GIB, 512 * GIB, "tmpfs"),  # noqa: S108 - the mount that NCCL uses
            nccl_shm_files=0,
            nccl_shm_bytes=0,
            pids_used=800,
            port_range=(32768, 60999),
            unprivileged_port_start=1024,
            iommu_groups=0,
            clock_synchronised=True,
        ),
        facts.InterfaceFacts.key: facts.InterfaceFacts(
            interfaces=(
                facts.Interface("lo", "loopback", mtu=65536, physical=False, addresses=(loopback,)),
                facts.Interface(
                    "eth0", mtu=9000, speed=100_000, addresses=(facts.Address("inet", address, 16),), driver="mlx5_core"
                ),
            ),
            routes=(facts.Route("0.0.0.0/0", "eth0", "10.0.255.254"), facts.Route("10.0.0.0/16", "eth0")),
            segments_sent=10_000_000,
            segments_retransmitted=100,
        ),
        facts.RdmaFacts.key: _rdma(host, rdma) if rdma else Missing(MissingReason.ABSENT, "no RDMA device"),
        GpuFacts.key: _gpus(host, gpus) if gpus else nothing,
        facts.DriverFacts.key: _drivers(gpus, rdma) if gpus else nothing,
        facts.KernelLogFacts.key: facts.KernelLogFacts(job_started=863000.0),
    }


def _rank_sections(
    rank: int, local_rank: int, host: int, world: int, per_host: int, hosts: int
) -> dict[str, Section | Missing]:
    process = facts.ProcessFacts(
        pid=10_000 + local_rank,
        user_id=1000,
        cpus_allowed=tuple(range(96)),
        limits=(
            facts.Limit("locked_memory", -1, -1),
            facts.Limit("open_files", 65536, 1048576),
            facts.Limit("processes", 500_000, 500_000),
            facts.Limit("stack", 8 << 20, -1),
        ),
        namespaces=tuple(facts.Namespace(kind, f"{kind}:[{host}]") for kind in ("ipc", "mnt", "net", "pid", "uts")),
        shm_device=23,
        threads_per_process=4,
    )
    if world == 1:
        no_master = Missing(MissingReason.ABSENT, "MASTER_ADDR is not set")
        return {
            LaunchFacts.key: LaunchFacts(),
            facts.ProcessFacts.key: process,
            facts.MasterFacts.key: no_master,
        }
    sizes = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": per_host}
    sizes |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": hosts}
    words = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    words["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    variables = {**{name: str(value) for name, value in sizes.items()}, **words}
    claim = facts.Claim("torchrun", rank, world, local_rank, per_host, host, hosts)
    launch = LaunchFacts(
        launcher="torchrun",
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=per_host,
        node_rank=host,
        running_together="TORCHELASTIC_RUN_ID",
        claims=(claim, msgspec.structs.replace(claim, source="environment", node_rank=None, node_count=None)),
        variables=tuple(Variable(name, variables[name]) for name in sorted(variables)),
        ancestors=("torchrun", "bash"),
    )
    master = facts.MasterFacts(
        address="node0",
        port=29500,
        resolved=("10.0.0.1",),
        seconds=0.001,
        is_local=host == 0,
        interface="lo" if host == 0 else "eth0",
        source_address=None,
    )
    return {LaunchFacts.key: launch, facts.ProcessFacts.key: process, facts.MasterFacts.key: master}


def _gpus(host: int, count: int) -> GpuFacts:
    links = tuple(facts.NvLink(link, active=True, remote="switch", errors=0, fatal=0) for link in range(18))
    gpus = tuple(
        facts.Gpu(
            index=index,
            uuid=f"GPU-{host:08x}-0000-0000-0000-{index:012x}",
            name="NVIDIA H100 80GB HBM3",
            bus_id=f"0000:{0x10 + index:02x}:00.0",
            minor=index,
            compute_capability="9.0",
            memory_total=80 * GIB,
            memory_used=GIB // 2,
            memory_free=80 * GIB - GIB // 2,
            processes=(),
            utilization=0,
            temperature=32,
            power=70_000,
            power_limit=700_000,
            clock=1980,
            clock_max=1980,
            clock_reasons=(),
            compute_mode="default",
            persistence=True,
            ecc=True,
            ecc_volatile_uncorrected=0,
            ecc_aggregate_uncorrected=0,
            remapped_correctable=0,
            remapped_uncorrectable=0,
            remap_pending=False,
            remap_failed=False,
            pcie_generation=5,
            pcie_generation_max=5,
            pcie_width=16,
            pcie_width_max=16,
            mig=False,
            numa_node=0 if index < 4 else 1,
            nvlinks=links,
            fabric=facts.Fabric("completed", 0),
        )
        for index in range(count)
    )
    pairs = tuple(
        facts.PeerLink(first, second, "nvlink", "ok", "ok")
        for first in range(count)
        for second in range(first + 1, count)
    )
    return GpuFacts(driver_version="570.124.06", cuda_version="12.8", nvml_version="12.570", gpus=gpus, links=pairs)


def _drivers(gpus: int, rdma: int) -> facts.DriverFacts:
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{index}" for index in range(gpus))]
    modules = ["nvidia", "nvidia_uvm"]
    if rdma:
        files += [f"/dev/infiniband/uverbs{index}" for index in range(rdma)]
        modules += ["ib_uverbs", "mlx5_ib", "nvidia_peermem"]
    return facts.DriverFacts(
        kernel_driver="570.124.06",
        pci_gpus=tuple(f"0000:{0x10 + index:02x}:00.0" for index in range(gpus)),
        nvswitches=4 if gpus == 8 else 0,
        device_files=tuple(sorted(files)),
        modules=tuple(sorted(modules)),
        services=(facts.Service("fabric-manager", True, "570.124.06"), facts.Service("persistenced", True)),
        imex_channels=0,
    )


def _rdma(host: int, count: int) -> facts.RdmaFacts:
    devices = tuple(
        facts.RdmaDevice(
            name=f"mlx5_{index}",
            ports=(
                facts.RdmaPort(
                    number=1,
                    state="ACTIVE",
                    physical_state="LinkUp",
                    rate=400.0,
                    link_layer="InfiniBand",
                    lid=100 + host * 16 + index,
                    gids=(facts.Gid(0, f"fe80:0000:0000:0000:0000:0000:{host:04x}:{index:04x}", "IB"),),
                    counters=(facts.Counter("link_downed", 0), facts.Counter("symbol_error", 0)),
                ),
            ),
            board="MCX75310AAS-NEAT",
            firmware="28.39.1002",
            driver="mlx5_core",
            numa_node=0 if index < 4 else 1,
            has_uverbs=True,
        )
        for index in range(count)
    )
    return facts.RdmaFacts(devices=devices, peer_memory=("nvidia_peermem",), dma_buf=True, verbs_library=True)
