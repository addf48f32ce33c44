"""ENV001: variables of a rank are missing or not numeric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from doctor.analysis.launch_origin import LONGEST_NUMBER, inner_launcher, launch_number, whole_number
from doctor.api import (
    Finding,
    IdenticalRanks,
    Job,
    Severity,
    Verdict,
    check,
    conjunction,
    event_groups,
    finding_from_logs,
    merge,
)
from doctor.facts import GpuFacts, LaunchFacts
from doctor.knowledge.launcher_index import LOCAL_RANKS, SCRIPT_VARIABLES
from doctor.testing import Fails, JobBuilder, Passes, healthy, logged

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that env:// requires, in its order (torch/distributed/rendezvous.py); an empty value counts as missing."""

COMPLETE = {*NEEDED, "LOCAL_RANK"}

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")

SUBSTITUTES = dict(zip(("RANK", "WORLD_SIZE"), SCRIPT_VARIABLES, strict=True))
"""Variables from which scripts under srun, mpirun and jsrun read the rank and the world size."""


def _from_logs(job: Job) -> Iterator[Finding]:
    for group in event_groups(job, "torch.env_missing"):
        names = [*group.values("var"), *group.values("var2")]
        is_one = len(names) == 1
        yield finding_from_logs(
            group,
            f"{conjunction(names)} {'is' if is_one else 'are'} not set: the script needs a launcher that sets "
            f"{'it' if is_one else 'them'}",
            evidence={"missing": names},
            confidence=0.6,
            fix="Start the script with `torchrun --nproc-per-node=gpu`, which sets the rank variables.",
            explains=("RUN004",),
        )


@check(
    id="ENV001",
    severity=Severity.ERROR,
    when="PM",
    needs=(LaunchFacts,),
    from_logs=_from_logs,
    impacts={
        r"needs a launcher": "The script fails at startup, and the training does not start.",
        r"is not a number": (
            "The rank fails with a ValueError in init_process_group(), and the other ranks wait for it until the "
            "store times out."
        ),
    },
    cases=lambda: (
        Passes("torchrun sets all of them", healthy(hosts=2, per_host=2)),
        Passes(
            "MASTER_ADDR and MASTER_PORT alone, as batch scripts export them",
            _lone().launched(MASTER_ADDR="n1", MASTER_PORT="1"),
        ),
        Passes("a bad port is for another check", _rank().launched(MASTER_PORT="http")),
        Passes("Lightning gives its own processes no RANK", _rank().launched(without=("RANK",), NODE_RANK="0")),
        Passes("srun with MASTER_ADDR and MASTER_PORT exported", healthy(hosts=2, per_host=2).by_srun()),
        Fails("WORLD_SIZE alone is left over in the shell", _lone().launched(WORLD_SIZE="8"), ranks=(0,)),
        Fails("one rank without MASTER_PORT", healthy().launched(ranks=(1,), without=("MASTER_PORT",)), ranks=(1,)),
        Fails("MASTER_ADDR is set and empty", healthy().launched(MASTER_ADDR=""), ranks=(0, 1)),
        Fails("RANK is an unexpanded variable", healthy().launched(ranks=(1,), RANK="$SLURM_PROCID"), ranks=(1,)),
        Fails(
            "srun with WORLD_SIZE exported, the script reads SLURM_PROCID",
            healthy(hosts=2, per_host=2).by_srun().launched(WORLD_SIZE="4"),
            ranks=(0, 1, 2, 3),
            severity=Severity.INFO,
        ),
        Fails(
            "several ranks a host and no LOCAL_RANK",
            healthy().launched(without=("LOCAL_RANK",)),
            ranks=(0, 1),
            severity=Severity.INFO,
        ),
        Fails(
            "log of torch, to which a variable is missing",
            logged(
                "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
                "expected, but not set"
            ),
            ranks=(),
        ),
        Fails("log of a script that reads a variable itself", logged("KeyError: 'LOCAL_RANK'")),
    ),
)
def rank_variables_incomplete(job: Job) -> Iterator[Verdict]:
    """Ask whether a process with RANK or WORLD_SIZE set has all variables that init_process_group() needs.

    Why it hurts: init_process_group() fails on each rank that lacks a variable; ranks that have all of them wait until
    the store times out.
    Fix: Use a launcher that sets them (`torchrun --nproc-per-node=8 train.py`), export RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT together, or run `unset RANK WORLD_SIZE LOCAL_RANK` if they are stale.
    """
    incomplete = [(launch, identical) for launch, identical in job.each(LaunchFacts) if not _is_complete(launch.filled)]
    lacking = {rank for _, identical in incomplete for rank in identical.ranks}
    effect = ""
    if lacking >= {rank.number for rank in job.ranks} and not job.ungathered:
        effect = f"init_process_group() fails {'on every rank' if len(job.ranks) > 1 else 'in this process'}."
    yield from merge(
        finding
        for launch, identical in incomplete
        for judge in (_judge_numbers, _judge_missing)
        for finding in judge(launch, identical, effect)
    )
    if incomplete:
        yield from merge(_judge_local_ranks(job))


def _is_complete(values: Mapping[str, str]) -> bool:
    """Whether LOCAL_RANK and all variables that torch needs are set, with short numbers, as by torchrun."""
    numbers = "".join(filter(None, map(values.get, NUMBERS)))
    return values.keys() >= COMPLETE and numbers.isdecimal() and len(numbers) <= LONGEST_NUMBER


def _judge_numbers(launch: LaunchFacts, identical: IdenticalRanks, effect: str) -> Iterator[Finding]:
    values = launch.filled
    odd = [name for name in NUMBERS if not (text := values.get(name, "0")).isdecimal() or len(text) > LONGEST_NUMBER]
    wrong = {name: values[name] for name in odd if whole_number(values[name]) is None}
    if wrong:
        shown = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        yield Finding(
            f"{shown} {'is not a number' if len(wrong) == 1 else 'are not numbers'}",
            ranks=identical.ranks,
            evidence={"variables": wrong},
            effect=effect,
            fix=_fix_of_numbers(wrong),
        )


def _fix_of_numbers(wrong: Mapping[str, str]) -> str:
    unexpanded = [value for value in wrong.values() if "$" in value]
    if unexpanded:
        return f"Set {' and '.join(wrong)} without single quotes, so that the shell expands `{unexpanded[0]}`."
    return f"Set {' and '.join(wrong)} to {'an integer' if len(wrong) == 1 else 'integers'}."


def _judge_missing(launch: LaunchFacts, identical: IdenticalRanks, effect: str) -> Iterator[Finding]:
    values = launch.filled
    missing = [name for name in NEEDED if name not in values]
    if not missing or {"RANK", "WORLD_SIZE"} <= set(missing):
        return
    if missing == ["RANK"] and "LOCAL_RANK" in values and "NODE_RANK" in values:
        return  # Lightning does not set RANK itself: lightning/fabric/strategies/launchers/subprocess_script.py
    there = {name: launch.get(name) for name in NEEDED if name not in missing}
    instead = [_substitute(launch, name) for name in missing]
    if all(instead):
        yield _mapped(missing, [name for name in instead if name], there, identical)
        return
    empty = [name for name in missing if launch.get(name) is not None]
    yield Finding(
        f"{conjunction(list(there))} {'is' if len(there) == 1 else 'are'} set, but {conjunction(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} {'empty' if empty == missing else 'missing'}",
        ranks=identical.ranks,
        evidence={
            "set": there,
            "missing": [name for name in missing if name not in empty],
            "empty": empty,
            "launcher": launch.launcher,
        },
        effect=effect,
        fix=f"Remove the command or code that {'empties' if empty == missing else 'unsets'} {conjunction(missing)} "
        f"after torchrun has set {'it' if len(missing) == 1 else 'them'}."
        if inner_launcher(launch) == "torchrun"
        else "Start the script with torchrun, which sets all four variables, or run "
        f"`unset {' '.join(there)}` if {'it is' if len(there) == 1 else 'they are'} left over from another job.",
    )


def _substitute(launch: LaunchFacts, name: str) -> str | None:
    """The launcher's own variable that a script can use instead of ``name``."""
    if inner_launcher(launch) == "torchrun":
        return None
    return next((other for other in SUBSTITUTES.get(name, ()) if launch_number(launch, other) is not None), None)


def _mapped(missing: list[str], instead: list[str], there: dict[str, str | None], identical: IdenticalRanks) -> Finding:
    return Finding(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: env:// fails unless the script reads "
        f"{' and '.join(instead)}",
        ranks=identical.ranks,
        severity=Severity.INFO,
        evidence={"set": there, "missing": missing, "instead": instead},
        effect="init_process_group() fails unless the script passes rank= and world_size=. Lightning reads the "
        "launcher's variables instead.",
        fix=f"Set {conjunction(missing)} in the command that each task runs:\n"
        + "\n".join(f"export {name}=${other}" for name, other in zip(missing, instead, strict=True)),
    )


def _judge_local_ranks(job: Job) -> Iterator[Finding]:
    for local in job.by_host():
        launches = [(rank.number, launch) for rank in local.members if (launch := rank.find(LaunchFacts)) is not None]
        gpus = local.find(GpuFacts)
        # Of a process that is judged alone, its neighbors are not seen: several GPUs stand for them.
        alone = len(job.ranks) == 1 and gpus is not None and len(gpus.gpus) > 1
        seen = 2 if alone and any((launch.world_size or 1) > 1 for _, launch in launches) else len(launches)
        without = tuple(number for number, launch in launches if _lacks_local_rank(launch, seen))
        if without:
            yield Finding(
                "LOCAL_RANK is not set, but there are several ranks per host",
                ranks=without,
                severity=Severity.INFO,
                evidence={"ranks_per_host": len(launches)},
                effect="A script that selects its GPU by LOCAL_RANK fails, or uses GPU 0 for all ranks of a host.",
                fix="Set LOCAL_RANK to the index of each process on its host, or start the ranks with torchrun.",
            )


def _lacks_local_rank(launch: LaunchFacts, seen_here: int) -> bool:
    several = seen_here > 1 or (launch_number(launch, "LOCAL_WORLD_SIZE") or 1) > 1
    return several and "RANK" in launch.filled and launch.filled.keys().isdisjoint(LOCAL_RANKS)


def _lone() -> JobBuilder:
    return healthy(hosts=1, per_host=1)


def _rank() -> JobBuilder:
    return healthy().only((0,))
