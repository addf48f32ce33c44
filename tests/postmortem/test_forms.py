"""The same job gives the same verdict and the same rank in every form in which its logs are handed over."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.core.settings import Settings
from doctor.postmortem.file_kinds import kind_of_head
from doctor.postmortem.logs.exports import PlainLines
from doctor.postmortem.run_outcome import outcome_of
from doctor.postmortem.run_reader import read_runs
from doctor.session import judge, load_checks
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.postmortem.log_forms import (
    ARCHIVES,
    FILES,
    HOSTS,
    PACKED,
    TAGGED,
    TEXTS,
    UNTAGGED,
    Files,
    by_rank,
    from_the_middle,
    in_tar,
    second_node,
    to_the_middle,
)

SETTINGS = Settings()
CHECKS = load_checks(SETTINGS)
OOM = "MEM011"
Verdict = tuple[str | None, tuple[int, ...], tuple[str, ...]]


@contextlib.contextmanager
def written(files: Files) -> Iterator[Path]:
    """Yield a folder with these files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "evidence")
        for file, data in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield folder


def verdict_on(path: Path) -> Verdict:
    """Return the primary finding of the only run, with its ranks and their hosts."""
    (run,) = read_runs([path])
    report = judge(run.job, CHECKS, SETTINGS, must_be_complete=False, outcome_of=outcome_of, inputs=run.inputs)
    found = [one for result in report.results if result.id == report.primary for one in result.findings]
    ranks = {rank for one in found for rank in one.ranks}
    hosts = {rank.host.name for rank in run.job.ranks if rank.number in ranks}
    return report.primary, tuple(sorted(ranks)), tuple(sorted(hosts))


def _text_forms() -> Iterator[tuple[str, Files]]:
    for kind, data in (("tagged", TAGGED), ("table", UNTAGGED)):
        for name, convert in TEXTS.items():
            yield f"{kind}, {name}", {"job.log": convert(data)}


def _packed_by_zstd() -> dict[str, Files]:
    zstd = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    packed = {"job.log.zst": zstd.compress(UNTAGGED), "logs.tar.zst": zstd.compress(in_tar({"job.log": UNTAGGED}))}
    return {name: {name: data} for name, data in packed.items()}


ALL_FORMS = {
    **{name: files() for name, files in FILES.items()},
    **dict(_text_forms()),
    **{name: {name: convert(UNTAGGED)} for name, convert in PACKED.items()},
    **{name: {name: convert({"job.log": UNTAGGED})} for name, convert in ARCHIVES.items()},
    **{f"{name}, a file a rank": {name: convert(by_rank("rank_{rank}.log")())} for name, convert in ARCHIVES.items()},
    **_packed_by_zstd(),
    "from the middle": {"job.log": from_the_middle(TAGGED)},
    "to the middle": {"job.log": to_the_middle(UNTAGGED)},
}


@each_case("form, files", ALL_FORMS.items(), ids=ALL_FORMS)
def test_the_form_of_the_logs_does_not_matter(form: str, files: Files) -> None:
    with written(files) as folder:
        primary, ranks, hosts = verdict_on(folder)
    assert (primary, ranks) == (OOM, (3,))
    assert form not in HOSTS or hosts == (HOSTS[form],)


@pytest.mark.parametrize("name", ["job.log", "logs.zip", "logs.tar.gz"])
def test_standard_input_and_pipes(name: str, tmp_path: Path) -> None:
    data = ARCHIVES[name]({"job.log": UNTAGGED}) if name in ARCHIVES else UNTAGGED
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    command = [sys.executable, "-m", "doctor", "diagnose", "--format", "json"]
    piped = subprocess.run([*command, "-"], input=data, stdout=subprocess.PIPE, timeout=patience(60))
    named = subprocess.run([*command, str(pipe)], stdout=subprocess.PIPE, timeout=patience(60))
    writer.join()
    for done in (piped, named):
        report = json.loads(done.stdout)
        found = next(one for one in report["results"] if one["id"] == OOM)
        assert (done.returncode, report["primary"], found["findings"][0]["ranks"]) == (1, OOM, [3])


def test_members_of_archives_are_listed_by_their_names() -> None:
    with written({"logs.zip": ARCHIVES["a tar in a zip.zip"](by_rank("rank_{rank}.log")())}) as folder:
        (run,) = read_runs([folder])
        paths = [Path(one.path).relative_to(folder).as_posix() for one in run.inputs]
    assert paths == [f"logs.zip/job/logs.tar.gz/job/rank_{rank}.log" for rank in (0, 1, 2, 3)]


def test_the_first_rank_of_a_host_is_that_of_its_table() -> None:
    with written(second_node()) as folder:
        assert verdict_on(folder)[:2] == (OOM, (7,))


INIT_OF_32 = (
    b"node1:77:77 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 17 nranks 32 cudaDev 0 commId 0x7 - Init COMPLETE\n"
)
AMBIGUOUS: dict[str, Files] = {
    "hosts, which may have several ranks": by_rank("node-{rank}.log")(),
    "steps": {f"eval_step_{rank}00.log": data for rank, data in enumerate(by_rank("{rank}")().values())},
    "counted from 1": {f"worker-{rank + 1}.log": data for rank, data in enumerate(by_rank("{rank}")().values())},
    "a larger world": {
        name: data.replace(b"Traceback", INIT_OF_32 + b"Traceback", 1)
        for name, data in by_rank("worker-{rank}.log")().items()
    },
}
"""Files whose numbers need not be ranks."""


@each_case("files", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_number_that_need_not_be_a_rank_is_none(files: Files) -> None:
    with written(files) as folder:
        ranks = {
            rank
            for run in read_runs([folder])
            for event in (run.job.evidence.events if run.job.evidence else ())
            if event.kind.startswith("cuda.oom")
            for rank in [event.rank]
        }
    assert 3 not in ranks


BAD_LABEL = b'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nValueError: bad label 7\n'
UNRELATED: dict[str, Files] = {
    "archives": {
        "one.zip": ARCHIVES["logs.zip"](by_rank("rank_{rank}.log")()),
        "two.zip": ARCHIVES["logs.zip"]({"rank_0.log": BAD_LABEL}),
    },
    "torchrun's folders": {
        **by_rank("logs/x_70fl1913/attempt_0/{rank}/stderr.log")(),
        "logs/y_80fl1914/attempt_0/0/stderr.log": BAD_LABEL,
    },
    "jobs of SLURM": {**by_rank("48213.{rank}.out")(), "48214.0.out": BAD_LABEL},
    "tasks of an array": {"48213_0.out": TAGGED, "48213_1.out": BAD_LABEL},
    "a launcher of another job": {**by_rank("a/rank_{rank}.log")(), "b/rank_0.log": BAD_LABEL},
    "exports": {"a.json": FILES["Loki's API"]()["export.json"], "b.log": BAD_LABEL},
}


@each_case("files", UNRELATED.values(), ids=UNRELATED)
def test_unrelated_jobs_are_told_apart(files: Files) -> None:
    with written(files) as folder:
        runs = read_runs([folder])
        texts = [" ".join(event.text for event in run.job.evidence.events) for run in runs if run.job.evidence]
    assert len(runs) == 2
    assert all(("out of memory" in text) != ("bad label" in text) for text in texts)


EXPORTS = {
    name: files for name, of in FILES.items() for files in [of()] if any(one.startswith("export") for one in files)
}


@each_case("files", EXPORTS.values(), ids=EXPORTS)
def test_a_damaged_export_is_read_as_far_as_it_goes(files: Files) -> None:
    chance = random.Random(7)
    (data,) = files.values()
    whole = b"".join(PlainLines([data]))
    for _ in range(60):
        damaged = bytearray(data[: chance.randrange(1, len(data))])
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        kind_of_head(bytes(damaged))
        read = PlainLines([bytes(damaged)])
        assert len(b"".join(read)) <= max(len(whole), len(damaged)) * 2
    cut = PlainLines([data[: len(data) // 2]])
    first = b"".join(cut).splitlines()
    assert len(first) > 5
    assert cut.cut is not None or data.startswith((b"@", b"container", b"timestamp"))


def test_a_carriage_return_in_the_first_line_is_no_table() -> None:
    assert kind_of_head(b"a,b\rc,message\nstep 1\n") == "log"


def test_an_export_is_read_in_time_that_grows_with_its_size() -> None:
    entry = {"line": "step 7: loss 0.1", "timestamp": "1795469700000000000"}
    data = json.dumps([entry] * 50_000).encode()
    pieces = [data[start : start + (1 << 16)] for start in range(0, len(data), 1 << 16)]
    sizes = [len(piece) for piece in PlainLines(pieces)]
    assert len(sizes) < 20
    assert sum(sizes) == 50_000 * len("2026-11-23T21:35:00.000000Z step 7: loss 0.1\n")
