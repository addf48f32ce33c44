"""The command line: options into settings, settings into a session, its report onto paper."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from doctor.cli.options import (
    PATH,
    format_option,
    gathering_options,
    judging_options,
    output_option,
    plugin_option,
    print_notes,
    read_timeout_option,
    redact_option,
    select_option,
    settings_of,
    settings_options,
)
from doctor.cli.output import deliver, deliver_several, keep_capture, print_notice, write
from doctor.core.decoding import prepared
from doctor.version import __version__

if TYPE_CHECKING:
    from doctor.cluster.gather.gather_plan import GatherMode, GatherOptions
    from doctor.cluster.gather.gather_session import GatherSession
    from doctor.cluster.ray.ray_session import RayGatherSession
    from doctor.core.check import Check
    from doctor.core.check_registry import CheckRegistry
    from doctor.core.check_runner import Ignore
    from doctor.core.job import Job
    from doctor.core.report_document import FailOn, Report, ReportInput
    from doctor.core.settings import Settings
    from doctor.lint.engine.rule import Rule
    from doctor.probes.collectives.mesh import Axis
    from doctor.report.playbook import PlaybookPage
    from doctor.session import Probe

_HELP = """The doctor for distributed PyTorch training: which rank, host, device or setting is to blame.

\b
Exit codes: 0 healthy, 1 a finding at or above --fail-on, 2 usage or unusable
input, 3 inconclusive (ranks were not gathered, something broke).
"""


_ELSEWHERE: dict[str, str] = {"estimate": "doctor.cli.estimate", "lint": "doctor.cli.lint"}
"""Commands in modules of their own, each with a command ``command``: loaded when they are asked for."""


class _LazyCommands(click.Group):
    """The commands here, and those elsewhere."""

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
@click.version_option(__version__, prog_name="rankdoctor", message="%(prog)s %(version)s")
def app() -> None:
    """Hold the commands together."""


@app.command()
@judging_options
@gathering_options
@click.option(
    "--probe",
    type=click.Choice(("none", "light", "full")),
    help="What is measured: nothing; between hosts reach, delay, packet size, clocks and look-ups within 10 s (light, "
    "the default with several hosts); besides bandwidth, collectives, devices and storage, in about a minute (full).",
)
@click.option(
    "--mesh",
    default="",
    metavar="AXES",
    help="The groups of the job for --probe full, outermost first, such as dp=4,tp=2 or dp=4:25MiB,tp=2:8MiB with the "
    "size of the messages (default: what the launcher says, else all ranks, and those within and across hosts).",
)
@click.option(
    "--why",
    is_flag=True,
    help="Measure what is slow or fails again with one thing changed at a time, and say what mends it "
    "(implies --probe full).",
)
@click.option("--exclude-list", type=PATH, help="Write the hosts at fault here, as srun --exclude takes them.")
def check(
    form: str,
    output: Path | None,
    select: str,
    ignore: str,
    fail_on: FailOn | None,
    strict: bool,
    expect: Path | None,
    plugins: tuple[Path, ...],
    redact: bool,
    quiet: bool,
    verbose: bool,
    timeout: float | None,
    gather: GatherMode,
    share: Path | None,
    group: str | None,
    ray: str | None,
    master: str | None,
    probe: Probe | None,
    mesh: str,
    why: bool,
    exclude_list: Path | None,
) -> None:
    """Tell what is wrong with this host, this environment and these GPUs, before the run; started by torchrun, srun,
    mpirun or on Ray, what is wrong with the job.
    """
    from doctor.cluster.hostlist import as_hostlist, hosts_to_exclude
    from doctor.session import judge

    if exclude_list is not None and redact:
        raise click.UsageError("--exclude-list needs the names of hosts, which --redact takes away.")
    started = time.time()
    settings = settings_of(select, ignore, fail_on, plugins, timeout, commands=verbose)
    wish, asked = _wish(gather, share, ray, master, group), _probe_request(probe, mesh, why=why)
    with _gathered(settings, wish, asked, discreet=redact, own_code=partial(_code_alone, settings)) as gathering:
        if gathering.judges:
            print_notes(settings)
        with redirect_stdout(sys.stderr):  # guests may print
            # Whoever judges looks at once whether all that it needs can be used; the others may never need it.
            ready = (_checks(settings, redact=redact), _expectation(expect)) if gathering.judges else None
            found = gathering.gather()
            catalog, found.expected = ready or (_checks(settings, redact=redact), _expectation(expect))
            job, ignored, _ = _shown(found, settings, redact=redact)
            report = judge(job, catalog, settings, strict=strict, started=started, ignore=ignored)
        _print_breakages(job)
        if exclude_list is not None:
            write(as_hostlist(hosts_to_exclude(report), job.launcher) + "\n", exclude_list)
        _finish(
            gathering,
            report.exit_code,
            output,
            lambda: deliver(report, form, output, quiet=quiet, verbose=verbose, job=job),
        )
    raise SystemExit(report.exit_code)


@app.command()
@click.option(
    "-o", "--output", "where", type=click.Path(readable=False), help="Write to this file or folder instead of stdout."
)
@redact_option
@settings_options
@gathering_options
def capture(
    where: str | None,
    redact: bool,
    timeout: float | None,
    gather: GatherMode,
    share: Path | None,
    group: str | None,
    ray: str | None,
    master: str | None,
) -> None:
    """Write the facts alone as JSON, without secrets, to be judged later or elsewhere.

    A folder given with -o gets one file a rank (rank-3.json), or a host where there are no ranks; one that ends with a
    slash is made where it does not exist. Else the ranks of a job are gathered into one document.
    """
    from doctor.core.capture import encode_document, file_name, to_document
    from doctor.core.report_summary import breakages
    from doctor.report.formatting import escaped

    output = Path(where) if where is not None else None
    # Path.is_dir raises where a parent may not be entered.
    into_folder = where is not None and (where.endswith(os.sep) or os.path.isdir(where))  # noqa: PTH112
    alone = into_folder and gather == "auto" and ray is None
    wish = _wish("none" if alone else gather, share, ray, master, group)
    settings = settings_of("", "", None, (), timeout)
    with _gathered(settings, wish, _ProbeRequest("none"), discreet=redact, own_code=_capture_alone) as gathering:
        if gathering.judges:
            print_notes(settings)
        job = gathering.gather()
        document = to_document(job)
        if redact:
            document = _redact_document(document)
        name = file_name(job, redacted=redact) if into_folder else None
        code = 3 if breakages(job) or job.absent else 0
        data = escaped(encode_document(document).decode()).encode()
        _finish(gathering, code, output, lambda: keep_capture(data, output, name, wish.group))
        _print_breakages(job)
    raise SystemExit(code)


@app.command()
@click.argument("paths", nargs=-1, required=True, type=PATH)
@judging_options
@read_timeout_option
def diagnose(
    paths: tuple[Path, ...],
    read_timeout: float | None,
    form: str,
    output: Path | None,
    select: str,
    ignore: str,
    fail_on: FailOn | None,
    strict: bool,
    expect: Path | None,
    plugins: tuple[Path, ...],
    redact: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Tell what happened first, on which rank and host, and why: from whatever a job left behind.

    PATHS are files and folders, in any mix, told apart by content: logs (of all ranks together or one a rank, also
    packed), dumps of torch's flight recorder, memory snapshots, captures, the callback's records, output of nvidia-smi
    and of NCCL's RAS. `-` is standard input. Nothing in them is run, and torch is not needed. Files of several runs are
    told apart by job ids, folders, names, hosts and times; each run gets a verdict of its own.
    """
    from doctor.core.files.spooled_streams import spooled_paths
    from doctor.core.report_summary import merge_reports
    from doctor.postmortem.run_reader import read_runs
    from doctor.session import judge

    started = time.time()
    settings = settings_of(select, ignore, fail_on, plugins, None)
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # guests may print
        catalog = _checks(settings, redact=redact)
        judged: list[tuple[str, Report, Job]] = []
        with spooled_paths(paths) as files:
            runs = read_runs(files, read_timeout)
        worked = _expectation(expect)
        for run in runs:
            run.job.expected = worked
            job, ignored, inputs = _shown(run.job, settings, redact=redact, inputs=run.inputs)
            report = judge(
                job,
                catalog,
                settings,
                strict=strict,
                must_be_complete=False,
                after_the_run=True,
                inputs=inputs,
                started=started,
                ignore=ignored,
            )
            judged.append((run.name, report, job))
    for _, _, job in judged:
        _print_breakages(job)
    if len(judged) == 1:
        _, report, job = judged[0]
        deliver(report, form, output, quiet=quiet, verbose=verbose, job=job)
        raise SystemExit(report.exit_code)
    from doctor.report.multi_run import JudgedRuns

    names = [f"run {number}" if redact else name for number, (name, _, _) in enumerate(judged, 1)]
    several = merge_reports(zip(names, (report for _, report, _ in judged), strict=True), started=started)
    document = JudgedRuns(several, [job for _, _, job in judged])
    deliver_several(document, form, output, quiet=quiet, verbose=verbose)
    raise SystemExit(several.exit_code)


@app.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@format_option("text", "json", "markdown")
@output_option
def diff(before: Path, after: Path, form: str, output: Path | None) -> None:
    """Tell what changed from BEFORE to AFTER, the likeliest causes first: captures, records of two runs (folders of
    them), or reports.

    Exit 1 where anything did.
    """
    from doctor.cli.diff import difference
    from doctor.postmortem.inputs import name_of
    from doctor.report.diff import render_difference

    differences = difference(before, after)
    write(render_difference(differences, name_of(before), name_of(after), form), output)
    raise SystemExit(1 if differences else 0)


@app.command()
@click.argument("word", metavar="ID")
@format_option("text", "json")
@output_option
@settings_options
@plugin_option
def explain(word: str, form: str, output: Path | None, plugins: tuple[Path, ...]) -> None:
    """Print the playbook of a check, by id (NET007) or name: what you see, how to fix it, why it happens."""
    from doctor.report.formatting import as_json

    page = _page(word, plugins)
    if form == "json":
        write(as_json(page) + "\n", output)
    elif output is not None or not sys.stdout.isatty():
        write(page.markdown, output)
    else:
        from doctor.report.rich_names import Markdown
        from doctor.report.terminal import make_console

        console = make_console(sys.stdout)
        with console.capture() as paper:
            console.print(Markdown(page.markdown))
        write(paper.get(), None)


def _page(word: str, plugins: tuple[Path, ...]) -> PlaybookPage:
    """The page of the playbook, else that of a check or rule of somebody else; these are loaded only then."""
    from doctor.core.errors import UnusableError
    from doctor.report.playbook import find_page, page_of

    with contextlib.suppress(UnusableError):
        return find_page(word)
    from doctor.core.check_registry import load_registry
    from doctor.lint.engine.registry import load_rules

    settings = settings_of("", "", None, plugins, None)
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # guests may print
        found: list[Check | Rule] = [*load_registry(settings.plugins).checks, *load_rules(settings.plugins).rules]
    return find_page(word, [page_of(one) for one in found if one.origin != "built-in"])


@app.command("list")
@format_option("text", "json")
@output_option
@select_option
@settings_options
@plugin_option
def list_(form: str, output: Path | None, select: str, plugins: tuple[Path, ...]) -> None:
    """List every check and every rule of lint with its family, severity, needs and origin."""
    from doctor.lint.engine.request import selected_checks_and_rules
    from doctor.report.listing import render_listing

    settings = settings_of(select, "", None, plugins, None)
    print_notes(settings)
    with redirect_stdout(sys.stderr):  # guests may print
        catalog, book = selected_checks_and_rules(settings)
    write(render_listing(catalog, book, form, sys.stdout), output)


def _checks(settings: Settings, *, redact: bool) -> CheckRegistry:
    """The checks to judge by; ``redact``: without the folders of plugins."""
    from dataclasses import replace

    from doctor.session import load_checks

    catalog = load_checks(settings)
    if not redact:
        return catalog
    checks = (replace(check, origin=os.path.basename(check.origin)) for check in catalog.checks)  # noqa: PTH119
    return replace(catalog, checks=tuple(checks))


def _code_alone(settings: Settings, job: Job) -> int:
    """The exit code of one process by what can be seen in it alone; what needs the other ranks is left out."""
    from doctor.session import judge

    return judge(job, _checks(settings, redact=False), settings, must_be_complete=False).exit_code


def _capture_alone(job: Job) -> int:
    """The same where nothing is judged."""
    from doctor.core.report_summary import breakages

    return 3 if breakages(job) else 0


def _expectation(path: Path | None) -> Job | None:
    """The job that worked, if one was named."""
    if path is None:
        return None
    from doctor.cli.baseline_file import load_baseline

    return load_baseline(path)


class _SingleProcess:
    """A process that is judged by itself, in the place of a gathering."""

    judges = True

    def __init__(self, settings: Settings, asked: _ProbeRequest) -> None:
        self._settings = settings
        self._asked = asked

    def gather(self) -> Job:
        """The job of this process alone."""
        from doctor.session import collect, measure_alone

        job = collect(self._settings, announce=print_notice)
        if self._asked.probe != "full":
            return job
        if self._asked.mesh:
            print_notice(
                "--mesh speaks of several ranks, and this process is judged alone: nothing is measured along it"
            )
        return measure_alone(job, self._settings, why=self._asked.why, tell=print_notice)

    def announce(self, code: int) -> None:
        """Nobody waits for it."""


class _ProbeRequest(NamedTuple):
    """What the user wants measured."""

    probe: Probe | None = None
    mesh: tuple[Axis, ...] = ()
    why: bool = False


def _probe_request(probe: Probe | None, mesh: str, *, why: bool) -> _ProbeRequest:
    """What is to be measured; a usage error where the options contradict one another."""
    if why and probe in ("none", "light"):
        raise click.UsageError(f"--why measures again, and --probe {probe} does not measure: leave --probe out.")
    asked = _ProbeRequest("full" if why else probe, _mesh(mesh), why)
    if asked.mesh and asked.probe != "full":
        raise click.UsageError("--mesh is for --probe full.")
    return asked


def _mesh(text: str) -> tuple[Axis, ...]:
    """The axes that were typed; a usage error where they can't be read."""
    if not text:
        return ()
    from doctor.probes.collectives.mesh import parse_mesh

    try:
        return parse_mesh(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--mesh") from None


def _wish(
    gather: GatherMode, share: Path | None, ray: str | None, master: str | None, group: str | None
) -> GatherOptions:
    from doctor.cluster.gather.gather_plan import GatherOptions
    from doctor.core.files.trusted_owners import chosen_group

    return GatherOptions(gather, share, ray, master, chosen_group(group))


@contextlib.contextmanager
def _gathered(
    settings: Settings, wish: GatherOptions, asked: _ProbeRequest, *, discreet: bool, own_code: Callable[[Job], int]
) -> Iterator[GatherSession | RayGatherSession | _SingleProcess]:
    """The gathering of this process's job. Those that do not judge leave from within."""
    from doctor.cluster.gather.dismissal import Dismissed
    from doctor.cluster.rendezvous.endpoint import NoRendezvous
    from doctor.session import open_gathering

    try:
        gathering = open_gathering(
            settings,
            wish,
            probe=asked.probe,
            mesh=asked.mesh,
            why=asked.why,
            announce=print_notice,
            discreet=discreet,
            own_code=own_code,
        )
    except NoRendezvous as none:
        print_notice(str(none))
        raise SystemExit(3) from None
    try:
        with gathering or contextlib.nullcontext(_SingleProcess(settings, asked)) as opened:
            yield opened
    except Dismissed as dismissed:
        raise SystemExit(dismissed.code) from None


def _finish(
    gathering: GatherSession | RayGatherSession | _SingleProcess,
    code: int,
    output: Path | None,
    write: Callable[[], None],
) -> None:
    """Let all ranks leave, and write. A file comes first: where it can't be written all leave with 2. A terminal, which
    may hold up whoever writes to it, comes last."""
    if output is not None:
        write()
    gathering.announce(code)
    if output is None:
        write()


def _print_breakages(job: Job) -> None:
    """What of the doctor itself broke: the report may hold no check that needed it."""
    from doctor.core.report_summary import breakages

    for broken in breakages(job):
        print_notice(broken.reason)


def _redact_document(document: dict[str, Any], *, paths: bool = False) -> dict[str, Any]:
    from doctor.core.redact.placeholders import redact

    return redact(document, paths=paths)


def _shown(
    job: Job, settings: Settings, *, redact: bool, inputs: tuple[ReportInput, ...] = ()
) -> tuple[Job, Ignore, tuple[ReportInput, ...]]:
    """The job to be judged, what is ignored in it, and the inputs. Stand-ins are put in before it is judged, so that no
    word of a finding can hold what they stand for; patterns of hosts are meant for the real names."""
    if not redact:
        return job, settings.ignored, inputs
    import msgspec

    from doctor.core.capture import from_document, to_document
    from doctor.core.report_document import ReportInput

    document = _redact_document(
        {**to_document(job), "inputs": msgspec.to_builtins(inputs)}, paths=bool(inputs) and job.evidence is not None
    )
    inputs = tuple(msgspec.convert(document.pop("inputs"), prepared(list[ReportInput])))
    shown = from_document(document)
    real = {stand_in.name: host.name for stand_in, host in zip(shown.hosts, job.hosts, strict=True)}
    return (
        shown,
        lambda check, finding, hosts: settings.ignored(check, finding, tuple(real.get(host, host) for host in hosts)),
        inputs,
    )
