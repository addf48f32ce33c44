"""How often ``doctor diagnose`` names the right finding on failure texts from public threads.

    python benchmarks/failure_texts.py                    scores both halves
    python benchmarks/failure_texts.py --misses           also lists the misses of the half ``rules``
    python benchmarks/failure_texts.py --sample fresh_1   scores one file of benchmarks/failure_texts
    python benchmarks/failure_texts.py --json FILE        writes the result of each text to FILE
    python benchmarks/failure_texts.py --write            writes the kept scores into docs/evidence
    python benchmarks/failure_texts.py --keep             adds the scores to benchmarks/failure_texts_results.json

The expected ids were committed before the first run on a text. A text belongs to the half ``rules`` if the first hex
digit of the SHA-256 of its address is even, otherwise to ``held``; texts of ``held`` are not read when rules are
written, so ``--misses`` does not show them. The texts are excerpts of what programs printed, in which names of users
and hosts, private addresses, process ids, pointers, dates and line numbers of users' programs are replaced.

A primary finding is right if its id is in ``expected``, and weak if it is in ``also``. The first three are the primary
finding, then the candidates of the report, then its other findings: unexplained ones first, by severity and
confidence.

Confidences and counted alternatives are cross-validated: those of an answer follow from benchmarks/first_answers.json
without the tenth of the texts that this one is in, by the hash of its address.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from click.testing import CliRunner

from doctor.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parent))
from answer_counts import counts, fold_of, with_counts, wrong_answers

TEXTS = Path(__file__).resolve().parent / "failure_texts"
RESULTS = TEXTS.with_name("failure_texts_results.json")
HALVES = ("rules", "held")
PURPOSES = dict.fromkeys(("dev_1", "dev_2"), "development, used for tuning")
SEVERITIES = ("error", "warning", "info")
BINS = ((0.0, 0.5), (0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.01))
Grade: TypeAlias = Literal["right", "weak", "wrong", "nothing found", "quiet", "false alarm"]


class Text(NamedTuple):
    """A text of a thread, and the ids that a reader of the thread expects."""

    address: str
    symptom: str
    text: str
    expected: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    cause: str = ""
    rank: int | None = None
    host: str | None = None
    healthy: bool = False


class Answer(NamedTuple):
    """What a report says: its exit code, the ids in their order, and whom the primary finding names."""

    exit_code: int
    primary: str | None
    ids: tuple[str, ...]
    confidence: float | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()


class Score(NamedTuple):
    """The grade of the answer on a text."""

    text: Text
    answer: Answer
    grade: Grade
    in_three: bool
    blame: Literal["right", "wrong", "none"] | None


def read_texts(sample: str) -> list[Text]:
    """The texts of a file of :data:`TEXTS`."""
    cases = json.loads((TEXTS / f"{sample}.json").read_text("utf-8"))
    return [
        Text(
            case["address"],
            case["class"],
            "\n".join(case["lines"]) + "\n",
            tuple(case.get("expected", ())),
            tuple(case.get("also", ())),
            case.get("cause", ""),
            case.get("rank"),
            case.get("host"),
            case.get("healthy", False),
        )
        for case in cases
    ]


def diagnose(text: str) -> Answer:
    """Run ``doctor diagnose`` on a text."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.log"
        log.write_text(text, "utf-8")
        done = CliRunner().invoke(app, ["diagnose", "--isolated", "--format", "json", str(log)])
    return answer_of(json.loads(done.stdout), done.exit_code)


def cross_validated(text: Text) -> Answer:
    """The answer on a text, with the confidence that follows from the texts of other folds."""
    fold = fold_of(text.address)
    with with_counts(counts(left_out=fold), wrong_answers(left_out=fold)):
        return diagnose(text.text)


def answer_of(report: dict[str, Any], exit_code: int) -> Answer:
    """Read the answer from a report in JSON; of several runs, from the first that has a primary finding."""
    if "runs" in report:
        reports = [run.get("report", run) for run in report["runs"]]
        report = next((one for one in reports if one.get("primary")), reports[0])
    findings = sorted(_findings(report), key=lambda one: (one[0] != report["primary"], *_rank_of(one[1])))
    candidates = report.get("candidates") or []
    ids = [report["primary"]] if report["primary"] else []
    ids += [one["id"] for one in candidates] + [check for check, _ in findings]
    first = next((one for check, one in findings if check == report["primary"]), None)
    confidence = first["confidence"] if first else candidates[0]["confidence"] if candidates else None
    return Answer(
        exit_code,
        report["primary"],
        tuple(dict.fromkeys(ids)),
        confidence,
        tuple(first["ranks"]) if first else (),
        tuple(first["hosts"]) if first else (),
        tuple(check for check, one in findings if one["severity"] != "info"),
    )


def _findings(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(result["id"], one) for result in report["results"] for one in result["findings"] if not one["ignored"]]


def _rank_of(finding: dict[str, Any]) -> tuple[bool, int, float]:
    return finding["explained_by"] is not None, SEVERITIES.index(finding["severity"]), -finding["confidence"]


def score(text: Text, answer: Answer) -> Score:
    """Grade an answer."""
    if text.healthy:
        alarm = bool(answer.alarms) or answer.exit_code == 1
        return Score(text, answer, "false alarm" if alarm else "quiet", in_three=not alarm, blame=None)
    grade: Grade = "wrong"
    first = answer.ids[0] if answer.ids else None
    if first is None:
        grade = "nothing found"
    elif first in text.expected:
        grade = "right"
    elif first in text.also:
        grade = "weak"
    return Score(text, answer, grade, bool({*answer.ids[:3]} & {*text.expected}), _blame(text, answer))


def _blame(text: Text, answer: Answer) -> Literal["right", "wrong", "none"] | None:
    expected, named = ({text.rank}, {*answer.ranks}) if text.rank is not None else ({text.host}, {*answer.hosts})
    if expected == {None}:
        return None
    return "none" if not named else "right" if named == expected else "wrong"


class Bin(NamedTuple):
    """The answers whose confidence lies from ``low`` to below ``high``."""

    low: float
    high: float
    number: int
    confidence: float
    hit_rate: float


def reliability(scores: Iterable[Score]) -> list[Bin]:
    """Confidence against hit rate, of the failures that got an answer."""
    answered = [
        (one.answer.confidence, one.grade == "right") for one in scores if one.answer.ids and not one.text.healthy
    ]
    bins = []
    for low, high in BINS:
        inside = [
            (confidence, hit) for confidence, hit in answered if confidence is not None and low <= confidence < high
        ]
        if inside:
            mean = sum(confidence for confidence, _ in inside) / len(inside)
            bins.append(Bin(low, high, len(inside), mean, sum(hit for _, hit in inside) / len(inside)))
    return bins


def calibration_error(bins: Sequence[Bin], always: float | None = None) -> float:
    """Expected calibration error; with ``always``, of a tool that gives that confidence to each answer."""
    number = sum(one.number for one in bins) or 1
    if always is not None:
        return abs(always - sum(one.number * one.hit_rate for one in bins) / number)
    return sum(one.number * abs(one.confidence - one.hit_rate) for one in bins) / number


def summary(scores: Sequence[Score]) -> dict[str, int]:
    """Counts of a sample by grade."""
    failures = [one for one in scores if not one.text.healthy]
    grades = Counter(one.grade for one in scores)
    blame = Counter(one.blame for one in failures)
    return {
        "failures": len(failures),
        "primary right": grades["right"],
        "weak": grades["weak"],
        "in the first three": sum(one.in_three for one in failures),
        "nothing found": grades["nothing found"],
        "wrong": grades["wrong"],
        "exit 0 on a failure": sum(one.answer.exit_code == 0 for one in failures),
        "rank or host right": blame["right"],
        "rank or host wrong": blame["wrong"],
        "rank or host not named": blame["none"],
        "healthy": len(scores) - len(failures),
        "false alarms": grades["false alarm"],
    }


def table(name: str, scores: Sequence[Score]) -> str:
    """The summary, the score by symptom and the reliability table of a sample, as text."""
    counts = summary(scores)
    lines = [f"{name}:"]
    for word, number in counts.items():
        share = f" ({number / counts['failures']:.0%})" if counts["failures"] and word in _SHARES else ""
        lines.append(f"  {word:24}{number:4}{share}")
    lines.append("  right by symptom: " + _by_symptom(scores))
    bins = reliability(scores)
    lines.append("  confidence    texts  mean  hit rate")
    lines += [
        f"  {one.low:.1f} to {min(one.high, 1):.1f}    {one.number:5}  {one.confidence:.2f}  {one.hit_rate:.2f}"
        for one in bins
    ]
    return "\n".join([*lines, "  " + calibration_line(name, scores)])


def calibration_line(name: str, scores: Sequence[Score]) -> str:
    """The calibration error over scores, beside that of a constant."""
    bins = reliability(scores)
    error, constant = calibration_error(bins), calibration_error(bins, always=0.5)
    return f"expected calibration error of {name} {error:.3f} (always 0.5: {constant:.3f})"


_SHARES = ("primary right", "weak", "in the first three", "nothing found", "wrong", "exit 0 on a failure")


def _by_symptom(scores: Sequence[Score]) -> str:
    symptoms: dict[str, list[bool]] = {}
    for one in scores:
        if not one.text.healthy:
            symptoms.setdefault(one.text.symptom, []).append(one.grade == "right")
    return ", ".join(f"{name} {sum(hits)}/{len(hits)}" for name, hits in sorted(symptoms.items()))


def miss(one: Score) -> str:
    """A miss as text: the grade, what was expected, what was answered and the log."""
    expected = ",".join(one.text.expected) or "no finding"
    answered = ",".join(one.answer.ids[:4]) or "nothing"
    head = f"{one.grade}: {one.text.address} ({one.text.symptom}), exit {one.answer.exit_code}"
    lines = [head, f"  expected {expected}, answered {answered}", f"  cause: {one.text.cause or 'none'}"]
    return "\n".join(lines + [f"  | {line}" for line in one.text.text.splitlines()])


def _as_json(one: Score) -> dict[str, Any]:
    answer = one.answer
    return {
        "address": one.text.address,
        "grade": one.grade,
        "in_three": one.in_three,
        "blame": one.blame,
        "exit_code": answer.exit_code,
        "ids": answer.ids[:6],
        "confidence": answer.confidence,
    }


def keep(samples: dict[str, Sequence[Score]]) -> None:
    """Add the scores of samples to :data:`RESULTS`, with the date and the commit that was scored."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TEXTS, capture_output=True, text=True, check=True
    )
    entries = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    for sample, scores in samples.items():
        bins = reliability(scores)
        entries.append(
            {
                "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
                "commit": commit.stdout.strip(),
                "sample": sample,
                **({"purpose": PURPOSES[sample]} if sample in PURPOSES else {}),
                "summary": summary(scores),
                "calibration_error": round(calibration_error(bins), 3),
                "calibration_error_of_always_0.5": round(calibration_error(bins, always=0.5), 3),
            }
        )
    RESULTS.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def kept_table() -> str:
    """The table of all kept scores, in their order."""
    rows = [
        "| measured | commit | sample | primary right | in the first three | nothing found | wrong | exit 0 on a "
        "failure | false alarms | calibration error |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for one in json.loads(RESULTS.read_text("utf-8")):
        found = one["summary"]
        texts = found["failures"]
        right, three = found["primary right"], found["in the first three"]
        sample = f"{one['sample']} ({one['purpose']})" if "purpose" in one else one["sample"]
        rows.append(
            f"| {one['date']} | {one['commit']} | {sample} | {right} of {texts} ({right / texts:.0%}) | {three} "
            f"({three / texts:.0%}) | {found['nothing found']} | {found['wrong']} | {found['exit 0 on a failure']} "
            f"| {found['false alarms']} of {found['healthy']} | {one['calibration_error']:.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Score the samples and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="append", help="a file of benchmarks/failure_texts (default: both halves)")
    parser.add_argument("--misses", action="store_true", help="list the misses of the half `rules`")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result of each text to FILE")
    parser.add_argument("--write", action="store_true", help="write the kept scores into docs/evidence, and no more")
    parser.add_argument("--keep", action="store_true", help=f"add the scores to {RESULTS.name}")
    arguments = parser.parse_args()
    if arguments.write:
        from evidence_pages import write_between

        write_between("failure texts", kept_table())
        return
    samples: dict[str, Sequence[Score]] = {}
    for sample in arguments.sample or HALVES:
        scores = samples[sample] = [score(text, cross_validated(text)) for text in read_texts(sample)]
        print(table(sample, scores))
        if arguments.misses and sample == "rules":
            print("\n\n".join(miss(one) for one in scores if one.grade not in ("right", "quiet")))
    if len(samples) > 1:
        print(calibration_line(" and ".join(samples), [one for scores in samples.values() for one in scores]))
    if arguments.keep:
        keep(samples)
    if arguments.json:
        results = {name: [_as_json(one) for one in scores] for name, scores in samples.items()}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
