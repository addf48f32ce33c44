"""What rooms and checks may import, and the shape of the tree."""

import ast
import sys
from pathlib import Path

import pytest

import doctor.api
import doctor_checks
from benchmarks.structure import ROOMS, Structure
from doctor.core.check_registry import CHECK_RULES, RULE_FAMILY, RULE_PACKAGES, builtin_checks
from doctor.lint.engine.registry import builtin_rules
from tests.lab.cases import assert_each

SHELF = Path(doctor_checks.__file__).parent
FILES = sorted(path for path in SHELF.rglob("*.py") if path.name != "__init__.py")
OF_ONE_FAULT = [path for path in FILES if not path.name.startswith("_")]
RULE_FILES = [path for path in OF_ONE_FAULT if path.relative_to(SHELF).parts[0] in RULE_PACKAGES]
CHECK_FILES = [path for path in OF_ONE_FAULT if path not in RULE_FILES]
IMPURE = {"os", "socket", "subprocess", "time", "torch", "shutil", "sys", "threading", "pathlib", "random", "importlib"}


@pytest.fixture(scope="module")
def tree():
    return Structure()


def test_rooms_import_what_their_line_names(tree):
    assert tree.against == []


def test_lines_name_what_there_is(tree):
    named = {f"doctor.{name}" for line in ROOMS.values() for name in line.split()}
    assert named | set(ROOMS) <= set(tree.all)


def test_no_modules_import_each_other(tree):
    assert tree.cycle == []


def test_class_names_are_unique(tree):
    assert tree.repeated_classes == []


def test_folders_are_small(tree):
    assert tree.large_folders == []
    assert len(tree.flat) <= 6


CLOCK = "doctor.core.clock"
TODAY = ("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today")
OWN_PROCESSES = {
    "doctor.collectors.storage.directory_scan",
    "doctor.monitor.sinks.otlp_process",
    "doctor.probes.storage.file_child",
}
IN_TRAINING = ("core", "collectors", "cluster", "probes", "monitor", "session")


def test_training_processes_read_the_clock_as_it_was(tree):
    """A program may replace the functions of ``time``, and ``datetime`` reads the same ones."""
    found = [
        name
        for name, module in tree.doctor.items()
        if name.startswith(tuple(f"doctor.{room}" for room in IN_TRAINING))
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Import) and "time" in [alias.name for alias in node.names])
        or (isinstance(node, ast.ImportFrom) and node.module == "time")
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("now", "today", "utcnow")
            and "datetime" in ast.unparse(node)
        )
    ]
    assert set(found) == {CLOCK, *OWN_PROCESSES}


def labeled(paths):
    return [(str(path.relative_to(SHELF)), (path,)) for path in paths]


def test_checks_and_rules_are_pure():
    assert_each(_is_pure, labeled(FILES))


def _is_pure(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names = [node.module]
        for top in (name.partition(".")[0] for name in names):
            assert top in ("doctor", "doctor_checks", "msgspec") or (
                top in sys.stdlib_module_names and top not in IMPURE
            ), top


def test_a_rule_is_one_file_with_its_name():
    assert_each(_holds_its_rule, labeled(RULE_FILES))


def _holds_its_rule(path):
    (rule,) = [rule for rule in builtin_rules() if rule.judge.__module__.endswith(f".{path.parent.name}.{path.stem}")]
    assert rule.name == path.stem.replace("_", "-")
    package, family = path.relative_to(SHELF).parts[:2]
    assert rule.family == (family if package == CHECK_RULES else RULE_FAMILY)


def test_a_check_is_one_file_with_its_name():
    assert_each(_holds_its_check, labeled(CHECK_FILES))


def _holds_its_check(path):
    (check,) = [check for check in builtin_checks() if check.judge.__module__.endswith(f".{path.stem}")]
    assert check.name == path.stem.replace("_", "-")
    assert check.family == path.relative_to(SHELF).parts[0]


def test_ids_and_names_are_unique():
    checks = list(builtin_checks())
    assert len({check.id for check in checks}) == len({check.name for check in checks}) == len(checks)


def test_the_names_that_plugins_import():
    pinned = (Path(__file__).parent / "data" / "api_names.txt").read_text().split()
    names = sorted(name for name in dir(doctor.api) if not name.startswith("_"))
    assert names == pinned, "the public names changed: say so in the changelog and pin them anew"
    assert all(getattr(doctor.api, name) is not None for name in names)
