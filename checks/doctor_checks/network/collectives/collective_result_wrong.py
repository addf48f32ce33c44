"""NET025: a collective with known inputs returned a wrong result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from doctor.api import Finding, Job, Scope, Severity, Verdict, check, correlates, ranks_in_words
from doctor.facts import CollectiveFacts, CollectiveResult
from doctor.testing import Fails, Passes, healthy
from doctor_checks._trial_conclusions import with_trials
from doctor_checks.network.connectivity._slow_rails import backend_name

EXACT = {"float64": 2**53, "float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""Largest integers that each type represents exactly; sums of integers below are exact in any order of addition."""
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""Relative tolerance for other values: a few units in the last place, because the order of sums differs. Other types
are exact."""


def _ran(
    received: float | None, expected: float = 10.0, dtype: str = "float32", backend: str = "nccl"
) -> CollectiveFacts:
    return CollectiveFacts(results=(CollectiveResult("all_reduce", backend, expected, received, dtype),))


def _along(axis: str, received: float, *members: int, operation: str = "all_reduce") -> CollectiveFacts:
    world = CollectiveResult("all_reduce", "gloo", 28.0, 28.0)
    return CollectiveFacts(
        results=(world, CollectiveResult(operation, "gloo", 1.0, received, "float32", axis, members))
    )


@check(
    id="NET025",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(CollectiveFacts,),
    cases=lambda: (
        Passes("not measured", healthy(hosts=1, per_host=4)),
        Passes("the sum is right", healthy(1, 4).put(_ran(10.0))),
        Passes("rounded as bfloat16 rounds", healthy(1, 2).put(_ran(1.0078125, 1.005, dtype="bfloat16"))),
        Passes("every group is right", healthy(2, 2).put(_along("tp", 1.0, 0, 1), ranks=(0, 1))),
        Fails(
            "one rank got a wrong sum",
            healthy(1, 4).put(_ran(10.0)).put(_ran(7.0), ranks=(2,)),
            ranks=(2,),
        ),
        Fails(
            "a host that computes nonsense",
            healthy(2, 2).put(_ran(10.0)).put(_ran(None), ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Fails("integers are exact", healthy(1, 2).put(_ran(11.0, dtype="int64", backend="gloo")), ranks=(0, 1)),
        Fails("bfloat16 holds 129", healthy(1, 2).put(_ran(129.0, 128.0, dtype="bfloat16"), ranks=(1,)), ranks=(1,)),
        Fails(
            "one group of an axis is wrong, and the others are right",
            healthy(2, 2).put(_along("tp", 1.0, 0, 1), ranks=(0, 1)).put(_along("tp", 2.0, 2, 3), ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Fails(
            "one rank is sent what was meant for another",
            healthy(2, 2)
            .put(_along("dp", 1.0, 0, 2, operation="all_to_all"), ranks=(0,))
            .put(_along("dp", 8.0, 0, 2, operation="all_to_all"), ranks=(2,)),
            ranks=(2,),
        ),
    ),
)
def collective_result_wrong(job: Job) -> Iterator[Verdict]:
    """Ask whether a collective with known inputs returned the expected result.

    Why it hurts: gradients are silently wrong, so the loss may drift or become NaN.
    Fix: Exclude the host on which the result is wrong, or find the cause with `doctor check --probe full --why`.
    """
    wrong: dict[str, list[tuple[CollectiveResult, tuple[int, ...]]]] = {}
    for facts, identical in job.each(CollectiveFacts):
        for result in facts.results:
            if not _is_right(result):
                along = f" ({result.axis} group)" if result.axis != "world" else ""
                name = f"{result.operation} of {result.dtype} over {backend_name(result.backend)}{along}"
                wrong.setdefault(name, []).append((result, identical.ranks))
    for name, results in wrong.items():
        yield with_trials(job, _finding(job, name, results), "collective")


def _finding(job: Job, name: str, wrong: Sequence[tuple[CollectiveResult, tuple[int, ...]]]) -> Finding:
    ranks = tuple(sorted({rank for _, own in wrong for rank in own}))
    groups = dict.fromkeys(result.members for result, _ in wrong if result.members)
    received = list(dict.fromkeys(_shown(result) for result, _ in wrong))
    evidence = {
        "received": received[:8] if len(received) > 1 else None,
        "groups": [ranks_in_words(group) for group in groups][:8],
        "goes_along_with": list(correlates(job, ranks)),
    }
    summary = f"{name} returned {_shown(wrong[0][0])} on {ranks_in_words(ranks)}"
    return Finding(summary, ranks=ranks, evidence=evidence, fix=_fix(job, ranks, wrong[0][0].backend))


def _fix(job: Job, ranks: tuple[int, ...], backend: str) -> str:
    hosts = job.hosts_of(ranks)
    if len(hosts) != 1:
        return "Find the cause with `doctor check --probe full --why` on all ranks."
    what, commands = ("GPUs", _GPU_ERRORS) if backend == "nccl" else ("memory", f"`{_MEMORY_ERRORS}`")
    errors = "ECC and NVLink errors" if backend == "nccl" else "errors"
    return (
        f"On {hosts[0]}, check the {what} for {errors} with {commands}, and exclude the host if it has any "
        f"(`srun --exclude={hosts[0]}` in SLURM)."
    )


_GPU_ERRORS = "`nvidia-smi -q -d ECC` and `nvidia-smi nvlink -e`"
_MEMORY_ERRORS = "sudo dmesg -T | grep -E 'Hardware Error|EDAC.* (CE|UE) '"
"""Lines of corrected and uncorrected errors; what the kernel logs about EDAC and MCE at boot is harmless."""


def _is_right(result: CollectiveResult) -> bool:
    if result.received is None:
        return False
    dtype = result.dtype.removeprefix("torch.")
    if result.expected.is_integer() and abs(result.expected) <= EXACT.get(dtype, math.inf):
        return result.received == result.expected
    tolerance = TOLERANCE.get(dtype, 0.0)
    return math.isclose(result.received, result.expected, rel_tol=tolerance, abs_tol=tolerance)


def _shown(result: CollectiveResult) -> str:
    return f"{'NaN or Inf' if result.received is None else f'{result.received:g}'} instead of {result.expected:g}"
