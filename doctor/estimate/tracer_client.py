"""Traces training steps of a factory's model in a child process, which can be killed."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import LoaderUse, TracedStep, TrainingPlan
from doctor.estimate.memory.non_torch import WORKSPACE
from doctor.estimate.tracer_main import LoadFactory, TracePlan, TracerReply, TracerRequest
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

_ENVIRON = {
    # No GPU is needed, and a CUDA context of the child would take memory from a running job.
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}


class TracerClient(AbstractContextManager["TracerClient"]):
    """A process that holds the factory's output, and traces one plan after another.

    ``factory``: ``MODULE:FACTORY``, importable from ``directory``, or ``FILE.py:FACTORY``. ``loading``: what its loader
    uses. ``seconds``: for all requests; then the process is killed. ``workspace``: bytes of cuBLAS's workspace, which
    is allocated twice; 0 to leave it out. ``capability``: compute capability of the GPU, which decides on kernels.

    Raises:
        UnusableError: the factory, or what it returns, is not usable, torch is missing, or the time is up.
    """

    def __init__(
        self, factory: str, *, directory: Path, seconds: float, workspace: int = WORKSPACE, capability: str = ""
    ) -> None:
        self._until = time.monotonic() + seconds
        self._seconds = seconds
        self._workspace, self._capability = workspace, capability
        self._factory = factory
        self._child = TorchChild(os.environ, _ENVIRON)
        try:
            reply = self._ask(LoadFactory(factory, str(directory)))
        except UnusableError:
            self.close()
            raise
        self.loading = reply.loading or LoaderUse()

    def run(self, plan: TrainingPlan) -> TracedStep:
        """Trace a training step under ``plan``; the errors are those of :class:`TracerClient`."""
        traced = self._ask(TracePlan(plan, self._workspace, self._capability)).traced
        if traced is None:
            raise UnusableError(f"{self._factory}: no step was traced")
        return traced

    def _ask(self, request: TracerRequest) -> TracerReply:
        left = self._until - time.monotonic()
        if left <= 0:
            raise UnusableError(f"{self._factory}: not done within {self._seconds:.0f} s")
        try:
            reply = self._child.ask("estimate", request, TracerReply, left)
        except (ChildLost, WorkRefused) as error:
            raise UnusableError(f"{self._factory}: {error}") from None
        if reply.unusable:
            raise UnusableError(reply.unusable)
        return reply

    def close(self) -> None:
        """Kill the process."""
        self._child.close()

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        self.close()
