"""What holds for the whole suite: signals are deliverable, limits follow the speed of the machine, no fuzz deadline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

from tests.lab.sample import ALL, ALL_SLOW, ONE_OF_EXAMPLES, ONE_OF_PATTERNS, TURN, TURNS, of_this_turn, turn
from tests.lab.speed import VARIABLE, patience, slowness

TESTS = Path(__file__).parent
REAL_TIME = frozenset(
    (
        "attach",
        "autostart",
        "cluster",
        "examples",
        "faults",
        "frameworks",
        "hostile",
        "integrations",
        "lab",
        "postmortem",
        "probes",
        "report",
        "sinks",
        "watchdog",
    )
)
"""Folders whose tests start processes that wait for each other with timeouts of the product; tests elsewhere carry the
marker ``real_time``. A scheduler that stops one process for seconds changes what the others may report, so a failure
counts if it repeats, with new fixtures; every repetition is listed at the end of the run (``RERUN``)."""
SLOW = (
    "attach/test_gathered.py",
    "autostart/test_jobs.py",
    "autostart/test_tracker.py",
    "cluster/test_ray.py",
    "estimate/test_accuracy.py",
    "examples/test_github_action.py",
    "examples/test_more_launchers.py",
    "examples/test_pytorchjob.py",
    "examples/test_recipes.py",
    "examples/test_slurm_epilog.py",
    "examples/test_uneven_batches.py",
    "faults/live/test_full_probes.py",
    "frameworks/test_frameworks.py",
    "integrations/test_replica_loops.py",
    "postmortem/test_real_runs.py",
    "probes/test_stage.py",
    "probes/test_why_groups.py",
)
"""What starts whole jobs of launchers and frameworks, or measures for long: a quarter of the time of all tests.
``-m slow`` runs it, a step of its own in ``.ci/run``, and so does DOCTOR_LONG_TESTS=1."""
SAMPLED = (
    "analysis/test_hang_real.py",
    "attach/test_attach_command.py",
    "attach/test_launched_jobs.py",
    "attach/test_refusals.py",
    "attach/test_scenes.py",
    "autostart/test_plain_loop.py",
    "checks/test_network_real.py",
    "cluster/test_commands.py",
    "cluster/test_hostile.py",
    "cluster/test_shared_folders.py",
    "cluster/test_taken_ports.py",
    "collectors/test_python_environment.py",
    "core/test_endings.py",
    "core/test_import_path.py",
    "estimate/test_cli_estimate.py",
    "faults/live/test_launchers.py",
    "faults/live/test_live_faults.py",
    "faults/run/test_run_faults.py",
    "integrations/test_callback_class.py",
    "integrations/test_many_runs.py",
    "integrations/test_threads.py",
    "lab/test_network.py",
    "probes/test_between_hosts.py",
    "probes/test_groups.py",
    "probes/test_pair_exchange.py",
    "probes/test_why_live.py",
    "report/test_json_schemas.py",
    "sinks/test_otlp.py",
    "telemetry/test_blocking_call.py",
    "telemetry/test_flight_recorder.py",
    "telemetry/test_group_names.py",
    "telemetry/test_tight_loops.py",
    "watchdog/test_alone.py",
    "watchdog/test_faults.py",
    "watchdog/test_hostile.py",
    "watchdog/test_runs.py",
)
"""Modules whose tests start several processes each, for seconds of CPU: a run of the whole suite takes a sample of
them, as ``-m slow`` does of ``JOBS``. Whoever names such a module on the command line gets all of it."""
BY_MARK = "pytest.mark.slow"
"""What marks single tests and cases of other modules as such."""
LEFT_OUT = pytest.mark.skip(reason="whole jobs; bash tests/run -m slow runs it, as .ci/run does in a step of its own")
JOBS = (
    "frameworks/test_frameworks.py::test_the_numbers_are_those_of_the_job_without_it[ray]",
    "test_documented_commands.py",
    "attach/test_gathered.py",
    "benchmarks/test_parts.py",
    "report/test_accessibility.py",
    "cluster/test_ray.py::cluster",
    "frameworks/",
    "autostart/test_jobs.py",
    "postmortem/test_real_runs.py::runs",
    "postmortem/test_real_runs.py::test_tasks_of_srun_with_labels",
    "examples/test_more_launchers.py",
    "examples/test_pytorchjob.py::test_pods_are_checked_and_train",
    "examples/test_recipes.py",
    "examples/test_slurm_epilog.py",
    "examples/test_uneven_batches.py",
    "faults/live/test_full_probes.py",
    "probes/test_stage.py::test_a_rank_",
    "probes/test_why_groups.py::test_the_interface_that_a_group_works_on",
    "benchmarks/test_samples.py",
    "test_release_files.py::test_the_list_of_components_has_every_dependency",
)
"""The slow tests that take seconds of CPU each, roughly the longest first: ``-m slow`` runs a sample of them. Tests
that share the named fixture of their module are one job, as they take as long for a few as for all."""
DELIVERABLE = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a shell without job control has its background jobs ignore (POSIX, Shell Command Language, 2.11); every
child would inherit that. SIGHUP stays as it is: ``nohup`` asked for it, and no test sends it."""


def pytest_configure() -> None:
    """Prepare the process that runs tests, and the environment of the workers that it starts."""
    _restore_signals()
    os.environ[VARIABLE] = f"{slowness():.2f}"
    os.environ[TURN] = f"{turn()}"
    _load_hypothesis_profile()


def _restore_signals() -> None:
    for number in DELIVERABLE:
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _load_hypothesis_profile() -> None:
    """An example may take long on a busy machine, and nothing is learnt from that."""
    try:
        from hypothesis import HealthCheck, settings
    except ModuleNotFoundError:  # the tests that need it say so
        return
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The measurement, for whoever reads a failure, and what is sampled without being skipped."""
    lines = [f"machine: {slowness():.2f} times as slow as the reference; deadlines follow"]
    if not ALL:
        part = f"one of {ONE_OF_EXAMPLES} examples of slow fuzz tests, one of {ONE_OF_PATTERNS} patterns of modules and"
        part += " messages, and unredacted reports of the corpus against their schema"
        lines.append(f"sample: {part}, and what is listed as skipped in the end; DOCTOR_LONG_TESTS=1 runs all")
    if not ALL_SLOW and (config.getoption("markexpr") == "slow" or _is_whole(config)):
        lines.append(f"sample: one of {TURNS} jobs, by {TURN}={turn()}; DOCTOR_ALL_SLOW=1 runs all")
    return lines


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only slow tests run, leave out modules without any: every worker imports what it collects."""
    if config.getoption("markexpr") != "slow" or collection_path.suffix != ".py":
        return None
    if not collection_path.is_relative_to(TESTS):
        return True
    if collection_path.relative_to(TESTS).as_posix().startswith(SLOW) or BY_MARK in collection_path.read_text("utf-8"):
        return None
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each worker begin with another folder.

    In a fresh checkout, all of them would rewrite the assertions of the same modules at the same time, which is half of
    what it takes to collect the tests; what one has rewritten, others load."""
    config, worker = session.config, getattr(session.config, "workerinput", None)
    if (
        worker is None
        or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        or config.option.markexpr == "slow"
    ):
        return
    folders = sorted(path for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__")
    modules = sorted(TESTS.glob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw")) * len(folders) // worker["workercount"]
    config.args[:] = map(str, [*folders[first:], *folders[:first], *modules])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs in a step of its own, before ``-m`` selects by marks."""
    if item.path.relative_to(TESTS).as_posix().startswith(SLOW):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Have any worker take any job where only slow tests run; other tests of a module stay together.

    Not by marks and ``--dist loadgroup``: pytest-xdist 3.8 writes groups to a field that pytest 9.2 does not read."""
    if config.getoption("markexpr") != "slow":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class JobScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.removeprefix(f"{TESTS.name}/").startswith(JOBS) else nodeid.partition("::")[0]

    return JobScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its limit, and those that depend on the scheduling of processes a second attempt."""
    items.sort(key=lambda item: item.path)  # workers collect in different orders
    if not ALL and "slow" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(LEFT_OUT)
        if _is_whole(config) and not ALL_SLOW:
            _sample_jobs(items, SAMPLED)
    elif not ALL_SLOW and config.getoption("markexpr") == "slow":
        _sample_jobs([item for item in items if item.get_closest_marker("slow")], JOBS)
    if config.getoption("markexpr") == "slow":
        items.sort(key=_rank_of)  # a long job that begins last has all other workers wait
    else:
        _spread_slow_modules(items, getattr(config, "workerinput", {}).get("workercount", 1))
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("real_time") or _is_in_real_time(item.path):
                item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))
    _scale_limits(config, items)


def _is_whole(config: pytest.Config) -> bool:
    """Whether no folder, module or test is named on the command line."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def _sample_jobs(items: list[pytest.Item], sampled: tuple[str, ...]) -> None:
    """Skip those of the jobs ``sampled`` that are of other turns, each with its name."""
    named: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not _is_skipped(item):
            named.setdefault(_job_of(item), []).append(item)
    jobs = {name for name in named if name.startswith(sampled)}
    for name in jobs - of_this_turn(jobs, named.keys() - jobs, turn()):
        for item in named[name]:
            reason = f"sampled: {item.name} runs for one commit in {TURNS}; DOCTOR_ALL_SLOW=1 runs it"
            item.add_marker(pytest.mark.skip(reason=reason))


def _job_of(item: pytest.Item) -> str:
    """The module with the fixture that is one of ``JOBS``, or with the test itself."""
    path = item.path.relative_to(TESTS).as_posix()
    shared = [one for fixture in getattr(item, "fixturenames", ()) if (one := f"{path}::{fixture}") in JOBS]
    return shared[0] if shared else f"{path}::{item.name}"


def _rank_of(item: pytest.Item) -> int:
    job = _job_of(item)
    return next((rank for rank, start in enumerate(JOBS) if job.startswith(start)), len(JOBS))


def _is_skipped(item: pytest.Item) -> bool:
    """Whether the test is left out already."""
    marks = [mark for mark in item.iter_markers() if mark.name in ("skip", "skipif")]
    return any(mark.name == "skip" or any(mark.args) for mark in marks)


def _is_in_real_time(path: Path) -> bool:
    return not REAL_TIME.isdisjoint(path.relative_to(TESTS).parts)


def _spread_slow_modules(items: list[pytest.Item], workers: int) -> None:
    """Give two workers of three a share of the modules that start processes, and the third what only computes.

    worksteal gives each worker one part of the list, in its order, and one that has none left half of another's: slow
    tests at the end would leave processors idle, and so would workers that all wait at the same time."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for position, path in enumerate(filter(_is_in_real_time, modules)):
        shares[position % (workers - workers // 3)] += modules[path]
    for path, found in modules.items():
        if not _is_in_real_time(path):
            min(shares, key=len).extend(found)
    items[:] = [item for share in shares for item in share]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Make the fixtures of the module again for a second attempt: what they hold may be why the first failed."""
    if getattr(item, "execution_count", 1) > 1:
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                if definition.scope == "module":
                    definition.finish(item._request)


def _scale_limits(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the limit of every test, unless the command line sets one."""
    if config.getoption("timeout") is not None:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds, *more = marker.args if marker and marker.args else (usual,)
        named = dict(marker.kwargs) if marker else {}
        seconds = named.pop("timeout", seconds)
        item.add_marker(pytest.mark.timeout(patience(seconds), *more, **named), append=False)
