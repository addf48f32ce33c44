"""Device memory that torch's allocator does not see: the CUDA context with its libraries, and NCCL's buffers."""

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
"""Where the generation is not known. The page of MEM001 has 300 to 800 MiB."""

LIBRARIES = 150 * MIB
"""Kernels of cuBLAS, cuDNN and torch that a training step loads into the context, on top of a bare one. Not cuBLAS's
workspaces, which torch allocates itself."""

OLD_WORKSPACE, WORKSPACE = 8320 * 1024, 32 * MIB
"""What cuBLAS works in, allocated by torch: before compute capability 9.0, and from there on
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""

PAIR, GROUP, NODES = 544 * MIB, 688 * MIB, 1100 * MIB
"""Buffers of one NCCL communicator on each of its GPUs: of two ranks, of more on one node (4 A100 with NVLink, after
an all-reduce: NVIDIA/nccl#964), and across nodes (1.6 GB with the context, NVIDIA/nccl#864). They grow with the
channels and the peers to which a ring or tree leads, and no more beyond two nodes (NVIDIA/nccl#986)."""


def outside(plan: TrainingPlan, capability: str = "") -> int:
    """Bytes on its device that a rank of ``plan`` holds outside of torch's allocator."""
    context = CONTEXTS.get(capability.partition(".")[0], UNKNOWN_CONTEXT)
    return context + LIBRARIES + communicator(plan)


def workspace(capability: str = "") -> int:
    """Bytes of one of cuBLAS's workspaces on a GPU of this compute capability; of the larger ones where it is not
    known."""
    major = capability.partition(".")[0]
    return OLD_WORKSPACE if major.isdecimal() and int(major) < 9 else WORKSPACE


def communicator(plan: TrainingPlan) -> int:
    """Bytes of NCCL's buffers on the device of a rank. Ranks that share a device can't use NCCL, which refuses them."""
    if plan.strategy == "none" or plan.world_size == 1 or plan.ranks_per_device > 1:
        return 0
    if plan.nodes > 1:
        return NODES
    return PAIR if plan.devices == 2 else GROUP
