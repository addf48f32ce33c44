"""The hook's watch over imports: installers are called once, and nobody notices."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from doctor.monitor.autostart.hook import sitecustomize as hook
from doctor.monitor.autostart.hook.sitecustomize import INSTALLERS, ImportWatcher, PackageFinder

NAME = "module_of_a_framework"
INSTALLER = "installer_of_a_framework"


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImportWatcher]:
    """A watcher over the imports of :data:`NAME`, whose installer notes its calls."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hook, "INSTALLERS", {NAME: f"{INSTALLER}:install"})
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    (tmp_path / f"{INSTALLER}.py").write_text("calls = []\ndef install(module): calls.append(module)\n")
    made = ImportWatcher()
    monkeypatch.setattr(sys, "meta_path", [made, *sys.meta_path])
    yield made
    for name in (NAME, INSTALLER):
        sys.modules.pop(name, None)


def calls() -> list[ModuleType]:
    return getattr(sys.modules.get(INSTALLER), "calls", [])


def test_the_installer_gets_the_module_once(watcher: ImportWatcher) -> None:
    module = importlib.import_module(NAME)
    assert calls() == [module]
    assert module.value == 1
    assert "exec_module" not in vars(module.__loader__)
    importlib.reload(module)
    assert calls() == [module]


def test_a_module_that_fails_is_tried_again(watcher: ImportWatcher, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.py"
    path.write_text("raise ValueError('of the module')\n")
    with pytest.raises(ValueError, match="of the module"):
        importlib.import_module(NAME)
    assert calls() == []
    path.write_text("value = 2  # longer\n")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).value == 2
    assert len(calls()) == 1


def test_looking_for_a_module_calls_nothing(watcher: ImportWatcher) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert calls() == []
    assert importlib.util.find_spec("no_such_module") is None


def test_beside_another_tool_that_asks_all_finders(watcher: ImportWatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking:
        asked = 0

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != NAME or self.asked:
                return None
            self.asked += 1
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asked -= 1

    for place in (0, 1):
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:place], Asking(), *sys.meta_path[place:]])
    importlib.import_module(NAME)
    assert len(calls()) == 1


def test_a_loader_without_attributes_is_left_alone(watcher: ImportWatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slots:
        __slots__ = ()

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            module.value = 3

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, self) if name == NAME else None

    monkeypatch.setattr(sys, "meta_path", [watcher, Slots(), *sys.meta_path[1:]])
    assert importlib.import_module(NAME).value == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def install(module): raise LookupError('of the installer')", "LookupError: of the installer"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("x =", "SyntaxError"),
    ],
)
def test_a_failing_installer_costs_one_line(
    text: str, words: str, watcher: ImportWatcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{INSTALLER}.py").write_text(text + "\n")
    assert importlib.import_module(NAME).value == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert words in errors


def test_without_standard_error_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    hook.tell("anything")


def test_a_module_of_the_program_named_doctor_is_not_hidden(
    watcher: ImportWatcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "doctor"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "doctor.py").write_text("mine = True\n")
    importlib.import_module(NAME)
    assert calls() == []
    assert importlib.import_module("doctor").mine
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert str(tmp_path / "doctor.py") in errors
    assert hook.hidden_by() == str(tmp_path / "doctor.py")  # as it is loaded


def test_the_package_is_found_where_nothing_else_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook.hidden_by() == ""
    for name in ("doctor", "doctor_checks"):
        spec = PackageFinder.find_spec(name)
        assert spec.origin == importlib.import_module(name).__file__
    assert PackageFinder.find_spec("click") is None
    assert PackageFinder.find_spec("doctor.monitor", ["/"]) is None


def test_every_installer_exists() -> None:
    for target in INSTALLERS.values():
        home, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(home), name))
