"""A folder of everything that can be wrong with a file, around one log that tells the cause."""

import gzip
import json
import os
import pickle
import random
import struct
from pathlib import Path

import pytest

from tests.lab.command import run_doctor

MESSAGE = "[rank1]: ValueError: <script>alert(1)</script> \x1b[31m\x1b]0;title\x07 no such column\n"


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch was-run",))


def bomb(path, mebibytes):
    with gzip.open(path, "wb", compresslevel=9) as stream:
        for _ in range(mebibytes):
            stream.write(b"\x00" * (1 << 20))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    (path / "good.log").write_text(MESSAGE)
    (path / "empty.log").write_text("")
    (path / "junk.bin").write_bytes(random.Random(1).randbytes(300_000))
    (path / "elf").write_bytes(b"\x7fELF\x02\x01\x01" + struct.pack("<40Q", *range(40)))
    (path / "hostile").write_bytes(pickle.dumps({"entries": [Hostile()], "pg_config": {}, "version": "2.10"}))
    (path / "rank_0").write_bytes(
        pickle.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": [{"record_id": 1}]})[:-20]
    )
    (path / "train.py").write_text('raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")\n')
    (path / "wide.log").write_bytes("[rank0]: step 3\r\n".encode("utf-16"))
    (path / "latin.log").write_bytes("[rank0]: d\xe9but de l'apprentissage\n".encode("latin-1"))
    (path / "line.log").write_bytes(b"x" * (8 << 20))
    (path / "cut.gz").write_bytes(gzip.compress(b"[rank0]: step 4\n" * 10_000)[:-9])
    bomb(path / "bomb.gz", 300)
    (path / "loop").symlink_to(path / "loop")
    (path / "up").symlink_to(path.parent, target_is_directory=True)
    os.mkfifo(path / "pipe")
    (path / "deep.json").write_text("[" * 100_000)
    return path


def diagnose(*arguments, cwd, code):
    done = run_doctor("diagnose", *arguments, cwd=cwd, seconds=100)
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return done


def test_what_is_bad_is_listed_and_what_is_good_is_judged(folder):
    runs = json.loads(diagnose(".", "--format", "json", cwd=folder, code=1).stdout)["runs"]
    assert {run["name"]: run["report"]["primary"] for run in runs}["good.log"] == "RUN004"
    inputs = [one for run in runs for one in run["report"]["inputs"]]
    why = {one["path"]: (one["kind"], one["skipped"]) for one in inputs}
    assert len(why) == len(inputs)
    read = {path for path, (_, skipped) in why.items() if skipped is None}
    assert read == {"good.log", "rank_0", "wide.log", "latin.log", "line.log", "cut.gz", "bomb.gz"}
    assert "system" in why["hostile"][1]
    assert why["train.py"] == ("unknown", "it is source text, not a log")
    assert why["empty.log"] == ("empty", "it is empty")
    assert why["pipe"] == ("special", "it is not a regular file")
    assert {why[name][0] for name in ("junk.bin", "elf", "deep.json")} == {"unknown"}
    assert "symbolic links" in why["loop"][1]
    assert not (folder / "was-run").exists()


@pytest.mark.parametrize("form", ["text", "markdown", "html", "junit", "github"])
def test_nothing_in_a_line_is_obeyed(folder, form):
    done = diagnose("good.log", "--format", form, cwd=folder, code=1)
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    if form in ("html", "junit"):
        assert "<script>alert" not in done.stdout


def test_nothing_but_bad_inputs_is_one_sentence(folder):
    for name in ("hostile", "junk.bin", "empty.log", "pipe", "loop", "elf"):
        done = diagnose(name, cwd=folder, code=2)
        assert (done.stdout, len(done.stderr.splitlines())) == ("", 1), name
    assert not (folder / "was-run").exists()


def test_a_log_that_begins_with_a_table_of_gpus_is_read_on(tmp_path):
    """It is no table of the ranks' own devices, either."""
    tables = Path(__file__).parents[1] / "data" / "nvidia_smi"
    for name in ("query.txt", "table.txt"):
        table = (tables / name).read_text()
        (tmp_path / name).write_text(f"{table}\n[rank0]: step 3\n{MESSAGE}[rank0]: step 4\n")
        report = json.loads(diagnose(name, "--format", "json", cwd=tmp_path, code=1).stdout)
        assert report["primary"] == "RUN004"
        assert {one["id"] for one in report["results"] if one["status"] == "fail"} == {"RUN004"}
