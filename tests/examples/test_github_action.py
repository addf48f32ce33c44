"""The action and its workflow: their form by the public schemas, and their steps as a runner runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.lab.sample import long_only
from tests.lab.speed import patience

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / "examples" / "github-action"
ACTION, WORKFLOW = FOLDER / "action.yml", FOLDER / "workflow.yml"


def _fits(file: Path, schema: str) -> bool:
    """Whether ``file`` is as the schema that check-jsonschema carries wants it; both are of SchemaStore."""
    pytest.importorskip("check_jsonschema")
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
    return subprocess.run(argv, capture_output=True, timeout=patience(60)).returncode == 0


@pytest.mark.parametrize(
    ("file", "schema", "spoil"),
    [
        (ACTION, "vendor.github-actions", ("using: composite", "using: compost")),
        (ACTION, "vendor.github-actions", ("description:", "describes:")),
        (WORKFLOW, "vendor.github-workflows", ("runs-on:", "runs_on:")),
    ],
)
def test_the_form_is_right_and_a_wrong_one_noticed(
    tmp_path: Path, file: Path, schema: str, spoil: tuple[str, str]
) -> None:
    assert _fits(file, schema)
    spoilt = tmp_path / file.name
    spoilt.write_text(file.read_text().replace(*spoil))
    assert not _fits(spoilt, schema)


def _run_steps(
    given: Mapping[str, str], env: Mapping[str, str], cwd: Path, folder: Path = FOLDER
) -> subprocess.CompletedProcess[str]:
    """The steps of the action in ``folder``, as a runner runs them until one fails: with defaults for the inputs that
    are not given, and by the command line that GitHub documents for ``shell: bash``. The result is that of the last
    one."""
    action = yaml.safe_load(ACTION.read_text())
    inputs = {name: given.get(name, told["default"]) for name, told in action["inputs"].items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for number, step in enumerate(action["runs"]["steps"]):
        script = cwd / f"step{number}.sh"
        script.write_text(step["run"])
        told = {name: _filled(value, inputs, folder) for name, value in step["env"].items()}
        assert step["shell"] == "bash"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            env={**os.environ, "PATH": path, **env, **told},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=patience(100),
        )
        if done.returncode:
            break
    return done


def _filled(text: str, inputs: Mapping[str, str], folder: Path) -> str:
    text = text.replace("${{ github.action_path }}", str(folder))
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)


def _python_that_notes(folder: Path) -> dict[str, str]:
    """Variables under which ``python`` writes what it is called with to ``called`` in ``folder``, and does nothing."""
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/called"\n')
    command.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_it_installs_the_checkout_that_it_is_part_of(tmp_path: Path) -> None:
    """Never a name of an index, which anybody may register."""
    _run_steps({"options": "--select NET007"}, _python_that_notes(tmp_path), tmp_path)
    requirement = (tmp_path / "called").read_text().splitlines()[-1]
    assert Path(requirement).resolve() == FOLDER.parents[1]


def test_a_copy_of_it_asks_what_to_install(tmp_path: Path) -> None:
    copy = tmp_path / ".github" / "actions" / "rankdoctor"
    copy.mkdir(parents=True)
    done = _run_steps({}, _python_that_notes(tmp_path), tmp_path, copy)
    assert done.returncode == 2
    assert done.stdout.startswith("::error::This action is a copy")
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("interface", "given", "code"),
    [
        ("=eth9", {}, 1),
        ("=eth9", {"fail-on": "never"}, 0),
        pytest.param("=eth9", {"options": "--ignore NET007"}, 0, marks=long_only("another input is passed on")),
        ("=lo", {"options": "--select NET007"}, 0),
    ],
)
def test_its_steps_annotate_and_fail(tmp_path: Path, interface: str, given: dict[str, str], code: int) -> None:
    # Installed as it is: pip has nothing to do, and does not ask an index.
    selected = {"requirement": "rankdoctor", "options": f"{given.get('options', '')} --select NET007"}
    done = _run_steps({**given, **selected}, {"NCCL_SOCKET_IFNAME": interface}, tmp_path)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert ("::error title=NET007" in done.stdout) == (interface == "=eth9" and "--ignore" not in selected["options"])


def test_a_job_is_kept_from_starting_where_it_can_not_be_installed(tmp_path: Path) -> None:
    done = _run_steps({"requirement": str(tmp_path / "nothing-here")}, {}, tmp_path)
    assert done.returncode != 0
    assert "nothing-here" in done.stderr


def test_the_workflow_takes_inputs_that_the_action_has() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["gpu-tests"]["steps"]
    (used,) = [step for step in steps if step.get("uses") == "./.github/actions/rankdoctor"]
    assert used["with"].keys() <= yaml.safe_load(ACTION.read_text())["inputs"].keys()
