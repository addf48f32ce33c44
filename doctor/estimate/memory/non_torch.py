"""Device memory outside of torch's allocator: the CUDA context with its libraries, and NCCL's buffers."""

from __future__ import annotations

from doctor.estimate.data_model import TrainingPlan

MIB = 1 << 20

CONTEXTS = {"6": 306 * MIB, "7": 320 * MIB, "8": 444 * MIB, "9": 520 * MIB, "10": 600 * MIB, "12": 500 * MIB}
"""Bytes of a bare context by the generation of the GPU, the major number of its compute capability, with kernels
loaded when they are first used (the default from CUDA 12.2 on). Reported: 306 MiB (pytorch/pytorch#7320), about 300 MiB
(pytorch/pytorch#107667), 256 MiB on an RTX 3090 (invoke-ai/InvokeAI#9413) and up to 444 MiB in other public logs, about
520 MiB on data centre GPUs of today (ai2cm/ace#1396). Of 10 and 12 no report was found: they are taken to be larger
than their forerunners 9 and 8."""

UNKNOWN_CONTEXT = 600 * MIB
"""The default for unknown generations. The page of MEM001 has 300 to 800 MiB."""

LIBRARIES = 150 * MIB
"""Kernels of cuBLAS, cuDNN and torch that a training step loads into the context, without cuBLAS's workspaces, which
torch allocates."""

OLD_WORKSPACE, WORKSPACE = 8320 * 1024, 32 * MIB
"""Workspace of cuBLAS, allocated by torch: before compute capability 9.0, and from 9.0 on
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

PAIR, GROUP, NODES = 544 * MIB, 688 * MIB, 1100 * MIB
"""Buffers of one NCCL communicator on each of its GPUs: of two ranks, of more on one node (4 A100 with NVLink, after
an all-reduce: NVIDIA/nccl#964), and across nodes (1.6 GB with the context, NVIDIA/nccl#864). They grow with the
channels and the peers to which a ring or tree leads, and no more beyond two nodes (NVIDIA/nccl#986)."""


def outside(plan: TrainingPlan, capability: str = "") -> int:
    """Return the bytes that a rank of ``plan`` holds on its device outside of torch's allocator."""
    context = CONTEXTS.get(capability.partition(".")[0], UNKNOWN_CONTEXT)
    return context + LIBRARIES + communicator(plan)


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
