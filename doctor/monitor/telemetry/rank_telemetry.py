"""Everything that is recorded of one rank, behind the few calls that an adapter of a framework makes."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from time import monotonic

import msgspec

from doctor.collectors.base import NotPresent, NotVisible
from doctor.core.facts import Failure, Missing, MissingReason, Section, TrainingFacts
from doctor.core.facts.section import in_unicode
from doctor.core.masking import mask_text
from doctor.monitor.telemetry.child_processes import child_processes
from doctor.monitor.telemetry.data.loader_history import LoaderHistories
from doctor.monitor.telemetry.event_log import ENDED, EventLog, StageEntered
from doctor.monitor.telemetry.flight_recorder import read_recorder
from doctor.monitor.telemetry.memory.memory_samples import MemorySampler
from doctor.monitor.telemetry.progress import Progress, Stall
from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker
from doctor.monitor.telemetry.stacks.live_stacks import frames_of_exception, thread_stack
from doctor.monitor.telemetry.step_clock import StepClock

Sections = dict[str, "Section | Missing"]


class RankTelemetry:
    """What one rank does. Calls come from the training thread; :meth:`card` and :meth:`position` from the sentinel's.

    ``every_n_steps``: how often the dearer looks (memory, checksums) are taken; ``when_due`` is called with them.
    ``note`` takes a moment, as :meth:`mark` does, where a frame less is worth it.
    """

    def __init__(self, *, hang_after: float | None = None, every_n_steps: int = 50) -> None:
        self.loaders = LoaderHistories()
        self.memory = MemorySampler()
        self.replica = ReplicaTracker(every_n_steps)
        self.training = TrainingFacts()
        self.when_due: Callable[[], None] = _nothing
        self._progress = Progress(hang_after=hang_after)
        self._steps = StepClock()
        self._tape = EventLog()
        self.note = self._tape.note
        self._reading = threading.RLock()  # a signal's handler may ask while its thread does
        self._see = self.replica.loss
        self._stage = self._progress.stage
        self._every = max(1, every_n_steps)
        self._begun = -1
        self._trained = 0
        self._stepped = 0

    @property
    def progress(self) -> Progress:
        """Where this rank is now."""
        self._read()
        return self._progress

    @property
    def steps(self) -> StepClock:
        """Where the time of its steps went until now."""
        self._read()
        return self._steps

    def _read(self) -> None:
        with self._reading:
            moments, whole = self._tape.read()
            if moments:
                self._progress.take(moments, whole=whole)
                self._steps.take(moments, whole=whole)

    def open(self) -> None:
        """Begin to look at what loaders draw."""
        self.loaders.open()

    def close(self) -> None:
        """Leave everything as it was."""
        self.loaders.close()

    # What adapters tell, in the order of a run.

    def stage_start(self, stage: str) -> None:
        """``sanity``, ``train``, ``validate``, ``test`` or ``predict`` begins."""
        self._enter(stage, "epoch-start")

    def epoch_start(self, stage: str, epoch: int) -> None:
        """An epoch of ``stage`` begins; its loaders are about to be drawn from."""
        self._enter(stage, "epoch-start", epoch)
        self.loaders.epoch_start(stage, epoch)

    def _enter(self, stage: str, point: str, epoch: int | None = None) -> None:
        self._stage = stage
        self.note((monotonic(), point, StageEntered(stage, epoch)))

    def batch_start(self, stage: str, batch: int, loader: int, content: object) -> None:
        """A batch is there. (step path)"""
        if stage == "train":
            self.train_batch_start(batch, loader)
        else:
            if stage != self._stage:
                self._enter(stage, "step")
            self.note((monotonic(), "step", (batch, loader, -1)))
        self.loaders.saw(stage, loader, content)

    def train_batch_start(self, batch: int, loader: int) -> None:
        """The same of training, without what the batch holds. (step path)"""
        if self._stage != "train":
            self._enter("train", "step")
        self._begun = number = self._begun + 1
        if (device := self._steps.device) is not None:
            device.begin(number)
        self.note((monotonic(), "step", (batch, loader, number)))

    def mark(self, point: str) -> None:
        """A point within the step: ``forward``, ``backward``, ``optimizer``, ``batch-end``, ``checkpoint``. (step
        path)"""
        self.note((monotonic(), point, None))

    def batch_end(self, stage: str, *, step: int | None = None, loss: object = None, point: str = "data") -> None:
        """A batch is done; ``step``: optimiser steps so far; ``loss``: a tensor, left on its device; ``point``: what
        follows, where that is not the wait for the next batch. (step path)"""
        if step is not None:
            self._progress.step = step
        if stage == "train":
            self.train_batch_end(loss, point)
        else:
            self.note((monotonic(), point, None))

    def train_batch_end(self, loss: object, point: str) -> None:
        """The same of training. (step path)"""
        self.note((monotonic(), point, ENDED))
        if (device := self._steps.device) is not None:
            device.end()
        self._trained = trained = self._trained + 1
        is_due = trained % self._every == 0
        if (loss is not None and self._see(trained, loss)) or is_due:
            self.replica.batch_end(trained, self._stepped)
        if is_due:
            self.memory.sample(trained, self.loaders.units())
            self.when_due()

    def optimizer_step(self) -> None:
        """The optimizer has stepped, or all those of a batch have, before the batch ends. (step path)"""
        self._stepped = stepped = self._stepped + 1
        if stepped % self._every == 0:
            self.replica.optimizer_step(stepped)

    def loader_end(self, stage: str, loader: int, *, ended: bool) -> None:
        """An epoch of a loader is over; ``ended``: because there was nothing left, not because of a limit."""
        batches = self.loaders.epoch_end(stage, loader, ended=ended)
        if ended:
            self.progress.end_of_loader(stage, loader, self.progress.epoch or 0, batches)

    def epoch_end(self, stage: str) -> None:
        """The hooks at the end of an epoch begin."""
        self.mark("epoch-end")

    def stage_end(self, stage: str, back_to: str | None = None) -> None:
        """``stage`` is over; ``back_to``: the one that it interrupted."""
        self._enter(back_to or stage, "step" if back_to else "ended")

    def failed(self, error: BaseException) -> None:
        """An exception ends this rank."""
        self.progress.failure = Failure(
            type(error).__name__, _message(error), round(time.time(), 3), frames_of_exception(error)
        )
        self.progress.state = "failed"
        if not _is_out_of_memory(error):  # what is fetched needs some, and the allocator would wait for the device
            self.replica.finish()

    def ended(self) -> None:
        """The run is over, as it should be."""
        if self.progress.state == "running":
            self.progress.state = "ended"
            self.replica.finish()

    # What the sentinel asks.

    def stall(self) -> Stall | None:
        """Whether progress has stopped. Asked twice a second, and the occasion for what is read as often."""
        with contextlib.suppress(OSError):  # a process of /proc that has just ended
            self.memory.look()
        return self.progress.stall()

    def card(self) -> Sections:
        """All that is known of this rank without disturbing it."""
        looks: dict[str, Callable[[], Section]] = {
            "training": lambda: self.training,
            "progress": self.progress.facts,
            "loaders": self.loaders.facts,
            "steps": self.steps.facts,
            "run-memory": self.memory.facts,
            "model": self.replica.model,
            "replica": self.replica.facts,
        }
        if self.progress.state != "running":  # the last card: whether ranks called different things without an error
            looks["flight-recorder"] = lambda: read_recorder(stacks=False)
        return {key: _look(key, look) for key, look in looks.items()}

    def position(self) -> Sections:
        """The card, and what tells where a rank stands that does not move: stack, children, last collectives."""
        return {
            **self.card(),
            "progress": _look("progress", self._where),
            "flight-recorder": _look("flight-recorder", read_recorder),
        }

    def _where(self) -> Section:
        return msgspec.structs.replace(
            self.progress.facts(),
            stack=thread_stack(self.progress.training_thread),
            stack_from="interpreter",
            children=child_processes(),
        )


def _nothing() -> None:
    pass


def _is_out_of_memory(error: BaseException) -> bool:
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def _look(key: str, look: Callable[[], Section]) -> Section | Missing:
    """One of the few places that forgive every exception: this runs beside a training."""
    try:
        return in_unicode(look())
    except NotPresent as absence:
        return Missing(MissingReason.ABSENT, str(absence))
    except NotVisible as barrier:
        return Missing(MissingReason.HIDDEN, barrier.reason, barrier.unhide)
    except Exception as error:
        return Missing(MissingReason.FAILED, f"{key} could not be read: {type(error).__name__}: {error}")


def _message(error: BaseException, most: int = 4000) -> str:
    """The exception's own words; long ones (torch adds stacks of C++) lose their middle."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = mask_text(text if len(text) <= 16 * most else text[: 8 * most] + text[-8 * most :])
    return text if len(text) <= most else f"{text[: most // 2]}\n…\n{text[-most // 2 :]}"
