"""ENV002: a host is given a number that is not below the number of hosts."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import hosts_of, is_static, rank_of_host, starts_of
from doctor.testing import lines

_CONFIG = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: {}\nnum_machines: {}\nnum_processes: 8\n"
)


@rule(
    id="ENV002",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "counted from one",
            lines("torchrun --nnodes=2 --node_rank=2 --master_addr=10.0.0.1 --master_port=29500 train.py  # !"),
            name="node2.sh",
        ),
        FileFails("the second of one machine", _CONFIG.format("1  # !", 1), name="config.yaml"),
        FileFails(
            "accelerate",
            lines("accelerate launch --num_machines 4 --machine_rank 4 --main_process_ip a train.py  # !"),
            name="node.sh",
        ),
        FilePasses(
            "counted from zero",
            lines("torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py"),
            name="node2.sh",
        ),
        FilePasses("the second of two machines", _CONFIG.format(1, 2), name="config.yaml"),
        FilePasses(
            "from outside", lines("torchrun --nnodes=$N --node_rank=2 --master_addr=10.0.0.1 train.py"), name="x.sh"
        ),
    ),
)
def rank_out_of_range(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the number of each host is below the number of hosts.

    Why it hurts: the launcher or torch refuses it, or the host waits for a job that has no place for it.
    Fix: count hosts from 0: of two hosts, --node-rank is 0 and 1.
    """
    for start in starts_of(file):
        hosts, number = hosts_of(start.launch), whole_number(rank_of_host(start.launch))
        if hosts is not None and number is not None and number >= hosts and _counts(start.launch):
            yield Violation(
                start.launch.place,
                f"the number of the host is {number}, and {hosts} host{' is' if hosts == 1 else 's are'} expected",
                evidence=(("node_rank", number), ("hosts", hosts)),
            )
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            number, machines, place = root.number("machine_rank"), root.number("num_machines"), root.get("machine_rank")
            if number is not None and machines and place is not None and number >= machines:
                yield Violation(
                    place.place,
                    f"machine_rank is {number} of {machines} machine{'' if machines == 1 else 's'}",
                    evidence=(("machine_rank", number), ("num_machines", machines)),
                )


def _counts(launch: Launch) -> bool:
    """A rendezvous of torchrun gives out numbers of its own."""
    return launch.program != "torchrun" or is_static(launch)
