"""Jobs whose hosts wrote to a directory and read what the next host wrote, for the cases of checks."""

from __future__ import annotations

from collections.abc import Collection

from doctor.core.facts import Directory, StorageFacts, StorageReading, StorageSpeedFacts, StorageTrial
from doctor.testing.cases import JobBuilder, healthy


def storage_tried(
    folder: Directory, hosts: int = 4, odd: int | None = None, before: float | None = None, **changes: object
) -> JobBuilder:
    """Return a job of ``hosts`` with two ranks each, which all wrote 8 MiB to ``folder`` within 0.1 s and read what the
    next one wrote. ``changes``: fields of the trial of host ``odd``; ``before``: seconds of its first fsync."""
    sketch = healthy(hosts).put(StorageFacts(directories=(folder,)))
    for own in range(hosts):
        wrote: dict[str, object] = {"bytes": 8 << 20, "write_seconds": 0.01, "sync_seconds": 0.05 + 0.01 * (own % 3)}
        odds: list[dict[str, object]] = [{"sync_seconds": before}, changes] if before is not None else [changes]
        wrote_then = [wrote | odd_one for odd_one in odds] if own == odd else [wrote]
        trials = tuple(StorageTrial(folder.path, folder.role, **one) for one in wrote_then)  # type: ignore[arg-type]
        reading = StorageReading(folder.path, f"node{(own + 1) % hosts}", "whole", 0.02)
        sketch = sketch.put(StorageSpeedFacts(trials=trials, readings=(reading,)), hosts=(f"node{own}",))
    return sketch


def storage_unread(folder: Directory, hosts: int, reader: int) -> JobBuilder:
    """Return the same job in which a read of host ``reader`` timed out."""
    reading = StorageReading(folder.path, f"node{(reader + 1) % hosts}", "silent")
    return storage_tried(folder, hosts).alter(StorageSpeedFacts, hosts=(f"node{reader}",), readings=(reading,))


def storage_apart(folder: Directory, hosts: int, odd: Collection[int]) -> JobBuilder:
    """Return the same job in which each host in ``odd`` has its own directory."""
    sketch = storage_tried(folder, hosts)
    for own in range(hosts):
        next_one = (own + 1) % hosts
        if own in odd or next_one in odd:
            reading = StorageReading(folder.path, f"node{next_one}", "absent")
            sketch = sketch.alter(StorageSpeedFacts, hosts=(f"node{own}",), readings=(reading,))
    return sketch
