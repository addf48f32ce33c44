"""Which way of pairing hosts finds the slow part: faults planted in simulated networks, ours against five others.

    python benchmarks/isolation.py [--part | --write] [--only designs|small|sizes] [--trials N] [--sizes 4,8,1024]

Three tables: all designs, all designs in a network so small that all pairs can be played, and this doctor by numbers of
hosts. Every cell is ``precision / recall``: of what was blamed, how much was planted, and of what was planted, how much
was blamed, by exactly its kind and its hosts (designs that only know hosts may name the host of a bad direction). Noise
is log-normal; besides, 2 % of the pairs and 2 % of the readings are slower by a random factor. ``link`` is a link that
the first rounds of the design measure, ``link-one-way`` one that is slow in one direction only (to blame is the link),
``host-and-link`` a host and such a link between two others; ``any-link`` is any pair of the job, of which no design
short of all pairs measures all. Bytes are the most that may flow, if a pair of any design sends as much as this
doctor's. Seeds are fixed.

The exit code is 1 where, in the first table, this doctor stays below 0.95 of precision or of recall for a kind that it
is held to, or plays more rounds than ceil(log2(hosts)) + 2. The smaller networks of --part have no say.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from evidence_pages import add_part, write_between  # noqa: E402
from isolation_faults import Network, plant  # noqa: E402 - the path comes first
from isolation_rivals import DESIGNS, Claim, Design  # noqa: E402

from doctor.probes.bandwidth.transfer import MOST_BYTES  # noqa: E402

SIZES = (4, 8, 16, 50, 64, 256, 1000, 1024, 4096)
NOISES = (0.01, 0.03, 0.1, 0.3)
SHARES = (0.5, 0.1)
HELD_TO = ("host", "sending", "receiving", "link", "half", "rack", "at-times")
"""Kinds of one fault that decide the exit code."""
ONE_FAULT = (*HELD_TO, "link-one-way")
KINDS = ("none", "host", "hosts-2", "hosts-4", "hosts-8", *ONE_FAULT[1:], "host-and-link", "any-link")
HOSTS_ALONE = {"none", "host", "hosts-2", "hosts-4", "hosts-8", "sending", "receiving", "at-times"}

MAIN = (1024, 0.1, 0.5)
"""Hosts, noise and the share of the usual in the first table of all designs."""

SMALL = (64, *MAIN[1:])
"""The same where all pairs are played, too."""

ENOUGH = 0.95
"""Precision and recall in the first table."""


@dataclass
class Score:
    """Faults found and missed, blame without a fault, trials with any of it, rounds and pairs measured; ``longest``:
    the rounds of the trial that had most."""

    right: int = 0
    missed: int = 0
    wrong: int = 0
    alarmed: int = 0
    trials: int = 0
    rounds: int = 0
    pairs: int = 0
    longest: int = 0

    def add(self, other: Score) -> None:
        """Take the trials of ``other`` in."""
        longest = max(self.longest, other.longest)
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.longest = longest

    def judge(self, planted: set[Claim], named: set[Claim], network: Network) -> None:
        """One more trial."""
        self.right += len(planted & named)
        self.missed += len(planted - named)
        self.wrong += len(named - planted)
        self.alarmed += bool(named - planted)
        self.trials += 1
        self.rounds += network.played
        self.pairs += network.measured
        self.longest = max(self.longest, network.played)

    @property
    def precision(self) -> float | None:
        """``None`` where nobody was blamed."""
        named = self.right + self.wrong
        return self.right / named if named else None

    @property
    def recall(self) -> float | None:
        """``None`` where nothing was planted."""
        planted = self.right + self.missed
        return self.right / planted if planted else None

    @property
    def words(self) -> str:
        """Precision and recall; false alarms where nothing was planted."""
        if self.recall is None:
            return f"{self.alarmed} of {self.trials}"
        precision = "–" if self.precision is None else f"{self.precision:.2f}"
        return f"{precision} / {self.recall:.2f}"

    @property
    def cost(self) -> list[str]:
        """Rounds of a trial, and gigabytes of all hosts together, as they are shown."""
        return [f"{self.rounds / self.trials:.0f}", _gigabytes(self.pairs / self.trials)]


def trials(design: Design, kind: str, count: int, noise: float, share: float, number: int) -> Score:
    """So many networks with a fault of this kind, the same ones for every design."""
    score = Score()
    for seed in range(number):
        chance = random.Random(f"{kind} {count} {noise} {share} {seed}")
        faults = plant(kind, count, share, chance, design.first_rounds(count))
        network = Network(count, faults, noise, chance)
        blamed: set[Claim] = {("host" if design.hosts_only else fault.blame, fault.members) for fault in faults}
        score.judge(blamed, design.find(network), network)
    return score


def kinds_for(count: int) -> list[str]:
    """Eight slow hosts of eight are the usual."""
    return [kind for kind in KINDS if not kind.startswith("hosts-") or 2 * int(kind[6:]) <= count]


def measured(design: Design, number: int, count: int, noise: float, share: float) -> dict[str, Score]:
    """The scores of a design by kind: of all for which it has words."""
    return {
        kind: trials(design, kind, count, noise, share, number)
        for kind in kinds_for(count)
        if not design.hosts_only or kind in HOSTS_ALONE
    }


def compare(
    number: int, count: int, noise: float, share: float, scores: dict[str, Mapping[str, Score]]
) -> Iterator[list[str]]:
    """A row for each design: its name, rounds, gigabytes of all hosts together, and the score of every kind, all of
    which are left in ``scores``, by the design's name."""
    kinds = kinds_for(count)
    yield ["", "rounds", "GB at most", *("nothing (false alarms)" if kind == "none" else kind for kind in kinds)]
    for design in DESIGNS:
        if count > design.most_hosts:
            pairs = count * (count - 1) // 2
            yield [design.name, str(count - 1), _gigabytes(pairs), *("not run" for _ in kinds)]
            continue
        own = scores[design.name] = measured(design, number, count, noise, share)
        yield [design.name, *_together(own.values()).cost, *(own[kind].words if kind in own else "" for kind in kinds)]


def _together(scores: Iterable[Score]) -> Score:
    total = Score()
    for score in scores:
        total.add(score)
    return total


def _gigabytes(pairs: float) -> str:
    """What so many pairs send at most, both ways."""
    gigabytes = 2 * pairs * MOST_BYTES / 1e9
    return f"{gigabytes:,.{0 if gigabytes >= 10 else 1}f}"


def shortfalls(scores: Mapping[str, Score], count: int) -> Iterator[str]:
    """What this doctor is held to and did not reach."""
    for kind in HELD_TO:
        score = scores[kind]
        if min(score.precision or 0.0, score.recall or 0.0) < ENOUGH:
            yield f"{kind}: {score.words} where {ENOUGH} is to be reached"
    most = math.ceil(math.log2(count)) + 2
    for kind, score in scores.items():
        if score.longest > most:
            yield f"{kind}: {score.longest} rounds where {most} are to do"


def by_size(number: int, sizes: Sequence[int]) -> Iterator[list[str]]:
    """Ours: a row for each number of hosts, all single faults together; a column for each noise and share."""
    columns = [(noise, share) for share in SHARES for noise in NOISES]
    yield ["hosts", "rounds", "GB at most", *(f"{noise:.0%} noise, {share} of usual" for noise, share in columns)]
    for count in sizes:
        cells = [
            _together(trials(DESIGNS[0], kind, count, noise, share, fewer(number, count)) for kind in ONE_FAULT)
            for noise, share in columns
        ]
        yield [str(count), *_together(cells).cost, *(cell.words for cell in cells)]


def fewer(number: int, count: int) -> int:
    """Trials of large networks take long, and differ less from one another."""
    return min(number, max(1 if count > 2048 else 2, number * 64 // max(count, 64)))


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table, printed row by row as it comes."""
    lines: list[str] = []
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
        if len(lines) == 1:
            lines.append("|" + "---|" * len(row))
            print(lines[-1])
    return "\n".join(lines)


def main() -> int:
    """Print the tables, and write them into docs/evidence if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_part(parser, "one network of each kind, of 4 and 8 hosts")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/evidence")
    parser.add_argument(
        "--trials", type=int, default=20, help="networks of each kind (fewer of the large ones by size)"
    )
    parser.add_argument("--sizes", help="numbers of hosts")
    parser.add_argument("--only", choices=("designs", "small", "sizes"), help="one of the three tables")
    options = parser.parse_args()
    number, is_written = (1, False) if options.part else (options.trials, options.write)
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else (4,) if options.part else SIZES
    began = time.perf_counter()
    short: list[str] = []
    if options.only in (None, "designs"):
        setting = (8, *MAIN[1:]) if options.part else MAIN
        scores = designs_table("isolation", number, setting, write=is_written)
        short += shortfalls(scores[DESIGNS[0].name], setting[0]) if setting == MAIN else ()
    if options.only in (None, "small"):
        designs_table("isolation-small", number, (4, *SMALL[1:]) if options.part else SMALL, write=is_written)
    if options.only in (None, "sizes"):
        table = markdown(by_size(number, sizes))
        if is_written:
            write_between("isolation-sizes", f"This doctor, one fault of each kind (precision / recall):\n\n{table}")
    print(f"{time.perf_counter() - began:.0f} s", *short, sep="\n")
    return 1 if short else 0


def designs_table(
    name: str, number: int, setting: tuple[int, float, float], *, write: bool
) -> dict[str, Mapping[str, Score]]:
    """Print a table of all designs, ``write`` it between the marks called ``name``, and return the scores."""
    count, noise, share = setting
    scores: dict[str, Mapping[str, Score]] = {}
    title = f"{count:,} hosts, {noise:.0%} noise, what is slow has {share} of the usual; {number} networks of each kind"
    print(f"{title}:")
    table = markdown(compare(number, count, noise, share, scores))
    if write:
        write_between(name, f"{title} (precision / recall):\n\n{table}")
    return scores


if __name__ == "__main__":
    sys.exit(main())
