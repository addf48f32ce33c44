"""Everything recorded of one rank, behind the few calls of a framework's adapter."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from doctor.collectors.base import NotPresent, NotVisible
from doctor.core.clock import monotonic, time
from doctor.core.facts import Failure, Frame, Missing, MissingReason, Section, TrainingFacts
from doctor.core.facts.section import in_unicode
from doctor.core.frames import frames_of_traceback, waits_in
from doctor.core.masking import mask_text
from doctor.monitor.telemetry.child_processes import ChildStillness
from doctor.monitor.telemetry.data.loader_history import LoaderHistories
from doctor.monitor.telemetry.event_log import ENDED, EventLog, StageEntered
from doctor.monitor.telemetry.failing_processes import FailingProcesses
from doctor.monitor.telemetry.flight_recorder import read_recorder
from doctor.monitor.telemetry.memory.memory_samples import MemorySampler
from doctor.monitor.telemetry.progress import Progress, Stall
from doctor.monitor.telemetry.rank_pauses import RankPauses
from doctor.monitor.telemetry.replica.replica_tracker import ReplicaTracker
from doctor.monitor.telemetry.stacks.blocking_call import blocking_call
from doctor.monitor.telemetry.stacks.endless_waits import shown_by_threads
from doctor.monitor.telemetry.stacks.folder_walks import walk_in_words
from doctor.monitor.telemetry.stacks.live_stacks import (
    awaited_transfer,
    made_group,
    named_root,
    thread_stack,
    with_statements,
)
from doctor.monitor.telemetry.stacks.stillness import nanoseconds_busy
from doctor.monitor.telemetry.step_clock import GRADIENTS, WAITED, StepClock
from doctor.monitor.telemetry.wait_shares import WaitShares

if TYPE_CHECKING:
    from doctor.monitor.telemetry.stacks.trickles import Trickle

Sections = dict[str, "Section | Missing"]

_RECEIVES = "data from "
"""Start of the words of a thread that receives."""
CHILD_LOOK = 1.0
"""Seconds without progress after which children are looked at: shorter steps cost nothing."""


class RankTelemetry:
    """The telemetry of one rank.

    Adapters call it from the training thread, the watchdog :meth:`current_facts` and :meth:`position` from its own.
    ``every_n_steps``: interval of expensive samples (memory, checksums); ``when_due`` is called with them. ``note``
    appends an event, as :meth:`mark` does, without its frame.
    """

    def __init__(self, *, hang_after: float | None = None, every_n_steps: int = 50) -> None:
        self.loaders = LoaderHistories()
        self.memory = MemorySampler()
        self.replica = ReplicaTracker(every_n_steps)
        self.pauses = RankPauses(
            busy=lambda: nanoseconds_busy(self._progress.native_id), passed=lambda: self.progress.passed
        )
        self.waits = WaitShares()
        self.training = TrainingFacts()
        self.when_due: Callable[[], None] = lambda: None
        self._progress = Progress(hang_after=hang_after)
        self._steps = StepClock()
        self._event_log = EventLog()
        self.note = self._event_log.note
        self._read_lock = threading.RLock()  # a signal handler may read while its thread does
        self._track_loss = self.replica.loss
        self.replica.gradients.batch = lambda: self._batches_trained + 1
        self.replica.has_peers = lambda: self._progress.has_peers
        self._stage = self._progress.stage
        self._every = max(1, every_n_steps)
        self._batches_begun = -1
        self._batches_trained = 0
        self._optimizer_steps = 0
        self._children = ChildStillness()
        self._failing = FailingProcesses()
        self._trickle: Trickle | None = None
        self._paused_at = -1

    @property
    def progress(self) -> Progress:
        """The current progress of this rank."""
        self._read()
        return self._progress

    @property
    def steps(self) -> StepClock:
        """The time breakdown of its steps until now."""
        self._read()
        return self._steps

    @property
    def training_thread(self) -> int:
        """The thread that trains. (step path)"""
        return self._progress.training_thread

    @property
    def batches_begun(self) -> int:
        """The number of the training batch that began last, from 0 on; -1 before the first. (step path)"""
        return self._batches_begun

    @property
    def has_peers(self) -> bool:
        """Whether other ranks may wait for this one. (step path)"""
        return self._progress.has_peers

    @property
    def times_device(self) -> bool:
        """Whether training batches run on a CUDA device. (step path)"""
        return self._steps.device is not None

    def _read(self) -> None:
        with self._read_lock:
            events, contiguous = self._event_log.read()
            if events:
                self._progress.take(events, contiguous=contiguous)
                self._steps.take(events, contiguous=contiguous)

    def open(self) -> None:
        """Start tracing samplers, and read counters."""
        self.loaders.open()
        with contextlib.suppress(OSError):
            self.pauses.open()

    def close(self) -> None:
        """Restore everything that was changed."""
        self.loaders.close()
        self.replica.gradients.detach()

    # Calls of adapters, in the order of a run.

    def stage_start(self, stage: str) -> None:
        """Record the start of ``sanity``, ``train``, ``validate``, ``test`` or ``predict``."""
        self._enter(stage, "epoch-start")

    def epoch_start(self, stage: str, epoch: int, *, of_loaders: bool = True) -> None:
        """Record the start of an epoch of ``stage``, before its loaders are iterated.

        ``of_loaders``: whether their epochs are those of ``stage``.
        """
        self._enter(stage, "epoch-start", epoch)
        if of_loaders:
            self.loaders.epoch_start(stage, epoch)

    def _enter(self, stage: str, point: str, epoch: int | None = None) -> None:
        self._stage = stage
        self.note((monotonic(), point, StageEntered(stage, epoch)))

    def batch_start(self, stage: str, batch: int, loader: int, content: object) -> None:
        """Record the start of a batch. (step path)"""
        if stage == "train":
            self.train_batch_start(batch, loader)
        else:
            if stage != self._stage:
                self._enter(stage, "step")
            self.note((monotonic(), "step", (batch, loader, -1)))
        self.loaders.record_batch(stage, loader, content)

    def train_batch_start(self, batch: int, loader: int) -> None:
        """Record the start of a training batch, without its content. (step path)"""
        if self._stage != "train":
            self._enter("train", "step")
        self._batches_begun = number = self._batches_begun + 1
        if (device := self._steps.device) is not None:
            device.begin(number)
        self.note((monotonic(), "step", (batch, loader, number)))

    def mark(self, point: str) -> None:
        """Record a point within the step, such as ``backward`` or ``checkpoint``. (step path)"""
        self.note((monotonic(), point, None))

    def checkpoint_begins(self) -> Callable[[], None] | None:
        """Record that a file is written; return what records its end.

        ``None`` in another thread than that of the training, and within a checkpoint.
        """
        progress = self.progress
        point = progress.point
        if point == "checkpoint" or threading.get_ident() != progress.training_thread:
            return None
        self.mark("checkpoint")
        return lambda: self.mark(point)

    def add_gradients(self, batch: int, seconds: float) -> None:
        """Record the seconds in which this rank computed its own gradients in a backward pass. (step path)"""
        self._steps.timed.append((batch, GRADIENTS, seconds))

    def add_wait(self, batch: int, seconds: float) -> None:
        """Record the seconds for which this rank waited for others after a batch. (step path)"""
        self._steps.timed.append((batch, WAITED, seconds))

    def batch_end(self, stage: str, *, step: int | None = None, loss: object = None) -> None:
        """Record the end of a batch. (step path)

        ``step``: optimizer steps so far; ``loss``: a tensor, left on its device.
        """
        if step is not None:
            self._progress.step = step
        if stage == "train":
            self.train_batch_end(loss, "data")
        else:
            self.note((monotonic(), "data", None))

    def train_batch_end(self, loss: object, point: str) -> None:
        """Record the end of a training batch. (step path) ``point``: what follows."""
        self.note((monotonic(), point, ENDED))
        if (device := self._steps.device) is not None:
            device.end()
        self._batches_trained = trained = self._batches_trained + 1
        is_due = trained % self._every == 0
        if (loss is not None and self._track_loss(trained, loss)) or is_due or trained == self.replica.early:
            self.replica.batch_end(trained, self._optimizer_steps)
        if is_due:
            self.memory.sample(trained, self.loaders.units())
            self.when_due()

    def optimizer_step(self) -> None:
        """Record the optimizer steps of a batch, before the batch ends. (step path)"""
        self._optimizer_steps = stepped = self._optimizer_steps + 1
        if stepped % self._every == 0 or stepped == self.replica.early:
            self.replica.optimizer_step(stepped, self._batches_trained + 1)

    def loader_end(self, stage: str, loader: int, *, ended: bool, left_at: Frame | None = None) -> None:
        """Record the end of a loader's epoch; ``ended``: it was exhausted, not limited.

        ``left_at``: the line of the user's loop that left it before.
        """
        batches = self.loaders.epoch_end(stage, loader, ended=ended)
        if ended:
            self.progress.end_of_loader(stage, loader, self.progress.epoch or 0, batches)
        elif left_at is not None:
            self.progress.left_loop(stage, loader, self.progress.epoch or 0, batches, left_at)

    def epoch_end(self, stage: str) -> None:
        """Record the start of the epoch-end hooks."""
        self.mark("epoch-end")

    def stage_end(self, stage: str, back_to: str | None = None) -> None:
        """Record the end of ``stage``; ``back_to``: the stage that it interrupted."""
        self._enter(back_to or stage, "step" if back_to else "ended")

    def failed(self, error: BaseException) -> None:
        """Record that an exception ends this rank."""
        self.progress.failure = Failure(
            type(error).__name__, _message(error), round(time(), 3), frames_of_traceback(error.__traceback__)
        )
        self.progress.state = "failed"
        self.steps.spans.stop(monotonic())
        # Fetching needs memory, and the allocator would wait for the device.
        if all(kind.__name__ != "OutOfMemoryError" for kind in type(error).__mro__):
            self.replica.finish()

    def ended(self) -> None:
        """Record that the run has ended normally."""
        if self.progress.state == "running":
            self.progress.state = "ended"
            self.steps.spans.stop(monotonic())
            self.replica.finish()

    # Calls of the watchdog.

    def stall(self) -> Stall | None:
        """Read what is due and return the stall, if progress has stopped; called twice a second."""
        with contextlib.suppress(OSError):  # a process of /proc that has just ended
            self.memory.look(monotonic())
            self._look_at_children()
        return self.progress.stall()

    def _look_at_children(self) -> None:
        """Begin to measure for how long children have not run, once in each pause between two points.

        Look each time whether processes that ended were replaced.
        """
        progress = self.progress
        if monotonic() - progress.since <= CHILD_LOOK:
            return
        if progress.passed != self._paused_at:
            self._paused_at = progress.passed
            self._children.look()
            self._failing.restart()
            self._trickle = _new_trickle()
        self._failing.look()
        if self._trickle is not None:
            self._trickle.look(progress.native_id)

    def sample(self) -> float:
        """Look whether the training thread waits for other ranks; return the seconds until the next look.

        For the watchdog's thread. Without a strategy whose ranks wait within a step, no check compares these waits, and
        the thread is woken between two ticks only while its own delays have to be timed more exactly.
        """
        if not self.training.waits_within_step:
            return self.waits.pause() if self.pauses.are_likely else math.inf
        now = self._progress
        is_in_step = now.stage == "train" and now.point not in ("epoch-end", "epoch-start", "checkpoint")
        self.waits.sample(now.training_thread, trains=is_in_step and now.state == "running")
        return self.waits.pause()

    def current_facts(self) -> Sections:
        """Return everything known of this rank without disturbing it."""
        readers: dict[str, Callable[[], Section]] = {
            "steps": self.steps.facts,
            "run-memory": self.memory.facts,
            "pauses": lambda: msgspec.structs.replace(self.pauses.facts(), waiting=self.waits.facts()),
        }
        if self.progress.state != "running":  # ranks may have called different collectives without an error
            readers["flight-recorder"] = lambda: read_recorder(stacks=False)
        return {**self._replica_facts(), **{key: _read_section(key, read) for key, read in readers.items()}}

    def look_facts(self) -> Sections:
        """Return what a look between two rounds compares and what explains it: everything of a rank that is not running
        normally, else all but durations and measurements, which take most of the time and matter to rounds alone."""
        return self._replica_facts() if self.progress.state == "running" else self.current_facts()

    def _replica_facts(self) -> Sections:
        def progress() -> Section:
            found = self.progress.facts()
            return (
                found if found.state == "running" else msgspec.structs.replace(found, left=with_statements(found.left))
            )

        readers: dict[str, Callable[[], Section]] = {
            "training": lambda: self.training,
            "progress": progress,
            "loaders": self.loaders.facts,
            "model": self.replica.model,
            "replica": self.replica.facts,
        }
        return {key: _read_section(key, read) for key, read in readers.items()}

    def position(self) -> Sections:
        """Return the facts with what explains a stall: stack, children, newest collectives."""

        def progress_with_stack() -> Section:
            progress, thread = self.progress.facts(), self.progress.training_thread
            stack = thread_stack(thread)
            is_over = progress.state not in ("running", "stalled")  # its thread then waits for the doctor
            blocked = "" if is_over or waits_in(stack) else blocking_call(self.progress.native_id, stack)
            if blocked.startswith(_RECEIVES) and self._trickle is not None:
                blocked += self._trickle.words(self.progress.native_id)
            children, failing = self._children.look(), self._failing.words() if blocked else ""
            if not (is_over or waits_in(stack)):
                blocked = progress.blocked or blocked or walk_in_words(sys._current_frames().get(thread))
            return msgspec.structs.replace(
                progress,
                left=with_statements(progress.left),
                stack=stack,
                blocked=blocked + (failing or _shown_by_others(thread, blocked)),
                root=None if is_over else named_root(thread),
                group="" if is_over else made_group(thread),
                awaits="" if is_over or waits_in(stack) else awaited_transfer(thread),
                stack_from="interpreter",
                children=self._failing.without_progress(children) if failing else children,
                # The forks of a pool use CPU time, so that the thread that waits for it does not seem still.
                still=max(progress.still or 0.0, self._failing.seconds) if failing else progress.still,
            )

        return {
            **self.current_facts(),
            "progress": _read_section("progress", progress_with_stack),
            "replica": _read_section("replica", lambda: self.replica.facts(stands=True)),
            "flight-recorder": _read_section("flight-recorder", read_recorder),
        }


def _shown_by_others(thread: int, blocked: str) -> str:
    """Return what other threads, and other processes of Ray, show of a wait of the training thread."""
    from doctor.monitor.telemetry.stacks.sibling_processes import work_in_siblings  # only waits need it

    shown = shown_by_threads(thread, blocked)
    return shown + work_in_siblings(blocked + shown)


def _new_trickle() -> Trickle:
    from doctor.monitor.telemetry.stacks.trickles import Trickle  # only pauses need it

    return Trickle()


def _read_section(key: str, read: Callable[[], Section]) -> Section | Missing:
    """Read a section, turning any exception into a Missing: this runs beside a training."""
    try:
        return in_unicode(read())
    except NotPresent as absence:
        return Missing(MissingReason.ABSENT, str(absence))
    except NotVisible as barrier:
        return Missing(MissingReason.HIDDEN, barrier.reason, barrier.unhide)
    except Exception as error:
        return Missing(MissingReason.FAILED, f"{key} could not be read: {type(error).__name__}: {error}")


def _message(error: BaseException, most: int = 4000) -> str:
    """Return the message of an exception; long ones (torch adds C++ stacks) lose their middle."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = mask_text(text if len(text) <= 16 * most else text[: 8 * most] + text[-8 * most :])
    return text if len(text) <= most else f"{text[: most // 2]}\n…\n{text[-most // 2 :]}"
