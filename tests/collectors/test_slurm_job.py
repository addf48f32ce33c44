"""The job's record as scontrol prints it, and scontrol programs that misbehave."""

import time
from pathlib import Path

import msgspec
import pytest

from doctor.collectors.base import Machine, NotPresent
from doctor.collectors.launch.slurm_job import (
    LIMIT,
    ScontrolResult,
    ask_scontrol,
    collect_slurm,
    gpu_count,
    read_duration,
    read_record,
    slurm_facts,
)
from doctor.core.facts import SlurmFacts
from tests.lab.cases import each_case
from tests.lab.speed import patience
from tests.recorded_launches import RECORDED, recorded


def facts_of(name: str, job_id: str, environ: dict[str, str] | None = None) -> SlurmFacts:
    record = read_record((RECORDED / name).read_text(), job_id)
    return slurm_facts(job_id, ScontrolResult(record), environ or {})


def fake_scontrol(folder: Path, script: str, **environ: str) -> dict[str, str]:
    """An environment in which ``scontrol`` is a shell script."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{folder}:/usr/bin:/bin", **environ}


def test_a_record_of_two_nodes() -> None:
    assert facts_of("scontrol_even.txt", "7") == SlurmFacts(
        job_id="7",
        state="RUNNING",
        partition="lab",
        node_count=2,
        node_list="node[0-1]",
        task_count=4,
        tasks_per_node=2,
        cpus_per_task=1,
        gpus_per_node=2,
        time_limit=26 * 3600 + 4 * 60,
        batch=True,
    )


def test_gpus_of_each_task() -> None:
    facts = facts_of("scontrol_per_task.txt", "1")
    assert (facts.gpus_per_task, facts.gpu_binding, facts.gpus_per_node) == (1, "closest", None)
    facts = facts_of("scontrol_per_task.txt", "1", recorded("slurm_step.env"))
    assert (facts.gpus_per_task, facts.gpu_binding, facts.gpus_per_node) == (1, "closest", 2)


def test_uneven_tasks_and_no_time_limit() -> None:
    facts = facts_of("scontrol_uneven.txt", "6", {"SLURM_TASKS_PER_NODE": "4,1"})
    assert (facts.task_count, facts.tasks_per_node) == (5, None)
    assert (facts.time_limit, facts.hidden) == (None, ())


def test_a_helper_step_does_not_speak_for_the_job() -> None:
    helper = {**recorded("slurm_step.env"), "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert facts_of("scontrol_even.txt", "7", helper).tasks_per_node == 2
    del helper["SLURM_NTASKS_PER_NODE"]
    assert facts_of("scontrol_uneven.txt", "6", helper).tasks_per_node is None
    assert facts_of("scontrol_array.txt", "8", helper).tasks_per_node == 2


def test_an_array_prints_other_tasks_too() -> None:
    text = (RECORDED / "scontrol_array.txt").read_text()
    assert read_record(text, "8")["TimeLimit"] == "00:05:00"
    assert read_record("\n\n".join(reversed(text.strip().split("\n\n"))), "8")
    changed = text.replace("JobId=9", "JobId=88").replace("NumTasks=2", "NumTasks=3", 1)
    assert read_record(changed, "8")["NumTasks"] == "3"
    assert read_record(changed, "88")["NumTasks"] == "2"
    assert read_record(changed, "9") == {}


def test_a_users_words_are_no_fields() -> None:
    text = (
        "JobId=7 JobName=x JobState=FAILED\n   JobState=RUNNING\n   Command=a TresPerNode=gres:gpu:9\n   NumNodes=2\n"
    )
    assert read_record(text, "7") == {"JobState": "RUNNING", "NumNodes": "2"}


def test_newer_releases_write_gpus_of_all_nodes() -> None:
    text = (
        "JobId=7 JobName=x\n   NumNodes=2-4\n   ReqTRES=cpu=8\n   AllocTRES=cpu=8,node=2,gres/gpu=16,gres/gpu:h100=16\n"
    )
    facts = slurm_facts("7", ScontrolResult(read_record(text, "7")), {"SLURM_JOB_NUM_NODES": "2"})
    assert (facts.node_count, facts.gpus_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("00:20:00", 1200),
        ("12:34", 754),
        ("365-00:00:00", 31536000),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("9999999999-00:00:00", None),
        ("", None),
        (None, None),
    ],
)
def test_durations(text: str | None, seconds: int | None) -> None:
    assert read_duration(text) == seconds


@each_case(
    ("text", "count"),
    [
        ("gres:gpu:2", 2),
        ("gres:gpu", 1),
        ("gres/gpu:a100:4,gres/gpu:v100:1", 5),
        ("gres/gpu=8", 8),
        ("cpu=4,gres/gpu:1", 1),
        ("gres:gpu:a100:2(S:0,1)", 2),
        ("gres/gpu:tesla", 1),
        ("gres:gpu:1g.5gb:3", 3),
        ("2", 2),
        ("a100:2", 2),
        ("0", 0),
        ("gres:mps:100", None),
        ("gres/gpumem:40", None),
        ("cpu=4", None),
        ("gpu:" + "9" * 50, None),
        ("", None),
        (None, None),
    ],
)
def test_gpu_requests(text: str | None, count: int | None) -> None:
    assert gpu_count(text) == count


def test_nothing_outside_slurm() -> None:
    with pytest.raises(NotPresent):
        collect_slurm(Machine(environ={"SLURM_CLUSTER_NAME": "lab"}))


def test_scontrol_answers(tmp_path: Path) -> None:
    environ = fake_scontrol(
        tmp_path, f"[ \"$*\" = 'show job 7' ] && [ $LC_ALL = C ] && cat {RECORDED}/scontrol_even.txt"
    )
    facts = collect_slurm(Machine(environ=environ))
    assert (facts.state, facts.hidden) == ("RUNNING", ())


def test_without_scontrol_the_environment_speaks(tmp_path: Path) -> None:
    environ = {**recorded("slurm_batch.env"), "PATH": str(tmp_path)}
    facts = collect_slurm(Machine(environ=environ))
    assert (facts.node_count, facts.task_count, facts.tasks_per_node, facts.partition) == (2, 4, 2, "lab")
    assert (facts.gpus_per_node, facts.gpus_per_task, facts.gpu_binding, facts.batch) == (2, 1, "closest", True)
    assert {note.field for note in facts.hidden} == {"state", "time_limit"}
    assert "not on PATH" in facts.hidden[0].reason


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "Invalid job id specified"),
        ("echo hello", "no record"),
        ("exit 0", "no record"),
        ("kill -9 $$", "code -9"),
        ("head -c 3000000 /dev/urandom", "no record"),
    ],
)
def test_scontrol_fails(tmp_path: Path, script: str, reason: str) -> None:
    facts = collect_slurm(Machine(environ=fake_scontrol(tmp_path, script, SLURM_NTASKS="4")))
    note = facts.why_hidden("time_limit")
    assert note is not None
    assert reason in note.reason
    assert facts.task_count == 4
    msgspec.json.encode(facts)


def test_scontrol_that_never_answers_is_ended(tmp_path: Path) -> None:
    """With the child that it started, which would keep the pipe open."""
    marker = tmp_path / "child"
    environ = fake_scontrol(tmp_path, f"sleep 600 & echo $! > {marker}; wait")
    answer = ask_scontrol(environ, "7", limit=0.5)
    assert answer.reason == "scontrol gave no answer within 0.5 s"
    state = Path(f"/proc/{marker.read_text().strip()}/stat")
    until = time.monotonic() + patience(5)
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until, "the child was not ended"
        time.sleep(0.02)


def test_scontrol_that_is_no_program(tmp_path: Path) -> None:
    environ = fake_scontrol(tmp_path, "")
    (tmp_path / "scontrol").write_bytes(b"\x7fELF rubbish")
    assert "could not be run" in ask_scontrol(environ, "7").reason


@pytest.mark.parametrize("job_id", ["--help", "7; rm", "٣", "9" * 50, "x"])
def test_only_numbers_are_asked_for(tmp_path: Path, job_id: str) -> None:
    environ = fake_scontrol(tmp_path, f"touch {tmp_path}/asked")
    assert ask_scontrol(environ, job_id).reason == "SLURM_JOB_ID is not a number"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("value", ["9" * 30, "x" * 100_000, b"\xff".decode("utf-8", "surrogateescape"), "-1", "4(x"])
def test_nonsense_can_always_be_written(value: str) -> None:
    environ = dict.fromkeys(recorded("slurm_step.env"), value)
    fields = "NumNodes NumTasks CPUs/Task TRES TresPerNode TresPerTask TimeLimit RunTime NtasksPerN:B:S:C JobState"
    text = "JobId=7\n" + "\n".join(f"{name}={value}" for name in fields.split())
    facts = slurm_facts("7", ScontrolResult(read_record(text.encode("utf-8", "replace").decode(), "7")), environ)
    msgspec.msgpack.encode(facts)


def test_the_limit_fits_the_deadline() -> None:
    from doctor.collectors import collector_for

    assert collector_for("slurm").deadline > LIMIT + 0.5
