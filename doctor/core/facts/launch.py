"""The launcher of this process, its identity, and its environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from doctor.core.facts.section import Level, Origin, Section, Variable

UNLIMITED = -1
"""A resource limit that is not set."""
T = TypeVar("T")


class _CachedValue(Generic[T]):
    """A ``functools.cached_property`` without the lock that it takes before Python 3.12, which costs more than the
    dictionaries below; checks read them of every rank."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._function.__name__] = self._function(instance)
        return value


class Claim(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The claim of one source about this process.

    ``source``: ``environment``, ``torchrun``, ``slurm``, ``openmpi``, ``pmi``, ``lsf``, ``kubeflow``, ``ray``,
    ``sagemaker``, ``lightning``, ``accelerate`` or ``llamafactory``. Sizes are counts of processes, ``node_count`` of
    hosts; a value that is not a number is ``None`` and remains in ``LaunchFacts.variables``.
    """

    source: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    node_count: int | None = None


class LaunchFacts(Section, frozen=True, kw_only=True, gc=True, dict=True):
    """The launcher and its variables, which differ from rank to rank.

    ``rank`` and ``world_size``: what this process would pass to torch (RANK and WORLD_SIZE, else the launcher's own).
    ``running_together``: the variable that shows that this process is one of several that run now; empty for a lone
    process, whatever variables are left over. ``ancestors``: names of the parent processes, nearest first.
    """

    key: ClassVar[str] = "launch"

    launcher: str = "none"
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    running_together: str = ""
    claims: tuple[Claim, ...] = ()
    variables: tuple[Variable, ...] = ()
    ancestors: tuple[str, ...] = ()

    @_CachedValue
    def values(self) -> dict[str, str]:
        """The launch variables by name; the first of duplicates. Cached, because checks read dozens per rank."""
        return {variable.name: variable.value for variable in reversed(self.variables)}

    @_CachedValue
    def filled(self) -> dict[str, str]:
        """The launch variables that are not empty: to torch, an empty variable is a missing one."""
        if all(map(str.strip, self.values.values())):
            return self.values
        return {name: value for name, value in self.values.items() if value.strip()}

    def get(self, name: str) -> str | None:
        """The value of the launch variable ``name``, or ``None`` if it is not set."""
        return self.values.get(name)

    def claim(self, source: str) -> Claim | None:
        """The claim of ``source``, or ``None`` if it makes none."""
        return next((claim for claim in self.claims if claim.source == source), None)


class EnvironmentFacts(Section, frozen=True, kw_only=True):
    """The other variables that steer training: NCCL, torch, Gloo, CUDA, allocator, threads, network libraries."""

    key: ClassVar[str] = "environment"

    variables: tuple[Variable, ...] = ()

    def get(self, name: str) -> str | None:
        """The value of ``name``, or ``None`` if it is not set."""
        return next((variable.value for variable in self.variables if variable.name == name), None)


class Listener(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The process that listens on a TCP port of this host. ``pid`` and ``process``: ``None`` without permission.

    ``is_ancestor``: it is this process or one of its parents. ``same_launcher``: the same torchrun, srun step or mpirun
    started it and this process, such as rank 0 of the same job.
    """

    address: str
    port: int
    pid: int | None = None
    process: str | None = None
    command: str | None = None
    is_ancestor: bool = False
    same_launcher: bool = False


class MasterFacts(Section, frozen=True, kw_only=True):
    """MASTER_ADDR as this process resolves it, and MASTER_PORT on this host. Missing if MASTER_ADDR is not set.

    ``is_local``: one of the resolved addresses is loopback or belongs to this host. ``interface`` and
    ``source_address``: what the kernel's routing table would use (queried without sending anything).
    ``seconds``: the duration of the lookup.
    """

    key: ClassVar[str] = "master"

    address: str = ""
    port: int | None = None
    resolved: tuple[str, ...] = ()
    error: str | None = None
    seconds: float | None = None
    is_local: bool | None = None
    interface: str | None = None
    source_address: str | None = None
    listener: Listener | None = None


class Limit(msgspec.Struct, frozen=True, gc=False):
    """A resource limit: bytes for ``locked_memory`` and ``stack``, counts for the others; :data:`UNLIMITED` is -1."""

    name: str
    soft: int
    hard: int


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """A Linux namespace of the process: ``net``, ``ipc``, ``pid``, ``mnt``, ``uts``, ``user``, ``cgroup``."""

    kind: str
    identity: str


class ProcessFacts(Section, frozen=True, kw_only=True):
    """This process: limits (``locked_memory``, ``open_files``, ``processes``, ``stack``), affinity, namespaces.

    ``pid`` is the number inside its own PID namespace; ``shm_device`` the device number of /dev/shm, by which NCCL
    decides whether two ranks share it. ``interactive``: IPython, Jupyter or a bare interpreter prompt.
    ``can_lock_memory``: it has CAP_IPC_LOCK in the initial user namespace, so ``locked_memory`` does not bind it.
    ``mps_daemon``: a control daemon listens in CUDA_MPS_PIPE_DIRECTORY; ``None`` if that is not set.
    ``forked_after_cuda``: torch, where this process has it loaded, says that CUDA was in use before a fork made it.
    """

    key: ClassVar[str] = "process"

    pid: int = 0
    user_id: int | None = None
    interactive: bool = False
    cpus_allowed: tuple[int, ...] = ()
    limits: tuple[Limit, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    shm_device: int | None = None
    threads_per_process: int | None = None
    can_lock_memory: bool | None = None
    forked_after_cuda: bool | None = None
    mps_daemon: bool | None = None

    def limit(self, name: str) -> Limit | None:
        """The limit ``name``, or ``None`` where it could not be read."""
        for limit in self.limits:  # of every rank; a generator would cost twice as much
            if limit.name == name:
                return limit
        return None

    def namespace(self, kind: str) -> str | None:
        """The identity of the namespace ``kind``, or ``None`` where it could not be read."""
        return next((space.identity for space in self.namespaces if space.kind == kind), None)


class TrainerFacts(Section, frozen=True, kw_only=True):
    """Arguments of the Trainer that are known before it runs: LT_* (``fabric run``) and PL_TRAINER_* variables.

    ``arguments`` keeps every argument by its own name, lower case. Missing if none is set."""

    key: ClassVar[str] = "trainer"

    source: str = ""
    devices: int | None = None
    node_count: int | None = None
    strategy: str | None = None
    accelerator: str | None = None
    backend: str | None = None
    arguments: tuple[Variable, ...] = ()


class SlurmFacts(Section, frozen=True, kw_only=True):
    """The output of ``scontrol show job`` for this job. Missing outside SLURM or without scontrol; times in seconds.

    ``gpus_per_task`` and ``gpu_binding`` come from the job's record or from the step's environment.
    """

    key: ClassVar[str] = "slurm"
    level: ClassVar[Level] = "host"

    job_id: str = ""
    state: str | None = None
    partition: str | None = None
    node_count: int | None = None
    node_list: str | None = None
    task_count: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gpu_binding: str | None = None
    time_limit: int | None = None
    batch: bool | None = None


class SiteProfileFacts(Section, frozen=True, kw_only=True):
    """The site profile that the user chose to compare the environment with. Missing if none was chosen."""

    key: ClassVar[str] = "site_profile"
    origin: ClassVar[Origin] = "chosen"

    name: str = ""
