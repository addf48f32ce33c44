"""ENV002 in launch files: a rank outside its world size."""

from __future__ import annotations

from collections.abc import Iterator

from doctor.api import FileFails, FilePasses, LaunchFile, Violation, rule
from doctor.lint.launch.launch_file import Launch
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.partial_text import whole_number
from doctor.lint.launch.process_launches import hosts_of, option_name, rank_of_host, starts_of, uses_node_rank
from doctor.testing.script_cases import shell_fails, shell_passes
from doctor_checks.launch.rank_out_of_range import rank_out_of_range

_CONFIG = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: {}\nnum_machines: {}\nnum_processes: 8\n"
)


@rule(
    check=rank_out_of_range,
    reads=LaunchFile,
    cases=lambda: (
        shell_fails(
            "counted from one",
            "torchrun --nnodes=2 --node_rank=2 --master_addr=10.0.0.1 --master_port=29500 train.py  # !",
        ),
        FileFails("the second of one machine", _CONFIG.format("1  # !", 1), name="config.yaml"),
        shell_fails(
            "accelerate", "accelerate launch --num_machines 4 --machine_rank 4 --main_process_ip a train.py  # !"
        ),
        shell_passes(
            "counted from zero", "torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29500 train.py"
        ),
        FilePasses("the second of two machines", _CONFIG.format(1, 2), name="config.yaml"),
        shell_passes("from outside", "torchrun --nnodes=$N --node_rank=2 --master_addr=10.0.0.1 train.py"),
    ),
)
def rank_out_of_range_in_files(file: LaunchFile) -> Iterator[Violation]:
    """Ask whether the node rank of each host is below the number of hosts.

    Why it hurts: the launcher or PyTorch rejects the node rank, or the host waits for a job that it cannot join.
    Fix: Number the hosts from 0.
    """
    for start in starts_of(file):
        hosts, number = hosts_of(start.launch), whole_number(rank_of_host(start.launch))
        if hosts is not None and number is not None and number >= hosts and uses_node_rank(start.launch):
            yield Violation(
                start.launch.place,
                f"The node rank is {number}, but "
                + ("the job has 1 host" if hosts == 1 else f"the {hosts} hosts are numbered 0-{hosts - 1}"),
                effect=_effect(start.launch),
                fix=_fix(hosts, option_name(start.launch, start.launch.command.node_rank)),
                evidence=(("node_rank", number), ("hosts", hosts)),
            )
    if isinstance(file, Manifest):
        for root in file.of_kind("accelerate"):
            number, machines, place = root.number("machine_rank"), root.number("num_machines"), root.get("machine_rank")
            if number is not None and machines and place is not None and number >= machines:
                yield Violation(
                    place.place,
                    f"machine_rank={number} is not below num_machines={machines}: "
                    + ("the only valid machine rank is 0" if machines == 1 else f"machine ranks are 0-{machines - 1}"),
                    fix=_fix(machines, "machine_rank"),
                    evidence=(("machine_rank", number), ("num_machines", machines)),
                )


def _effect(launch: Launch) -> str:
    """For agents of torchrun and of launchers on top of it: they do not check the node rank (``_assign_worker_ranks``,
    torch/distributed/elastic/agent/server/api.py)."""
    if not launch.command.rendezvous:
        return ""
    return (
        f"{launch.program} does not reject the node rank: this host waits for ranks that the host of node rank 0 never "
        "assigns to it, and fails at the timeout."
    )


def _fix(hosts: int, name: str) -> str:
    """``name``: the option or key of the node rank."""
    if hosts == 1:
        return f"Set {name} to 0, or set the number of hosts to that of the job."
    return f"Set {name} to a different number from 0 to {hosts - 1} on each host."
