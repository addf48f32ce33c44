"""What ``doctor estimate`` adds to torch's memory, against processes in public messages of torch's OutOfMemoryError.

    python benchmarks/estimate_contexts.py [--write]

Such a message has the memory of the process as the driver counts it, and what torch had allocated and reserved: the
rest is the CUDA context with its kernels, and NCCL's buffers. ``estimate_contexts.json`` beside this program has the
messages and the rule by which they were taken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from estimate_published import GOALS  # noqa: E402 - the path comes first
from estimate_results import MIB, percent  # noqa: E402
from evidence_pages import folded, write_between  # noqa: E402

from doctor.estimate.data_model import TrainingPlan  # noqa: E402
from doctor.estimate.device_budget import size_of  # noqa: E402
from doctor.estimate.memory.non_torch import outside  # noqa: E402

PATH = ROOT / "benchmarks" / "estimate_contexts.json"


class PublishedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message, with sizes as it prints them. ``ranks``: processes of the run, each with a GPU of the host."""

    url: str
    gpu: str
    capability: str
    process: str
    allocated: str
    cached: str
    ranks: int = 1

    @property
    def used(self) -> int:
        """Bytes of the process."""
        return size_of(self.process)

    @property
    def torch(self) -> int:
        """Bytes that torch reserved."""
        return size_of(self.allocated) + size_of(self.cached)

    @property
    def added(self) -> int:
        """Bytes that an estimate adds to those of torch."""
        plan = TrainingPlan(strategy="ddp" if self.ranks > 1 else "none", devices=self.ranks)
        return outside(plan, self.capability)

    @property
    def off(self) -> float:
        """The error of the whole process as a share of it; negative if the estimate is too low."""
        return (self.torch + self.added) / self.used - 1


class PublishedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The file: when it was read, by which rule, and the messages."""

    read: str
    rule: str
    figures: tuple[PublishedMessage, ...]


def summary(messages: PublishedMessages) -> str:
    """Return the errors of processes, and of the part outside of torch's allocator."""
    offs = [one.off for one in messages.figures]
    apart = [abs(one.added - (one.used - one.torch)) / MIB for one in messages.figures]
    kinds = len({one.gpu for one in messages.figures})
    median, worst = GOALS["process"]
    return (
        f"{len(offs)} processes on {kinds} kinds of GPU: median error {percent(statistics.median(offs))}, without sign "
        f"{percent(statistics.median(map(abs, offs))).lstrip('+')} (aim {median:.0%}), lowest {percent(min(offs))}, "
        f"highest {percent(max(offs))} (aim {worst:.0%}). Of the part outside of torch's allocator alone: median "
        f"{statistics.median(apart):,.0f} MiB, at most {max(apart):,.0f} MiB."
    )


def markdown(messages: PublishedMessages) -> str:
    """Return the summary, the rule, and every message with its address."""
    rows = [
        "| GPU | Ranks | Process | Outside of torch | Estimate | Error of the process |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(messages.figures, key=lambda each: (each.capability, each.gpu, each.url)):
        rows.append(
            f"| [{one.gpu}]({one.url}) | {one.ranks} | {one.used / MIB:,.0f} MiB | {(one.used - one.torch) / MIB:,.0f} "
            f"MiB | {one.added / MIB:,.0f} MiB | {percent(one.off)} |"
        )
    return "\n\n".join((summary(messages), f"Rule: {messages.rule}.", folded("All processes", "\n".join(rows))))


def main() -> int:
    """Print the summary; end with 1 if an aim is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the table into the page of evidence")
    given = parser.parse_args()
    messages = msgspec.json.decode(PATH.read_bytes(), type=PublishedMessages)
    print(summary(messages))
    if given.write:
        write_between("estimate-contexts", markdown(messages))
    median, worst = GOALS["process"]
    offs = [abs(one.off) for one in messages.figures]
    return int(statistics.median(offs) > median or max(offs) > worst)


if __name__ == "__main__":
    sys.exit(main())
