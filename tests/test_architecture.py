"""The borders that import contracts can't see."""

import ast
import sys
from pathlib import Path

import doctor.api
import doctor_checks
from doctor.core.check_registry import RULES, builtin_checks
from doctor.lint.engine.registry import builtin_rules
from tests.lab.cases import assert_each

SHELF = Path(doctor_checks.__file__).parent
FILES = sorted(path for path in SHELF.rglob("*.py") if path.name != "__init__.py")
RULE_FILES = [path for path in FILES if path.parent.name in RULES]
CHECK_FILES = [path for path in FILES if path not in RULE_FILES]
APIS = ("doctor.api", "doctor.facts", "doctor.testing", "doctor.analysis", "doctor.knowledge")
RULE_APIS = (*APIS, "doctor.lint.python", "doctor.lint.launch", "doctor.lint.fix.trainer_arguments")
IMPURE = {"os", "socket", "subprocess", "time", "torch", "shutil", "sys", "threading", "pathlib", "random", "importlib"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports a neighbour"
            yield node.module or ""


def labeled(paths, *more):
    return [(str(path.relative_to(SHELF)), (path, *more)) for path in paths]


def test_checks_and_rules_are_pure():
    assert_each(_is_pure, [*labeled(CHECK_FILES, APIS), *labeled(RULE_FILES, RULE_APIS)])


def _is_pure(path, apis):
    for name in imported(path):
        top = name.partition(".")[0]
        assert any(name == api or name.startswith(f"{api}.") for api in apis) or (
            top in sys.stdlib_module_names and top not in IMPURE
        ), name


def test_a_rule_is_one_file_with_its_name():
    assert_each(_holds_its_rule, labeled(RULE_FILES))


def _holds_its_rule(path):
    (rule,) = [rule for rule in builtin_rules() if rule.judge.__module__.endswith(f".{path.parent.name}.{path.stem}")]
    assert rule.name == path.stem.replace("_", "-")


def test_a_check_is_one_file_with_its_name():
    assert_each(_holds_its_check, labeled(CHECK_FILES))


def _holds_its_check(path):
    (check,) = [check for check in builtin_checks() if check.judge.__module__.endswith(f".{path.stem}")]
    assert check.name == path.stem.replace("_", "-")
    assert check.family == path.parent.name


def test_ids_and_names_are_unique():
    checks = list(builtin_checks())
    assert len({check.id for check in checks}) == len({check.name for check in checks}) == len(checks)


def test_the_names_that_guests_build_on():
    pinned = (Path(__file__).parent / "data" / "api_names.txt").read_text().split()
    assert sorted(doctor.api.__all__) == pinned, "the public names changed: say so in the changelog and pin them anew"
    assert all(hasattr(doctor.api, name) for name in doctor.api.__all__)
