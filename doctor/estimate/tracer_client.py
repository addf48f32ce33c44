"""Asks a process of its own, which can be killed, to trace training steps of what a factory makes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from doctor.core.errors import UnusableError
from doctor.estimate.data_model import LoaderUse, TracedStep, TrainingPlan
from doctor.estimate.tracer_protocol import WORKSPACE, LoadFactory, TracePlan, TracerReply, TracerRequest
from doctor.probes.runtime.torch_child import ChildLost, TorchChild, WorkRefused

_ENVIRON = {
    # No GPU is needed, and a context of the child on one would be memory taken from a job that runs there.
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}


def trace(
    factory: str, plans: Sequence[TrainingPlan], *, directory: Path, seconds: float, workspace: int = WORKSPACE
) -> tuple[LoaderUse, tuple[TracedStep, ...]]:
    """What one training step of one rank holds under each of ``plans``, and what the factory's loaders say.

    ``factory``: ``MODULE:FACTORY``, importable from ``directory``, or ``FILE.py:FACTORY``. ``seconds``: for all of it.
    ``workspace``: see :class:`TracerClient`.

    Raises:
        UnusableError: the factory, or what it returns, can't be used, torch is missing, or the time is over.
    """
    with TracerClient(factory, directory=directory, seconds=seconds, workspace=workspace) as tracer:
        return tracer.loading, tuple(tracer.run(plan) for plan in plans)


class TracerClient:
    """One process that holds what the factory made, to be asked for one plan after another.

    ``seconds``: of all questions together; the process is killed when they are over. ``workspace``: bytes of cuBLAS's
    workspace, which are there twice, 0 to leave it out.

    Raises:
        UnusableError: as :func:`trace`.
    """

    def __init__(self, factory: str, *, directory: Path, seconds: float, workspace: int = WORKSPACE) -> None:
        self._until = time.monotonic() + seconds
        self._seconds = seconds
        self._workspace = workspace
        self._factory = factory
        self._child = TorchChild(os.environ, _ENVIRON)
        try:
            answer = self._ask(LoadFactory(factory, str(directory)))
        except UnusableError:
            self.close()
            raise
        self.loading = answer.loading or LoaderUse()
        """What of the factory's Trainer and loaders is of concern."""

    def run(self, plan: TrainingPlan) -> TracedStep:
        """One training step under ``plan``.

        Raises:
            UnusableError: as :func:`trace`.
        """
        traced = self._ask(TracePlan(plan, self._workspace)).traced
        if traced is None:
            raise UnusableError(f"{self._factory}: no step was traced")
        return traced

    def _ask(self, question: TracerRequest) -> TracerReply:
        left = self._until - time.monotonic()
        if left <= 0:
            raise UnusableError(f"{self._factory}: not done within {self._seconds:.0f} s")
        try:
            answer = self._child.ask("estimate", question, TracerReply, left)
        except (ChildLost, WorkRefused) as error:
            raise UnusableError(f"{self._factory}: {error}") from None
        if answer.unusable:
            raise UnusableError(answer.unusable)
        return answer

    def close(self) -> None:
        """Kill the process."""
        self._child.close()

    def __enter__(self) -> TracerClient:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process."""
        self.close()
