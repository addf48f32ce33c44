"""No file of the working directory is executed, whatever it is called: neither by a command nor by its children."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import doctor
from doctor.core.process import start_python
from tests.lab.sample import long_only
from tests.lab.speed import patience
from tests.postmortem.allocating import training

SCRIPT = [str(Path(sys.executable).parent / "doctor")]
MODULE = [sys.executable, "-m", "doctor"]
CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
OURS = {"click", "msgspec", "rich", "yaml", "jinja2", "markdown_it", "packaging", "psutil", "pynvml", "ahocorasick_rs"}
NAMES = {*sys.stdlib_module_names, *OURS, "torch", "numpy", "sitecustomize", "usercustomize", "evil"}
PLANTED = "with open({proof!r}, 'a') as proof:\n    proof.write(__name__ + '\\n')\n"


def loaded_before_us():
    """What is imported when the script that pip wrote calls us: nobody can keep it from that."""
    program = "import re, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=CLEAN, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@contextlib.contextmanager
def hostile(folder, spared=frozenset()):
    """A folder with a log, a snapshot and a file of every name; afterwards none of the files has run."""
    folder.mkdir()
    proof = folder.parent / "proof"
    for name in sorted(NAMES - spared):
        text = PLANTED.format(proof=str(proof))
        (folder / f"{name}.py").write_text(text)
        if name in ("encodings", "json", "importlib", "click", "torch"):
            (folder / f"{name}.py").unlink()
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(text)
    # A distribution, as far as the names of plugins go.
    (folder / "evil-1.dist-info").mkdir()
    (folder / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (folder / "evil-1.dist-info" / "entry_points.txt").write_text("[doctor.checks]\nevil = evil\n")
    (folder / "dump_snapshot.pickle").write_bytes(pickle.dumps(training().snapshot(), 4))
    (folder / "dump_0").write_bytes(pickle.dumps({"entries": [], "version": "2.10", "pg_config": {}}))
    (folder / "slurm-1.out").write_text("[rank0]: RuntimeError: CUDA out of memory.\n")
    yield
    assert (set(proof.read_text().split()) if proof.exists() else set()) == set()


def run(command, cwd, **environ):
    done = subprocess.run(
        command, cwd=cwd, env={**CLEAN, **environ}, capture_output=True, text=True, timeout=patience(100)
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 3), (done.returncode, done.stderr)
    return done


COMMANDS = [("--version",), ("diagnose", "."), ("check", "--timeout", "20", "--probe", "none"), ("list",)]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_the_script_executes_nothing_of_the_working_directory(tmp_path, arguments):
    with hostile(tmp_path / "here"):
        run([*SCRIPT, *arguments], tmp_path / "here")


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_python_m_executes_nothing_after_it_has_found_the_package(tmp_path, arguments):
    trivial = tmp_path / "trivial"
    trivial.mkdir()
    (trivial / "__init__.py").write_text("import sys; print('\\n'.join(sys.modules))\n")
    (trivial / "__main__.py").touch()
    done = subprocess.run([sys.executable, "-m", "trivial"], cwd=tmp_path, capture_output=True, text=True, env=CLEAN)
    with hostile(tmp_path / "here", spared={name.partition(".")[0] for name in done.stdout.split()}):
        run([*MODULE, *arguments], tmp_path / "here")


def test_torchrun_starts_the_script_and_nothing_of_the_working_directory(tmp_path):
    """As the recipes do; torch itself is not ours, and not imported from there either."""
    torchrun = Path(sys.executable).parent / "torchrun"
    if not torchrun.is_file():
        pytest.skip("needs torch")
    launch = [str(torchrun), "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--no-python"]
    with hostile(tmp_path / "here"):
        done = run([*launch, *SCRIPT, "check", "--probe", "none", "--select", "ENV"], tmp_path / "here")
    assert "2 of 2 ranks seen" in done.stdout


@pytest.mark.parametrize(
    "entries",
    [
        "{}:",
        *(
            pytest.param(entries, marks=long_only("another empty or relative entry is run"))
            for entries in (":{}", ".:{}")
        ),
        "../here:{}",
    ],
)
def test_an_empty_or_relative_entry_of_pythonpath_is_no_working_directory(tmp_path, entries):
    (tmp_path / "elsewhere").mkdir()
    spared = {"sitecustomize", "usercustomize", *loaded_before_us()}
    with hostile(tmp_path / "here", spared):
        run([*SCRIPT, "diagnose", "."], tmp_path / "here", PYTHONPATH=entries.format(tmp_path / "elsewhere"))


def test_a_working_directory_that_pythonpath_names_whole_stays(tmp_path):
    """The user asked for it: a package that stands there is found."""
    (tmp_path / "found_here.py").write_text("def main(*words): print(*words, __file__)\n")
    program = (
        "from doctor.core.import_path import leave_working_directory as leave; leave(); "
        "from doctor.core.process import start_python as start; "
        "print(start('found_here', ['a', 'b']).communicate()[0].decode())"
    )
    done = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=f":{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.stdout.split() == ["a", "b", str(tmp_path / "found_here.py")]


def test_a_child_finds_what_its_parent_finds_and_works_where_it_works(tmp_path, monkeypatch):
    (tmp_path / "lies_here.py").write_text("def main(): import os, sys; print(os.getcwd(), sys.argv, sys.path)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said, _ = start_python("lies_here").communicate(timeout=patience(60))
    where, argv, path = said.decode().split(" ", 2)
    assert (where, argv) == (str(tmp_path), "['-c']")
    assert "''" not in path
    assert str(tmp_path) in path


def test_a_child_of_a_deleted_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said, _ = start_python("doctor.collectors.isolated_child", ["environment"]).communicate(timeout=patience(60))
    assert said


def test_packages_of_the_user_are_found_by_children(tmp_path):
    """As ``pip install --user torch``; an interpreter of a virtual environment has none."""
    base = os.path.realpath(sys.executable)
    ask = [base, "-c", "import site; print(site.getusersitepackages())"]
    environ = {**CLEAN, "PYTHONUSERBASE": str(tmp_path / "base")}
    place = Path(subprocess.run(ask, env=environ, capture_output=True, text=True, check=True).stdout.strip())
    place.mkdir(parents=True)
    (place / "lies_there.py").write_text("def main(): print(__file__)\n")
    program = (
        "import sys; sys.path += sys.argv[1:]; from doctor.core.process import start_python as start; "
        "print(start('lies_there').communicate()[0].decode())"
    )
    (tmp_path / "cwd").mkdir()
    done = run([base, "-c", program, *filter(None, sys.path), *doctor_home()], tmp_path / "cwd", **environ)
    assert done.stdout.strip() == str(place / "lies_there.py")


def doctor_home():
    return [str(Path(doctor.__file__).parent.parent)]


def test_children_are_started_in_one_place():
    """Others would have to think of the import path themselves. Two run a file with -I -S, which has none to clean."""
    sources = Path(doctor.__file__).parent.rglob("*.py")
    starts = {path.name for path in sources if re.search(r"sys\.executable,", path.read_text(encoding="utf-8"))}
    assert starts == {"bounded_scan.py", "file_probe.py", "process.py"}
