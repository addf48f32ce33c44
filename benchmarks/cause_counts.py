"""Counts public failures by symptom and cause: the priors of candidate causes.

    python benchmarks/cause_counts.py [PATH ...]     print the counts
    python benchmarks/cause_counts.py [PATH ...] --write     replace doctor/knowledge/causes/case_counts.json

Cases: those in tests/data/reported_failures.jsonl, in the half of the failure texts that rules may be made from, and
those of each PATH, a folder of NNN.json, a file of one case a line, or a JSON list. A case counts once for each symptom
that its text or title shows, by log events or by the words of :data:`WORDS`. Its cause is the first one that reports an
id that is accepted as right (``accepted_ids``; or ``expected``, then ``also``). Cases of unknown cause do not count.
Never give cases that measure the candidates.

A symptom without log events is the finding that nothing explains an error: of it those failure texts are counted on
which it was the first answer (benchmarks/first_answers.json), by the ids that are right.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from doctor.core.errors import UnusableError
from doctor.knowledge.candidate_causes import Symptom, known_causes, known_symptoms
from doctor.postmortem.run_reader import read_runs

sys.path.insert(0, str(Path(__file__).resolve().parent))
from answer_counts import first_answers

ROOT = Path(__file__).resolve().parent.parent
REPORTED = ROOT / "tests" / "data" / "reported_failures.jsonl"
TEXTS = ROOT / "benchmarks" / "failure_texts"
RULES = TEXTS / "rules.json"
COUNTS = ROOT / "doctor" / "knowledge" / "causes" / "case_counts.json"
WORDS = {
    "collective-timeout": re.compile(r"\bhang|\bstuck\b|\bfreez|deadlock|collective operation timeout", re.IGNORECASE),
    "device-memory": re.compile(r"out of memory", re.IGNORECASE),
    "gpu-fault": re.compile(r"illegal memory access|device-side assert|unspecified launch failure", re.IGNORECASE),
    "lost-peer": re.compile(r"connection (?:was )?(?:closed|reset)|broken pipe|failed to recv", re.IGNORECASE),
    "nccl-error": re.compile(r"NCCL (?:error|WARN)|nccl\w+Error|unhandled (?:cuda|system) error", re.IGNORECASE),
    "process-ended": re.compile(r"\bkilled\b|exit ?code|signal \d|SIG[A-Z]+|segmentation fault", re.IGNORECASE),
    "store-timeout": re.compile(r"rendezvous|TCPStore|client socket|wait timeout", re.IGNORECASE),
}
"""How people name a symptom in the title of a report, where the lines that they quote do not show it."""
_CRASH = re.compile(r"segmentation fault|SIGSEGV|SIGABRT|core dumped", re.IGNORECASE)


def read_cases(path: Path) -> Iterator[Mapping[str, Any]]:
    """The cases of a folder, by number, or of a file."""
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield json.loads(file.read_text())
    elif path.suffix == ".jsonl":
        yield from map(json.loads, path.read_text().splitlines())
    else:
        yield from json.loads(path.read_text())


def cause_of(case: Mapping[str, Any]) -> str | None:
    """The name of the cause of a case, or ``None``."""
    if case.get("healthy") or case.get("cause", "").startswith("unknown"):
        return None
    for accepted in case.get("accepted_ids") or (*case.get("expected", ()), *case.get("also", ())):
        names = [one.name for one in known_causes().values() if accepted in one.checks]
        if "native-crash" in names:
            return "native-crash" if _CRASH.search(_text(case)) else "other-rank-failed"
        if names:
            return names[0]
    return None


def _text(case: Mapping[str, Any]) -> str:
    text = case["text"] if "text" in case else "\n".join(case["lines"])
    return f"{case.get('title', '')}\n{text}"


def symptoms_of(case: Mapping[str, Any]) -> Iterator[Symptom]:
    """The symptoms that a case shows."""
    text = _text(case)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.log"
        log.write_text(text)
        try:
            evidence = read_runs([log])[0].job.evidence
        except UnusableError:
            evidence = None
    for symptom in known_symptoms():
        words = WORDS.get(symptom.name)
        events = evidence.of(*symptom.kinds) if evidence is not None and symptom.kinds else ()
        if events or (words is not None and words.search(text)):
            yield symptom


def count(cases: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The numbers of cases by symptom and cause."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case in cases:
        cause = cause_of(case)
        for symptom in symptoms_of(case) if cause is not None else ():
            if cause in symptom.causes:
                counts[symptom.name][str(cause)] += 1
    return {name: dict(sorted(counts[name].items())) for name in sorted(counts)}


def count_of_answers() -> dict[str, dict[str, int]]:
    """The numbers of texts by symptom and cause, of the symptoms without log events."""
    texts = {case["address"]: case for path in TEXTS.glob("*.json") for case in read_cases(path)}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for symptom in known_symptoms():
        for answer in () if symptom.kinds else first_answers():
            causes = _causes_of_answer(symptom, texts[answer.address]["expected"])
            counts[symptom.name].update(causes if answer.primary in symptom.checks else ())
    return {name: dict(sorted(found.items())) for name, found in sorted(counts.items()) if found}


def _causes_of_answer(symptom: Symptom, expected: Sequence[str]) -> list[str]:
    """The first cause of the symptom that reports a right id, if any."""
    return [name for one in expected for name in symptom.causes if one in known_causes()[name].checks][:1]


def main(arguments: Sequence[str]) -> int:
    """Print the counts, or write them."""
    paths = [REPORTED, RULES, *(Path(one) for one in arguments if not one.startswith("-"))]
    counts = count(case for path in paths for case in read_cases(path))
    counts |= count_of_answers()
    text = json.dumps(dict(sorted(counts.items())), indent=2) + "\n"
    if "--write" in arguments:
        COUNTS.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
