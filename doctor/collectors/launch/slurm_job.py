"""The SLURM job: its record (``scontrol show job``), and the environment for what that lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

import msgspec

from doctor.collectors.base import Machine, NotPresent, collector, first_known, parse_int
from doctor.collectors.launch.rank_variables import is_slurm_step, task_counts, whole_number
from doctor.core.facts import HiddenField, SlurmFacts
from doctor.core.masking import mask_text, readable
from doctor.core.process import abandon_child, start_child
from doctor.core.text import lazy_compile

Environ = Mapping[str, str]
JobRecord = dict[str, str]

LIMIT = 4.0
"""Seconds for scontrol, which retries for over a minute if the controller does not answer."""

LARGEST_OUTPUT = 1 << 20
"""Bytes of its output that are read. A record has about two thousand, and an array prints one per task."""

_FIELD = lazy_compile(r"(?:^|\s)([A-Za-z][\w/:.]*)=(\S*)")
_FREE_TEXT = ("JobId=", "Command=", "WorkDir=", "Std", "Comment=", "AdminComment=", "SystemComment=", "SubmitLine=")
"""Prefixes of lines with text of the user, which may look like fields."""

_EMPTY = frozenset({"", "(null)", "N/A", "None", "Unknown", "UNKNOWN"})
_TIME = lazy_compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", re.ASCII)
_GPUS = lazy_compile(
    r"(?:^|[,:/])gpu(?::(?!\d+(?:[,(]|$))[^,:=]+)?(?:[:=](\d{1,6})(?:\([^)]*\))?)?(?=,|$)",
    re.ASCII,
)
"""``gpu``, a type that is not a number (``a100``, ``1g.5gb``), a count, the sockets in parentheses."""

_ALL_GPUS = lazy_compile(r"(?:^|,)gres/gpu=(\d{1,9})", re.ASCII)
_JOB_ID = lazy_compile(r"\d{1,12}", re.ASCII)


class ScontrolResult(msgspec.Struct, frozen=True):
    """The record of the job, or the reason for its absence and how to get it."""

    record: JobRecord
    reason: str = ""
    unhide: str = ""


@collector(SlurmFacts)
def collect_slurm(machine: Machine) -> SlurmFacts:
    """Collect the job, from the environment if scontrol does not answer. Raises ``NotPresent`` outside SLURM."""
    environ = machine.environ
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        raise NotPresent("SLURM_JOB_ID is not set")
    # One question a node: thousands of tasks that ask at once would stop the controller.
    asks = environ.get("SLURM_LOCALID", "0") == "0"
    answer = ask_scontrol(environ, job_id) if asks else ScontrolResult({}, "the first task of the node asks scontrol")
    return slurm_facts(readable(job_id), answer, environ)


def ask_scontrol(environ: Environ, job_id: str, limit: float = LIMIT) -> ScontrolResult:
    """Run ``scontrol show job`` for at most ``limit`` seconds. As text: ``--json`` differs between releases."""
    unhide = f"scontrol show job {readable(job_id)}"
    if not _JOB_ID.fullmatch(job_id):
        return ScontrolResult({}, "SLURM_JOB_ID is not a number")
    program = shutil.which("scontrol", path=environ.get("PATH", os.defpath))
    if program is None:
        return ScontrolResult(
            {}, "scontrol is not on PATH", f"mount SLURM's commands and munge's socket here, or run {unhide}"
        )
    try:
        command = [program, "show", "job", job_id]
        process = start_child(command, stderr=subprocess.PIPE, env={**environ, "LC_ALL": "C"})
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        abandon_child(process)
        return ScontrolResult({}, f"scontrol gave no answer within {limit:g} s", unhide)
    except (OSError, ValueError) as error:
        return ScontrolResult({}, f"scontrol could not be run: {error}", unhide)
    if process.returncode != 0:
        words = readable(mask_text(_text(errors).strip().partition("\n")[0]))[:200]
        return ScontrolResult({}, f"scontrol ended with code {process.returncode}: {words}", unhide)
    record = read_record(_text(output), job_id)
    return ScontrolResult(record) if record else ScontrolResult({}, "scontrol printed no record of the job", unhide)


def _text(output: bytes) -> str:
    return output[:LARGEST_OUTPUT].decode("utf-8", "replace")


def read_record(text: str, job_id: str) -> JobRecord:
    """Return the fields of the job ``job_id`` in the output of ``scontrol show job``; empty if it is not there.

    The job id of the last task of an array is that of the array, for which scontrol prints every task.
    """
    blocks = re.split(r"\n\s*\n", text)
    block = next((block for block in blocks if re.match(rf"\s*JobId={job_id}\b", block)), "")
    record: JobRecord = {}
    for line in block.splitlines():
        line = line.strip()
        if not line.startswith(_FREE_TEXT):
            for name, value in _FIELD.findall(line):
                if value not in _EMPTY:
                    record.setdefault(name, value)
    return record


def slurm_facts(job_id: str, answer: ScontrolResult, environ: Environ) -> SlurmFacts:
    """Return the facts of a record, and of the environment for what it lacks; a note for each missing field.

    ``time_limit`` is ``None`` without a note if the job has no limit.
    """
    record = answer.record
    # The environment never has the state and the times; the rest it has, or the job has none.
    missing = ("state", "time_limit") if answer.reason else ()
    nodes = first_known(_count(record.get("NumNodes")), whole_number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"))
    # How GPUs are bound to tasks, such as ``closest`` or ``single:1`` (--gpu-bind in srun(1)).
    binding = environ.get("SLURM_GPU_BIND") or environ.get("SLURMD_TRES_BIND") or record.get("TresBind") or ""
    # Without a record: a batch script is the only place that has a task without a step.
    in_script = "SLURM_PROCID" in environ and not is_slurm_step(environ)
    return SlurmFacts(
        job_id=job_id,
        state=record.get("JobState"),
        partition=_words(record.get("Partition") or environ.get("SLURM_JOB_PARTITION")),
        node_count=nodes,
        node_list=_words(record.get("NodeList") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")),
        task_count=first_known(_count(record.get("NumTasks")), whole_number(environ, "SLURM_NTASKS")),
        tasks_per_node=_tasks_per_node(record, environ, nodes),
        cpus_per_task=first_known(_count(record.get("CPUs/Task")), whole_number(environ, "SLURM_CPUS_PER_TASK")),
        gpus_per_node=_gpus_per_node(record, environ, nodes),
        gpus_per_task=first_known(gpu_count(environ.get("SLURM_GPUS_PER_TASK")), gpu_count(record.get("TresPerTask"))),
        gpu_binding=_words(re.sub(r"^(?:gres[:/])?gpu:", "", binding)),
        time_limit=read_duration(record.get("TimeLimit")),
        batch=record["BatchFlag"] != "0" if "BatchFlag" in record else in_script or None,
        hidden=tuple(HiddenField(name, answer.reason, answer.unhide) for name in missing),
    )


def read_duration(text: str | None) -> int | None:
    """Parse ``[days-][hours:]minutes:seconds`` (scontrol(1)) as seconds; ``None`` for UNLIMITED and Partition_Limit."""
    found = _TIME.fullmatch(text or "")
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def gpu_count(text: str | None) -> int | None:
    """Return the GPUs in a request: ``gres/gpu:a100:4,gres/gpu:v100:1``, ``a100:2``, ``2``; 1 without a number."""
    if not text:
        return None
    plain = re.fullmatch(r"(?:[^:,=/]+:)?(\d{1,6})", text, re.ASCII)
    if plain:
        return int(plain.group(1))
    counts = [int(number or 1) for number in _GPUS.findall(text)]
    return sum(counts) if counts else None


def _gpus_per_node(record: JobRecord, environ: Environ, nodes: int | None) -> int | None:
    asked = gpu_count(record.get("TresPerNode"))
    total = _ALL_GPUS.search(record.get("AllocTRES") or record.get("TRES") or "")
    if asked is None and total and nodes and int(total.group(1)) % nodes == 0:
        asked = int(total.group(1)) // nodes
    return first_known(asked, whole_number(environ, "SLURM_GPUS_ON_NODE"))


def _tasks_per_node(record: JobRecord, environ: Environ, nodes: int | None) -> int | None:
    """Return the tasks of the job on each node if all have the same; ``None`` if they differ.

    In a step SLURM_TASKS_PER_NODE describes the step, which may be a helper of one task.
    """
    asked = _count(record.get("NtasksPerN:B:S:C", "").partition(":")[0])
    if not asked and nodes == 1:
        asked = _count(record.get("NumTasks"))
    if asked or is_slurm_step(environ):
        return asked or whole_number(environ, "SLURM_NTASKS_PER_NODE")
    counts = {count for count, _ in task_counts(environ.get("SLURM_TASKS_PER_NODE", "")) or ()}
    return counts.pop() if len(counts) == 1 else None


def _count(text: str | None) -> int | None:
    number = parse_int(text)
    return number if number is not None and 0 <= number < 1 << 31 else None


def _words(text: str | None) -> str | None:
    return readable(mask_text(text)) if text else None
