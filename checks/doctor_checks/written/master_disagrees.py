"""ENV006: the hosts of a job are told different masters."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Severity, Violation, rule
from doctor.lint.launch.partial_text import is_known
from doctor.lint.launch.process_launches import endpoint_of, hosts_of, is_loopback, port_of, rank_of_host, starts_of
from doctor.testing import lines

_OLD = "python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2"


@rule(
    id="ENV006",
    severity=Severity.ERROR,
    reads=LaunchFile,
    cases=lambda: (
        FileFails(
            "each host is told itself",
            lines(
                "# node 1",
                f'{_OLD} --node_rank=0 --master_addr="192.168.1.3" --master_port=12581 train.py > 1.log 2>&1 &',
                "# node 2",
                f'{_OLD} --node_rank=1 --master_addr="192.168.1.2" --master_port=12581 train.py > 2.log 2>&1 &  # !',
            ),
            name="run.sh",
        ),
        FileFails(
            "another port on the second host",
            lines(
                f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
                f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29501 train.py  # !",
            ),
            name="run.sh",
        ),
        FileFails(
            "accelerate",
            lines(
                "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip a x.py",
                "accelerate launch --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip b x.py  # !",
            ),
            name="run.sh",
        ),
        FilePasses(
            "both are told the first",
            lines(
                f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
                f"{_OLD} --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py",
            ),
            name="run.sh",
        ),
        FilePasses(
            "two jobs",
            lines(
                f"{_OLD} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 pretrain.py",
                f"{_OLD} --node_rank=1 --master_addr=10.0.0.2 --master_port=29500 finetune.py",
            ),
            name="run.sh",
        ),
        FilePasses(
            "from outside",
            lines(
                f"{_OLD} --node_rank=0 --master_addr=$1 --master_port=29500 train.py",
                f"{_OLD} --node_rank=1 --master_addr=$2 --master_port=29500 train.py",
            ),
            name="run.sh",
        ),
    ),
)
def master_disagrees(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the commands for the hosts of one job name one master.

    Why it hurts: each host waits for the others at another address, until the store times out.
    Fix: the address of the host with --node-rank=0 and one port in all of them.
    """
    masters: dict[tuple[str, ...], tuple[str, str, int]] = {}
    for start in starts_of(file):
        launch = start.launch
        hosts, number, endpoint = hosts_of(launch), rank_of_host(launch), endpoint_of(launch)
        if not hosts or hosts < 2 or number is None or not number.isdigit() or endpoint is None:
            continue
        if not is_known(endpoint[1]) or is_loopback(endpoint[1]):
            continue
        master = f"{endpoint[1]}:{port_of(launch) or ''}"
        key = (launch.program, str(hosts), launch.script)
        first, other, line = masters.setdefault(key, (number, master, launch.place.line))
        if first != number and other != master:
            yield Violation(
                launch.place,
                f"host {number} is told {master.rstrip(':')} as its master, and host {first} (line {line}) "
                f"{other.rstrip(':')}",
                evidence=(("master", master), ("elsewhere", other)),
            )
