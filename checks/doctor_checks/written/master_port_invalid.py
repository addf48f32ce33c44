"""ENV007: a port that is none."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.process_launches import starts_of
from doctor.testing import lines

MOST = 65535


@rule(
    id="ENV007",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails("above the highest", lines("export MASTER_PORT=295000  # !", "srun python train.py"), name="job.sh"),
        FileFails("an option", lines("torchrun --nproc_per_node=8 --master_port=65537 train.py  # !"), name="train.sh"),
        FileFails(
            "summed up beyond it",
            lines("BASE=65000", "export MASTER_PORT=$((BASE + 1000))  # !", "srun python train.py"),
            name="job.sh",
        ),
        FileFails("no number", lines("export MASTER_PORT=auto  # !", "srun python train.py"), name="job.sh"),
        FilePasses("a port", lines("export MASTER_PORT=29500", "srun python train.py"), name="job.sh"),
        FilePasses("any", lines("torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py"), name="train.sh"),
        FilePasses(
            "by the job", lines("export MASTER_PORT=$((10000 + RANDOM % 50000))", "srun python train.py"), name="a.sh"
        ),
        FilePasses("not of this file", lines("MASTER_PORT=70000", "echo $MASTER_PORT; python x.py"), name="train.sh"),
    ),
)
def master_port_invalid(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the port of the master is one.

    Why it hurts: rank 0 can't listen there: torch refuses the port on every rank.
    Fix: a number from 1024 to 32767, the same for all ranks of the job: `export MASTER_PORT=29500`.
    """
    for setting in file.settings:
        if setting.name == "MASTER_PORT" and setting.is_exported and setting.told and not _is_port(setting.told):
            yield Violation(
                setting.place, f"MASTER_PORT={setting.told} is no port", evidence=(("value", setting.told),)
            )
    for start in starts_of(file):
        given = start.launch.told("master-port", "main-process-port", "main-port") if start.is_agent else None
        if given and not _is_port(given):
            yield Violation(start.launch.place, f"the port {given} is none", evidence=(("value", given),))


def _is_port(text: str) -> bool:
    return text.isdigit() and int(text) <= MOST
