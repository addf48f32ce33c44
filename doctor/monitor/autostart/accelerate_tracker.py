"""``DoctorTracker``: a tracker of Accelerate, by which a loop that Accelerate prepared is watched.

    accelerator = Accelerator(log_with=[DoctorTracker()])

Every process constructs it, before its process group and before its models are wrapped. Accelerate calls ``start`` and
``log`` on the main process only (``Accelerator.init_trackers``, accelerate/accelerator.py), so that they could not
watch the other ranks; they do nothing here.
"""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker  # type: ignore[import-not-found, import-untyped, unused-ignore]

from doctor.monitor.autostart.plain_loop import LoopWatch
from doctor.monitor.autostart.torch_modules import watch_from_here


class DoctorTracker(GeneralTracker):  # type: ignore[misc]
    """Watches the loops of this process as ``doctor run`` does, from here to ``accelerator.end_training()``.

    Below ``doctor run``, and in a program with ``doctor.watch`` or a callback, it does nothing.

    Args:
        options: those of ``doctor.DoctorCallback``.

    Raises:
        ValueError: an option is not valid.
    """

    name = "rankdoctor"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        watch_from_here(options)

    @property
    def tracker(self) -> LoopWatch | None:
        """What watches the loops of this process; ``None`` if nothing does."""
        return LoopWatch.current

    def finish(self) -> None:
        """End the run. Other ranks than that of the main process end theirs with the process group."""
        if LoopWatch.current is not None:
            LoopWatch.current.end()
