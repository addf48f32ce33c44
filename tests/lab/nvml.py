"""Machines with GPUs that are not there: the fake libnvidia-ml.so.1, compiled once, and what it shall answer.

A test takes a machine of :data:`MACHINES`, adds lines of its own, and starts a process with the environment of
:meth:`FakeNvml.environ`; the real nvidia-ml-py loads the fake library there. The format of the lines is described in
``fake_nvml/fake_nvml.c``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.lab.speed import patience

SOURCE = Path(__file__).parent / "fake_nvml" / "fake_nvml.c"

MACHINES: dict[str, str] = {
    "eight_h100": """
        link=40
    """,
    "one_gpu_a100": """
        count=1
        gpu.*.name=NVIDIA A100-PCIE-40GB
        gpu.*.cc_major=8
        gpu.*.mem_total_mib=40960
        gpu.*.pcie_gen=4
        gpu.*.pcie_max_gen=4
        gpu.*.nvlinks=0
        gpu.*.fabric_state=0
    """,
    "dead_gpu": """
        gpu.4.lost=1
    """,
    "fallen_off_bus": """
        gpu.4.error.nvmlDeviceGetHandleByIndex_v2=999
    """,
    "reset_required": """
        gpu.2.error.nvmlDeviceGetUtilizationRates=16
    """,
    "mig": """
        count=2
        gpu.0.mig=1
        gpu.0.mig_slices=3
        gpu.0.mig.1.procs=71:-
        gpu.0.error.nvmlDeviceGetUtilizationRates=3
    """,
    "throttled": """
        gpu.6.clock_reasons=0x48
        gpu.6.clock=345
        gpu.6.temp=91
    """,
    "foreign_processes": """
        gpu.2.mem_used_mib=79000
        gpu.2.procs=4242:78000,4243:-
        gpu.2.graphics_procs=4244:16
    """,
    "memory_errors": """
        gpu.3.pages_pending=1
        gpu.5.sram_parity=2
        gpu.5.sram_secded=40
        gpu.5.sram_threshold=1
        gpu.7.ecc_volatile_uncorrected=3
        gpu.7.ecc_aggregate_uncorrected=9
        gpu.7.rows_corrected=1
        gpu.7.rows_uncorrected=2
        gpu.7.rows_pending=1
        gpu.7.rows_failed=1
        gpu.7.field.230=1
    """,
    "nvlink_down": """
        gpu.1.nvlink.4=0
        gpu.1.nvlink.5=0
        gpu.3.nvlink_errors.7.0=12
        gpu.3.nvlink_errors.7.1=2
        gpu.3.nvlink_errors.7.2=5
    """,
    "no_fabric_manager": """
        gpu.*.fabric_state=1
        gpu.*.fabric_status=999
        p2p.2=5
        p2p.0=6
        p2p.1=6
    """,
    "multi_node_nvlink": """
        count=4
        gpu.*.name=NVIDIA GB200
        gpu.*.cc_major=10
        gpu.*.fabric_cluster=7
        gpu.*.fabric_clique=32766
        gpu.*.error.nvmlDeviceGetNvLinkErrorCounter=3
        gpu.*.field.214=0
        gpu.*.field.208=0
        gpu.1.field.214.3=2
        fabric.interface=3
    """,
    "exclusive_mode": """
        gpu.*.compute_mode=3
    """,
    "pcie_degraded": """
        gpu.5.pcie_gen=3
        gpu.5.pcie_width=4
    """,
    "two_models": """
        gpu.7.name=NVIDIA A100-SXM4-80GB
        gpu.7.cc_major=8
    """,
    "peer_access_blocked": """
        count=2
        link=50
        p2p.2=5
        p2p.0=4
        p2p.1=3
        gpu.*.nvlinks=0
    """,
    "hanging_driver": """
        sleep.nvmlDeviceGetTemperature=60
    """,
    "version_mismatch": """
        init=18
    """,
    "driver_not_loaded": """
        init=9
    """,
    "no_permission": """
        init=4
    """,
    "restricted_container": """
        count=2
        gpu.1.error.nvmlDeviceGetHandleByIndex_v2=4
        gpu.*.error.nvmlDeviceGetComputeRunningProcesses_v3=4
        gpu.*.error.nvmlDeviceGetComputeRunningProcesses_v2=4
    """,
    "old_driver": """
        count=2
        driver=450.51.06
        cuda=11000
        error.nvmlDeviceGetComputeRunningProcesses_v3=13
        error.nvmlDeviceGetGraphicsRunningProcesses_v3=13
        error.nvmlDeviceGetCurrentClocksEventReasons=13
        error.nvmlDeviceGetMemoryInfo_v2=13
        error.nvmlDeviceGetGpuFabricInfoV=13
        error.nvmlDeviceGetGpuFabricInfo=13
        error.nvmlDeviceGetSramEccErrorStatus=13
        error.nvmlDeviceGetMemoryAffinity=13
        error.nvmlDeviceGetRemappedRows=3
    """,
}
"""Named machines as lines of the configuration; each has eight healthy H100 GPUs unless a line says otherwise."""


@dataclass(frozen=True)
class FakeNvml:
    """The compiled library and a folder for configurations."""

    library: Path
    folder: Path

    def environ(self, machine: str, *lines: str) -> dict[str, str]:
        """The environment of a process on that ``machine``, with more configuration ``lines`` after its own."""
        text = "\n".join(line.strip() for line in (*MACHINES[machine].splitlines(), *lines))
        conf = self.folder / f"{machine}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.conf"
        conf.write_text(text + "\n")
        return {
            **os.environ,
            "LD_LIBRARY_PATH": f"{self.library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
            "FAKE_NVML_CONF": str(conf),
        }


def compiler() -> str | None:
    """A C compiler of this machine."""
    return shutil.which("gcc") or shutil.which("cc")


def build_library() -> Path:
    """The fake library, compiled where no earlier session of this user has done it for this source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rankdoctor-fake-nvml-{os.getuid()}-{digest}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        # Several test processes may come here at once: the last rename wins, and all of them are the same.
        part = folder / f"part-{os.getpid()}.so"
        subprocess.run(
            [str(compiler()), "-shared", "-fPIC", "-O1", "-o", part, SOURCE], check=True, timeout=patience(60)
        )
        part.rename(library)
    return library
