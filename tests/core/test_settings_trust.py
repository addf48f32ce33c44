"""A settings file is data: it names code only where the user named it, and it is nobody else's."""

import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest

from doctor.core.errors import UnusableError
from doctor.core.files.settings_file import LARGEST, VARIABLE
from doctor.core.settings import Settings, read_settings
from tests.lab.command import run_doctor

NOBODY = 65534
CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
PLUGIN = """
open({proof!r}, "a").close()
from doctor.api import Finding, Severity, check
from doctor.facts import SoftwareFacts

@check(id="ACME001", severity=Severity.WARNING, needs=(SoftwareFacts,))
def old_python(job):
    for software, identical in job.each(SoftwareFacts):
        yield Finding("seen", ranks=identical.ranks)
"""
NAMES_CODE = 'plugins = ["ours.py"]\nfail-on = "never"\n'

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of a second user")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A home of its own, so that no settings of who runs the tests count."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def project(tmp_path):
    """A folder whose doctor.toml names code, which leaves a proof where it runs."""
    folder = tmp_path / "project"
    folder.mkdir()
    put(folder / "doctor.toml", NAMES_CODE)
    put(folder / "ours.py", PLUGIN.format(proof=str(tmp_path / "proof")))
    put(folder / "train.py", "import torch\ntorch.distributed.init_process_group('nccl')\n")
    return folder


def put(path, text, mode=0o644, owner=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    if owner is not None:
        os.lchown(path, owner, owner)
    return path


def give_away(folder, owner=NOBODY):
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, owner, owner)


def doctor(*arguments, cwd, code=None, **variables):
    done = run_doctor(*arguments, cwd=cwd, env={**CLEAN, "HOME": os.environ["HOME"], **variables})
    assert "Traceback" not in done.stderr
    assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def as_user(uid, work):
    """What ``work`` gives in a process of that user."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(write, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(answer)


COMMANDS = [
    ("check", "--timeout", "20"),
    ("diagnose", "."),
    ("lint", "."),
    ("list",),
    ("explain", "NET007"),
    ("explain", "ACME001"),
    ("capture", "-o", "capture.json"),
    ("estimate", "train:make", "--timeout", "5"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_command_runs_what_a_file_of_the_folder_names(project, tmp_path, arguments):
    done = doctor(*arguments, cwd=project)
    assert not (tmp_path / "proof").exists()
    if arguments[:1] != ("explain",):
        said = [line for line in done.stderr.splitlines() if "plugins not loaded (ours.py)" in line]
        assert len(said) == 1
        assert f"--config {project / 'doctor.toml'}" in said[0]


@needs_root
@pytest.mark.parametrize("arguments", COMMANDS[:4], ids=" ".join)
def test_no_command_of_root_runs_what_another_user_wrote(project, tmp_path, arguments):
    give_away(project)
    done = doctor(*arguments, cwd=project)
    assert not (tmp_path / "proof").exists()
    assert f"{project / 'doctor.toml'} ignored: it belongs to uid {NOBODY}" in done.stderr


def test_all_else_of_a_found_file_counts(project):
    put(
        project / "doctor.toml", NAMES_CODE + '[[ignore]]\nid = "ACME001"\nreason = "x"\n[limits]\n"ACME001.most" = 3\n'
    )
    settings = read_settings(project)
    assert (settings.fail_on, settings.plugins, settings.withheld) == ("never", (), ("ours.py",))
    doctor("list", "--select", "NET", cwd=project, code=0)
    doctor("list", "--select", "NETT", cwd=project, code=2)
    doctor("lint", "train.py", cwd=project, code=0)


@pytest.mark.parametrize("way", ["option", "variable", "user", "home"])
def test_a_file_that_was_named_or_is_the_users_own_brings_its_plugins(project, tmp_path, monkeypatch, way):
    place = {"user": tmp_path / "xdg" / "rankdoctor", "home": tmp_path / "home" / ".config" / "rankdoctor"}.get(way)
    for name in ("doctor.toml", "ours.py") if place else ():
        put(place / name, (project / name).read_text())
    (tmp_path / "cwd").mkdir()
    variables = {
        "variable": {VARIABLE: str(project / "doctor.toml")},
        "user": {"XDG_CONFIG_HOME": str(tmp_path / "xdg")},
    }
    options = ["--config", project / "doctor.toml"] if way == "option" else []
    done = doctor("list", "--format", "json", *options, cwd=tmp_path / "cwd", code=0, **variables.get(way, {}))
    assert "ACME001" in [one["id"] for one in json.loads(done.stdout)["checks"]]
    assert done.stderr == ""


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_to_names_no_code(project, tmp_path, mode):
    (project / "doctor.toml").chmod(mode)
    done = doctor("list", "--config", "doctor.toml", cwd=project, code=2)
    assert "chmod go-w" in done.stderr
    put(tmp_path / "home/.config/rankdoctor/doctor.toml", f'plugins = ["{project}/ours.py"]', mode)
    (tmp_path / "cwd").mkdir()
    done = doctor("list", cwd=tmp_path / "cwd", code=0)
    assert "plugins not loaded" in done.stderr
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_plugin_that_others_may_write_to_is_not_run(project, tmp_path, mode):
    (project / "ours.py").chmod(mode)
    done = doctor("list", "--config", "doctor.toml", cwd=project, code=2)
    assert "is not loaded, because others own it or may write to it" in done.stderr
    assert not (tmp_path / "proof").exists()


@needs_root
def test_a_named_file_of_another_user_is_data(project, tmp_path):
    give_away(project)
    doctor("list", "--config", "doctor.toml", cwd=project, code=2)
    put(project / "doctor.toml", 'fail-on = "never"\n', owner=NOBODY)
    assert read_settings(tmp_path, config=project / "doctor.toml").fail_on == "never"


@needs_root
def test_files_of_root_are_trusted_by_others():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        put(file := Path(folder) / "doctor.toml", NAMES_CODE)
        Path(folder).chmod(0o755)
        settings = as_user(NOBODY, lambda: read_settings(Path("/"), config=file))
        found = as_user(NOBODY, lambda: read_settings(Path(folder)))
    assert settings.plugins == (file.parent / "ours.py",)
    assert (found.fail_on, found.plugins) == ("never", ())


@needs_root
@pytest.mark.parametrize("kind", ["file", "link to it", "link of theirs"])
def test_a_file_of_another_user_is_passed_over_and_the_search_goes_on(tmp_path, kind):
    theirs = put(tmp_path / "theirs.toml", 'fail-on = "warning"\n', owner=0 if kind == "link of theirs" else NOBODY)
    put(tmp_path / "a" / "doctor.toml", 'fail-on = "never"\n')
    below = tmp_path / "a" / "b"
    below.mkdir()
    if kind == "file":
        theirs.rename(below / "doctor.toml")
    else:
        (below / "doctor.toml").symlink_to(theirs)
        os.lchown(below / "doctor.toml", *([NOBODY] * 2 if kind == "link of theirs" else [0, 0]))
    settings = read_settings(below)
    assert settings.fail_on == "never"
    (note,) = settings.notes
    assert f"belongs to uid {NOBODY}; to use it, pass --config {below / 'doctor.toml'}" in note


@needs_root
def test_the_search_does_not_go_up_into_a_folder_of_another_user(tmp_path):
    put(tmp_path / "doctor.toml", 'fail-on = "never"\n')
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    assert read_settings(tmp_path / "theirs" / "ours") == Settings()
    assert read_settings(tmp_path / "theirs").fail_on == "never"


@pytest.mark.parametrize("root", [".git", "pyproject.toml"])
def test_the_search_ends_at_the_root_of_the_project(tmp_path, root):
    put(tmp_path / "doctor.toml", 'fail-on = "never"\n')
    below = tmp_path / "project" / "a" / "b"
    below.mkdir(parents=True)
    assert read_settings(below).fail_on == "never"
    (tmp_path / "project" / root).touch()
    assert read_settings(below) == Settings()
    put(tmp_path / "project" / "doctor.toml", 'fail-on = "warning"\n')
    assert read_settings(below).fail_on == "warning"


def test_the_search_ends_at_home(tmp_path):
    put(tmp_path / "doctor.toml", 'fail-on = "never"\n')
    below = tmp_path / "home" / "runs"
    below.mkdir()
    assert read_settings(below) == Settings()
    put(tmp_path / "home" / "doctor.toml", 'fail-on = "warning"\n')
    assert read_settings(below).fail_on == "warning"


def test_precedence(tmp_path, monkeypatch):
    option, variable, project, user = (
        put(tmp_path / name / "doctor.toml", f"timeout = {seconds}\n")
        for seconds, name in enumerate(("option", "variable", "project", "home/.config/rankdoctor"), 1)
    )
    monkeypatch.setenv(VARIABLE, str(variable))
    assert read_settings(project.parent, config=option).timeout == 1
    assert read_settings(project.parent).timeout == 2
    monkeypatch.setenv(VARIABLE, "")
    assert read_settings(project.parent).timeout == 3
    project.unlink()
    assert read_settings(project.parent).timeout == 4
    assert read_settings(project.parent, isolated=True) == Settings()
    monkeypatch.setenv("XDG_CONFIG_HOME", "home/.config")  # relative: the specification says to ignore it
    assert read_settings(project.parent).timeout == 4
    user.unlink()
    assert read_settings(project.parent) == Settings()


def test_a_relative_path_in_the_variable_is_refused(project, monkeypatch):
    monkeypatch.setenv(VARIABLE, "doctor.toml")
    with pytest.raises(UnusableError, match="is not an absolute path"):
        read_settings(project)


def test_config_and_isolated_exclude_each_other(project):
    doctor("list", "--config", "doctor.toml", "--isolated", cwd=project, code=2)
    assert doctor("list", "--isolated", cwd=project, code=0).stderr == ""


@pytest.mark.parametrize("arguments", [*COMMANDS[:4], ("explain", "ACME001"), *COMMANDS[6:]], ids=" ".join)
def test_every_command_that_reads_settings_takes_both_options(project, arguments):
    done = doctor(*arguments, "--config", "absent.toml", cwd=project, code=2)
    assert "absent.toml: No such file or directory" in done.stderr
    assert "--isolated" in doctor(arguments[0], "--help", cwd=project, code=0).stdout


@pytest.mark.parametrize("command", ["check", "list"])
def test_the_name_of_the_distribution_is_not_the_name_of_the_table(tmp_path, command):
    put(tmp_path / "pyproject.toml", '[tool.rankdoctor]\nfail-on = "never"\n')
    done = doctor(command, cwd=tmp_path, code=2)
    assert "[tool.rankdoctor] is not read; name the table [tool.doctor]" in done.stderr


def special(path, kind):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with open(path, "wb") as stream:
            stream.truncate(2 << 30)
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("name", ["doctor.toml", "pyproject.toml"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "sparse", "/dev/zero", "/dev/tty", "/proc/kmsg", "nowhere"])
def test_no_file_makes_a_command_wait_or_grow(tmp_path, kind, name):
    special(tmp_path / name, kind)
    done = doctor("list", "--select", "NET", cwd=tmp_path)
    assert done.returncode in (0, 2)
    done = doctor("list", "--config", name, cwd=tmp_path, code=2)
    assert len(done.stderr.splitlines()) == 1


HOSTILE = {
    "dotted": "a." * 30_000 + "a = 1",
    "dotted in a table": "x = {" + "a." * 30_000 + "a = 1}",
    "quoted and dotted": "'a'." * 30_000 + "a = 1",
    "nested": "x = " + "[" * 60_000,
    "limits": "[limits]\n" + "\n".join("a." * 99 + f"b{number} = 1" for number in range(600)),
    "limits within": "[limits" + ".a" * 99 + "]\n" + "b" + ".a" * 99 + "=1\n",
    "digits": "timeout = 1" + "0" * 60_000,
    "blank": "\n" * 200_000,
    "large": "#" * (LARGEST + 1),
    "date": "[[ignore]]\nid='NET'\nreason=''\nuntil=0000-99-99",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_toml_is_one_sentence(tmp_path, kind):
    """Keys of many parts are refused before tomllib sees them: it takes half a minute for one of 64 KiB."""
    put(tmp_path / "doctor.toml", HOSTILE[kind])
    if kind in ("blank", "limits", "limits within"):  # all of it is read
        read_settings(tmp_path)
        return
    with pytest.raises(UnusableError, match="100 dots" if "dotted" in kind else "doctor.toml") as caught:
        read_settings(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_project_that_says_nothing_of_us_is_not_parsed(tmp_path):
    put(tmp_path / "pyproject.toml", HOSTILE["dotted"])
    assert read_settings(tmp_path) == Settings()
