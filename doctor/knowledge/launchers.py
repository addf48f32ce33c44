"""Launchers and schedulers: the variables they set, the processes they run as, and how their logs look.

One row per launcher; code that identifies a process, derives a rendezvous or reads a log uses this table alone. Where
a lookup of variables is not enough, the row names a function as ``module:function``.

Sources: torch/distributed/elastic/agent/server/local_elastic_agent.py, slurm src/common/env.c,
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html, accelerate/utils/environment.py,
lightning/fabric/plugins/environments, sagemaker-training-toolkit, kubeflow/training-operator. Command lines:
torch/distributed/run.py, accelerate/commands/launch.py, deepspeed/launcher/runner.py, lightning/fabric/cli.py,
https://slurm.schedmd.com/srun.html, https://docs.open-mpi.org/en/main/man-openmpi/man1/mpirun.1.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Names = tuple[str, ...]
UNRANKED = 1_000
"""Precedence of rows that never count as the launcher of a process."""
_VARIABLES = "doctor.collectors.launch.rank_variables:"
_ABORTS_FIRST = ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "NCCL_ASYNC_ERROR_HANDLING=1")


def _names(text: str) -> Names:
    return tuple(text.split())


def _letters(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First SLURM step number that is not a step of srun: batch script, external and interactive step (slurm.h,
MAX_NORMAL_STEP_ID, SLURM_BATCH_SCRIPT and those next to it)."""
INTERACTIVE_JOBS = ("bash", "interactive")
"""SLURM job names that Lightning does not treat as a SLURM run (lightning/fabric/plugins/environments/slurm.py)."""


class ProcessCount(msgspec.Struct, frozen=True):
    """The variables by which a launcher counts the processes that run now.

    ``mark`` is the variable that ``LaunchFacts.running_together`` names. ``by_agent``: an agent starts the processes of
    a host, and its count overrides that of any launcher around it. ``in_step``: ``mark`` holds a SLURM step number,
    which batch scripts and Ray workers inherit too.
    """

    mark: str
    rank: str
    sizes: Names
    by_agent: bool = False
    in_step: bool = False


class OptionSyntax(msgspec.Struct, frozen=True):
    """``flags``: long names, with dashes, of options without a value; ``short``: letters to long names."""

    flags: Names
    short: Mapping[str, str] = {}


class AddedOption(msgspec.Struct, frozen=True):
    """An option, with a value, that a launcher gives the program itself, in front of those of the command.

    ``since``, ``until``: the first release of its distribution that does, and the first that does not. ``modules``:
    only if it is started as one of these. ``unless``: its own options, with dashes, with which it does not.
    """

    option: str
    since: str = ""
    until: str = ""
    modules: Names = ()
    unless: Names = ()


class LaunchCommand(msgspec.Struct, frozen=True):
    """How a launch file starts a launcher. Names of options are as users write them, without leading dashes.

    ``program``: the word for it in findings. ``calls``: the words that start it, the longest first; ``modules``: the
    same for ``python -m``. ``options``: those before the script; ``None``: it has none. ``starts``: the ranks of its
    host, or a task on each of several hosts. ``variables``: the option with NAME=VALUE for the tasks, and what
    separates several. ``several_values``: options may have more than one value, so they end at the first known program.

    ``variable_prefix``: instead of an option users may set the variable of this prefix and the name in capitals.
    ``processes``: the options with the processes of each host; ``all_processes``: of all hosts; ``included``: the
    option with the devices of a host (``host:0,1``). ``hosts``, ``node_rank``: the options with the number of hosts
    and that of this host. ``master``, ``port``: the options with address and port of the master; ``host_port``: the
    one with both. ``default_processes``, ``default_hosts``: the numbers without these options.

    ``tasks``: the option with the number of tasks, unless one of ``placement`` distributes them over hosts. ``parts``:
    options with which several commands form one job. ``device_ids``: the option with the GPUs of the host; ``cpu``:
    the one for training without any.

    ``rendezvous``: the option whose value, unless it is ``static``, names a rendezvous that assigns node ranks.
    ``standalone``: the option for a job of one host. ``assumes_rank_0``: without a node rank a host is host 0.
    ``assumes_loopback``: without a master's address the master is the same host. ``reaches_hosts``: it starts the
    processes of the other hosts itself. ``has_config``: a configuration file may hold any option. ``added``: what it
    gives the program itself.
    """

    program: str
    calls: Names = ()
    modules: Names = ()
    options: OptionSyntax | None = None
    starts: Literal["", "ranks", "tasks"] = "ranks"
    variables: tuple[str, str] = ("", "")
    several_values: bool = False
    variable_prefix: str | None = None
    processes: Names = ()
    default_processes: int | None = None
    all_processes: str = ""
    included: str = ""
    hosts: str = ""
    default_hosts: int | None = None
    node_rank: str = ""
    host_port: str = ""
    master: str = ""
    port: str = ""
    tasks: str = ""
    placement: Names = ()
    parts: Names = ()
    device_ids: str = ""
    cpu: str = ""
    rendezvous: str = ""
    standalone: str = ""
    assumes_rank_0: bool = False
    assumes_loopback: bool = False
    reaches_hosts: bool = False
    has_config: bool = False
    added: tuple[AddedOption, ...] = ()


SLURM_OPTIONS = OptionSyntax(
    _names(
        "overlap exclusive kill-on-bad-exit label unbuffered pty verbose quiet overcommit oversubscribe no-kill "
        "no-container-mount-home container-mount-home container-remap-root no-container-remap-root container-writable "
        "container-readonly no-container-entrypoint container-entrypoint disable-status multi-prog preserve-env "
        "test-only contiguous hold reboot spread-job use-min-nodes propagate no-requeue requeue parsable "
        "wait-all-nodes no-allocate help version mem-per-gpu-bind"
    ),
    _letters(
        "A=account a=array b=begin B=extra-node-info C=constraint c=cpus-per-task d=dependency D=chdir E=preserve-env "
        "e=error G=gpus H=hold i=input J=job-name K=kill-on-bad-exit k=no-kill l=label L=licenses M=clusters "
        "m=distribution N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos r=relative s=oversubscribe "
        "S=core-spec T=threads t=time u=unbuffered v=verbose W=wait w=nodelist X=disable-status x=exclude"
    ),
)
"""Options of srun, sbatch and salloc."""


class Launcher(msgspec.Struct, frozen=True):
    """One launcher or scheduler. Fields that list variables put the preferred name first.

    ``name``: the value of ``LaunchFacts.launcher``. ``source``: the name of its claim, if it is another one.
    ``precedence``: the launcher that a process reports is the detected one with the lowest number, so an inner launcher
    has a lower one than those around it. ``detected_by``: variables that only its processes have, one of which is set.
    A launcher without any is detected by ``detector``, a function of the row and the environment, or by a claimed rank
    that does not repeat that of a SLURM task.

    ``marks``: one of these is set if it claims something about the process. ``claim_reader``: the function of row and
    environment that derives the claim. ``tasks_per_node``: variables with SLURM's ``4(x2),3``. ``counts_hosts``: its
    rank and size count hosts, not processes. ``ignores_step``: its workers inherit a SLURM step that does not describe
    them. ``script_variables``: the rank and the size that user scripts read. ``exports``: NAME=VALUE that it sets.

    ``recognized_by``: how a rank inside a SLURM task shows that this launcher started it: by the mark of ``counts``, by
    being the reported launcher, or by a claim. ``program``: the word for it in findings, if it is not the name.
    ``is_script``: a process of the training script starts the others. ``ends_others``: its agent ends the ranks of its
    host if one of them fails. ``chooses_port``: it chooses MASTER_PORT itself,
    so any free port may be in use.

    ``job_variables`` identify the job in the scheduler, ``run_variables`` the run: both are equal in all processes.
    ``node_list``: variables with the hosts in rank order; ``node_list_source`` is their name in messages. ``endpoint``:
    the function of environment and identity that derives the store's endpoint instead. ``folds_hosts``: its host lists
    fold numbers (``node[1-3]``). ``status_command`` lists the hosts; ``daemon_log`` is the log of its daemon on a host.

    ``processes``: beginnings of the names of processes that start ranks; ``agent_modules``: modules that do
    (``python -m``), besides those of ``command``. ``parents``: exact names of parents that show that ``parent_program``
    started a process that has none of the variables. ``log_prefixes``: regular expressions of
    what it puts before a line, with groups named ``rank``, ``local_rank``, ``host``, ``pid`` or ``tag``. ``command``:
    how a launch file starts it.
    """

    name: str
    precedence: int = UNRANKED
    source: str = ""
    detected_by: Names = ()
    detector: str = ""
    marks: Names = ()
    rank: Names = ()
    world_size: Names = ()
    local_rank: Names = ()
    local_world_size: Names = ()
    node_rank: Names = ()
    node_count: Names = ()
    claim_reader: str = ""
    tasks_per_node: Names = ()
    counts_hosts: bool = False
    ignores_step: bool = False
    script_variables: Names = ()
    exports: Names = ()
    counts: ProcessCount | None = None
    recognized_by: Literal["", "counts", "launcher", "claim"] = ""
    program: str = ""
    is_script: bool = False
    ends_others: bool = False
    chooses_port: bool = False
    prefixes: Names = ()
    variables: Names = ()
    job_variables: Names = ()
    job_names: Names = ()
    run_variables: Names = ()
    node_list: Names = ()
    node_list_source: str = ""
    endpoint: str = ""
    folds_hosts: bool = True
    status_command: str = ""
    daemon_log: str = ""
    processes: Names = ()
    agent_modules: Names = ()
    parents: Names = ()
    parent_program: str = ""
    log_prefixes: Names = ()
    command: LaunchCommand | None = None

    @property
    def claim(self) -> str:
        """The name of its claim."""
        return self.source or self.name

    @property
    def title(self) -> str:
        """The word for it in findings."""
        return self.program or self.name


ENVIRONMENT = Launcher(
    "environment",
    marks=_names("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK"),
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("NODE_RANK",),
    variables=_names("MASTER_ADDR MASTER_PORT STANDALONE_PORT JPY_PARENT_PID"),
    processes=("python", "pt_main_thread"),
)
"""The plain variables that torch reads (``env://``), whoever sets them. A Python program may start ranks itself."""

LAUNCHERS = (
    Launcher(
        "torchrun",
        precedence=10,
        detected_by=("TORCHELASTIC_RUN_ID",),
        marks=("TORCHELASTIC_RUN_ID",),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        node_count=("GROUP_WORLD_SIZE",),
        exports=_ABORTS_FIRST,
        counts=ProcessCount("TORCHELASTIC_RUN_ID", "RANK", ("WORLD_SIZE",), by_agent=True),
        recognized_by="counts",
        # "_poll" in torch/distributed/elastic/multiprocessing/api.py reports the first exit code that is not 0, and the
        # agent then stops its workers.
        ends_others=True,
        chooses_port=True,
        prefixes=_names("TORCHELASTIC_ PET_"),
        variables=_names("ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"),
        run_variables=_names("TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"),
        # Since torch 2.5 torchrun calls itself pt_elastic (torch/distributed/run.py).
        processes=_names("torchrun pt_elastic"),
        parents=_names("torchrun pt_elastic"),
        # "[${role_name}${local_rank}]:", and templates with both ranks.
        log_prefixes=(
            r"\[[A-Za-z][\w.-]*?(?P<local_rank>\d{1,7})\|(?P<rank>\d{1,7})\]:? ?",
            r"\[(?!rank|Rank|RANK)[A-Za-z][A-Za-z_.-]*?(?P<local_rank>\d{1,7})\]: ?",
        ),
        command=LaunchCommand(
            "torchrun",
            calls=("torchrun",),
            modules=_names("torch.distributed.run torch.distributed.launch"),
            options=OptionSyntax(
                _names("standalone no-python module run-path use-env virtual-local-rank help"),
                _letters("m=module r=redirects"),
            ),
            variable_prefix="PET_",
            processes=("nproc-per-node",),
            default_processes=1,
            hosts="nnodes",
            default_hosts=1,
            node_rank="node-rank",
            host_port="rdzv-endpoint",
            master="master-addr",
            port="master-port",
            rendezvous="rdzv-backend",
            standalone="standalone",
            assumes_rank_0=True,
            assumes_loopback=True,
            # "config_from_args" in torch/distributed/run.py, of both releases: "--local_rank" up to 1.13.
            added=(
                AddedOption("--local-rank", since="2.0", modules=("torch.distributed.launch",), unless=("use-env",)),
                AddedOption("--local_rank", until="2.0", modules=("torch.distributed.launch",), unless=("use-env",)),
            ),
        ),
    ),
    Launcher(
        "slurm",
        precedence=60,
        marks=_names("SLURM_PROCID SLURM_NTASKS SLURM_STEP_NUM_TASKS"),
        rank=("SLURM_PROCID",),
        # The tasks of the step; of the job where there is no step.
        world_size=_names("SLURM_STEP_NUM_TASKS SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        node_count=_names("SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES"),
        tasks_per_node=_names("SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE"),
        script_variables=_names("SLURM_PROCID SLURM_NTASKS"),
        counts=ProcessCount("SLURM_STEP_ID", "SLURM_PROCID", _names("SLURM_STEP_NUM_TASKS SLURM_NTASKS"), in_step=True),
        program="srun",
        prefixes=_names("SLURM_ SLURMD_ SRUN_ SALLOC_ SBATCH_"),
        job_variables=_names("SLURM_JOB_ID SLURM_STEP_ID"),
        job_names=_names("SLURM_JOB_NAME SBATCH_JOB_NAME"),
        node_list=_names("SLURM_STEP_NODELIST SLURM_JOB_NODELIST"),
        node_list_source="SLURM's node list",
        processes=("slurmstepd", "srun"),
        command=LaunchCommand(
            "srun",
            calls=("srun",),
            options=SLURM_OPTIONS,
            starts="tasks",
            variables=("--export", ","),
            parts=_names("nodelist relative multi-prog het-group"),
        ),
    ),
    Launcher(
        "openmpi",
        precedence=40,
        # OMPI_COMM_WORLD_NODE_RANK counts processes on the node, so it is not the number of a node.
        marks=_names("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        script_variables=_names("OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
        counts=ProcessCount("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
        recognized_by="counts",
        program="mpirun",
        prefixes=("OMPI_COMM_",),
        variables=_names("OMPI_UNIVERSE_SIZE PMIX_RANK"),
        run_variables=_names("OMPI_MCA_ess_base_jobid PMIX_NAMESPACE"),
        endpoint="doctor.cluster.gather.plan:open_mpi_endpoint",
        processes=_names("mpirun mpiexec orterun orted prte"),
        # mpirun --tag-output (Open MPI 4 and 5, PRRTE), horovodrun, SageMaker.
        log_prefixes=(
            r"\[(?:(?:[\w.@-]+@)?\d+,)?(?P<rank>\d{1,7})\]<std(?:out|err|diag)>: ?",
            r"\[\d+,mpirank:(?P<rank>\d{1,7}),(?P<host>[\w.-]+)\]<std(?:out|err|diag)>: ?",
        ),
        command=LaunchCommand(
            "mpirun",
            calls=_names("mpirun mpiexec"),
            options=OptionSyntax(
                _names(
                    "allow-run-as-root oversubscribe report-bindings tag-output display-map display-allocation "
                    "nooversubscribe merge-stderr-to-stdout verbose quiet genvall timestamp-output help"
                ),
                _letters(
                    "n=np c=np np=np x=x H=host N=npernode npernode=npernode ppn=npernode hostfile=hostfile host=host "
                    "mca=mca"
                ),
            ),
            starts="tasks",
            variables=("-x", "\n"),
            tasks="np",
            placement=_names("npernode map-by"),
            several_values=True,
        ),
    ),
    Launcher(
        # MPICH, Intel MPI, MVAPICH2 and PALS.
        "mpich",
        precedence=50,
        source="pmi",
        marks=_names("PMI_RANK PMI_SIZE MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE PALS_RANKID"),
        rank=_names("PMI_RANK MV2_COMM_WORLD_RANK PALS_RANKID"),
        world_size=_names("PMI_SIZE MV2_COMM_WORLD_SIZE"),
        local_rank=_names("MPI_LOCALRANKID MV2_COMM_WORLD_LOCAL_RANK PALS_LOCAL_RANKID"),
        local_world_size=_names("MPI_LOCALNRANKS MV2_COMM_WORLD_LOCAL_SIZE PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        script_variables=_names("PMI_RANK PMI_SIZE"),
        counts=ProcessCount("PMI_SIZE", "PMI_RANK", ("PMI_SIZE",)),
        recognized_by="counts",
        program="mpirun",
        prefixes=_names("MPI_LOCAL MV2_COMM_ PMI_ PALS_"),
        processes=_names("hydra_pmi_proxy hydra_bstrap pmi_proxy"),
    ),
    Launcher(
        "lsf",
        precedence=30,
        detected_by=("JSM_NAMESPACE_RANK",),
        marks=_names("JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE"),
        rank=("JSM_NAMESPACE_RANK",),
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        script_variables=_names("JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE"),
        program="jsrun",
        prefixes=_names("LSB_ JSM_"),
        job_variables=("LSB_JOBID",),
        job_names=("LSB_JOBNAME",),
        processes=("jsm", "jsrun"),
    ),
    Launcher(
        "kubeflow",
        precedence=70,
        detector=_VARIABLES + "is_started_by_kubeflow",
        # Defaults of torchrun's arguments (torch/distributed/argparse_util.py), set in every pod.
        marks=_names("PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK"),
        claim_reader=_VARIABLES + "kubeflow_claim",
        counts_hosts=True,
        chooses_port=True,
        variables=("KUBERNETES_SERVICE_HOST",),
    ),
    Launcher(
        "ray",
        precedence=20,
        # Set in processes that a raylet starts; RAY_ADDRESS may be set in any shell. Ray Train adds the plain names.
        detected_by=_names("RAY_JOB_ID RAY_RAYLET_PID"),
        marks=_names("RAY_JOB_ID RAY_RAYLET_PID"),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("NODE_RANK",),
        ignores_step=True,
        exports=_ABORTS_FIRST,
        recognized_by="launcher",
        chooses_port=True,
        prefixes=("RAY_",),
        status_command="ray status",
        daemon_log="/tmp/ray/session_latest/logs/raylet.out",  # noqa: S108
        processes=("raylet", "ray::"),
        parents=("raylet",),
        parent_program="Ray",
        # "(RayTrainWorker pid=123, ip=10.0.0.2)"; vLLM: "(VllmWorkerProcess pid=123)".
        log_prefixes=(
            r"\((?:(?P<tag>[\w.:<>]+) )?pid=(?P<pid>\d{1,9})(?:, ip=(?P<host>[\w.:-]+))?(?:, [^)]*)?\) ?",
            r"\((?P<tag>raylet|autoscaler|gcs_server)(?:, [^)]*)?\) ?",
        ),
    ),
    Launcher(
        "sagemaker",
        precedence=80,
        detector=_VARIABLES + "has_all_marks",
        marks=_names("SM_HOSTS SM_CURRENT_HOST"),
        claim_reader=_VARIABLES + "sagemaker_claim",
        counts_hosts=True,
        recognized_by="launcher",
        chooses_port=True,
        # Without the user's hyperparameters (SM_HP_*), which may hold anything.
        variables=_names(
            "SM_HOSTS SM_CURRENT_HOST SM_NUM_GPUS SM_NUM_CPUS SM_NETWORK_INTERFACE_NAME SM_CURRENT_INSTANCE_TYPE"
        ),
    ),
    Launcher(
        "lightning",
        precedence=100,
        detector=_VARIABLES + "is_started_by_lightning",
        claim_reader=_VARIABLES + "lightning_claim",
        recognized_by="claim",
        is_script=True,
        chooses_port=True,
        prefixes=_names("LT_ PL_"),
        processes=_names("fabric lightning"),
        command=LaunchCommand(
            "fabric",
            calls=("fabric run model", "fabric run", "lightning run model", "lightning run"),
            options=OptionSyntax(_names("help")),
            processes=("devices",),
            hosts="num-nodes",
            default_hosts=1,
            node_rank="node-rank",
            master="main-address",
            port="main-port",
        ),
    ),
    Launcher(
        "accelerate",
        precedence=90,
        # Set by "accelerate launch" alone.
        detected_by=_names("ACCELERATE_MIXED_PRECISION ACCELERATE_DYNAMO_BACKEND"),
        marks=_names("ACCELERATE_MIXED_PRECISION ACCELERATE_DYNAMO_BACKEND"),
        rank=_names("RANK PMI_RANK OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_RANK"),
        world_size=_names("WORLD_SIZE PMI_SIZE OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE"),
        local_rank=_names("LOCAL_RANK MPI_LOCALRANKID OMPI_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK"),
        local_world_size=_names(
            "LOCAL_WORLD_SIZE MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE MV2_COMM_WORLD_LOCAL_SIZE"
        ),
        exports=_ABORTS_FIRST,
        recognized_by="claim",
        ends_others=True,
        chooses_port=True,
        prefixes=("ACCELERATE_",),
        processes=("accelerate",),
        parents=("accelerate",),
        parent_program="accelerate launch",
        command=LaunchCommand(
            "accelerate",
            calls=("accelerate launch", "accelerate-launch"),
            modules=("accelerate.commands.launch",),
            options=OptionSyntax(
                _names(
                    "quiet cpu multi-gpu tpu use-deepspeed use-fsdp use-megatron-lm use-parallelism-config "
                    "enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic dynamo-use-regional-compilation "
                    "same-network module no-python tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 "
                    "fp8-use-autocast-during-eval debug use-mps-device ipex use-xpu mps help"
                ),
                _letters("m=module q=quiet t=tee"),
            ),
            all_processes="num_processes",
            hosts="num_machines",
            node_rank="machine_rank",
            master="main_process_ip",
            port="main_process_port",
            device_ids="gpu_ids",
            cpu="cpu",
            rendezvous="rdzv_backend",
            has_config=True,
        ),
    ),
    Launcher(
        "llamafactory",
        claim_reader=_VARIABLES + "llamafactory_claim",
        variables=_names("FORCE_TORCHRUN NNODES NPROC_PER_NODE"),
        command=LaunchCommand(
            "llamafactory",
            calls=("llamafactory-cli train",),
            variable_prefix="",
            processes=("nproc-per-node",),
            hosts="nnodes",
            node_rank="node-rank",
            master="master-addr",
            port="master-port",
            assumes_rank_0=True,
        ),
    ),
    Launcher(
        "deepspeed",
        # "sigkill_handler" in deepspeed/launcher/launch.py.
        ends_others=True,
        processes=("deepspeed",),
        agent_modules=("deepspeed.launcher.launch",),
        parents=("deepspeed",),
        command=LaunchCommand(
            "deepspeed",
            calls=("deepspeed",),
            modules=_names("deepspeed deepspeed.launcher.runner"),
            options=OptionSyntax(
                _names(
                    "no-python no-local-rank module no-ssh-check no-ssh force-multi save-pid elastic-training "
                    "bind-cores-to-rank help"
                ),
                _letters("H=hostfile i=include e=exclude"),
            ),
            processes=_names("num_gpus num_accelerators"),
            included="include",
            hosts="num_nodes",
            node_rank="node_rank",
            master="master_addr",
            port="master_port",
            reaches_hosts=True,
            # "main" in deepspeed/launcher/launch.py, which neither the elastic agent nor the launchers of MPI and Slurm
            # in deepspeed/launcher/multinode_runner.py run.
            added=(AddedOption("--local_rank", unless=_names("no-local-rank elastic-training launcher autotuning")),),
        ),
    ),
    Launcher("pbs", job_variables=("PBS_JOBID",), job_names=("PBS_JOBNAME",)),
    Launcher("flux", job_variables=("FLUX_JOB_ID",)),
    Launcher(
        "azureml",
        variables=_names("AZ_BATCH_MASTER_NODE AZ_BATCHAI_MPI_MASTER_NODE AZUREML_EXPERIMENT_ID DLTS_JOB_ID"),
    ),
)
"""In the order in which their claims are listed."""
