"""Environment variables that affect training and belong to no launcher: NCCL, torch, Gloo, CUDA, threads, libraries."""

from __future__ import annotations

from doctor.collectors.base import Machine, collector
from doctor.core.facts import EnvironmentFacts
from doctor.core.masking import mask_variables
from doctor.core.text import lazy_compile

PREFIXES = (
    "NCCL_",
    "RCCL_",
    "TORCH_",
    "TORCHCOMM_",
    "PYTORCH_",
    "DCP_",
    "GLOO_",
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_",
    "HSA_",
    "HIP_",
    "ROCR_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "UCX_",
    "FI_",
    "OFI_",
    "RDMAV_",
    "IBV_",
    "MLX5_",
    "SHARP_",
    "CCL_",
    "CXI_",
    "MPICH_",
    "OMPI_MCA_btl_",
    "OMPI_MCA_oob_",
)
"""Prefixes of the names that torch and the libraries below it read."""

NAMES = frozenset(
    {
        "ACCELERATE_USE_CPU",
        "CONDA_PREFIX",
        "ENABLE_NCCL_HEALTH_CHECK",
        "GPU_DEVICE_ORDINAL",
        "HF_HOME",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOGLEVEL",
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PL_TORCH_DISTRIBUTED_BACKEND",
        "PYTHONFAULTHANDLER",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "TMPDIR",
        "TOKENIZERS_PARALLELISM",
        "TP_SOCKET_IFNAME",
        "TRITON_CACHE_DIR",
        "USE_LIBUV",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
"""Single names: threads, caches, libraries, interpreters."""


_SLIPPED = lazy_compile(r"(?:N+[CL]{1,4}|GL[0O]{1,3}|T[0O]RCH)_[A-Z]")
"""``NCLL_DEBUG``, ``GL00_SOCKET_IFNAME``: misspelled variables of NCCL, Gloo or torch, which do not read them."""


def is_setting(name: str) -> bool:
    """Return whether the variable ``name`` affects training, or was meant to, and belongs to no launcher."""
    return name in NAMES or name.startswith(PREFIXES) or _SLIPPED.match(name) is not None


@collector(EnvironmentFacts)
def collect_environment(machine: Machine) -> EnvironmentFacts:
    """Collect the settings of this process by name; a variable that is set and empty has an empty value."""
    return EnvironmentFacts(variables=mask_variables(machine.environ, is_setting))
