"""Traces training steps of a model in a child process, which can be killed."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

from doctor.core.errors import UnusableError
from doctor.core.text import byte_size
from doctor.estimate.data_model import LoaderUse, ModelRecipe, TracedStep, TrainingPlan
from doctor.estimate.memory.non_torch import WORKSPACE
from doctor.estimate.tracer_main import LoadFactory, LoadModel, TracePlan, TracerReply, TracerRequest
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

_ENVIRON = {
    # No GPU is needed, and a CUDA context of the child would take memory from a running job.
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Of a model that is built from a configuration: Transformers asks no hub."""


class TracerClient(AbstractContextManager["TracerClient"]):
    """A process that holds a model and its batch, and traces one plan after another.

    ``source``: ``MODULE:FACTORY``, importable from ``directory``, or ``FILE.py:FACTORY``; or the recipe of a model.
    ``loading``: what its loader uses. ``seconds``: for all requests; then the process is killed. ``workspace``: bytes
    of cuBLAS's workspace, which is allocated twice; 0 to leave it out. ``capability``: compute capability of the GPU,
    which decides on kernels. ``loading_seconds``: how long it took to load the model.

    Raises:
        UnusableError: the factory, or what it returns, is not usable, torch is missing, or the time is up.
    """

    def __init__(
        self,
        source: str | ModelRecipe,
        *,
        directory: Path,
        seconds: float,
        workspace: int = WORKSPACE,
        capability: str = "",
    ) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._workspace, self._capability = workspace, capability
        self._name = source if isinstance(source, str) else source.name
        self.loading = LoaderUse()
        self.loading_seconds = 0.0
        self._child = TorchChild(os.environ, _ENVIRON if isinstance(source, str) else {**_ENVIRON, **_OFFLINE})
        try:
            request = LoadFactory(source, str(directory)) if isinstance(source, str) else LoadModel(source)
            self.loading = self._ask(request).loading or LoaderUse()
        except UnusableError:
            self.close()
            raise
        self.loading_seconds = time.monotonic() - self._began

    def run(self, plan: TrainingPlan) -> TracedStep:
        """Trace a training step under ``plan``; the errors are those of :class:`TracerClient`."""
        traced = self._ask(TracePlan(plan, self._workspace, self._capability)).traced
        if traced is None:
            raise UnusableError(f"{self._name}: no training step was traced")
        return traced

    def _ask(self, request: TracerRequest) -> TracerReply:
        left = self._began + self._seconds - time.monotonic()
        if left <= 0:
            raise UnusableError(self._late())
        try:
            reply = self._child.ask("estimate", request, TracerReply, left)
        except (ChildLost, WorkRefused) as error:
            is_late = time.monotonic() >= self._began + self._seconds
            raise UnusableError(self._late() if is_late else f"{self._name}: {error}") from None
        if reply.unusable:
            raise UnusableError(reply.unusable)
        return reply

    def _late(self) -> str:
        """Say what the time was spent on, and what is known."""
        if not self.loading_seconds:
            return f"{self._name}: the model was not loaded within {self._seconds:.0f} s (--timeout)"
        tracing = time.monotonic() - self._began - self.loading_seconds
        weights = f"{self.loading.parameter_count / 1e6:,.0f} M parameters, {byte_size(self.loading.parameter_bytes)}"
        return (
            f"{self._name}: not finished within {self._seconds:.0f} s (--timeout): loading the model took "
            f"{self.loading_seconds:.0f} s ({weights}), tracing a step {tracing:.0f} s"
        )

    def close(self) -> None:
        """Kill the process."""
        self._child.close()

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        self.close()
