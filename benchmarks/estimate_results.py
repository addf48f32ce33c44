"""Rows of the table that ``benchmarks/estimate.py`` makes, what is aimed at, and how it is shown."""

from __future__ import annotations

import msgspec
from evidence_pages import folded

MEDIAN, NINETY_FIFTH, BELOW = 0.03, 0.10, 0.05
"""Aims: of the errors without their sign, and how far an estimate may lie below the truth."""
MIB = 1 << 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration; bytes, ``reserved`` by the allocator and ``used`` of the device in all where that was a GPU.
    ``bound``: why the estimate is only a bound. ``error``: what went wrong instead."""

    name: str
    estimate: int = 0
    truth: int = 0
    estimated_reserved: int = 0
    reserved: int | None = None
    used: int | None = None
    estimated_moment: str = ""
    moment: str = ""
    bound: str = ""
    error: str = ""
    estimate_seconds: float = 0.0
    truth_seconds: float = 0.0

    @property
    def off(self) -> float:
        """The error of the estimate, as a part of the truth; negative where it is too low."""
        return self.estimate / self.truth - 1


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Of one machine."""

    machine: str
    torch: str
    compared: str
    rows: tuple[Row, ...]

    @property
    def errors(self) -> list[float]:
        """Of the rows that were traced, without sign, smallest first."""
        return sorted(abs(row.off) for row in self.rows if not row.error and not row.bound)

    @property
    def lowest(self) -> Row:
        """The estimate that is furthest below the truth, or least above it; bounds too."""
        return min((row for row in self.rows if not row.error), key=lambda row: row.off)


def percent(part: float) -> str:
    """With its sign."""
    return f"{part * 100:+.1f} %"


def summary(results: Results) -> str:
    """The figures that the aims are for."""
    errors, lowest = results.errors, results.lowest
    bounds = sum(1 for row in results.rows if row.bound)
    failed = sum(1 for row in results.rows if row.error)
    middle = (
        f"median error {errors[len(errors) // 2] * 100:.1f} % (aim {MEDIAN:.0%}), "
        f"95th percentile {at_share(errors, 0.95) * 100:.1f} % (aim {NINETY_FIFTH:.0%}), "
        if errors
        else ""
    )
    return (
        f"{len(results.rows)} configurations: {middle}lowest against the truth "
        f"{percent(lowest.off)} ({lowest.name}; aim -{BELOW:.0%}); {bounds} bounds, {failed} failed"
    )


def at_share(ordered: list[float], share: float) -> float:
    """The value that this share of the others does not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def is_good(results: Results) -> bool:
    """Whether all aims are reached."""
    errors = results.errors
    near = bool(errors) and errors[len(errors) // 2] <= MEDIAN and at_share(errors, 0.95) <= NINETY_FIFTH
    return near and results.lowest.off >= -BELOW and not any(row.error for row in results.rows)


def markdown(results: Results) -> str:
    """As the page of evidence shows it."""
    lines = ["| Configuration | Real peak | Estimate | Error | Peak comes in |", "|---|---|---|---|---|"]
    for row in results.rows:
        if row.error:
            lines.append(f"| {row.name} | | | {row.error} | |")
            continue
        note = f" (bound: {row.bound})" if row.bound else ""
        lines.append(
            f"| {row.name} | {row.truth / MIB:,.1f} MiB | {row.estimate / MIB:,.1f} MiB{note} | {percent(row.off)} | "
            f"{row.estimated_moment} |"
        )
    told = f"{results.machine}, torch {results.torch}: {results.compared}."
    return f"{summary(results)}.\n\n{told}\n\n" + folded("All configurations", "\n".join(lines))
