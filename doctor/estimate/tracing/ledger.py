"""The ledger of a traced step: what was allocated and freed, in order, and what for."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.estimate.data_model import MemoryBreakdown, StepPhase
from doctor.estimate.memory.caching_allocator import peak_reserved, rounded

KINDS = frozenset(MemoryBreakdown.__struct_fields__) - {"rounding", "context", "others"}


class AllocationLedger:
    """Allocations, numbered in order. ``kind`` is a field of :class:`MemoryBreakdown` and may change until the end,
    because it is often known only later what a buffer is for, as with a gradient."""

    def __init__(self) -> None:
        self.moment: StepPhase = "between steps"
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.events: list[int] = []
        self.streams: dict[int, int] = {}
        """The stream of each allocation that is not on the default one."""
        self._moments: list[tuple[int, StepPhase]] = []
        self._born_in: list[StepPhase] = []

    def enter(self, moment: StepPhase) -> None:
        """Start the phase ``moment`` of the step."""
        self.moment = moment
        self._moments.append((len(self.events), moment))

    def allocate(self, size: int, kind: str, stream: int = 0) -> int:
        """Record an allocation of ``size`` bytes on a stream, and return its number."""
        key = len(self.sizes)
        self.sizes.append(size)
        self.kinds.append(kind)
        self._born_in.append(self.moment)
        self.events.append(key)
        if stream:
            self.streams[key] = stream
        return key

    def free(self, key: int) -> None:
        """Record that ``key`` was freed. What is freed in the forward pass was not an activation."""
        self.events.append(~key)
        if self.moment == "forward" and self.kinds[key] == "activations":
            self.kinds[key] = "temporary"

    def mark(self, key: int, kind: str) -> None:
        """Set the kind of ``key``."""
        self.kinds[key] = kind

    @property
    def everything(self) -> int:
        """Bytes of all allocations in forward passes, an upper bound of what a step holds of them."""
        return sum(size for size, born in zip(self.sizes, self._born_in, strict=True) if born == "forward")

    def peak(self) -> tuple[MemoryBreakdown, StepPhase]:
        """Return what was held at the peak, and in which phase it was."""
        most, at, now = -1, 0, 0
        for place, event in enumerate(self.events):
            if event >= 0:
                now += rounded(self.sizes[event]) if self.sizes[event] else 0
                if now > most:
                    most, at = now, place
            elif self.sizes[~event]:
                now -= rounded(self.sizes[~event])
        moments: Iterator[StepPhase] = (moment for since, moment in reversed(self._moments) if since <= at)
        return self._held_at(at), next(moments, "between steps")

    def _held_at(self, place: int) -> MemoryBreakdown:
        live: set[int] = set()
        for event in self.events[: place + 1]:
            if event >= 0:
                live.add(event)
            else:
                live.discard(~event)
        held = dict.fromkeys(KINDS, 0)
        for key in live:
            held[self.kinds[key]] += rounded(self.sizes[key]) if self.sizes[key] else 0
        return MemoryBreakdown(**held)

    def reserved(self) -> int:
        """Return the peak in bytes that the caching allocator would reserve."""
        return peak_reserved(self.events, self.sizes, self.streams)
