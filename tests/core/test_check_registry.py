import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from doctor.api import Status
from doctor.core.check_registry import (
    CheckRegistry,
    IndexedCheck,
    builtin_checks,
    builtin_package,
    index_path,
    index_text,
    load_registry,
    matches,
)
from doctor.core.check_runner import examine_job as examine
from doctor.core.errors import UnusableError
from doctor.core.settings import choose
from doctor.testing import healthy
from tests.lab.sample import long_only

PLUGIN = '''
from doctor.api import *
from doctor.facts import SoftwareFacts

@check(id="{id}", severity=Severity.WARNING, needs=(SoftwareFacts,))
def too_new(job):
    """Ask whether Python is too new.

    Why it hurts: wheels are missing.
    Fix: use an older one.
    """
    for software, identical in job.each(SoftwareFacts):
        yield Finding(f"Python {{software.python}}", ranks=identical.ranks)
'''


def plugin(folder, name="acme.py", text=None, **values):
    path = folder / name
    path.write_text(textwrap.dedent(text if text is not None else PLUGIN.format(**{"id": "ACME001", **values})))
    return path


def test_every_builtin_loads():
    assert not load_registry(plugins=False).broken


def test_the_index_has_all_builtins():
    # Not by bytes: releases of msgspec differ in the fields with default values that they leave out.
    kept, new = (
        msgspec.json.decode(text, type=list[IndexedCheck])
        for text in (index_path().read_bytes(), index_text(builtin_checks()))
    )
    assert kept == new, "run: python -m doctor.report.playbook"


def test_an_indexed_check_is_that_of_its_module():
    own = {check.id: check for check in builtin_checks()}
    indexed = load_registry(plugins=False, by_index=True).checks
    assert [check.id for check in indexed] == [check.id for check in load_registry(plugins=False).checks]
    functions = {"judge", "cases", "from_logs"}
    for check in indexed:
        for field in msgspec.structs.fields(check):
            if field.name not in functions:
                assert getattr(check, field.name) == getattr(own[check.id], field.name), (check.id, field.name)
        assert len(check.from_logs) == len(own[check.id].from_logs)


def test_an_indexed_check_judges_as_that_of_its_module():
    own = {check.id: check for check in builtin_checks()}
    for check in load_registry(plugins=False, by_index=True).checks:
        for case in check.cases():
            job = case.sketch.job()
            assert results_of(check, job) == results_of(own[check.id], job), (check.id, case.name)


def results_of(check, job):
    (result,) = examine(job, CheckRegistry((check,)))
    return msgspec.structs.replace(result, seconds=0.0)


BY_INDEX = """
import sys
from doctor.core.check_registry import load_ahead, load_registry
from doctor.core.check_runner import examine_job
from doctor.testing import healthy
catalog = load_registry(plugins=False, by_index=True)
loaded = lambda: sum(name.startswith("doctor_checks.") for name in sys.modules)
numbers = [len(catalog.checks), loaded()]
examine_job(healthy(1, 1).job(), catalog)
numbers += [loaded()]
load_ahead(catalog.checks, 2)
numbers += [loaded()]
load_ahead(catalog.checks, 1000)
print(*numbers, loaded())
"""


def test_modules_are_imported_when_a_check_is_called_or_ahead():
    done = subprocess.run([sys.executable, "-c", BY_INDEX], capture_output=True, text=True, check=True)
    checks, first, called, two_more, all_of_them = map(int, done.stdout.split())
    assert first == 0
    assert 0 < called < checks
    assert called < two_more < all_of_them
    assert all_of_them >= checks


def test_without_an_index_all_modules_are_read(tmp_path, monkeypatch):
    for text in (None, b"[", b"[{}]", index_path().read_bytes().replace(b'"ENV001"', b'"env"')):
        path = tmp_path / "index.json"
        if text is not None:
            path.write_bytes(text)
        monkeypatch.setattr("doctor.core.check_registry.index_path", lambda path=path: path)
        found = load_registry(plugins=False, by_index=True)
        assert found.ids() == load_registry(plugins=False).ids()


def test_an_indexed_check_whose_module_is_gone_is_an_error(monkeypatch):
    (check,) = choose(load_registry(plugins=False, by_index=True), ["ENV001"]).checks
    for module in ("doctor_checks.launch.absent", "doctor_checks.launch.rank_absent"):
        gone = msgspec.structs.replace(check, judge=functools.partial(check.judge.func, module, "ENV001"))
        (result,) = examine(healthy().job(), CheckRegistry((gone,)))
        assert result.status is Status.ERROR
        assert module in result.reason


def test_a_file_brings_checks(tmp_path):
    catalog = load_registry([plugin(tmp_path)], plugins=False)
    found = next(check for check in catalog.checks if check.id == "ACME001")
    assert found.origin.endswith("acme.py")
    (result,) = examine(healthy().job(), choose(catalog, ["ACME001"]))
    assert result.status is Status.FAIL
    assert result.family == "acme"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "defines no check"),
        ("raise RuntimeError('boom')", "cannot load plugin .*acme.py: RuntimeError: boom"),
        ("import nothing_of_that_name", "cannot load plugin .*acme.py: ModuleNotFoundError"),
        ("def (", "cannot load plugin .*acme.py: SyntaxError"),
        ("raise SystemExit(0)", "cannot load plugin .*acme.py: SystemExit"),
        (PLUGIN.format(id="NCCL008"), "defines NCCL008, which is already defined by built-in"),
        (PLUGIN.format(id="lower1"), "cannot load plugin .*acme.py: ValueError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, words):
    with pytest.raises(UnusableError, match=words):
        load_registry([plugin(tmp_path, text=text)], plugins=False)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UnusableError, match=r"none\.py: no such file"):
        load_registry([tmp_path / "none.py"], plugins=False)
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UnusableError, match=r"folder\.py: not a readable Python file"):
        load_registry([tmp_path / "folder.py"], plugins=False)


def install(folder, monkeypatch, target, **modules):
    """A distribution with an entry point, laid out as pip would."""
    folder.mkdir(exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    info = folder / "acme_checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[doctor.checks]\nacme = {target}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_an_installed_plugin_is_found(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "acme_well", acme_well=PLUGIN.format(id="ACME001"))
    catalog = load_registry()
    assert [check.origin for check in catalog.checks if check.id == "ACME001"] == ["acme-checks"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("acme_raises", "raise RuntimeError('boom')"),
        ("acme_empty", "x = 1"),
        ("acme_taken", PLUGIN.format(id="NCCL008")),
        ("acme_exits", "import sys; sys.exit(3)"),
        ("acme_bare", "class Bare(BaseException): pass\nraise Bare"),
    ],
)
def test_an_installed_plugin_that_fails_is_a_crash_line(tmp_path, monkeypatch, module, text):
    install(tmp_path, monkeypatch, module, **{module: text})
    catalog = load_registry()
    assert [broken.origin for broken in catalog.broken] == ["acme-checks"]
    results = examine(healthy().job(), CheckRegistry((), catalog.broken))
    assert [result.status for result in results] == [Status.ERROR]
    assert len(catalog.checks) == len(list(builtin_checks()))


@pytest.mark.parametrize("pattern", ["NET007", "net007", "NET", "network", "ALL", "Network"])
def test_patterns(pattern):
    assert matches("NET007", "network", pattern)


@pytest.mark.parametrize("pattern", ["NET00", "NET0071", "nccl", ""])
def test_patterns_that_name_others(pattern):
    assert not matches("NET007", "network", pattern)


def test_a_misspelt_pattern_is_refused_with_near_names():
    catalog = load_registry(plugins=False)
    with pytest.raises(UnusableError, match="unknown check or family 'NCLL008'; did you mean NCCL008"):
        choose(catalog, ["NCLL008"])


def test_a_distribution_with_a_malformed_file_takes_nobody_along(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "acme_fine", acme_fine=PLUGIN.format(id="ACME001"))
    (tmp_path / "acme_checks-1.0.dist-info" / "entry_points.txt").write_text("[doctor.checks]\nacme\n")
    catalog = load_registry()
    assert len(catalog.checks) == len(list(builtin_checks()))
    assert [broken.name for broken in catalog.broken] == ["plugins"]


def test_a_distribution_behind_another_of_its_name_brings_no_plugin(tmp_path, monkeypatch):
    install(tmp_path / "old", monkeypatch, "acme_old", acme_old=PLUGIN.format(id="ACME001"))
    assert load_registry().ids()[-1] == "ACME001"
    install(tmp_path / "new", monkeypatch, "acme_new", acme_new="x = 1")
    (tmp_path / "new" / "acme_checks-1.0.dist-info" / "entry_points.txt").unlink()
    catalog = load_registry()
    assert len(catalog.checks) == len(list(builtin_checks()))
    assert not catalog.broken


def test_one_check_that_a_package_shows_twice_is_one(tmp_path, monkeypatch):
    package = tmp_path / "acme_tree"
    package.mkdir()
    (package / "inner.py").write_text(PLUGIN.format(id="ACME001"))
    (package / "__init__.py").write_text("from acme_tree.inner import too_new\n")
    install(tmp_path, monkeypatch, "acme_tree")
    assert [check.origin for check in load_registry().checks if check.id == "ACME001"] == ["acme-checks"]


def test_two_checks_of_one_plugin_with_one_id_are_refused(tmp_path, monkeypatch):
    text = PLUGIN.format(id="ACME001") + PLUGIN.format(id="ACME001").replace("too_new", "too_old")
    install(tmp_path, monkeypatch, "acme_double", acme_double=text)
    assert [broken.reason for broken in load_registry().broken] == ["ACME001 is taken"]


def with_broken_builtins(folder, **texts):
    """An environment in which files of the built-in checks have these contents."""
    package = Path(builtin_package().__path__[0])
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in texts.items():
        path = folder / package.name / f"{name.replace('__in__', '/')}.py"
        assert path.is_file()
        path.write_text(text)
    return {**os.environ, "PYTHONPATH": str(folder)}


def doctor(environment, *arguments):
    ran = subprocess.run(
        [sys.executable, "-m", "doctor", *arguments, "--format", "json"],
        env=environment,
        cwd=environment["PYTHONPATH"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("file", "text", "name", "reason"),
    [
        ("host__in__open_files_limit", "import not_installed", "host.open_files_limit", "ModuleNotFoundError"),
        ("host__in__open_files_limit", "raise SystemExit(0)", "host.open_files_limit", "SystemExit"),
        ("host__in__open_files_limit", "", "host.open_files_limit", "it defines no check"),
        ("host__in____init__", "import not_installed", "host", "ModuleNotFoundError"),
        ("host__in____init__", "1 / 0", "host", "ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("select", [pytest.param("HOST", marks=long_only("it is told though not selected")), "NET"])
def test_a_builtin_that_fails_to_load_is_an_error_of_the_report(tmp_path, file, text, name, reason, select):
    code, report = doctor(with_broken_builtins(tmp_path, **{file: text}), "check", "--select", select)
    assert (code, report["verdict"]) == (3, "inconclusive")
    (result,) = [result for result in report["results"] if result["status"] == "error"]
    assert result["id"] == f"doctor_checks.{name}"
    assert reason in result["reason"]


def test_a_rule_package_that_fails_to_load_is_an_error_of_lint(tmp_path):
    environment = with_broken_builtins(tmp_path, code__in____init__="import not_installed")
    (tmp_path / "train.py").write_text("import torch\n")
    code, report = doctor(environment, "lint", str(tmp_path / "train.py"))
    assert (code, report["verdict"]) == (3, "inconclusive")
    assert [result["id"] for result in report["results"] if result["status"] == "error"] == ["doctor_checks.code"]
    assert [one["name"] for one in doctor(environment, "list")[1]["not_loaded"]] == ["doctor_checks.code"]


def test_a_check_whose_module_fails_to_load_may_be_selected_by_its_id(tmp_path):
    environment = with_broken_builtins(tmp_path, host__in__open_files_limit="import not_installed")
    code, report = doctor(environment, "check", "--select", "HOST002")
    assert code == 3
    assert [result["status"] for result in report["results"]] == ["error"]
