"""``doctor attach``: where the ranks of a running job are, which one the others wait for, and why."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from doctor.cli.options import (
    PATH,
    CommonOptions,
    detail_options,
    fail_on_option,
    format_option,
    gathering_options,
    ignore_option,
    in_order,
    plugin_option,
    print_notes,
    redact_option,
    select_option,
    settings_options,
    strict_option,
    with_common_options,
)
from doctor.cli.output import print_notice, write_report

if TYPE_CHECKING:
    from doctor.attach.read_job import JobReader, ReadJob
    from doctor.attach.sampler import SamplingOptions
    from doctor.attach.targets import TargetRequest
    from doctor.cluster.gather.gather_session import GatherSession
    from doctor.cluster.gather.participant import HostCollector
    from doctor.cluster.gather.plan import GatherOptions
    from doctor.cluster.ray.ray_session import RayGatherSession
    from doctor.core.check import Check
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.job import Job
    from doctor.core.report_document import Report
    from doctor.core.settings import Settings

    Session: TypeAlias = "GatherSession | RayGatherSession | _OneHost"

NATIVE_SECONDS = 30.0
"""Seconds in which the processes of a host are read with native frames: a CPU reads about one in two seconds."""
INCONCLUSIVE = 3
"""The exit code if nothing could be read: no training process, or no access to it."""


@click.command("attach", short_help="Show where the ranks of a running job are blocked.")
@click.option("--pid", "pids", multiple=True, type=click.IntRange(min=1), help="Read this process and its children.")
@click.option("--job", default="", metavar="ID", help="Read the job with this id (of the scheduler, or --rdzv-id).")
@click.option("--all-users", is_flag=True, help="Look for jobs of all users (root only).")
@click.option("--native", is_flag=True, help="Read native frames too; stops each process for 0.5 to 1.5 s.")
@click.option(
    "--locals",
    "with_locals",
    is_flag=True,
    help="Read local variables too; they show rank numbers and steps per second.",
)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="Samples of each process.")
@click.option(
    "--allow-inject",
    is_flag=True,
    help="Let a rank that py-spy cannot read run a script that writes its stacks (Python 3.14 or later).",
)
@click.option(
    "--debug-server", default="", metavar="HOST[:PORT]", help="Query torch's debug server of the job too (port 25999)."
)
@click.option(
    "--nccl-ras",
    default="",
    metavar="HOST[:PORT]",
    help="Query NCCL's RAS service at this address instead of this host's (port 28028).",
)
@click.option(
    "--flight-recorder",
    is_flag=True,
    help="Request dumps of the flight recorders (jobs with TORCH_NCCL_DEBUG_INFO_PIPE_FILE).",
)
@click.option(
    "--watch",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Attach again every SECONDS until all ranks make progress or the job ends.",
)
@click.option("--hosts", type=click.IntRange(min=1), metavar="N", help="Number of hosts, if the job does not state it.")
@click.option(
    "-o", "--output", "folder", type=PATH, metavar="FOLDER", help="Write the stacks and the report to FOLDER."
)
@format_option("text", "json", "markdown", "html", "junit", "github")
@in_order(select_option, ignore_option, fail_on_option, strict_option, settings_options, plugin_option, redact_option)
@detail_options
@gathering_options
@with_common_options
def command(
    options: CommonOptions,
    pids: tuple[int, ...],
    job: str,
    all_users: bool,
    native: bool,
    with_locals: bool,
    rounds: int,
    allow_inject: bool,
    debug_server: str,
    nccl_ras: str,
    flight_recorder: bool,
    watch: float | None,
    hosts: int | None,
    folder: Path | None,
    **gathering: Any,
) -> None:
    """Show where each rank of a running job is, and which rank the others wait for.

    Reads the stacks of the training processes on this host several times, from outside: nothing has to be installed
    in the job, and the job keeps running. Run it on every host to compare all ranks: `srun --overlap --jobid=ID
    --nodes=N --ntasks-per-node=1 doctor attach`, `mpirun ... doctor attach`, or by ssh or kubectl exec with
    `--share DIR`.

    Example: doctor attach --pid 4711

    Exit codes: 0 all ranks make progress, 1 a problem was found, 2 a wrong option
    or no such process or job, 3 a rank could not be read, access to it was refused
    (ptrace), or no training process was found.
    """
    from doctor.attach.debug_server import server_address
    from doctor.attach.sampler import DEFAULTS
    from doctor.attach.sources.nccl_ras import ras_address
    from doctor.attach.targets import TargetRequest

    if debug_server:
        server_address(debug_server)
    if nccl_ras:
        ras_address(nccl_ras)
    if all_users and os.geteuid() != 0:
        raise click.UsageError("--all-users needs root.")
    if pids and job:
        raise click.UsageError("--pid and --job exclude each other.")
    if allow_inject and sys.version_info < (3, 14):
        raise click.UsageError("--allow-inject needs Python 3.14 or later, of the same minor version as the job's.")
    attachment = _Attachment(
        options,
        options.settings(),
        TargetRequest(pids, job, all_users),
        DEFAULTS._replace(
            rounds=rounds,
            native=native,
            locals=with_locals,
            as_owner=not pids,
            seconds=NATIVE_SECONDS if native else DEFAULTS.seconds,
            debug_server=debug_server,
            nccl_ras=nccl_ras,
            flight_recorder=flight_recorder,
            inject=allow_inject,
        ),
        _gather_options(**gathering),
        hosts,
        folder,
    )
    code, goes_on = attachment.attach()
    while goes_on and watch is not None:
        time.sleep(watch)
        code, goes_on = attachment.attach(code)
    raise SystemExit(code)


def _gather_options(group: str | None, **gathering: Any) -> GatherOptions:
    from doctor.cluster.gather.plan import GatherOptions
    from doctor.core.files.trusted_owners import chosen_group

    return GatherOptions(**gathering, group=chosen_group(group))


class _Round(NamedTuple):
    """The exit code, and whether ranks were read that did not all make progress."""

    code: int
    goes_on: bool = False


class _Attachment:
    """Attaches to one job, once or several times."""

    def __init__(
        self,
        options: CommonOptions,
        settings: Settings,
        request: TargetRequest,
        sampling: SamplingOptions,
        wish: GatherOptions,
        hosts: int | None,
        folder: Path | None,
    ) -> None:
        self._options = options
        self._settings = settings
        self._request = request
        self._sampling = sampling
        self._wish = wish
        self._hosts = hosts
        self._folder = folder
        self._turn = -1

    @cached_property
    def _reader(self) -> JobReader:
        """Derives the job of the ranks; created only in a process that evaluates the job."""
        from doctor.attach.read_job import JobReader

        return JobReader()

    def attach(self, before: int | None = None) -> _Round:
        """Read the job once and write the report. ``before``: the exit code of the round before this one."""
        from doctor.cluster.gather.dismissal import Dismissed

        started = time.time()
        self._turn += 1
        try:
            with self._session() as session:
                if session.judges and before is None:
                    print_notes(self._settings)
                with redirect_stdout(sys.stderr):  # plugins may print
                    # Loaded while the ranks are sampled; a process that does not evaluate the job needs no checks.
                    catalog = self._checks() if session.judges else None
                    members = self._redacted(session.gather())
                    read = self._reader.read(members)
                    if not read.ranks.ranks:
                        return self._without_ranks(session, read.members, before)
                    report = self._judged(read, catalog or self._checks(), started)
                    if before is not None and read.has_ended:
                        return self._without_ranks(session, read.members, before)
                self._finish(session, read, report)
        except Dismissed as dismissed:
            return _Round(dismissed.code, goes_on=dismissed.code in (1, INCONCLUSIVE) and not dismissed.unreached)
        return _Round(report.exit_code, goes_on=report.exit_code != 0)

    def _without_ranks(self, session: Session, members: Job, before: int | None) -> _Round:
        from doctor.core.facts import AttachFacts

        code = INCONCLUSIVE if before is None else before
        if before is not None:
            print_notice("the job has ended")
        else:
            print_notice(
                "no training process was found"
                if self._request.all_users
                else "no training process of this user was found"
            )
        for facts, _ in members.facts(AttachFacts):
            for note in facts.notes:
                print_notice(note)
        session.announce(code)
        return _Round(code)

    def _checks(self) -> CheckRegistry:
        from doctor.session import load_checks

        return load_checks(self._settings)

    def _redacted(self, members: Job) -> Job:
        """The gathered facts; with ``--redact``, without names, before anything is derived from them."""
        if not self._options.redact:
            return members
        from doctor.core.capture import from_document, to_document
        from doctor.core.redact.placeholders import redact

        return from_document(redact(to_document(members), paths=True))

    def _judged(self, read: ReadJob, catalog: CheckRegistry, started: float) -> Report:
        import msgspec

        from doctor.core.masking import mask_record
        from doctor.session import judge

        report = judge(
            read.ranks,
            _applicable(catalog, read.ranks, self._settings),
            self._settings,
            strict=self._options.strict,
            started=started,
            outcome_of=read.outcome_of,
        )
        return msgspec.structs.replace(report, stacks=mask_record(read.stacks))

    def _finish(self, session: Session, read: ReadJob, report: Report) -> None:
        """Announce the exit code to all ranks, and write; a folder first, as its errors change the exit code."""
        if self._folder is not None:
            from doctor.cli.attach_folder import keep_attached

            keep_attached(self._folder, read, report, self._options, self._wish.group)
        session.announce(report.exit_code)
        write_report(report, read.ranks, self._options)

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session]:
        """Open the session that gathers the hosts, or reads this one."""
        from doctor.cluster.gather.plan import NoRendezvous
        from doctor.session import open_gathering

        try:
            session = open_gathering(
                self._settings,
                self._wish,
                probe="none",
                announce=print_notice,
                discreet=self._options.redact,
                own_code=self._own_code,
                collector=self._collector(),
            )
        except NoRendezvous as none:
            print_notice(str(none))
            raise SystemExit(INCONCLUSIVE) from None
        with session or contextlib.nullcontext(_OneHost(self._alone)) as opened:
            yield opened

    def _own_code(self, members: Job) -> int:
        """The exit code of this process, without the ranks of other hosts."""
        from doctor.attach.read_job import JobReader
        from doctor.session import judge

        job = JobReader().read(members).ranks
        if not job.ranks:
            return 0
        catalog = _applicable(self._checks(), job, self._settings)
        return judge(job, catalog, self._settings, must_be_complete=False).exit_code

    def _alone(self) -> Job:
        """The job of this process, which reads this host."""
        from doctor.attach.host_reading import read_host, targets_of
        from doctor.core.job import Member, build_job

        targets = targets_of(self._request, alone=self._turn == 0)
        return build_job([Member(0, read_host(targets, self._sampling, timeout=self._settings.timeout))])

    def _collector(self) -> HostCollector:
        """What is gathered: the process that leads its host reads the job there."""
        import msgspec

        from doctor.attach.host_reading import (
            HostRequest,
            collect_host,
            identity_of,
            is_launched,
            own_environ,
            targets_of,
        )
        from doctor.cluster.gather.participant import HostCollector
        from doctor.cluster.rendezvous.process_identity import ProcessIdentity

        environ = own_environ()
        targets, identity = None, None
        has_place = self._wish.share is not None or self._wish.master is not None
        if has_place and self._wish.gather != "none" and not is_launched(environ):
            targets = targets_of(self._request, alone=False)
            if not targets.ranks:
                print_notice("no training process was found on this host, so its place in the job is unknown")
                raise SystemExit(INCONCLUSIVE)
            if (found := identity_of(targets, self._hosts)) is not None:
                identity = ProcessIdentity(*found)
        wanted = HostRequest(self._request, self._sampling, self._settings.timeout)
        return HostCollector(
            lambda keys: dict(collect_host(keys, wanted, targets)),
            environ,
            identity,
            self._turn,
            ("doctor.attach.host_reading:collector_of", msgspec.json.encode(wanted).decode()),
        )


class _OneHost:
    """Replaces the session of gathered hosts."""

    judges = True

    def __init__(self, read: Callable[[], Job]) -> None:
        self._read = read

    def gather(self) -> Job:
        """Return the job of this process."""
        return self._read()

    def announce(self, code: int) -> None:
        """Do nothing: no other process waits for the exit code."""


def _applicable(catalog: CheckRegistry, job: Job, settings: Settings) -> CheckRegistry:
    """The checks of what attaching reads, or that the user selected; the host itself is read only to name it."""
    from msgspec.structs import replace

    from doctor.core.facts import HostFacts

    if settings.select:
        return catalog
    holders = (*job.ranks, *job.hosts)
    read = {key for holder in holders for key in holder.sections}

    def is_read(check: Check) -> bool:
        wanted = ({one.key for one in needs} for needs in (check.needs, check.or_needs))
        return any(keys <= read and keys != {HostFacts.key} for keys in wanted if keys)

    return replace(catalog, checks=tuple(filter(is_read, catalog.checks)))
