"""A session that records the calls of an adapter; no evaluation takes place."""

from __future__ import annotations

from typing import Any, ClassVar

from doctor.monitor.findings_error import Findings
from doctor.monitor.watch_session import WatchSession

RECORDED = ("stage_start", "epoch_start", "batch_start", "mark", "batch_end", "loader_end", "epoch_end")
OF_TRAINING = ("train_batch_start", "train_batch_end")
RECORDED += ("stage_end", *OF_TRAINING)


class RecordedSession(WatchSession):
    """Uses the real telemetry; instead of a watchdog it records its own calls."""

    made: ClassVar[list[RecordedSession]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Any, ...]] = []
        self._within = False
        self.world_size = kwargs["world_size"]
        RecordedSession.made.append(self)
        for name in RECORDED:
            setattr(self.telemetry, name, self._recording(name, getattr(self.telemetry, name)))
        self._note, self.telemetry.note = self.telemetry.note, self._note_event

    def _note_event(self, event: Any) -> None:
        if not self._within:  # a hook that does without ``mark``
            self.calls.append(("mark", event[1]))
        self._note(event)

    def _recording(self, name: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> None:
            if self._within:  # the monitor calls itself
                call(*args, **kwargs)
                return
            values = tuple(arg for arg in args if isinstance(arg, (str, int)))
            if name in OF_TRAINING:
                values = ("train", *(number for number in values if isinstance(number, int)))
            self.calls.append(
                (name.removeprefix("train_"), *values, *(kwargs[key] for key in ("ended", "back_to") if key in kwargs))
            )
            self._within = True
            try:
                call(*args, **kwargs)
            finally:
                self._within = False

        return recorded

    def open(self) -> None:
        self.calls.append(("open",))
        self.telemetry.open()

    def check_start(self, *, meets: bool = False) -> None:
        self.calls.append(("check_start",))

    def fail(self, error: BaseException) -> None:
        self.telemetry.failed(error)
        self.calls.append(("fail", type(error).__name__))
        self.telemetry.close()

    def close(self, seconds: float = 5.0) -> None:
        self.calls.append(("close",))
        self.telemetry.close()

    def said(self, *names: str) -> list[tuple[Any, ...]]:
        """The entries of these names."""
        return [entry for entry in self.calls if entry[0] in names]


def found(_: RecordedSession, *, meets: bool = False) -> None:
    """Replaces ``check_start``: an error was found that would break the run."""
    raise Findings("uneven", ["DATA001"])
