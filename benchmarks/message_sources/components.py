"""The components whose messages are read from source code: where it is, and which calls log a failure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from message_sources import native_calls, python_calls, torch_calls
from message_sources.c_calls import calls, printf_text, table_texts
from message_sources.mpi_texts import error_names, help_texts

FAILURE = (
    "fail",
    "error",
    "unable",
    "cannot",
    "can't",
    "could not",
    "abort",
    "timed out",
    "timeout",
    "invalid",
    "mismatch",
    "not supported",
    "unsupported",
    "no such",
    "refused",
    "closed",
    "unexpected",
    "corrupt",
    "out of",
    "lost",
    "denied",
)
"""Words of an announcement at a level below warning that is one of a failure."""


DOCUMENTED = Path(__file__).parent / "documented"
"""Messages of software without public source code, as its documentation lists them."""
EVERY_YEAR = "yearly"
"""The last commit of each year is read."""


class SourceComponent(NamedTuple):
    """A component: how it is described in the package, and how its messages are read.

    ``rules``: the component whose rules follow its own. ``besides``: the component whose messages are left out, since
    its lines look alike. ``is_chatty``: the cues are in most lines of healthy logs; ``is_bare``: the lines have no
    prefix. ``checkout``: the folder below ``--sources``; ``paths``: regular expression of the files that are read;
    ``tags``: regular expression of the releases that are read if the folder is a clone, :data:`EVERY_YEAR` if it has
    none, ``""`` if it holds one release, which its file ``RELEASE`` names. ``read``: yields the messages in the text of
    one file.
    """

    name: str
    file: str
    checkout: str
    source: str
    paths: str
    tags: str
    cues: tuple[str, ...]
    line: str
    read: Callable[[str], Iterable[str]]
    rules: str = ""
    besides: str = ""
    is_raised: bool = False
    packages: tuple[str, ...] = ()
    is_chatty: bool = False
    is_bare: bool = False


def announces_failure(text: str) -> bool:
    """Whether a message that is not logged as an error is one of a failure."""
    lower = text.lower()
    return any(word in lower for word in FAILURE)


def printf_calls(names: str, informing: str = "", format_at: int | None = None) -> Callable[[str], Iterator[str]]:
    """A reader of calls with a format of ``printf``: the first argument that is made of literals, or the one at
    ``format_at``. Of the functions ``informing``, only messages of failures are read."""

    def read(source: str) -> Iterator[str]:
        for call in calls(source, f"{names}|{informing}" if informing else names):
            chosen = call.arguments if format_at is None else call.arguments[format_at : format_at + 1]
            text = next((text for text in map(printf_text, chosen) if text), None)
            if text and (not informing or call.name not in informing.split("|") or announces_failure(text)):
                yield text

    return read


LEAST_OF_EXCEPTION = 20
"""Minimum number of letters in the text of an exception that tells which component raised it: no cue does."""
OF_PYTHON = re.compile(r"has no attribute|object is not|is not defined|not supported between")
"""Texts that Python itself uses for errors of any program."""
LONGEST = 120
"""Number of characters after which a message is cut at the next word: its beginning identifies it."""


def beginnings(read: Callable[[str], Iterable[str]]) -> Callable[[str], Iterator[str]]:
    """A reader of the beginnings of the messages that ``read`` finds."""

    def read_beginnings(source: str) -> Iterator[str]:
        for text in read(source):
            cut = re.match(rf"(?s).{{{LONGEST}}}\S*", text)
            yield (cut[0] if cut else text).strip()

    return read_beginnings


def exceptions(read: Callable[[str], Iterable[str]]) -> Callable[[str], Iterator[str]]:
    """A reader of the beginnings of those texts of exceptions that are specific for a component."""

    def read_specific(source: str) -> Iterator[str]:
        for text in beginnings(read)(source):
            parts = re.split(r"(?<!%)%[sdxf]", text)
            letters = [sum(map(str.isalnum, part)) for part in parts]
            is_specific = sum(letters) >= LEAST_OF_EXCEPTION and max(letters) >= LEAST_OF_EXCEPTION // 2
            if is_specific and not OF_PYTHON.search(text):
                yield text

    return read_specific


TRACEBACK = 'Traceback (most recent call last):\n  File "/opt/site-packages/{}/core.py", line 7, in run\n'
"""What precedes the text of an exception of a package in a log."""
PYTORCH_RELEASES = r"v2\.\d+\.0$"


def slurm_messages(source: str) -> Iterator[str]:
    """Messages of SLURM's commands and of its step daemon, and its table of errors."""
    yield from printf_calls("error|fatal|info", "info")(source)
    yield from table_texts(source)


def python_exceptions(
    file: str,
    source: str,
    *,
    name: str,
    paths: str,
    tags: str,
    error: str,
    read: Callable[[str], Iterable[str]] = python_calls.raised,
    checkout: str = "",
    packages: tuple[str, ...] = (),
) -> SourceComponent:
    """A component of the exceptions that a package raises, of which ``error`` is one. ``packages``: the names of the
    package, by default ``file``; ``checkout``: by default ``file``."""
    packages = packages or (file,)
    return SourceComponent(
        name=name,
        file=file,
        checkout=checkout or file,
        source=source,
        paths=paths,
        tags=tags,
        cues=(),
        line=TRACEBACK.format(packages[0]) + f"{error}: {{message}}",
        read=exceptions(read),
        is_raised=True,
        packages=packages,
    )


def listed(
    file: str, source: str, read: Callable[[str], Iterable[str]] = str.splitlines, **more: Any
) -> SourceComponent:
    """A component whose messages are lines of ``documented/<file>/errors.txt``. ``more``: other fields."""
    return SourceComponent(
        file=file,
        source=source,
        checkout=str(DOCUMENTED / file),
        paths=r"errors\.txt$",
        tags="",
        read=read,
        **more,
    )


COMPONENTS = (
    SourceComponent(
        name="NCCL",
        file="nccl",
        checkout="nccl",
        source="https://github.com/NVIDIA/nccl",
        paths=r"src/.*\.(?:cc|h|cpp)$",
        tags=r"v2\.(?:1\d|2\d|3\d)\.\d+-1$",
        cues=("NCCL WARN ",),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN {message}",
        read=printf_calls("WARN"),
    ),
    SourceComponent(
        name="NCCL",
        file="nccl_info",
        checkout="nccl",
        source="https://github.com/NVIDIA/nccl",
        paths=r"src/.*\.(?:cc|h|cpp)$",
        tags=r"v2\.(?:1\d|2\d|3\d)\.\d+-1$",
        cues=("NCCL INFO ",),
        line="gpu-node-3:4127:4190 [2] NCCL INFO {message}",
        read=printf_calls("INFO", "INFO"),
        is_chatty=True,
    ),
    SourceComponent(
        name="Gloo",
        file="gloo",
        checkout="gloo",
        source="https://github.com/pytorch/gloo",
        paths=r"gloo/(?!test/|benchmark/|examples/).*\.(?:cc|h)$",
        tags=EVERY_YEAR,
        cues=("gloo/transport/", "gloo/rendezvous/", "gloo/common/", "gloo/mpi/", "gloo/context.", "gloo/all"),
        line="RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] {message}",
        read=beginnings(native_calls.gloo),
    ),
    SourceComponent(
        name="RCCL",
        file="rccl",
        checkout="rccl",
        source="https://github.com/ROCm/rccl",
        paths=r"src/.*\.(?:cc|h|cpp)$",
        tags=r"rocm-\d\.\d\.\d",
        cues=("NCCL WARN ",),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN {message}",
        read=printf_calls("WARN"),
        rules="nccl",
        besides="nccl",
    ),
    SourceComponent(
        name="aws-ofi-nccl",
        file="aws_ofi_nccl",
        checkout="aws-ofi-nccl",
        source="https://github.com/aws/aws-ofi-nccl",
        paths=r"(?:src|include)/.*\.(?:c|cc|h|cpp)$",
        tags=r"v1\.(?:[4-9]|[12]\d)\.\d+(?:-aws)?",
        cues=("NCCL WARN NET/OFI ",),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN NET/OFI {message}",
        read=printf_calls("NCCL_OFI_WARN"),
    ),
    SourceComponent(
        name="nccl-rdma-sharp-plugins",
        file="nccl_rdma_sharp",
        checkout="nccl-rdma-sharp-plugins",
        source="https://github.com/Mellanox/nccl-rdma-sharp-plugins",
        paths=r"(?:src|include)/.*\.(?:c|cc|h)$",
        tags=EVERY_YEAR,
        cues=("NCCL WARN ",),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN {message}",
        read=printf_calls("WARN"),
        rules="nccl",
        besides="nccl",
    ),
    SourceComponent(
        name="nccl-fastsocket",
        file="nccl_fastsocket",
        checkout="nccl-fastsocket",
        source="https://github.com/google/nccl-fastsocket",
        paths=r"(?:.*/)?[^/]+\.(?:cc|h)$",
        tags=EVERY_YEAR,
        cues=("NCCL WARN ",),
        line="gpu-node-3:4127:4190 [2] {place} NCCL WARN {message}",
        read=printf_calls("WARN"),
        rules="nccl",
        besides="nccl",
    ),
    SourceComponent(
        name="UCX",
        file="ucx",
        checkout="ucx",
        source="https://github.com/openucx/ucx",
        paths=r"src/(?:ucs|uct|ucp|ucm)/(?!.*(?:/tests?/|/examples?/|/ugni/|/vfs/|/stats/|/profile/|/gaudi/)).*\.(?:c|h|inl|cc)$",
        tags=r"v1\.(?:9|[12]\d)(?:\.\d+)?",
        cues=("UCX  ERROR", "UCX  WARN", "UCX  FATAL"),
        line="[1699999999.123456] [gpu-node-3:4127 :0] ib_mlx5.c:123  UCX  ERROR {message}",
        read=beginnings(printf_calls("ucs_error|ucs_fatal|uct_ib_check_memlock_limit_msg", "ucs_warn|ucs_log")),
    ),
    SourceComponent(
        name="libfabric",
        file="libfabric",
        checkout="libfabric",
        source="https://github.com/ofiwg/libfabric",
        paths=r"(?:prov/(?:efa|verbs|tcp|rxm|util|shm|cxi)/|src/)(?!.*/tests?/).*\.(?:c|h)$",
        tags=r"v(?:1\.(?:1[4-9]|2\d)\.0|2\.\d+\.\d+)",
        cues=("libfabric:",),
        line="libfabric:4127:1699999999::efa:ep_ctrl:efa_rdm_ep_open():123<warn> {message}",
        read=beginnings(printf_calls(r"(?:FI|EFA|VRB|RXM|XNET|CXIP|TXC|RXC|SM2|SMR)_WARN\w*|CXIP_FATAL")),
    ),
    SourceComponent(
        name="oneCCL",
        file="oneccl",
        checkout="oneccl",
        source="https://github.com/uxlfoundation/oneCCL",
        paths=r"src/.*\.(?:cpp|hpp|h)$",
        tags=r"2021\.(?:[5-9]|1\d)(?:\.\d+)?",
        cues=("|CCL_ERROR| ", "oneCCL: "),
        line="2026:01:02-03:04:05:( 4242) |CCL_ERROR| atl_ofi.cpp:512 ep_poll: {message}",
        read=beginnings(native_calls.oneccl),
    ),
    listed(
        "cuda",
        "cudaGetErrorString of libcudart 13.0",
        name="CUDA runtime",
        cues=("CUDA error: ", "CUDA runtime error: "),
        line="RuntimeError: CUDA error: {message}",
    ),
    listed(
        "hip",
        "hipGetErrorString, https://github.com/ROCm/clr/blob/0bf2a983/hipamd/src/hip_error.cpp",
        name="HIP runtime",
        cues=("HIP error: ", "HIP failure '"),
        line="RuntimeError: HIP error: {message}",
        rules="cuda",
    ),
    listed(
        "amdgpu",
        "drivers/gpu/drm/amd of https://github.com/torvalds/linux (18 files, a list by hand)",
        name="amdgpu",
        cues=("amdgpu ",),
        line="kernel: amdgpu 0000:c3:00.0: amdgpu: {message}",
    ),
    listed(
        "gaudi",
        "https://github.com/HabanaAI/gaudi-pytorch-bridge (a list by hand)",
        name="Intel Gaudi",
        cues=(),
        line="RuntimeError: [Rank:0] {message}",
        is_bare=True,
    ),
    listed(
        "hccl",
        "hcomm_g_msg of hcomm, a part of CANN (errors EI0001 to EI0020 and EJ0001 to EJ0004)",
        name="HCCL",
        cues=("EI00", "EJ00"),
        line="EI0006: [PID: 176930] 2025-07-01-00:40:04.135.732 {message}",
    ),
    SourceComponent(
        name="torch.distributed",
        file="torch",
        checkout="torch",
        source="https://github.com/pytorch/pytorch",
        paths=r"(?:torch/csrc/distributed/c10d|torch/csrc/cuda|c10/cuda)/(?!test/|init\.cpp).*\.(?:cpp|hpp|h)$|"
        r"torch/distributed/(?!elastic|launch|run\.py|_tools|examples|flight_recorder|_spmd|debug/).*\.py$",
        tags=PYTORCH_RELEASES,
        cues=(
            "ProcessGroupNCCL.cpp:",
            "ProcessGroupNCCL.hpp:",
            "ProcessGroupGloo.cpp:",
            "ProcessGroupMPI.cpp:",
            "ProcessGroupUCC.cpp:",
            "ProcessGroupWrapper.cpp:",
            "ProcessGroup.cpp:",
            "NCCLUtils.cpp:",
            "NCCLUtils.hpp:",
            "UCCUtils.cpp:",
            "HeartbeatMonitor.cpp:",
            "FlightRecorder.cpp:",
            "FlightRecorderDetail.hpp:",
            "TraceUtils.h:",
            "TCPStore.cpp:",
            "TCPStoreBackend.cpp:",
            "TCPStoreLibUvBackend.cpp:",
            "FileStore.cpp:",
            "Store.cpp:",
            "socket.cpp:",
            "Utils.hpp:",
            "Work.cpp:",
            "reducer.cpp:",
            "logger.cpp:",
            "intra_node_comm.cpp:",
            "CudaDMAConnectivity.cpp:",
            "WorkerServer.cpp:",
            "CUDACachingAllocator.cpp:",
            "CUDAAllocatorConfig.cpp:",
            "CUDAFunctions.cpp:",
            "CUDAException.cpp:",
            "CUDAException.h:",
            "torch/distributed/",
        ),
        line="[rank1]:[E1123 10:00:00.123456789 ProcessGroupNCCL.cpp:683] [Rank 1] {message}",
        read=beginnings(torch_calls.logged),
    ),
    python_exceptions(
        "torch_exceptions",
        "https://github.com/pytorch/pytorch",
        name="torch.distributed",
        paths=r"torch/csrc/distributed/c10d/(?!test/|init\.cpp).*\.(?:cpp|hpp|h)$|torch/csrc/cuda/nccl\.cpp|"
        r"torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives|device_mesh|utils)\.py$|"
        r"torch/nn/parallel/distributed\.py$|torch/distributed/(?:nn|algorithms|_composable/replicate\w*)/.*\.py$",
        tags=PYTORCH_RELEASES,
        error="torch.distributed.DistBackendError",
        read=torch_calls.raised,
        checkout="torch",
        packages=("torch",),
    ),
    listed(
        "torch_nccl",
        "https://github.com/pytorch/pytorch (ProcessGroupNCCL and nccl2 of 2025 and 2026, a list by hand)",
        beginnings(str.splitlines),
        name="torch.distributed",
        cues=(
            "ProcessGroupNCCL.cpp:",
            "NCCLUtils.cpp:",
            "NcclApi.cpp:",
            "HeartbeatMonitor.cpp:",
            "ReconfigureNCCL.cpp:",
        ),
        line="[rank1]:[E1123 10:00:00.123456789 ProcessGroupNCCL.cpp:683] [Rank 1] {message}",
        rules="torch",
        besides="torch",
    ),
    python_exceptions(
        "torch_nccl_exceptions",
        "https://github.com/pytorch/pytorch (ProcessGroupNCCL and nccl2 of 2025 and 2026, a list by hand)",
        name="torch.distributed",
        paths=r"errors\.txt$",
        tags="",
        error="torch.distributed.DistBackendError",
        read=str.splitlines,
        checkout=str(DOCUMENTED / "torch_nccl_exceptions"),
        packages=("torch",),
    )._replace(rules="torch_exceptions", besides="torch_exceptions"),
    SourceComponent(
        name="torch.distributed.elastic",
        file="elastic",
        checkout="torch",
        source="https://github.com/pytorch/pytorch",
        paths=r"torch/distributed/(?:elastic/|launcher/|run\.py|launch\.py).*",
        tags=PYTORCH_RELEASES,
        cues=(
            "torch/distributed/elastic/",
            "torch/distributed/launcher/",
            "torch/distributed/run.py:",
            "torch.distributed.elastic.",
            "torch.distributed.launcher.",
            "torch.distributed.run:",
        ),
        line="E1123 10:00:00.123000 41 torch/distributed/elastic/multiprocessing/api.py:882] {message}",
        read=beginnings(torch_calls.logged),
    ),
    python_exceptions(
        "elastic_exceptions",
        "https://github.com/pytorch/pytorch",
        name="torch.distributed.elastic",
        paths=r"torch/distributed/(?:elastic/|launcher/|run\.py|launch\.py).*",
        tags=PYTORCH_RELEASES,
        error="torch.distributed.elastic.rendezvous.api.RendezvousError",
        read=torch_calls.raised,
        checkout="torch",
        packages=("torch",),
    ),
    python_exceptions(
        "pytorch_exceptions",
        "https://github.com/pytorch/pytorch",
        name="PyTorch",
        paths=r"torch/distributed/(?:fsdp|checkpoint|_composable|tensor|_tensor|_shard|pipelining|optim)/"
        r"(?!.*(?:examples|_ops|debug|_experimental)/).*\.py$|"
        r"torch/(?:utils/data|multiprocessing|_inductor/compile_worker)/(?!.*typing).*\.py$|"
        r"torch/(?:_inductor/async_compile|serialization|utils/checkpoint|storage|amp/grad_scaler|optim/optimizer)\.py$|"
        r"torch/cuda/(?:__init__|_utils|amp/grad_scaler|graphs|memory|nccl|streams)\.py$|torch/nn/parallel/.*\.py$",
        tags=PYTORCH_RELEASES,
        error="RuntimeError",
        read=torch_calls.raised,
        checkout="torch",
        packages=("torch",),
    ),
    SourceComponent(
        name="PyTorch",
        file="cuda_exceptions",
        checkout="torch",
        source="https://github.com/pytorch/pytorch",
        paths=r"(?:torch/csrc/cuda|c10/cuda|aten/src/ATen/cuda)/(?!test/|detail/|nccl).*\.(?:cpp|h)$",
        tags=PYTORCH_RELEASES,
        cues=(),
        line=TRACEBACK.format("torch") + "RuntimeError: {message}",
        read=exceptions(torch_calls.raised),
        is_raised=True,
    ),
    SourceComponent(
        name="SLURM",
        file="slurm",
        checkout="slurm",
        source="https://github.com/SchedMD/slurm",
        paths=r"src/(?:srun|sbatch|salloc|slurmd/slurmstepd|api|plugins/(?:task|cgroup|mpi|launch|proctrack))/.*\.c$|"
        r"src/common/(?:slurm_errno|slurm_opt|slurm_resolv|cpu_frequency|stepd_api|spank|plugstack|log)\.c$",
        tags=r"slurm-(?:1[79]|2\d)-\d\d-\d-1$",
        cues=("srun: ", "sbatch: ", "salloc: ", "slurmstepd: "),
        line="srun: error: {message}",
        read=slurm_messages,
    ),
    SourceComponent(
        name="Open MPI",
        file="openmpi",
        checkout="ompi",
        source="https://github.com/open-mpi/ompi",
        paths=r"(?!contrib|docs|test).*help-.*\.txt$",
        tags=r"v(?:3\.1\.\d|4\.[01]\.\d|5\.0\.\d+)$",
        cues=(),
        line="{message}",
        read=help_texts,
        is_bare=True,
    ),
    SourceComponent(
        name="Open MPI",
        file="prrte",
        checkout="prrte",
        source="https://github.com/openpmix/prrte",
        paths=r"(?!contrib|docs|test).*help-.*\.txt$",
        tags=r"v[1-4]\.\d+\.\d+$",
        cues=(),
        line="{message}",
        read=help_texts,
        rules="openmpi",
        is_bare=True,
    ),
    SourceComponent(
        name="MPICH",
        file="mpich",
        checkout="mpich",
        source="https://github.com/pmodels/mpich",
        paths=r"src/.*errnames\.txt$",
        tags=r"v(?:3\.[234]|4\.\d)(?:\.\d)?$",
        cues=("MPIR_", "MPID", "PMPI_", "internal_", "Fatal error in ", "Other MPI error, error stack"),
        line="MPIDI_CH3I_Progress(239): {message}",
        read=error_names,
    ),
    python_exceptions(
        "lightning",
        "https://github.com/Lightning-AI/pytorch-lightning",
        name="Lightning",
        paths=r"(?:src/)?(?:lightning/(?:pytorch|fabric)|pytorch_lightning|lightning_fabric|lightning_lite)/(?!.*_graveyard).*\.py$",
        tags=r"(?:1\.[4-9]|2\.\d+)\.0(?:\.post0)?$",
        error="lightning.fabric.utilities.exceptions.MisconfigurationException",
        packages=("lightning", "pytorch_lightning", "lightning_fabric", "lightning_lite"),
    ),
    python_exceptions(
        "accelerate",
        "https://github.com/huggingface/accelerate",
        name="Accelerate",
        paths=r"src/accelerate/(?!test_utils|commands/menu).*\.py$",
        tags=r"v(?:0\.(?:1[2-9]|2\d|3\d)|1\.\d+)\.0$",
        error="RuntimeError",
    ),
    python_exceptions(
        "deepspeed",
        "https://github.com/deepspeedai/DeepSpeed",
        name="DeepSpeed",
        paths=r"deepspeed/(?!inference|model_implementations|module_inject|autotuning|compression|profiling|ops/(?:sparse|transformer)).*\.py$",
        tags=r"v0\.\d+\.0$",
        error="AssertionError",
    ),
    python_exceptions(
        "megatron",
        "https://github.com/NVIDIA/Megatron-LM",
        name="Megatron-LM",
        paths=r"megatron/(?:core|training)/(?!inference|export|models/(?:retro|T5|bert|huggingface|mimo|multimodal)|datasets/retro|ssm).*\.py$",
        tags=r"core_v0\.\d+\.0$|core_r0\.\d+\.0$",
        error="AssertionError",
    ),
    python_exceptions(
        "transformers",
        "https://github.com/huggingface/transformers",
        name="Transformers",
        paths=r"transformers/.*\.py$",
        tags=r"",
        error="ValueError",
    ),
    python_exceptions(
        "ray",
        "https://github.com/ray-project/ray",
        name="Ray",
        paths=r"(?:python/)?ray/(?!.*(?:test_utils|/examples/|thirdparty|tensorflow|horovod|xgboost|lightgbm|microbenchmark|ray_perf|aws|gcp|azure|vsphere|aliyun|kuberay|spark)).*\.py$",
        tags=r"",
        error="ray.exceptions.RaySystemError",
    ),
)
