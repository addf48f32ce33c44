"""NET025: a collective of known values gave another result."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from doctor.api import (
    CollectiveFacts,
    CollectiveResult,
    Finding,
    Job,
    Scope,
    Severity,
    Sick,
    Verdict,
    Well,
    check,
    correlates,
    healthy,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""Relative: a few units in the last place of each type, for sums whose order differs. Other types are exact."""


def _ran(
    received: float | None, expected: float = 10.0, dtype: str = "float32", backend: str = "nccl"
) -> CollectiveFacts:
    return CollectiveFacts(results=(CollectiveResult("all_reduce", backend, expected, received, dtype),))


@check(
    id="NET025",
    severity=Severity.ERROR,
    scope=Scope.JOB,
    needs=(CollectiveFacts,),
    cases=lambda: (
        Well("nobody measured", healthy(hosts=1, per_host=4)),
        Well("the sum is right", healthy(1, 4).put(_ran(10.0))),
        Well("rounded as bfloat16 rounds", healthy(1, 2).put(_ran(10.0625, dtype="bfloat16"))),
        Sick(
            "one rank got a wrong sum",
            healthy(1, 4).put(_ran(10.0)).put(_ran(7.0), ranks=(2,)),
            ranks=(2,),
        ),
        Sick(
            "a host that computes nonsense",
            healthy(2, 2).put(_ran(10.0)).put(_ran(None), ranks=(2, 3)),
            ranks=(2, 3),
        ),
        Sick("integers are exact", healthy(1, 2).put(_ran(11.0, dtype="int64", backend="gloo")), ranks=(0, 1)),
    ),
)
def collective_result_wrong(job: Job) -> Iterator[Verdict]:
    """Ask whether a collective of known values gave the known result.

    Why it hurts: gradients are wrong without any error; the loss drifts or becomes NaN, and the run is lost.
    Fix: take the host out; check PCI access control (`sudo lspci -vvv | grep ACSCtl`), ECC and NVLink errors
    (`nvidia-smi -q`), and compare with `NCCL_P2P_DISABLE=1` and `NCCL_ALGO=Ring NCCL_PROTO=Simple`.
    """
    wrong: dict[str, list[int]] = {}
    shown: dict[str, list[str]] = {}
    for facts, alike in job.each(CollectiveFacts):
        for result in facts.results:
            if not _is_right(result):
                name = f"{result.operation} of {result.dtype} over {result.backend}"
                wrong.setdefault(name, []).extend(alike.ranks)
                shown.setdefault(name, []).append(f"{_shown(result.received)}, not {result.expected:g}")
    for name, ranks in wrong.items():
        evidence = {"received": list(dict.fromkeys(shown[name]))[:8], "goes_along_with": list(correlates(job, ranks))}
        yield Finding(f"{name} gave {shown[name][0]}", ranks=tuple(sorted(set(ranks))), evidence=evidence)


def _is_right(result: CollectiveResult) -> bool:
    if result.received is None:
        return False
    tolerance = TOLERANCE.get(result.dtype.removeprefix("torch."), 0.0)
    return isclose(result.received, result.expected, rel_tol=tolerance, abs_tol=tolerance)


def _shown(received: float | None) -> str:
    return "no number" if received is None else f"{received:g}"
