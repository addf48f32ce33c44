"""Device memory outside of torch's allocator: the CUDA context with its libraries, and NCCL's buffers."""

from __future__ import annotations

from typing import Literal

from doctor.estimate.data_model import TrainingPlan

MIB = 1 << 20

ModuleLoading = Literal["lazy", "eager"]
"""When the driver loads kernels into a context: at their first use, or all of them when it is created."""

CONTEXTS = {
    "6": 306 * MIB,
    "7.0": 306 * MIB,
    "7.5": 105 * MIB,
    "8.0": 444 * MIB,
    "8.6": 256 * MIB,
    "8.9": 444 * MIB,
    "9": 520 * MIB,
    "10": 600 * MIB,
    "12": 500 * MIB,
}
"""Bytes of a bare context by compute capability, or its major number, with kernels loaded when they are first used.
Reported: 306 MiB (pytorch/pytorch#7320), 105 MiB on a Tesla T4 (fitcheck, ``cuda_context_init_mib`` of 2026), 256 MiB
on an RTX 3090 (invoke-ai/InvokeAI#9413), up to 444 MiB in other public logs, and about 520 MiB on data centre GPUs of
today (ai2cm/ace#1396). Of 10 and 12 no report was found: they are taken to be larger than their forerunners 9 and 8."""

UNKNOWN_CONTEXT = 600 * MIB
"""The default for unknown generations. The page of MEM001 has 300 to 800 MiB."""

EAGER_CONTEXT = 1343 * MIB
"""A context into which all kernels of torch and its libraries are loaded at once: of a V100 with CUDA 11.2 in January
2022 (Transformers' documentation, ``performance.mdx``). Each module is loaded at its first use from CUDA 11.7 on, with
``CUDA_MODULE_LOADING=LAZY``, which torch sets from 1.13 on, and which is CUDA's default from 12.2 on."""
LAZY_FROM = (11, 7)

LIBRARIES = 36 * MIB
"""Kernels that a training step loads into a context with lazy loading, without cuBLAS's workspaces, which torch
allocates: 141 - 105 MiB on a Tesla T4 (fitcheck, ``cuda_context_mib``, after three steps)."""

OLD_WORKSPACE, WORKSPACE = 8320 * 1024, 32 * MIB
"""Workspace of cuBLAS, allocated by torch: before compute capability 9.0, and from 9.0 on
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

PAIR, GROUP, NODES = 544 * MIB, 688 * MIB, 1100 * MIB
"""Buffers of one NCCL communicator on each of its GPUs: of two ranks, of more on one node (4 A100 with NVLink, after
an all-reduce: NVIDIA/nccl#964), and across nodes (1.6 GB with the context, NVIDIA/nccl#864). They grow with the
channels and the peers to which a ring or tree leads, and no more beyond two nodes (NVIDIA/nccl#986)."""


def outside(
    plan: TrainingPlan, capability: str = "", *, loading: ModuleLoading = "lazy", measured: int | None = None
) -> int:
    """Return the bytes that a rank of ``plan`` holds on its device outside of torch's allocator.

    ``measured``: a context with its libraries, as a capture shows it."""
    return (context(capability, loading) if measured is None else measured) + communicator(plan)


def context(capability: str, loading: ModuleLoading = "lazy") -> int:
    """Return the bytes of a CUDA context after some steps of training."""
    if loading == "eager":
        return EAGER_CONTEXT
    bare = CONTEXTS.get(capability) or CONTEXTS.get(capability.partition(".")[0]) or UNKNOWN_CONTEXT
    return bare + LIBRARIES


def loading_of(cuda: str) -> ModuleLoading:
    """Return how torch built for this release of CUDA (``11.2``) loads kernels; lazily if it is unknown."""
    numbers = tuple(int(each) for each in cuda.split(".")[:2] if each.isdecimal())
    return "eager" if numbers and numbers < LAZY_FROM else "lazy"


def workspace(capability: str = "") -> int:
    """Return the bytes of one cuBLAS workspace on a GPU of this compute capability; the larger size if unknown."""
    major = capability.partition(".")[0]
    return OLD_WORKSPACE if major.isdecimal() and int(major) < 9 else WORKSPACE


def communicator(plan: TrainingPlan) -> int:
    """Return the bytes of NCCL's buffers of a rank; 0 if ranks share a device, which NCCL refuses."""
    if plan.strategy == "none" or plan.world_size == 1 or plan.ranks_per_device > 1:
        return 0
    if plan.nodes > 1:
        return NODES
    return PAIR if plan.devices == 2 else GROUP
