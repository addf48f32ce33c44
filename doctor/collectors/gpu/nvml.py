"""Access to NVML, one value at a time: a refusal costs one value, never the section."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

from doctor.collectors.base import Machine, NotPresent, NotVisible
from doctor.core.facts import HiddenField
from doctor.knowledge.nvidia import DRIVER_MISMATCH

LIBRARY = "libnvidia-ml.so.1"

# Return codes, nvml.h nvmlReturn_t.
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
GPU_NOT_FOUND = 28
UNKNOWN = 999

UNSUPPORTED = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, NOT_FOUND, INVALID_ARGUMENT})
"""Codes for what this card or driver does not have: the value is ``None`` and nothing is hidden."""

LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
"""Codes after which a GPU returns no more values."""


class DeviceLost(Exception):
    """The driver no longer reaches this GPU, or requires a reset before its use."""


class Nvml:
    """Initialized NVML. ``ask`` returns ``None`` for a value that is not available and records refusals as notes."""

    def __init__(self, bindings: ModuleType) -> None:
        self.bindings = bindings
        self._refusals: dict[tuple[str, str], set[int]] = defaultdict(set)

    def constant(self, name: str) -> Any:
        """A constant or structure of the bindings, or ``None`` where this nvidia-ml-py does not define it."""
        return getattr(self.bindings, name, None)

    def call(self, function: str, *arguments: Any) -> tuple[Any, int]:
        """The answer of a function and its return code; ``FUNCTION_NOT_FOUND`` where bindings or driver lack it."""
        entry = getattr(self.bindings, function, None)
        if entry is None:
            return None, FUNCTION_NOT_FOUND
        try:
            return entry(*arguments), 0
        except self.bindings.NVMLError as error:
            return None, int(error.value)

    def ask(self, function: str, *arguments: Any, field: str = "", index: int = -1) -> Any:
        """The answer, or ``None``. ``field`` (of GPU ``index``, where one is given) is noted as hidden when NVML
        refuses without saying that the value does not exist. Raises :class:`DeviceLost`."""
        answer, code = self.call(function, *arguments)
        if code in LOST:
            raise DeviceLost(self.words(code))
        if code and code not in UNSUPPORTED:
            path = f"gpus.{field}" if index >= 0 else field or function
            self._refusals[path, self.words(code)].add(index)
        return answer

    def words(self, code: int) -> str:
        """Return the text of NVML for a return code."""
        return f"{self.bindings.NVMLError(code)} (NVML code {code})"

    def hidden(self) -> tuple[HiddenField, ...]:
        """Return a note for each refused value; GPUs with the same refusal share one."""
        notes = []
        for (field, reason), indices in self._refusals.items():
            known = ", ".join(str(index) for index in sorted(indices) if index >= 0)
            unhide = "run as root, or with access to the NVIDIA device files" if "ermission" in reason else ""
            notes.append(HiddenField(field, f"GPU {known}: {reason}" if known else reason, unhide))
        return tuple(notes)


def require_library(machine: Machine) -> None:
    """Raise :class:`NotPresent` if this environment has no NVML library; loading it calls no driver."""
    for directory in machine.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if directory and Path(directory, LIBRARY).exists():
            return
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        raise NotPresent(f"no NVIDIA driver: {LIBRARY} is not installed") from None


def start_nvml() -> Nvml:
    """Return initialized NVML. Raises ``NotPresent`` without a loaded driver, ``NotVisible`` if it refuses."""
    import pynvml

    nvml = Nvml(pynvml)
    _, code = nvml.call("nvmlInit")
    if code == 0:
        return nvml
    if code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        raise NotPresent(f"no NVIDIA driver: {nvml.words(code)}")
    if code == LIB_RM_VERSION_MISMATCH:
        raise NotVisible(
            f"{DRIVER_MISMATCH}: {nvml.words(code)}",
            "the driver was updated without a restart: reboot the host, or unload and load the nvidia modules",
        )
    unhide = "give this process access to /dev/nvidiactl and /dev/nvidia*" if code == NO_PERMISSION else ""
    raise NotVisible(f"NVML does not start: {nvml.words(code)}", unhide)
