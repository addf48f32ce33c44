"""From files to the report: results by id, what could not be judged, and rules that break."""

import os
import signal
import subprocess
import sys
import time

import pytest

from doctor.api import Script, Severity, SourceLocation, Violation, rule
from doctor.core.errors import UnusableError
from doctor.core.finding import Status
from doctor.core.settings import IgnoreEntry, Settings
from doctor.lint.engine import file_check
from doctor.lint.engine.registry import Rulebook, choose_rules, load_rules
from doctor.lint.engine.releases import Releases
from doctor.lint.engine.request import lint_request
from doctor.lint.engine.runner import LintRequest, build_report, lint_paths
from doctor.lint.engine.suppressions import UNUSED_SUPPRESSION
from doctor.lint.engine.worker_pool import map_in_workers


@rule(id="TEST001", severity=Severity.WARNING, reads=Script, mentions=("bad",), foreshadows=("MEM001",))
def bad_call(script):
    """Ask whether bad() is called.

    Why it hurts: it does.
    Fix: call good().
    """
    for call in script.all(__import__("ast").Call):
        if getattr(call.func, "id", "") == "bad":
            yield Violation(call, "bad is called", evidence=(("numbers", (1, 2)),))


@rule(id="TEST002", severity=Severity.ERROR, reads=Script, mentions=("breaks",))
def broken_rule(script):
    """Ask nothing.

    Why it hurts: it does.
    Fix: none.
    """
    yield Violation(script.tree.body[0], "the first line")
    raise ZeroDivisionError("it broke")


def asked(*rules, settings=None, strict=False):
    book = Rulebook((UNUSED_SUPPRESSION, *(rules or (bad_call,))))
    known = {one.id: one.family for one in book.rules}
    return LintRequest(book, settings or Settings(), known, Releases({}), strict=strict)


def run(folder, what=None, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    what = what or asked()
    return build_report(lint_paths([folder], what), what, started=time.time())


def test_findings_say_where_and_what(tmp_path):
    report = run(tmp_path, a="x = 1\n", b="é = 'ü'; bad(\n  1)\n")
    result = report.result("TEST001")
    (finding,) = result.findings
    assert (finding.source.file, finding.source.line) == (str(tmp_path / "b.py"), 1)
    told = dict(finding.evidence)
    assert (told["column"], told["end_line"], told["end_column"]) == (10, 2, 5)
    assert (told["code"], told["foreshadows"], told["numbers"]) == ("é = 'ü'; bad(", ["MEM001"], (1, 2))
    assert (finding.severity, finding.effect, finding.fix) == (Severity.WARNING, "It does.", "call good().")
    assert (result.status, result.seen, result.expected) == (Status.FAIL, 2, 2)
    assert (report.job, report.verdict, report.exit_code, report.primary) == (None, "pass", 0, "TEST001")


@pytest.mark.parametrize(("fail_on", "code"), [("warning", 1), ("error", 0), ("never", 0)])
def test_exit_codes(tmp_path, fail_on, code):
    assert run(tmp_path, asked(settings=Settings(fail_on=fail_on)), a="bad()\n").exit_code == code


def test_a_rule_that_breaks_breaks_alone(tmp_path):
    report = run(tmp_path, asked(bad_call, broken_rule), a="bad(breaks)\n", b="bad()\n")
    assert len(report.result("TEST001").findings) == 2
    broken = report.result("TEST002")
    assert (broken.status, len(broken.findings)) == (Status.FAIL, 1)
    assert "ZeroDivisionError: it broke" in broken.crash
    assert (report.exit_code, report.verdict) == (1, "fail")
    settings = Settings(ignore=(IgnoreEntry("TEST002", "known"),))
    report = run(tmp_path, asked(bad_call, broken_rule, settings=settings))
    assert (report.result("TEST002").status, report.exit_code) == (Status.ERROR, 3)


def test_a_file_that_is_no_python_makes_the_answer_unknown(tmp_path):
    report = run(tmp_path, a="bad = (\n", b="bad = 1\n")
    result = report.result("TEST001")
    assert (result.status, result.seen, result.expected) == (Status.UNKNOWN, 1, 2)
    assert "a.py: it is not valid Python for this interpreter: line 1" in result.reason
    assert [one.skipped is None for one in report.inputs] == [False, True]
    assert report.exit_code == 0
    assert run(tmp_path, asked(strict=True)).exit_code == 3


@pytest.mark.parametrize(
    "text", ["bad = (\n", "bad\0\n", "bad = " + "(" * 5_000 + "\n", "bad = " + "-" * 200_000 + "1\n"]
)
def test_nothing_that_can_be_judged(tmp_path, text):
    with pytest.raises(UnusableError, match=r"nothing can be judged: .*a\.py"):
        run(tmp_path, a=text)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UnusableError, match="nothing can be judged"):
        run(tmp_path)


def test_what_is_ignored_stays_visible(tmp_path):
    text = "bad()  # doctor: ignore[TEST001] on purpose\n"
    report = run(tmp_path, asked(settings=Settings(fail_on="warning")), a=text)
    (finding,) = report.result("TEST001").findings
    assert (finding.ignored.reason, finding.ignored.by) == ("on purpose", f"{tmp_path / 'a.py'}:1")
    assert (report.result("TEST001").status, report.exit_code) == (Status.PASS, 0)
    assert not report.result("CODE000").findings


def test_an_ignore_without_a_reason_does_not_count(tmp_path):
    report = run(tmp_path, a="bad()  # doctor: ignore[TEST001]\n")
    assert report.result("TEST001").findings[0].ignored is None
    assert "no reason" in report.result("CODE000").findings[0].summary


@pytest.mark.parametrize(("path", "counts"), [("*/a.py", False), ("a.py", False), ("b.py", True), (None, False)])
def test_the_settings_ignore_by_path(tmp_path, path, counts):
    settings = Settings(ignore=(IgnoreEntry("TEST001", "known", path=path, by="doctor.toml:1"),))
    report = run(tmp_path, asked(settings=settings), a="bad()\n")
    assert (report.result("TEST001").findings[0].ignored is None) is counts


def test_a_notebook_is_told_by_cell(tmp_path):
    (tmp_path / "n.ipynb").write_text(
        '{"nbformat": 4, "metadata": {}, "cells": [\n{"cell_type": "code", "source": [\n"%time\\n",\n"bad()"\n]}]}'
    )
    (finding,) = run(tmp_path).result("TEST001").findings
    assert finding.source.line == 4
    assert (finding.evidence["cell"], finding.evidence["line_in_cell"]) == (1, 2)


def test_the_same_again_in_the_same_order(tmp_path):
    files = {f"f{number:03d}": "bad()\n" * (number % 3) for number in range(60)}
    first, second = run(tmp_path, **files), run(tmp_path)
    assert first.results[1].findings == second.results[1].findings
    assert [one.path for one in first.inputs] == sorted(one.path for one in first.inputs)


def test_a_violation_states_its_own_impact(tmp_path):
    @rule(id="TEST004", severity=Severity.ERROR, reads=Script, mentions=("x",))
    def assigned(script):
        """Ask.

        Why it hurts: the impact of the rule.
        Fix: none.
        """
        yield Violation(SourceLocation(1), "first")
        yield Violation(SourceLocation(2), "second", effect="None: it is not used.")

    findings = run(tmp_path, asked(assigned), a="x = 1\nx = 2\n").result("TEST004").findings
    assert [one.effect for one in findings] == ["The impact of the rule.", "None: it is not used."]


def test_a_rule_that_never_ends_is_given_up_with_its_file(tmp_path, monkeypatch):
    @rule(id="TEST003", severity=Severity.ERROR, reads=Script, mentions=("forever",))
    def endless(script):
        while True:
            try:
                time.sleep(1)
            except Exception:
                continue
        yield Violation(SourceLocation(1), "never")

    monkeypatch.setattr(file_check, "DEADLINE", 0.3)
    report = run(tmp_path, asked(bad_call, endless), a="bad(forever)\n", b="bad()\n")
    assert report.inputs[0].skipped == "it took longer than 0.3 s"
    assert len(report.result("TEST001").findings) == 1


def _fate(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(60)
    return str(number)


def test_pieces_that_break_or_hang_are_lost_alone():
    outcomes = map_in_workers(range(30), _fate, lambda number, why: f"{number}: {why}", deadline=0.5, most=3)
    assert outcomes[3] == "3: it broke the process that looked at it"
    assert outcomes[5] == "5: it took longer than 0.5 s"
    assert [outcomes[number] for number in range(30) if number not in (3, 5)] == [
        str(number) for number in range(30) if number not in (3, 5)
    ]


def _computes(number):
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    return str(number)


def test_waiting_for_a_processor_takes_no_time_of_a_piece():
    """Four processes share one processor, so that each piece takes longer than its deadline."""
    all_of_them, one = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {one})
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        outcomes = map_in_workers(range(2), _computes, lambda number, why: f"{number}: {why}", deadline=0.7, most=1)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, all_of_them)
    assert outcomes == ["0", "1"]


PLUGIN = '''
from doctor.api import Script, Severity, Violation, rule

@rule(id="{id}", severity=Severity.INFO, reads=Script)
def own_rule(script):
    """Ask."""
    yield Violation(script.tree, "seen")
'''


def test_rules_of_a_plug_in(tmp_path):
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN.format(id="OWN001"))
    book = load_rules([path])
    (own,) = choose_rules(book, ["OWN001"]).rules
    assert own.origin == str(path)
    path.write_text(PLUGIN.format(id="CODE001"))
    with pytest.raises(UnusableError, match="already taken: CODE001"):
        load_rules([path])
    path.write_text("x = 1 / 0\n")
    with pytest.raises(UnusableError, match="ZeroDivisionError"):
        load_rules([path])


def test_patterns_and_releases_that_are_unknown():
    with pytest.raises(UnusableError, match="no rule or family is called CODE99"):
        lint_request(Settings(select=("CODE99",)), typed=["CODE99"])
    with pytest.raises(UnusableError, match="unknown check or family 'NIX'"):
        lint_request(Settings(ignore=(IgnoreEntry("NIX", "why"),)))
    with pytest.raises(UnusableError, match="not a release"):
        lint_request(Settings(), lightning="two")
    assert (
        lint_request(Settings(ignore=(IgnoreEntry("NET026", "of a check"),)), lightning="2.1").releases["lightning"]
        == "2.1"
    )
