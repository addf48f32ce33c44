"""Counts how often a primary finding was right in public failure texts: the confidences of ``doctor diagnose``.

    python benchmarks/answer_counts.py --write            replaces answer_counts.json and wrong_answers.json in
                                                          doctor/knowledge/causes
    python benchmarks/answer_counts.py --record SAMPLE    adds the answers on a file of benchmarks/failure_texts

benchmarks/first_answers.json holds the answers of the first version that was scored on a sample, before rules were made
from it; texts that rules were made from would say how well the rules fit, not how often they are right. The confidence
in it is that of the check. All answers count for their level, and those that the present version still gives also for
their id: what was wrong before a check was corrected says nothing about the check. The half ``held`` is not recorded:
it measures the result. wrong_answers.json holds the causes that were expected where an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from doctor.analysis.differential.measured_confidence import LEVELS, level_of
from doctor.knowledge import candidate_causes

if TYPE_CHECKING:
    from failure_texts import Answer, Text

ANSWERS = Path(__file__).resolve().with_name("first_answers.json")
COUNTS = Path(candidate_causes.__file__).with_name("causes") / "answer_counts.json"
WRONG = COUNTS.with_name("wrong_answers.json")
FOLDS = 10


class FirstAnswer(NamedTuple):
    """The primary finding on a text, the confidence that its check gave, and whether its id was an expected one.

    ``stands``: the present version gives the same id."""

    sample: str
    address: str
    primary: str
    stated: float
    right: bool
    stands: bool = True


@functools.cache
def first_answers() -> list[FirstAnswer]:
    """All recorded answers."""
    return [FirstAnswer(*one) for one in json.loads(ANSWERS.read_text("utf-8"))]


def fold_of(address: str) -> int:
    """The fold of cross-validation that a text is in, by the hash of its address."""
    return int(hashlib.sha256(address.encode()).hexdigest()[:8], 16) % FOLDS


def counts(left_out: int | None = None) -> dict[str, dict[str, tuple[int, int]]]:
    """The numbers of right answers and of answers by level: by id those that stand, and as ``""`` all of the level.

    ``left_out``: a fold that does not count."""
    found: dict[str, dict[str, tuple[int, int]]] = {str(least): {} for least in LEVELS}
    for one in sorted(first_answers(), key=lambda answer: answer.primary):
        level = found[level_of(one.stated)]
        for name in ("", one.primary) if one.stands else ("",):
            if fold_of(one.address) != left_out:
                right, number = level.get(name, (0, 0))
                level[name] = (right + one.right, number + 1)
    return found


def wrong_answers(left_out: int | None = None) -> dict[str, dict[str, int]]:
    """The causes that were expected where an answer was wrong, by its id, and as ``""`` all of them.

    ``left_out``: a fold that does not count."""
    expected = _expected()
    found: dict[str, Counter[str]] = {"": Counter()}
    for one in first_answers():
        if one.right or fold_of(one.address) == left_out:
            continue
        names = (candidate_causes.cause_of(check) for check in expected.get((one.sample, one.address), ()))
        name = next((name for name in names if name is not None), None)
        if name is not None:
            found[""][name] += 1
            found.setdefault(one.primary, Counter())[name] += 1
    return {check: dict(sorted(causes.items())) for check, causes in sorted(found.items())}


@functools.cache
def _expected() -> dict[tuple[str, str], tuple[str, ...]]:
    from failure_texts import read_texts

    samples = {one.sample for one in first_answers()}
    return {(sample, text.address): text.expected for sample in samples for text in read_texts(sample)}


@contextlib.contextmanager
def with_counts(
    numbers: Mapping[str, Mapping[str, tuple[int, int]]], wrong: Mapping[str, Mapping[str, int]] | None = None
) -> Iterator[None]:
    """A context in which confidences and alternatives follow from ``numbers`` and ``wrong``; without any, confidences
    are those of the checks."""
    with (
        mock.patch.object(candidate_causes, "answer_counts", return_value=numbers),
        mock.patch.object(candidate_causes, "wrong_answers", return_value=wrong or {}),
    ):
        yield


def record(sample: str) -> None:
    """Add the answers on a sample to :data:`ANSWERS`."""
    from failure_texts import score

    found = [*first_answers()]
    for text, answer in _answers(sample):
        if answer.primary is not None and answer.confidence is not None:
            right = score(text, answer).grade == "right"
            found.append(FirstAnswer(sample, text.address, answer.primary, answer.confidence, right))
    _write(found)


def compare() -> None:
    """Note which recorded answers the present version still gives."""
    samples = {one.sample for one in first_answers()}
    present = {(sample, text.address, answer.primary) for sample in samples for text, answer in _answers(sample)}
    _write([one._replace(stands=(one.sample, one.address, one.primary) in present) for one in first_answers()])


def _answers(sample: str) -> Iterator[tuple[Text, Answer]]:
    from failure_texts import diagnose, read_texts

    for text in read_texts(sample):
        if not text.healthy:
            with with_counts({}):
                answer = diagnose(text.text)
            yield text, answer


def _write(found: Iterable[FirstAnswer]) -> None:
    ANSWERS.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n", "utf-8")
    first_answers.cache_clear()


def main() -> None:
    """Record a sample, or write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    samples = sorted({path.stem for path in ANSWERS.with_name("failure_texts").glob("*.json")} - {"held"})
    parser.add_argument("--record", metavar="SAMPLE", choices=samples)
    parser.add_argument("--write", action="store_true", help=f"replace {COUNTS.name}")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
    if arguments.write:
        compare()
    rows = [
        f' "{level}": {{\n' + ",\n".join(f'  "{name}": {list(pair)}' for name, pair in ids.items()) + "\n }"
        for level, ids in counts().items()
    ]
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    if arguments.write:
        COUNTS.write_text(text, "utf-8")
        wrong = [f'"{check}": {json.dumps(causes)}' for check, causes in wrong_answers().items()]
        WRONG.write_text("{\n" + ",\n".join(wrong) + "\n}\n", "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
