"""An attendance whose monitor keeps a tape of what an adapter told it; nobody judges."""

from __future__ import annotations

from typing import Any, ClassVar

from doctor.monitor.findings_error import Findings
from doctor.monitor.watch_session import WatchSession

TOLD = ("stage_start", "epoch_start", "batch_start", "mark", "batch_end", "loader_end", "epoch_end")
OF_TRAINING = ("train_batch_start", "train_batch_end")
TOLD += ("stage_end", *OF_TRAINING)


class Taped(WatchSession):
    """Watches with the real monitor; in place of the sentinel it notes when it was called."""

    made: ClassVar[list[Taped]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tape: list[tuple[Any, ...]] = []
        self._within = False
        self.world_size = kwargs["world_size"]
        Taped.made.append(self)
        for name in TOLD:
            setattr(self.telemetry, name, self._taping(name, getattr(self.telemetry, name)))
        self._note, self.telemetry.note = self.telemetry.note, self._noting

    def _noting(self, moment: Any) -> None:
        if not self._within:  # a hook that does without ``mark``
            self.tape.append(("mark", moment[1]))
        self._note(moment)

    def _taping(self, name: str, call: Any) -> Any:
        def taped(*args: Any, **kwargs: Any) -> None:
            if self._within:  # the monitor calls itself
                call(*args, **kwargs)
                return
            told = tuple(arg for arg in args if isinstance(arg, (str, int)))
            if name in OF_TRAINING:
                told = ("train", *(number for number in told if isinstance(number, int)))
            self.tape.append(
                (name.removeprefix("train_"), *told, *(kwargs[key] for key in ("ended", "back_to") if key in kwargs))
            )
            self._within = True
            try:
                call(*args, **kwargs)
            finally:
                self._within = False

        return taped

    def open(self) -> None:
        self.tape.append(("open",))
        self.telemetry.open()

    def check_start(self) -> None:
        self.tape.append(("check_start",))

    def fail(self, error: BaseException) -> None:
        self.telemetry.failed(error)
        self.tape.append(("fail", type(error).__name__))
        self.telemetry.close()

    def close(self) -> None:
        self.tape.append(("close",))
        self.telemetry.close()

    def said(self, *names: str) -> list[tuple[Any, ...]]:
        """The entries of these names."""
        return [entry for entry in self.tape if entry[0] in names]


def found(_: Taped) -> None:
    """In place of ``meet``: something that would break the run was found."""
    raise Findings("uneven", ["DATA001"])
