"""VER007: LD_PRELOAD names a library that does not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.api import Finding, Job, Severity, Verdict, check, merge
from doctor.core.text import HERE, conjunction
from doctor.facts import SoftwareFacts
from doctor.testing import Fails, Passes, healthy

_ABSENT = ("/usr/local/cuda-12.8/lib/libnccl.so",)


@check(
    id="VER007",
    severity=Severity.WARNING,
    needs=(SoftwareFacts,),
    cases=lambda: (
        Passes("nothing is preloaded, or all of it exists", healthy(2, 2)),
        Fails(
            "a library of another image",
            healthy(2, 2).alter(SoftwareFacts, ranks=(2, 3), preloads_missing=_ABSENT),
            ranks=(2, 3),
        ),
        Fails(
            "two libraries",
            healthy(1, 2).alter(SoftwareFacts, preloads_missing=(*_ABSENT, "libjemalloc.so.2")),
            ranks=(0, 1),
        ),
    ),
)
def preload_missing(job: Job) -> Iterator[Verdict]:
    """Ask whether the dynamic loader finds every library in LD_PRELOAD.

    Why it hurts: the loader only prints an error, and programs start without the library: they may use another NCCL,
    allocator or profiler than intended.
    Fix: Correct the path in LD_PRELOAD, or unset it.
    """
    drafts = (
        Finding(
            f"The loader cannot find {_some(software.preloads_missing)} that LD_PRELOAD names",
            ranks=identical.ranks,
            evidence={"missing": list(software.preloads_missing)},
            fix=f"Correct or remove {missing} in LD_PRELOAD on {HERE}.",
        )
        for software, identical in job.each(SoftwareFacts)
        if (missing := conjunction(software.preloads_missing[:3]))
    )
    yield from merge(drafts, job.place_of)


def _some(missing: Sequence[str]) -> str:
    if len(missing) == 1:
        return f"the library {missing[0]}"
    return f"{missing[0]} and {len(missing) - 1} more {'library' if len(missing) == 2 else 'libraries'}"
