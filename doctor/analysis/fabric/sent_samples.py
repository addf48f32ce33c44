"""The transfers between hosts, and which of them a part of the network affects.

Apart from what localizes such a part, because every watched run imports this.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeVar

from doctor.core.facts import Transfer, TransferFacts
from doctor.core.job import Job

H = TypeVar("H", bound=Hashable)


class SentSample(NamedTuple):
    """A transfer that the host ``source`` sent, as received by its peer."""

    source: str
    sample: Transfer


def sent_samples(job: Job) -> tuple[SentSample, ...]:
    """All transfers of a job, once each."""
    return tuple(
        SentSample(host.name, sample)
        for host in job.hosts
        if (facts := host.find(TransferFacts)) is not None
        for sample in facts.samples
        if sample.peer != host.name
    )


def touches(kind: str, members: frozenset[H], source: H, target: H) -> bool:
    """Whether a component of this :data:`Blame` affects the path from ``source`` to ``target``."""
    ends = {source, target}
    if kind == "link":
        return ends == members
    if kind == "boundary":
        return len(ends & members) == 1
    end = {"sending": {source}, "receiving": {target}}.get(kind, ends)
    return bool(end & members)
