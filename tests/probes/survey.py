"""Light probes between hosts of the lab, with one agent on each, and what the checks say to it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from doctor.api import Status
from doctor.collectors.runner import decode_outcome
from doctor.core.check_registry import CheckRegistry, builtin_checks
from doctor.core.check_runner import examine_job
from doctor.core.job import Job, Member, build_job
from doctor.core.report_document import CheckResult
from doctor.facts import ClockFacts, PathFacts, Reach, ReachFacts
from doctor.probes.reachability.assignments import Agent, Assignment, LightProbeResult
from doctor.probes.reachability.connection_plan import plan_light
from tests.lab.hosts import LabHost
from tests.lab.running import end
from tests.probes import agent as program

JUDGES = ("HOST003", "NET006", "NET012", "NET013", "NET014", "NET015", "NET024")
CHECKS = {check.id: check for check in builtin_checks()}
PORT = 29500
ANSWER_SECONDS = 30.0


class _Station:
    """An agent that runs on a host."""

    def __init__(self, process: subprocess.Popen[str], rank: int) -> None:
        self.process = process
        self.rank = rank

    def hello(self) -> None:
        card = self.heard()
        self.agent = Agent(self.rank, self.rank, card["port"], card["word"])
        facts = {key: decode_outcome(key, bytes.fromhex(data)) for key, data in card["facts"].items()}
        self.member = Member(self.rank, facts)

    def say(self, **message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def heard(self, seconds: float = ANSWER_SECONDS) -> dict:
        """What it says next."""
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"rank {self.rank} says nothing (exit {self.process.poll()})"
        return json.loads(line)


@dataclass(frozen=True)
class Findings:
    """What one survey brought. ``took``: the seconds of each agent, by rank; ``files``: its open files after it."""

    job: Job
    measured: dict[int, LightProbeResult]
    took: dict[int, float]
    files: dict[int, int]

    def result(self, check: str) -> CheckResult:
        [result] = examine_job(self.job, CheckRegistry((CHECKS[check],)))
        assert result.status is not Status.ERROR, result.reason
        return result

    def faulty(self) -> dict[str, set[str]]:
        """The hosts that each check blames; checks that blame nobody are left out."""
        found = {name: {host for one in self.result(name).findings for host in one.hosts} for name in JUDGES}
        return {name: hosts for name, hosts in found.items() if hosts}

    def reach(self, rank: int, peer: str, purpose: str = "peer") -> list[Reach]:
        attempts = self.measured[rank].reach.attempts
        return [attempt for attempt in attempts if attempt.peer == peer and attempt.purpose == purpose]

    def outcomes(self, purpose: str = "peer") -> dict[tuple[int, str], str]:
        """By rank and peer."""
        attempts = ((rank, one) for rank, found in self.measured.items() for one in found.reach.attempts)
        return {(rank, one.peer): one.outcome for rank, one in attempts if one.purpose == purpose}


class Survey:
    """The agents of all hosts, one rank each, ready to probe as often as asked."""

    def __init__(self, stations: Sequence[_Station]) -> None:
        self.stations = stations
        self.agents = [station.agent for station in stations]

    def job(self) -> Job:
        return build_job([station.member for station in self.stations], world_size=len(self.stations))

    def plan(self) -> tuple[Assignment, ...]:
        return plan_light(self.job(), self.agents)

    def run(self, *, without: Sequence[int] = (), **options: object) -> Findings:
        """Probe between all hosts at the same time; ``without``: ranks that are not told to."""
        asked = []
        for station, assignment in zip(self.stations, self.plan(), strict=True):
            if station.rank not in without:
                station.say(assignment=msgspec.msgpack.encode(assignment).hex(), options=options)
                asked.append(station)
        answers = {station.rank: station.heard() for station in asked}
        measured = {
            rank: msgspec.msgpack.decode(bytes.fromhex(answer["measured"]), type=LightProbeResult)
            for rank, answer in answers.items()
        }
        members = [_with(station.member, measured.get(station.rank)) for station in self.stations]
        return Findings(
            build_job(members, world_size=len(members)),
            measured,
            {rank: answer["took"] for rank, answer in answers.items()},
            {rank: answer["files"] for rank, answer in answers.items()},
        )


def _with(member: Member, measured: LightProbeResult | None) -> Member:
    if measured is None:
        return member
    sections = {ReachFacts.key: measured.reach, PathFacts.key: measured.paths}
    if measured.clock is not None:
        sections[ClockFacts.key] = measured.clock
    return member._replace(sections={**member.sections, **sections})


@contextmanager
def surveying(
    hosts: Sequence[LabHost],
    *,
    ahead: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    own_env: Mapping[str, Mapping[str, str]] | None = None,
    before: str = "",
) -> Iterator[Survey]:
    """An agent on each of ``hosts``, that of the first being rank 0. ``ahead``: seconds by which the clock of a host,
    by its name, is ahead. ``env`` is laid over the variables of all, ``own_env`` over those of one; ``before`` are
    shell lines that come before each."""
    with ExitStack() as stack:
        stations = []
        for rank, host in enumerate(hosts):
            command = f'{before}\nexec "$0" "$@"'
            argv = ["bash", "-c", command, sys.executable, program.__file__, str((ahead or {}).get(host.name, 0))]
            environ = {**_environ(rank, len(hosts), hosts[0].name), **(env or {}), **(own_env or {}).get(host.name, {})}
            process = host.start(argv, env=environ, stdin=subprocess.PIPE, stderr=None)
            stack.callback(end, process)
            stations.append(_Station(process, rank))
        for station in stations:
            station.hello()
        yield Survey(stations)


def _environ(rank: int, world: int, master: str) -> dict[str, str]:
    """What torchrun sets for one rank a host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "TORCHELASTIC_RUN_ID": "none",
    }
