"""NCCL007: a launch file leaves a debug setting on."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.testing import lines

_COSTS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch waits for its end, and several communicators may deadlock",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
    "TORCH_NCCL_NAN_CHECK": "every collective searches its input for NaN first",
}
_LEVELS = {
    ("NCCL_DEBUG", "TRACE"): "every call of NCCL writes a line",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is compared over Gloo first",
}
_OFF = ("", "0", "n", "no", "f", "false", "off")


@rule(
    id="NCCL007",
    severity=Severity.INFO,
    reads=LaunchFile,
    cases=lambda: (
        FileFails("launches wait", lines("export CUDA_LAUNCH_BLOCKING=1  # !", "torchrun train.py"), name="train.sh"),
        FileFails("all is compared", lines("TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun train.py  # !"), name="train.sh"),
        FileFails("all is logged", lines("export NCCL_DEBUG=TRACE  # !", "srun python train.py"), name="job.sh"),
        FilePasses(
            "a quiet level", lines("export NCCL_DEBUG=WARN TORCH_DISTRIBUTED_DEBUG=INFO", "torchrun x.py"), name="a.sh"
        ),
        FilePasses("off", lines("export CUDA_LAUNCH_BLOCKING=0", "torchrun train.py"), name="train.sh"),
        FilePasses(
            "on demand",
            lines("if [ $DEBUG ]; then", "  export CUDA_LAUNCH_BLOCKING=1", "fi", "torchrun x.py"),
            name="a.sh",
        ),
    ),
)
def debug_left_on(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether a launch file sets what is meant for the search of a fault and costs speed.

    Why it hurts: each launch or collective waits or writes a line: the run is many times slower, and on some releases
    it crashes.
    Fix: remove CUDA_LAUNCH_BLOCKING and TORCH_DISTRIBUTED_DEBUG, and `export NCCL_DEBUG=WARN`.
    """
    for setting in file.settings:
        if not setting.is_exported or not setting.is_certain or setting.told is None:
            continue
        value = setting.told.strip()
        cost = _COSTS.get(setting.name) if value.lower() not in _OFF else None
        cost = cost or _LEVELS.get((setting.name, value.upper()))
        if cost:
            yield Violation(setting.place, f"{setting.name}={value}: {cost}", evidence=((setting.name, value),))
