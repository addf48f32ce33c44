"""The commands of ``doctor``: each runs a session with the settings that its options override, and writes a report."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from doctor.cli.options import (
    PATH,
    CommonOptions,
    format_option,
    gathering_options,
    output_option,
    plugin_option,
    print_notes,
    redact_option,
    report_options,
    select_option,
    settings_options,
    with_common_options,
)
from doctor.cli.output import keep_capture, print_notice, write, write_report, write_reports
from doctor.cli.site_profile import find_profile, print_profile, profile_option, with_profile
from doctor.core.decoding import prepared
from doctor.version import __version__

if TYPE_CHECKING:
    from doctor.cluster.gather.gather_session import GatherSession
    from doctor.cluster.gather.plan import GatherOptions
    from doctor.cluster.ray.ray_session import RayGatherSession
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.check_runner import Ignore
    from doctor.core.job import Job
    from doctor.core.report_document import Report, ReportInput
    from doctor.core.settings import Settings
    from doctor.probes.collectives.mesh import Axis
    from doctor.session import Probe

    Session: TypeAlias = "GatherSession | RayGatherSession | _SingleProcess"

_HELP = """Diagnose distributed PyTorch training: find the rank, host, device or setting that causes a problem.

\b
Exit codes: 0 no problem found, 1 a finding at or above --fail-on, 2 usage error
or unusable input, 3 inconclusive (ranks missing, or a check failed to run).

Example: torchrun --nproc-per-node=8 --no-python doctor check
"""


_ELSEWHERE: dict[str, str] = {
    "attach": "doctor.cli.attach",
    "estimate": "doctor.cli.estimate",
    "explain": "doctor.cli.explain",
    "help": "doctor.cli.help",
    "lint": "doctor.cli.lint",
    "run": "doctor.cli.run",
    "schema": "doctor.cli.schema",
}
"""Commands that are loaded on use, by the module whose ``command`` they are."""


class _LazyCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(_ELSEWHERE[cmd_name]).command
        return command


@click.group(
    cls=_LazyCommands, help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, "-V", "--version", prog_name="rankdoctor", message="%(prog)s %(version)s")
def app() -> None:
    """Hold the commands together."""


@app.command(short_help="Print the version.")
def version() -> None:
    """Print the version of rankdoctor, as doctor --version does.

    Example: doctor version
    """
    click.echo(f"rankdoctor {__version__}")


@app.command(short_help="Check this host or job before a run.")
@report_options("openmetrics")
@gathering_options
@click.option(
    "--probe",
    type=click.Choice(("none", "light", "full")),
    help="Active probes. light (default with several hosts): connectivity, latency, packet size, clocks and name "
    "lookups between hosts, within 10 s. full: also bandwidth, collectives, devices and storage, about a minute.",
)
@click.option(
    "--mesh",
    default="",
    metavar="AXES",
    help="Process groups of the job for --probe full, outermost first: dp=4,tp=2, or dp=4:25MiB,tp=2:8MiB with message "
    "sizes (default: from the launcher, else all ranks, and the groups within and across hosts).",
)
@click.option(
    "--why",
    is_flag=True,
    help="Repeat slow or failed measurements with one setting changed at a time, and report which change fixes them "
    "(implies --probe full).",
)
@click.option(
    "--exclude-list", type=PATH, metavar="FILE", help="Write the faulty hosts to FILE in srun --exclude format."
)
@profile_option
@with_common_options
def check(
    options: CommonOptions,
    probe: Probe | None,
    mesh: str,
    why: bool,
    exclude_list: Path | None,
    profile: str | None,
    **gathering: Any,
) -> None:
    """Check this host, its environment and its GPUs before a run.

    Under torchrun, srun, mpirun or Ray, check the whole job.

    Example: srun doctor check
    """
    from doctor.cluster.hostlist import as_hostlist, hosts_to_exclude
    from doctor.session import judge, load_checks

    if exclude_list is not None and options.redact:
        raise click.UsageError("--exclude-list writes host names, which --redact removes: use one of them.")
    chosen = find_profile(profile, options)
    started = time.time()
    settings = options.settings(commands=options.verbose)
    wanted, request = _gather_options(**gathering), _probe_request(probe, mesh, why=why)

    def own_code(job: Job) -> int:
        """Return the exit code of this process, without what needs the other ranks."""
        return judge(job, load_checks(settings), settings, must_be_complete=False).exit_code

    with _gathered(settings, wanted, request, discreet=options.redact, own_code=own_code) as session:
        if session.judges:
            print_notes(settings)
            print_profile(chosen)
        with redirect_stdout(sys.stderr):  # plugins may print
            # The process that writes the report fails before it gathers if a plugin or the baseline is not valid.
            ready = (_checks(settings, options), _baseline(options)) if session.judges else None
            found = session.gather()
            registry, found.expected = ready or (_checks(settings, options), _baseline(options))
            job, ignored, _ = _redacted_job(found, settings, options)
            job = with_profile(job, chosen)
            report = judge(job, registry, settings, strict=options.strict, started=started, ignore=ignored)
        _print_breakages(job)
        if exclude_list is not None:
            hosts = hosts_to_exclude(report)  # none: an empty file, for which `test -s` is false
            write(as_hostlist(hosts, job.launcher) + "\n" if hosts else "", exclude_list)
        _finish(session, report.exit_code, options.output, partial(write_report, report, job, options))
    raise SystemExit(report.exit_code)


@app.command(short_help="Save collected facts as JSON, to be analyzed later.")
@click.option(
    "-o",
    "--output",
    "where",
    type=click.Path(readable=False),
    metavar="PATH",
    help="Write to this file or folder instead of stdout.",
)
@redact_option
@settings_options
@gathering_options
@with_common_options
def capture(options: CommonOptions, where: str | None, **gathering: Any) -> None:
    """Save collected facts (no secrets) as JSON, to be analyzed later or on another machine.

    If -o names a folder, each rank writes its own file (rank-3.json), or each host if there are no ranks; a folder
    whose name ends with a slash is created if necessary. Otherwise the facts of all ranks are gathered into one file.

    Example: srun doctor capture -o captures/
    """
    from doctor.core.capture import encode_document, file_name, to_document
    from doctor.core.report_summary import breakages
    from doctor.report.formatting import escaped

    output = Path(where) if where is not None else None
    # Path.is_dir raises if a parent folder is not accessible.
    into_folder = where is not None and (where.endswith(os.sep) or os.path.isdir(where))  # noqa: PTH112
    if into_folder and gathering["gather"] == "auto" and gathering["ray"] is None:
        gathering["gather"] = "none"
    wanted, settings = _gather_options(**gathering), options.settings()
    request = _ProbeRequest("none")
    with _gathered(
        settings, wanted, request, discreet=options.redact, own_code=lambda job: 3 if breakages(job) else 0
    ) as session:
        if session.judges:
            print_notes(settings)
        job = session.gather()
        document = to_document(job)
        if options.redact:
            from doctor.core.redact.placeholders import redact

            document = redact(document)
        name = file_name(job, redacted=options.redact) if into_folder else None
        code = 3 if breakages(job) or job.absent else 0
        data = escaped(encode_document(document).decode()).encode()
        _finish(session, code, output, partial(keep_capture, data, output, name, wanted.group))
        _print_breakages(job)
    raise SystemExit(code)


@app.command(short_help="Find what failed first, from a job's logs and dumps.")
@click.argument("paths", nargs=-1, required=True, type=PATH)
@report_options()
@click.option(
    "--read-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop reading after SECONDS and exit 3 (default: by size, at least 60 for each file).",
)
@with_common_options
def diagnose(options: CommonOptions, paths: tuple[Path, ...], read_timeout: float | None) -> None:
    """Find what failed first, on which rank and host, from a job's logs and dumps.

    PATHS are files, folders and archives (zip, tar); `-` is standard input. File types are detected by content: logs
    (of all ranks or one per rank, also compressed or exported from a log store), PyTorch flight-recorder dumps, memory
    snapshots, captures, the callback's records, output of nvidia-smi and NCCL RAS, and stacks from py-spy, pystack,
    gdb, faulthandler, `ray stack` or PyTorch's debug server. No code from the files is run, and PyTorch is not needed.
    Files of several runs are separated by job id, folder, name, host and time; each run gets its own verdict.

    Example: doctor diagnose slurm-4711.out
    """
    import msgspec

    from doctor.core.files.spooled_streams import spooled_paths
    from doctor.core.masking import mask_record
    from doctor.core.report_summary import merge_reports
    from doctor.postmortem.run_outcome import outcome_of
    from doctor.postmortem.run_reader import read_runs
    from doctor.postmortem.stacks.rank_groups import collected_stacks
    from doctor.session import judge

    started = time.time()
    settings = options.settings()
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # plugins may print
        registry = _checks(settings, options)
        judged: list[tuple[str, Report, Job]] = []
        with spooled_paths(paths) as files:
            runs = read_runs(files, read_timeout)
        baseline = _baseline(options)
        for run in runs:
            run.job.expected = baseline
            job, ignored, inputs = _redacted_job(run.job, settings, options, inputs=run.inputs)
            report = judge(
                job,
                registry,
                settings,
                strict=options.strict,
                must_be_complete=False,
                outcome_of=outcome_of,
                inputs=inputs,
                started=started,
                ignore=ignored,
            )
            stacks = collected_stacks(job)
            report = report if stacks is None else msgspec.structs.replace(report, stacks=mask_record(stacks))
            judged.append((run.name, report, job))
    for _, _, job in judged:
        _print_breakages(job)
    if len(judged) == 1:
        _, report, job = judged[0]
        write_report(report, job, options)
        raise SystemExit(report.exit_code)
    from doctor.report.multi_run import JudgedRuns

    names = [f"run {number}" if options.redact else name for number, (name, _, _) in enumerate(judged, 1)]
    several = merge_reports(zip(names, (report for _, report, _ in judged), strict=True), started=started)
    write_reports(JudgedRuns(several, [job for _, _, job in judged]), options)
    raise SystemExit(several.exit_code)


@app.command(short_help="Show what changed between two captures, runs or reports.")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@format_option("text", "json", "markdown")
@output_option
def diff(before: Path, after: Path, form: str, output: Path | None) -> None:
    """Show what changed from BEFORE to AFTER, most likely causes first.

    Both are captures, records of runs (or folders of them), or reports. Exits 1 if anything changed.

    Example: doctor diff captures/monday captures/today
    """
    from doctor.cli.diff import difference
    from doctor.postmortem.filenames import name_of
    from doctor.report.diff import render_difference

    differences = difference(before, after)
    write(render_difference(differences, name_of(before), name_of(after), form), output)
    raise SystemExit(1 if differences else 0)


@app.command("list", short_help="List all checks and lint rules.")
@format_option("text", "json")
@output_option
@select_option
@settings_options
@plugin_option
@with_common_options
def list_(options: CommonOptions) -> None:
    """List all checks and lint rules with family, severity, needs and origin.

    Example: doctor list --select NET
    """
    from doctor.lint.engine.request import selected_checks_and_rules
    from doctor.report.listing import render_listing

    settings = options.settings()
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # plugins may print
        registry, book = selected_checks_and_rules(settings)
    write(render_listing(registry, book, options.form, sys.stdout), options.output)


def _checks(settings: Settings, options: CommonOptions) -> CheckRegistry:
    """Return the selected checks; with ``--redact``, without the folders of plugins."""
    from msgspec.structs import replace

    from doctor.session import load_checks

    registry = load_checks(settings)
    if not options.redact:
        return registry
    checks = (replace(check, origin=os.path.basename(check.origin)) for check in registry.checks)  # noqa: PTH119
    return replace(registry, checks=tuple(checks))


def _baseline(options: CommonOptions) -> Job | None:
    if options.expect is None:
        return None
    from doctor.cli.baseline_file import load_baseline

    return load_baseline(options.expect)


class _SingleProcess:
    """Replaces the session of gathered ranks for a job of only this process."""

    judges = True

    def __init__(self, settings: Settings, request: _ProbeRequest) -> None:
        self._settings = settings
        self._request = request

    def gather(self) -> Job:
        from doctor.session import collect, measure_alone

        job = collect(self._settings, announce=print_notice)
        if self._request.probe != "full":
            return job
        if self._request.mesh:
            print_notice("--mesh is ignored: it applies to jobs of several ranks, and this is a single process")
        return measure_alone(job, self._settings, why=self._request.why, tell=print_notice)

    def announce(self, code: int) -> None:
        """Do nothing: no other rank waits for the exit code."""


class _ProbeRequest(NamedTuple):
    probe: Probe | None = None
    mesh: tuple[Axis, ...] = ()
    why: bool = False


def _probe_request(probe: Probe | None, mesh: str, *, why: bool) -> _ProbeRequest:
    if why and probe in ("none", "light"):
        raise click.UsageError(f"--why needs --probe full, not --probe {probe}.")
    axes: tuple[Axis, ...] = ()
    if mesh:
        from doctor.probes.collectives.mesh import parse_mesh

        try:
            axes = parse_mesh(mesh)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--mesh") from None
    probe = "full" if why else probe
    if axes and probe != "full":
        raise click.UsageError("--mesh needs --probe full.")
    return _ProbeRequest(probe, axes, why)


def _gather_options(group: str | None, **gathering: Any) -> GatherOptions:
    from doctor.cluster.gather.plan import GatherOptions
    from doctor.core.files.trusted_owners import chosen_group

    return GatherOptions(**gathering, group=chosen_group(group))


@contextlib.contextmanager
def _gathered(
    settings: Settings, wanted: GatherOptions, request: _ProbeRequest, *, discreet: bool, own_code: Callable[[Job], int]
) -> Iterator[Session]:
    """Open the session that gathers this process's job. Ranks that do not write the report exit inside of it."""
    from doctor.cluster.gather.dismissal import Dismissed
    from doctor.cluster.gather.plan import NoRendezvous
    from doctor.session import open_gathering

    try:
        session = open_gathering(
            settings,
            wanted,
            probe=request.probe,
            mesh=request.mesh,
            why=request.why,
            announce=print_notice,
            discreet=discreet,
            own_code=own_code,
        )
    except NoRendezvous as none:
        print_notice(str(none))
        raise SystemExit(3) from None
    if session is None and wanted.share is not None:
        print_notice("--share is ignored: no launcher is in use, and this is a single process")
    try:
        with session or contextlib.nullcontext(_SingleProcess(settings, request)) as opened:
            yield opened
    except Dismissed as dismissed:
        raise SystemExit(dismissed.code) from None


def _finish(session: Session, code: int, output: Path | None, write: Callable[[], None]) -> None:
    """Announce the exit code to all ranks, and write. A file is written first: if that fails, all ranks exit with 2.
    Stdout is written last, because a terminal or pipe may block."""
    if output is not None:
        write()
    session.announce(code)
    if output is None:
        write()


def _print_breakages(job: Job) -> None:
    """Print the failures of rankdoctor itself, which no check of the report may have needed."""
    from doctor.core.report_summary import breakages

    for broken in breakages(job):
        print_notice(broken.reason)


def _redacted_job(
    job: Job, settings: Settings, options: CommonOptions, *, inputs: tuple[ReportInput, ...] = ()
) -> tuple[Job, Ignore, tuple[ReportInput, ...]]:
    """Return the job to check, which of its findings are ignored, and the inputs; with ``--redact``, all redacted.

    Redacting before the checks run keeps real names out of every finding. Host patterns of the settings still match
    the real names."""
    if not options.redact:
        return job, settings.ignored, inputs
    import msgspec

    from doctor.core.capture import from_document, to_document
    from doctor.core.redact.placeholders import redact
    from doctor.core.report_document import ReportInput

    whole = {**to_document(job), "inputs": msgspec.to_builtins(inputs)}
    document = redact(whole, paths=bool(inputs) and job.evidence is not None)
    inputs = tuple(msgspec.convert(document.pop("inputs"), prepared(list[ReportInput])))
    redacted = from_document(document)
    real = {placeholder.name: host.name for placeholder, host in zip(redacted.hosts, job.hosts, strict=True)}
    return (
        redacted,
        lambda check, finding, hosts: settings.ignored(check, finding, tuple(real.get(host, host) for host in hosts)),
        inputs,
    )
