"""Collects facts, runs checks and builds the report, for the command line and integrations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from doctor.core.clock import time
from doctor.core.facts import LaunchFacts, StepFacts
from doctor.core.job import Job, Member, build_job
from doctor.core.logs.event_groups import quoted_places
from doctor.core.masking import mask_record
from doctor.core.report_document import FailOn, Report, ReportInput, RunOutcome
from doctor.core.report_summary import summarize
from doctor.core.settings import IgnoreEntry, Settings, choose, require_known_limits, require_known_patterns

if TYPE_CHECKING:
    from doctor.cluster.gather.gather_session import GatherSession
    from doctor.cluster.gather.participant import HostCollector
    from doctor.cluster.gather.plan import GatherOptions
    from doctor.cluster.gather.probe_schedule import ProbeOptions
    from doctor.cluster.ray.ray_session import RayGatherSession
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.check_runner import Ignore
    from doctor.probes.collectives.mesh import Axis

Announce = Callable[[str], None]
Probe = Literal["none", "light", "full"]
OutcomeOf = Callable[[Job, Collection[tuple[str, int]], float], RunOutcome | None]
"""How the run of a job ended, by the places that findings quote and the time in seconds since the epoch."""


def collect(settings: Settings | None = None, *, announce: Announce | None = None) -> Job:
    """Collect the facts of this process and its host as a job of one rank; every collector has a deadline.
    ``announce`` is called once with what is still being read after a second."""
    from doctor.collectors import MODULES
    from doctor.collectors.base import Machine
    from doctor.collectors.runner import collect_facts

    settings = settings or Settings()
    machine = Machine(directories=settings.directories, commands=settings.commands)
    sections = collect_facts(MODULES, machine, timeout=settings.timeout, announce=announce)
    launch = sections.get(LaunchFacts.key)
    rank = launch.rank if isinstance(launch, LaunchFacts) and launch.rank is not None else 0
    return build_job([Member(rank, sections)])


def measure_alone(job: Job, settings: Settings, *, why: bool = False, tell: Announce) -> Job:
    """The job of this process alone with full probes. ``why``: measure which settings fix what is slow or fails."""
    from doctor.cluster.gather.single_process import probe_single_process
    from doctor.collectors.base import Machine

    return probe_single_process(
        job, Machine(directories=settings.directories, commands=settings.commands), tell, why=why
    )


def open_gathering(
    settings: Settings,
    wish: GatherOptions,
    *,
    probe: Probe | None = None,
    mesh: tuple[Axis, ...] = (),
    why: bool = False,
    announce: Announce | None = None,
    discreet: bool = False,
    own_code: Callable[[Job], int] | None = None,
    collector: HostCollector | None = None,
) -> GatherSession | RayGatherSession | None:
    """Open the gathering of this process's job; ``None`` if it is checked alone.

    Collecting begins at once. ``probe``: ``None`` for light probes if there are several hosts. ``mesh``: the axes
    of the job, for full probes; ``why``: measure which settings fix what is slow or fails. ``own_code``: the exit
    code of this process alone, which counts if messages are not signed. ``collector``: what is collected in place of
    all facts of this process.

    Raises:
        NoWay: nothing says where the processes can meet.
        UnusableError: the options contradict each other, or the key of the job can't be used.
    """
    from doctor.cluster.gather.plan import gather_plan
    from doctor.cluster.rendezvous.process_identity import identity_of_turn
    from doctor.collectors.base import Machine
    from doctor.collectors.launch.launcher import launch_facts

    tell = announce or (lambda _: None)
    machine = Machine(directories=settings.directories, commands=settings.commands)
    if collector is not None:
        machine = msgspec.structs.replace(machine, environ=collector.environ)
    launch = launch_facts(machine.environ)
    plan = gather_plan(wish, machine.environ, launch, collector.identity if collector is not None else None)
    if collector is not None and plan.identity is not None:
        plan = plan._replace(identity=identity_of_turn(plan.identity, collector.turn))
    if plan.ray is None and plan.identity is None:
        return None
    from doctor.cluster.transport.secret_file import secret_from_environ

    secret = secret_from_environ(machine.environ)
    if plan.ray is not None:
        from doctor.cluster.ray.ray_session import RayGatherSession

        return RayGatherSession(
            plan.ray,
            probe_options=_probe_options(probe, mesh, why, several_hosts=True),
            timeout=settings.timeout,
            directories=settings.directories,
            write_line=tell,
            discreet=discreet,
            remote=collector.remote if collector is not None else ("", ""),
        )
    assert plan.identity is not None  # a plan has one or the other
    from doctor.cluster.gather.gather_session import GatherSession
    from doctor.cluster.gather.participant import start_participant

    options = _probe_options(probe, mesh, why, several_hosts=plan.identity.spans_hosts)
    participant, schedule = start_participant(
        plan.identity,
        machine,
        timeout=settings.timeout,
        probe_options=options,
        write_line=tell,
        announce=announce,
        collect=collector.collect if collector is not None else None,
    )
    return GatherSession(
        plan,
        plan.identity,
        participant,
        schedule,
        timeout=settings.timeout,
        write_line=tell,
        discreet=discreet,
        secret=secret,
        own_code=own_code,
    )


def _probe_options(
    probe: Probe | None, mesh: tuple[Axis, ...], why: bool, *, several_hosts: bool
) -> ProbeOptions | None:
    """The probe options; ``None`` if there is one host and no full probe was requested."""
    if probe == "none" or (probe != "full" and not several_hosts):
        return None
    from doctor.cluster.gather.probe_schedule import ProbeOptions

    return ProbeOptions("full" if probe == "full" else "light", mesh, why)


def examine(job: Job, settings: Settings | None = None) -> Report:
    """Run all checks, built-in and installed, over ``job`` and build the report.

    Raises:
        UnusableError: a plugin, pattern or limit in ``settings`` can't be used.
    """
    settings = settings or Settings()
    return judge(job, load_checks(settings), settings)


def load_checks(settings: Settings, *, by_index: bool = False) -> CheckRegistry:
    """The checks that the settings select, including plugins and plugin files; the errors of :func:`examine`.

    ``by_index``: as of :func:`doctor.core.check_registry.load_registry`.
    """
    from doctor.core.check_registry import load_registry

    catalog = load_registry(settings.plugins, by_index=by_index)
    require_known_limits(settings, catalog)
    require_known_patterns(catalog, settings.to_be_known())
    return choose(catalog, settings.select)


def judge(
    job: Job,
    catalog: CheckRegistry,
    settings: Settings,
    *,
    strict: bool = False,
    must_be_complete: bool = True,
    outcome_of: OutcomeOf | None = None,
    inputs: Iterable[ReportInput] = (),
    started: float | None = None,
    ignore: Ignore | None = None,
) -> Report:
    """Run the checks of ``catalog`` over ``job`` and build the report.

    ``must_be_complete``: missing ranks of a running job make the verdict inconclusive (not so for captures).
    ``outcome_of``: of what a run left behind, which is healthy only if its end or its progress was seen.
    ``started``: ``time.time()`` when the command began.
    """
    from doctor.core.check_runner import examine_job

    began = time() if started is None else started
    results = examine_job(job, catalog, limits=settings.limits, ignore=ignore or settings.ignored)
    inputs = tuple(inputs)
    # A check of last resort quotes lines that it does not explain.
    unexplained = {check.id for check in catalog.checks if check.last_resort}
    explained = quoted_places(one for result in results if result.id not in unexplained for one in result.findings)
    report = summarize(
        job,
        results,
        started=began,
        fail_on=settings.fail_on,
        strict=strict,
        must_be_complete=must_be_complete,
        inconclusive=outcome_of is not None and any(one.notes for one in inputs),
        inputs=inputs,
        outcome=outcome_of(job, explained, began) if outcome_of else None,
    )
    report = _with_lost_time(report, job)
    if job.evidence is None or report.verdict == "pass":
        return report
    from doctor.analysis.differential.candidates import candidates_of
    from doctor.analysis.differential.measured_confidence import with_measured_confidence

    candidates = tuple(map(mask_record, candidates_of(job, results, report.primary)))
    # The counts are of texts of logs, and say nothing about records, dumps or stacks.
    from_logs = not any(one.skipped is None and one.kind in _MORE_THAN_LOGS for one in inputs)
    measured = with_measured_confidence(report.results, report.primary) if from_logs else report.results
    return msgspec.structs.replace(report, candidates=candidates, results=measured)


def _with_lost_time(report: Report, job: Job) -> Report:
    """The report with the lost time of a watched run that has trained."""
    if not any(steps.spans for steps, _ in job.facts(StepFacts)):
        return report
    from doctor.analysis.lost_time.summary import lost_time

    return msgspec.structs.replace(report, lost_time=lost_time(job))


_MORE_THAN_LOGS = frozenset({"capture", "record", "flight-recorder", "snapshot", "stacks"})
"""Kinds of inputs."""


def with_command_line(
    settings: Settings,
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: FailOn | None = None,
    plugins: Iterable[Path] = (),
    timeout: float | None = None,
    commands: bool = False,
    preview: bool = False,
    tests: bool = False,
) -> Settings:
    """The settings with the command-line options applied over the configured ones."""
    select, ignore = tuple(select), tuple(ignore)
    typed = tuple(IgnoreEntry(pattern, "typed on the command line", by="command line") for pattern in ignore)
    return msgspec.structs.replace(
        settings,
        select=select or settings.select,
        ignore=typed + settings.ignore,
        fail_on=fail_on or settings.fail_on,
        timeout=timeout if timeout is not None else settings.timeout,
        plugins=settings.plugins + tuple(plugins),
        typed=frozenset((*select, *ignore)),
        replaced=settings.select if select else (),
        commands=commands,
        preview=preview or settings.preview,
        tests=tests or settings.tests,
    )
