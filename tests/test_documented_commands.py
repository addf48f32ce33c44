"""Each command of the README and of docs/ is run: here in a folder with its inputs, or by what ``TESTED`` names.

Commands that nothing runs are in ``NOT_RUN``, with what they need, and may be at most 15 % of all. ``python -m
tests.test_documented_commands`` prints the shares. The commands of docs/evidence measured the figures there, in minutes
to hours: the tests in ``MEASURED`` run a small part of each, by the same script.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.core.capture import encode_document, to_document
from doctor.facts import SoftwareFacts
from doctor.testing import healthy
from tests.lab.speed import patience
from tests.test_named_commands import FENCE, PROMPT, ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout")

MOST_NOT_RUN = 0.15
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

HERE = (
    r"NCCL_SOCKET_IFN\w+=.*doctor check",
    r"doctor check( --(gather none|profile|format|select|probe none|-o).*)?$",
    r"doctor diagnose (logs/|job\.log|captures/|rankdoctor/)",
    r"doctor (lint|explain|schema) ",
    r"doctor diff good\.json",
    r"doctor capture --redact",
    r"torchrun --nproc-per-node=(2 --no-python|2 examples/hang|4 train\.py)",
    r"check-jsonschema ",
    r"(set -euo|export OTEL)",
)
"""Beginnings of commands that this test runs."""
TESTED = {
    r"python3 -m venv \.venv && ": "other_pythons",
    r"bash tests/run": "../.ci/run",
    r"python3 -m pip wheel --wheel-dir|\(cd wheels|tar -|python3 -m venv /opt|/opt/": "air_gapped",
    r"torchrun --nnodes": "examples/test_recipes.py::test_torchrun_trains_on_healthy_hosts",
    r"srun doctor check|srun python": "examples/test_recipes.py::test_slurm_job_checks_in_a_step_and_trains",
    r"srun doctor check --probe full|(srun|sbatch) --exclude": "faults/live/test_full_probes.py",
    r"srun doctor capture": "core/test_baseline_file.py::test_a_file_and_a_folder_of_the_files_of_all_ranks",
    r"srun --overlap": "examples/test_recipes.py::test_the_command_for_a_job_that_hangs_reaches_every_node",
    r"mpirun --host": "examples/test_recipes.py::test_mpirun_checks_and_trains",
    r"mpirun --map-by": "attach/test_gathered.py::test_mpirun_attaches_to_a_job_of_mpirun",
    r"doctor check --ray": "cluster/test_ray.py::test_all_nodes_are_ranks_and_nothing_is_left_behind",
    r"doctor attach --ray": "attach/test_gathered.py::test_ray_reads_the_trainers_of_all_nodes",
    r"doctor attach$": "attach/test_scenes.py",
    r"doctor run -- torchrun": "autostart/test_jobs.py::test_a_hang_of_one_rank_is_named",
    r"(srun|mpirun -n 16) doctor run|doctor run --on": "frameworks/test_frameworks.py::test_a_crash_of_rank_1_is_named",
    r"doctor diff runs/": "core/test_runs.py::test_folders_of_records_on_the_command_line",
    r"doctor check --probe full --format json": "faults/live/test_full_probes.py::test_all_options_at_once",
    r"doctor estimate .*--(context-from|device)": "estimate/test_cli_estimate.py",
    r"doctor estimate .*--training-config .*": "estimate/test_cli_configuration.py",
    r"doctor estimate llama3_lora": "estimate/test_configuration.py::test_llama_factory",
    r"doctor estimate (hf:|\./|config)": "estimate/test_configuration.py",
    r"python -m doctor\.monitor\.sinks\.grafana|promtool": "sinks/test_alerts.py",
}
"""Beginnings of commands, and what in tests/ runs them with its own files, hosts and models; the longest one counts."""
NOT_RUN = {
    r"kubectl ": "a Kubernetes cluster",
    r"podman ": "podman and the registry of its base image",
    r"python3 -m pip (download|wheel --no-deps)|pip install '\.\[otel\]'": "a package index",
    r"pdsh ": "pdsh and hosts with SSH",
    r"benchmarks/frameworks/environment |python benchmarks/lint\.py --rivals": "a package index",
}
"""Beginnings of commands that nothing runs, and what they need."""
PARTS = "benchmarks/test_parts.py"
MEASURED = {
    **dict.fromkeys(("failure_texts.py --sample", "estimate_contexts.py", "lint_readings.py"), "here"),
    "detection.py": "../.ci/run",
    **dict.fromkeys(("coverage.py", "whole_jobs.py", "gathering.py", "startup.py", "scale.py", "cases.py"), PARTS),
    **dict.fromkeys(("lint_scripts.py", "lint.py --sources", "lint.py --hits", "environments.py"), PARTS),
    **dict.fromkeys(("framework_faults.py", "callback_cost.py", "estimate.py --published", "isolation.py"), PARTS),
    "estimate.py": "estimate/test_accuracy.py::test_experts_by_the_benchmark",
    "frameworks.py": "frameworks/test_frameworks.py::test_the_benchmark_compares_numbers_and_finds_a_crash",
    "loggers.py": "frameworks/test_loggers.py::test_the_csv_logger_by_the_benchmark",
    "full_probes.py": "faults/live/test_full_probes.py::test_a_wrong_sum_by_the_benchmark",
    "live_faults.py": "faults/live/test_live_faults.py::test_the_benchmark_prints_its_table_for_a_scene",
    "real_faults.py": "faults/test_real_faults.py::test_the_benchmark_prints_its_table_for_a_scene",
    "run_faults.py": "faults/run/test_run_faults.py::test_the_benchmark_prints_its_tables",
}
"""Scripts of docs/evidence, and what in tests/ runs a part of each; ``here``: this test runs all of it. The first one
that a command begins with counts."""


def commands_of(page: Path) -> Iterator[str]:
    """The commands of a page: lines of shell blocks, and what is typed at a prompt."""
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        body = re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", block["body"])
        if block["language"] in ("bash", "sh", "shell"):
            lines = map(str.strip, body.splitlines())
            yield from (line for line in lines if line and not line.startswith("#"))
        elif block["language"] == "console":
            yield from (match["command"] for match in PROMPT.finditer(body))


COMMANDS = [(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands_of(page)]


def kind_of(command: str) -> tuple[str, str]:
    """How a command is run: ``here``, ``tested`` or ``measured in part`` with the place, ``not run`` with what is
    missing, or ``unknown``."""
    for kind, table in (("not run", NOT_RUN), ("tested", _LONGEST_FIRST)):
        for pattern, where in table.items():
            if re.match(pattern, command):
                return kind, where
    script = re.match(r"(?:python|ENVIRONMENT/bin/python) benchmarks/(.+)", command)
    where = next((place for name, place in MEASURED.items() if script and script[1].startswith(name)), "")
    if where:
        return ("here" if where == "here" else "measured in part"), where
    bare = command.partition(" #")[0].strip()
    return ("here" if any(re.match(pattern, bare) for pattern in HERE) else "unknown"), ""


_LONGEST_FIRST = dict(sorted(TESTED.items(), key=lambda one: -len(one[0])))


def test_every_command_is_run_or_names_what_it_needs() -> None:
    assert [one for one in COMMANDS if kind_of(one[1])[0] == "unknown"] == []


def test_few_commands_are_not_run() -> None:
    kinds = Counter(kind_of(command)[0] for _, command in COMMANDS)
    assert len(COMMANDS) > 120
    assert kinds["not run"] <= MOST_NOT_RUN * len(COMMANDS), kinds


def test_no_entry_is_left_over() -> None:
    for pattern in (*HERE, *TESTED, *NOT_RUN):
        assert any(re.match(pattern, command) for _, command in COMMANDS), pattern
    for script in MEASURED:
        assert any(f"benchmarks/{script}" in command for _, command in COMMANDS), script


def test_what_runs_a_command_exists() -> None:
    for where in (*TESTED.values(), *(where for where in MEASURED.values() if where != "here")):
        name, _, test = where.partition("::")
        path = ROOT / "tests" / name
        assert path.is_file(), where
        assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), where


def test_what_measures_a_part_names_the_script() -> None:
    for script, where in MEASURED.items():
        if where in (PARTS, "../.ci/run"):
            assert script in (ROOT / "tests" / where).read_text(encoding="utf-8"), script


def test_scripts_behind_the_figures_exist() -> None:
    found = [re.search(r"benchmarks/[\w/]+(?:\.py)?", command) for page, command in COMMANDS if "evidence" in page]
    assert len(found) > 20
    assert all(script is not None and (ROOT / script[0]).is_file() for script in found)


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for _, one in COMMANDS if kind_of(one) == ("here", "here")])
def test_short_measurements_run_as_they_are_written(command: str) -> None:
    pytest.importorskip("torch")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(120)
    )
    assert (done.returncode, done.stdout != "") == (0, True), done.stderr[-500:]


TRAIN = "import torch.distributed as dist\n\ndist.init_process_group('gloo')\nassert dist.get_rank() != 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the commands read."""
    good = healthy(2, 2)
    captures = {"good.json": good, "bad.json": good.alter(SoftwareFacts, ranks=(1,), nccl_libraries=())}
    for name, sketch in captures.items():
        (tmp_path / name).write_bytes(encode_document(to_document(sketch.job())))
    for name in ("captures", "logs", "launch", "configs"):
        (tmp_path / name).mkdir()
    shutil.copy(tmp_path / "bad.json", tmp_path / "captures" / "host.json")
    log = "[rank2]: Traceback (most recent call last):\n[rank2]: KeyError: 'label'\n"
    (tmp_path / "job.log").write_text(log)
    (tmp_path / "logs" / "slurm-1.out").write_text(log)
    (tmp_path / "logs" / "slurm-2.out").write_text(log)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "launch" / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    (tmp_path / "configs" / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    return tmp_path


@pytest.mark.slow
def test_commands_run_as_they_are_written(folder: Path) -> None:
    """In the order of each page, because some read what others wrote."""
    pytest.importorskip("torch")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    faults = []
    for page, command in dict.fromkeys(COMMANDS):
        if kind_of(command) == ("here", ""):
            line = command.replace("/var/lib/node_exporter/", f"{folder}/")
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=folder,
                env={**environment, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=patience(90),
            )
            if done.returncode not in _codes_of(command) or "doctor/" in done.stderr.rpartition("File ")[2]:
                faults.append((page, command, done.returncode, done.stderr[-500:]))
    assert faults == []


def _codes_of(command: str) -> tuple[int, ...]:
    """The exit codes that a command may have: the trainings fail, as their pages say, and so do what reads of them."""
    if command.startswith(("doctor check", "doctor diagnose", "doctor diff", "doctor lint", "NCCL", "torchrun")):
        return (0, 1, 3)
    return (0,)


if __name__ == "__main__":
    counted = Counter(kind_of(command)[0] for _, command in COMMANDS)
    print(f"{len(COMMANDS)} commands: " + ", ".join(f"{count} {kind}" for kind, count in counted.most_common()))
    print(f"not run: {counted['not run'] / len(COMMANDS):.1%}")
    needs = Counter(where for kind, where in (kind_of(command) for _, command in COMMANDS) if kind == "not run")
    print("".join(f"  {count} need {what}\n" for what, count in needs.items()), end="")
