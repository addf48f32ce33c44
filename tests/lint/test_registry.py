"""Every rule over files keeps the same promises."""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.api import FileFails, FilePasses, Script, Severity, SourceLocation, rule
from doctor.core.check import effect_of_kind
from doctor.core.check_registry import RULE_FAMILY, builtin_checks, builtin_package, walk_modules
from doctor.core.errors import UnusableError
from doctor.core.finding import capitalized
from doctor.lint.engine.discovery import find_files
from doctor.lint.engine.project_files import ProjectFiles
from doctor.lint.engine.registry import Rulebook, builtin_rules, choose_rules, rules_in
from doctor.lint.fix.edits import fixed_text
from doctor.lint.launch.launch_file import LaunchFile
from doctor.lint.launch.manifest import Manifest
from doctor.lint.launch.shell.reader import ShellFile
from doctor.report.playbook import find_page
from tests.lab.cases import assert_each
from tests.lab.shell import fault_of_fix
from tests.lab.wording import LONGEST_WITH_CODE, fault_of_prose, fault_of_summary

RULES = sorted(builtin_rules(), key=lambda rule: (rule.id, rule.judge.__module__))
CHECKS = {check.id: check for check in builtin_checks()}


def _label(rule):
    return rule.id if rule.family == RULE_FAMILY else f"{rule.id}-{rule.reads.__name__}"


LABELED = [(_label(rule), (rule,)) for rule in RULES]


def source_of(rule, case, text=None):
    text = case.text if text is None else text
    if case.name.endswith(".py"):
        return Script(case.name, text, releases=dict(case.releases), processors=case.processors)
    from doctor.lint.launch.file_type import read_launch_file

    source = read_launch_file(case.name, text)
    assert isinstance(source, rule.reads), f"{case.title!r} is read as {type(source).__name__}"
    return replace(source, releases=dict(case.releases))


def hits_of(rule, case, text=None):
    source = source_of(rule, case, text)
    if not case.beside:
        return list(rule.violations(source))
    with tempfile.TemporaryDirectory() as folder:
        for name, beside in ((case.name, case.text if text is None else text), *case.beside):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(beside)
        files = find_files([Path(folder)])
        shown = next(one.shown for one in files if one.path.name == case.name)
        return list(rule.violations(replace(source, path=shown, modules=ProjectFiles(files))))


def test_metadata():
    assert_each(_is_documented, LABELED)
    assert_each(_is_named_after_its_check_or_has_a_name_of_its_own, LABELED)
    assert_each(_has_bad_and_good_cases, LABELED)


def _is_documented(rule):
    assert rule.question.startswith("Ask ")
    assert rule.effect, "the docstring lacks 'Why it hurts:'"
    assert rule.fix, "the docstring lacks 'Fix:'"
    assert isinstance(rule.mentions, tuple)
    assert set(rule.foreshadows) <= set(CHECKS)
    assert find_page(rule.id).name == rule.name


def _is_named_after_its_check_or_has_a_name_of_its_own(rule):
    if rule.family == RULE_FAMILY:
        assert rule.name not in {check.name for check in CHECKS.values()}
        assert rule.reads in (Script, Manifest, ShellFile, LaunchFile)
        assert rule.mentions, "words by which files are told that need no parsing"
        assert rule.judge.__name__ == rule.judge.__module__.rpartition(".")[2]
    else:
        assert rule.name == CHECKS[rule.id].name
        module = CHECKS[rule.id].judge.__module__
        assert rule.judge.__module__.split(".")[-2:] == [rule.family, module.rpartition(".")[2]]


def _has_bad_and_good_cases(rule):
    cases = list(rule.cases())
    assert sum(isinstance(case, FileFails) for case in cases) >= 3
    assert sum(isinstance(case, FilePasses) for case in cases) >= 3
    assert len({case.title for case in cases}) == len(cases)
    assert all(case.lines for case in cases if isinstance(case, FileFails)), "a bad case marks no line"


@pytest.mark.parametrize("rule", RULES, ids=_label)
def test_cases(rule):
    cases = list(rule.cases())
    assert_each(_hits_the_marked_lines, [(case.title, (rule, case)) for case in cases])
    assert_each(_is_fixed, [(case.title, (rule, case)) for case in cases if isinstance(case, FileFails)])


def _hits_the_marked_lines(rule, case):
    hits = hits_of(rule, case)
    found = [(hit.place.line, hit.summary) for hit in hits]
    if isinstance(case, FilePasses):
        assert not found
        return
    assert sorted(line for line, _ in found) == list(case.lines), found
    assert not rule.mentions or any(word in case.text for word in rule.mentions), "no word that it mentions is there"
    for hit in hits:
        assert hit.summary
        assert "\n" not in hit.summary
        assert fault_of_fix(hit.fix) == ""
        assert fault_of_summary(hit.summary, LONGEST_WITH_CODE) == ""
        assert fault_of_prose(hit.fix) == ""
        assert 0 < hit.confidence <= 1
        assert isinstance(hit.place, SourceLocation)


@pytest.mark.parametrize(
    ("rule_id", "title", "text"),
    [
        ("CODE015", "its sampler", "so it depends on the number of ranks. |"),
        (
            "CODE034",
            "parameters that were taken before",
            "Call `self.model.parameters()` and create the optimizer after",
        ),
        ("CODE034", "the wrapper last", "| Create the optimizer after line 5."),
        ("CODE035", "parameters to the CPU in stage 2", "| Set `stage` to 3, or remove `offload_param`."),
        ("CODE035", "fp16 and bf16", "| Set `fp16.enabled` to false"),
        ("ENV002", "counted from one", "torchrun does not reject the node rank"),
        ("ENV002", "counted from one", "| Set --node-rank to a different number from 0 to 1 on each host."),
    ],
)
def test_texts_say_what_their_case_shows(rule_id, title, text):
    cases = [(rule, case) for rule in RULES if rule.id == rule_id for case in rule.cases() if case.title == title]
    hits = [hit for rule, case in cases for hit in hits_of(rule, case)]
    assert text in " ".join(f"{hit.effect} | {hit.fix}" for hit in hits)


def _is_fixed(rule, case):
    """``--fix`` turns a bad case into the text that the case gives, which needs no further fix."""
    edits = [hit.edits for hit in hits_of(rule, case) if hit.edits]
    if not case.fixed:
        assert not edits, "the case does not say what the fix makes of it"
        return
    fixed, applied = fixed_text(case.text, edits)
    assert len(applied) == len(edits)
    assert _unmarked(fixed) == _unmarked(case.fixed)
    assert not [hit.summary for hit in hits_of(rule, case, fixed) if hit.edits]
    if all(hit.edits for hit in hits_of(rule, case)):
        assert not hits_of(rule, case, fixed)


def _unmarked(text):
    return [line.removesuffix("# !").rstrip() for line in text.rstrip().splitlines()]


def test_each_kind_of_impact_is_that_of_a_violation():
    own = {id(check.impacts) for check in CHECKS.values()}
    assert_each(_has_violations_for_its_impacts, [one for one in LABELED if id(one[1][0].impacts) not in own])


def _has_violations_for_its_impacts(rule):
    summaries = {capitalized(hit.summary) for case in rule.cases() for hit in hits_of(rule, case)}
    effects = {effect_of_kind(rule.impacts, summary) for summary in summaries}
    assert set(rule.impacts.values()) - effects == set()


def test_the_rules_of_all_modules_are_found():
    """Only the packages of rules are loaded for ``doctor lint``."""
    found = [rule.id for module in walk_modules(builtin_package()) for rule in rules_in(module)]
    assert sorted(found) == [rule.id for rule in RULES]


def test_no_module_without_rules_is_loaded():
    loaded = "from doctor.lint.engine.registry import builtin_rules; builtin_rules(); import sys; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()
    assert "doctor_checks.launch.rank_collision" in names
    assert "doctor_checks.launch.rank_absent" not in names


def test_a_rule_takes_from_its_check_what_it_does_not_give():
    own = CHECKS["ENV003"]

    def world_size_in_files(file):
        """Ask whether the file is right."""
        return ()

    made = rule(check=own, reads=Script)(world_size_in_files)
    assert (made.id, made.name, made.severity) == (own.id, own.name, own.severity)
    assert (made.question, made.effect, made.fix) == ("Ask whether the file is right.", own.effect, own.fix)
    assert made.impacts == own.impacts
    assert rule(check=own, impacts={"x": "y"}, reads=Script)(world_size_in_files).impacts == {"x": "y"}
    assert rule(check=own, severity=Severity.INFO, reads=Script)(world_size_in_files).severity is Severity.INFO


def test_a_rule_without_a_check_has_an_id_and_a_severity():
    for given in ({"id": "CODE999"}, {"severity": Severity.ERROR}):
        with pytest.raises(ValueError, match="an id and a severity"):
            rule(reads=Script, **given)


def test_ids_are_numbered_without_a_gap():
    numbers = [int(rule.id[4:]) for rule in RULES if rule.family == RULE_FAMILY]
    assert numbers == list(range(1, len(numbers) + 1))


def test_rules_are_selected_by_id_and_family():
    book = Rulebook(tuple(RULES))
    first = RULES[0]
    assert [rule.id for rule in choose_rules(book, [first.id.lower()]).rules] == [
        rule.id for rule in RULES if rule.id == first.id
    ]
    assert choose_rules(book, ["ALL"]).rules == book.rules
    assert {rule.family for rule in choose_rules(book, ["CODE"]).rules} <= {"code"}
    with pytest.raises(UnusableError, match="CODE9"):
        choose_rules(book, ["CODE999"])
