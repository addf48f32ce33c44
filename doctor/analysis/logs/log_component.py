"""The component that logged a line, by the names that it prints, and what makes it log more."""

from __future__ import annotations

from typing import NamedTuple

from doctor.core.facts import Event
from doctor.core.text import lazy_compile


class LogComponent(NamedTuple):
    """A part of the software: its ``name``, and what to ``collect`` for its errors: a command or a sentence."""

    name: str
    collect: str = ""


_NCCL = "`export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET NCCL_DEBUG_FILE=nccl.%h.%p.log`"
_DMESG = "`dmesg -T | tail -n 100` on that host."
_TORCH = "`export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_SHOW_CPP_STACKTRACES=1`"
_MPI = "the whole text that mpirun printed below the first `-----` line, and `ompi_info --parsable --version all`"
_FROM_PRINTED_NAMES: tuple[tuple[LogComponent, str], ...] = (
    (LogComponent("aws-ofi-nccl", _NCCL + " and `export FI_LOG_LEVEL=warn`"), r"\bNET/OFI\b"),
    (LogComponent("NCCL", _NCCL), r"\bNCCL (?:WARN|INFO|ERROR|TRACE)\b|\bnccl[A-Z]\w{3,40}\b"),
    (
        LogComponent("oneCCL", "`export CCL_LOG_LEVEL=info FI_LOG_LEVEL=warn`"),
        r"\|CCL_\w{1,10}\||\boneCCL\b|\bCCL_\w{1,40}",
    ),
    (
        LogComponent(
            "HCCL", "the plog folder of that process (`~/ascend/log/debug/plog`) with `ASCEND_GLOBAL_LOG_LEVEL=1`"
        ),
        r"\bHCCL\b|\bE[A-Z]\d{4}: |\bACL(?:RT)?[ _]|\[hccl",
    ),
    (
        LogComponent("UCX", "`export UCX_LOG_LEVEL=info`"),
        r"\bUCX +(?:FATAL|ERROR|WARN|DIAG)|\buc[xpt]_\w",
    ),
    (LogComponent("libfabric", "`export FI_LOG_LEVEL=info`"), r"\blibfabric:\d|\bfi_[a-z]{3,20}\b"),
    (LogComponent("Gloo", _TORCH), r"\bgloo/|\bGloo\b|\bgloo::"),
    (
        LogComponent("SLURM", "`sacct -j JOB --format=JobID,State,ExitCode,DerivedExitCode,Reason,NodeList`"),
        r"\b(?:srun|sbatch|salloc|slurmstepd|slurmd|slurmctld)\b",
    ),
    (
        LogComponent("Open MPI", _MPI),
        r"\b(?:mpirun|mpiexec|orterun|orted|prterun|prted)\b|\bPM[Ii][xX]\b|\bORTE\b|\bPRTE\b|\bopal_|\bompi_|\bMPI_ERR",
    ),
    (LogComponent("MPICH", "`export HYDRA_DEBUG=1`"), r"\bHYD[TUS]?_|\[proxy:|\bMPIDI?_|^Abort\(\d+\) on node"),
    (LogComponent("MPI", "the whole text that mpirun printed"), r"\bMPI_[A-Z]"),
    (
        LogComponent("ROCm", "`export AMD_LOG_LEVEL=3` and `dmesg -T | grep -i amdgpu`"),
        r"\bhip[A-Z]\w+|\bHIP |\bHSA_|\bROCm?\b|\bMIOpen",
    ),
    (
        LogComponent("CUDA", "`export CUDA_LAUNCH_BLOCKING=1` and `dmesg -T | grep -iE 'xid|nvrm'`"),
        r"\bcuda[A-Z]\w+|\bcu(?:BLAS|DNN|FFT|SPARSE|SOLVER)\b|\bCUBLAS_|\bCUDNN_|\bcublas|\bcudnn|\bCUDA\b",
    ),
    (
        LogComponent("torch.distributed", _TORCH),
        r"\bc10d\b|\bProcessGroup\w{2,12}\b|\bTCPStore\b|\btorch[./]distributed\b|\bDist(?:Store|Network|Backend)?Error",
    ),
    (
        LogComponent("Ray", "`ray logs cluster` and the files in `/tmp/ray/session_latest/logs` of that host"),
        r"\bray[./:]|\braylet\b|\bgcs_",
    ),
    (LogComponent("DeepSpeed"), r"(?i)\bdeepspeed\b"),
    (LogComponent("Accelerate"), r"\baccelerate[./]"),
    (LogComponent("Lightning"), r"\b(?:pytorch_)?lightning[./]"),
    (LogComponent("Transformers"), r"\btransformers[./]"),
    (LogComponent("Megatron"), r"(?i)\bmegatron\b"),
    (LogComponent("TensorFlow"), r"\btensorflow/"),
    (LogComponent("XLA"), r"\bxla/"),
    (LogComponent("Triton"), r"\btriton[./]"),
    (LogComponent("Weights & Biases", "`wandb/debug-internal.log`"), r"\bwandb: "),
    (LogComponent("PyTorch", _TORCH), r"\bc10::|\bat::|\btorch[./]|\bINTERNAL ASSERT FAILED"),
    (
        LogComponent("Kubernetes", "`kubectl describe pod POD` and `kubectl logs --previous POD`"),
        r"\bkubelet\b|\bkubectl\b|\bBack-?[oO]ff\b",
    ),
    (LogComponent("the NVIDIA driver", _DMESG), r"\bNVRM\b|\bnvidia-(?:smi|persistenced|fabricmanager)\b|\bNVML\b"),
    (LogComponent("the Linux kernel", _DMESG), r"\bkernel: |^\[ *\d{1,9}\.\d{6}\]|\bBUG: |\bmlx[45]_core\b|\bamdgpu\b"),
    (
        LogComponent(
            "the C++ runtime", "`export TORCH_SHOW_CPP_STACKTRACES=1`, and a core file (`ulimit -c unlimited`)"
        ),
        r"\bterminate called|\bwhat\(\): ",
    ),
    (LogComponent("Rust code", "`export RUST_BACKTRACE=1`"), r"^thread '.{0,80}' panicked at"),
    (LogComponent("Go code"), r"^panic: |^goroutine \d"),
    (
        LogComponent("the compiler", "the lines of the compiler above the first error"),
        r"\bninja: |\bnvcc\b|\bld: |\bcollect2: |\bfatal error: ",
    ),
    (
        LogComponent("the shell", "the script, with `set -x` in its first line"),
        r"^(?:-?bash|sh|zsh|dash|ksh)\b|\bline \d+: |^make(?:\[\d+\])?: ",
    ),
)
_PRINTED = tuple((component, lazy_compile(pattern)) for component, pattern in _FROM_PRINTED_NAMES)
_LOGGER = lazy_compile(
    r"(?:^|[\s\]|-])(?P<before>[A-Za-z_][\w.]{2,60})\]?(?: -)? ?[:|-]? ?\[?(?:ERROR|CRITICAL|FATAL)\b"
    r"|\b(?:ERROR|CRITICAL|FATAL)\]?(?: -)? ?[:|-] ?\[?(?P<after>[A-Za-z_][\w.]{2,60}?)(?=[:\]|]| -)"
)
_SOURCE = lazy_compile(
    r"\[?[EF](?:\d{3,4} [\d:.]{8,16} +\d{1,9})? (?P<file>[\w./-]{1,80}\.(?:cc|cpp|cu|c|py|go|rs)):\d+\]"
)


_ENV = "`python -m torch.utils.collect_env`"
_NCCL_RELEASE = '`python -c "import torch; print(torch.__version__, torch.cuda.nccl.version())"`'
_PACKAGES = "`python -m pip list`"
_REPORTS: dict[str, tuple[str, str]] = {
    "NCCL": (_NCCL_RELEASE, _NCCL),
    "RCCL": (_NCCL_RELEASE, _NCCL),
    "aws-ofi-nccl": (
        "the line `NET/OFI Initializing aws-ofi-nccl` of NCCL's log",
        f"{_NCCL} and `export FI_LOG_LEVEL=warn`",
    ),
    "nccl-rdma-sharp-plugins": (_NCCL_RELEASE, f"{_NCCL} and `export UCX_LOG_LEVEL=info`"),
    "nccl-fastsocket": (_NCCL_RELEASE, _NCCL),
    "Gloo": (_ENV, _TORCH),
    "UCX": ("`ucx_info -v`", "`export UCX_LOG_LEVEL=info`"),
    "libfabric": ("`fi_info --version`", "`export FI_LOG_LEVEL=info`"),
    "oneCCL": (_PACKAGES, "`export CCL_LOG_LEVEL=info FI_LOG_LEVEL=warn`"),
    "CUDA runtime": (_ENV, "`export CUDA_LAUNCH_BLOCKING=1`"),
    "HIP runtime": (_ENV, "`export AMD_LOG_LEVEL=3`"),
    "Intel Gaudi": ("`hl-smi`", "`export LOG_LEVEL_ALL=3 ENABLE_CONSOLE=true`"),
    "torch.distributed": (_ENV, _TORCH),
    "torch.distributed.elastic": (_ENV, "`export LOGLEVEL=INFO`"),
    "PyTorch": (_ENV, _TORCH),
    "SLURM": ("`sinfo --version`", "`srun -vv`"),
    "Open MPI": ("`ompi_info --version`", "`mpirun --mca btl_base_verbose 100`"),
    "MPICH": ("`mpichversion`", "`export HYDRA_DEBUG=1`"),
    "DeepSpeed": ("`ds_report`", ""),
    "Accelerate": ("`accelerate env`", ""),
    "Transformers": ("`transformers env`", ""),
    "Ray": ("`ray --version`", "`ray logs cluster`"),
}
"""What maintainers ask for: how the release is shown, and what makes the component log more, by its name.

Commands and variables as they are commonly used with each component; not compared with the issue templates of the
projects."""


def report_of(name: str) -> tuple[str, str]:
    """How the release of a component is shown, and what makes it log more (may be empty), as its maintainers ask."""
    return _REPORTS.get(name, (_PACKAGES, ""))


def component_of(event: Event) -> LogComponent | None:
    """The component that logged a line: the first that the line names, else its logger or source file; of a traceback,
    the package of its innermost frame."""
    text = event.text
    found = next((component for component, pattern in _PRINTED if pattern.search(text)), None)
    if found is not None:
        return found
    if event.frames:
        return LogComponent(_package_of(event.frames[0].file))
    logger, source = _LOGGER.search(text), _SOURCE.search(text)
    name = (logger["before"] or logger["after"]) if logger else source["file"].rpartition("/")[2] if source else None
    return LogComponent(name) if name else None


def _package_of(file: str) -> str:
    """``mypkg`` for ``…/site-packages/mypkg/engine.py``, else the name of the file."""
    _, found, rest = file.replace("\\", "/").rpartition("-packages/")
    return rest.partition("/")[0] if found else file.replace("\\", "/").rpartition("/")[2]
