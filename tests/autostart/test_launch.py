"""``doctor run`` as a command: what it starts behaves as if it had been started alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from doctor.cli import run
from doctor.monitor.autostart.hook import sitecustomize as hook
from doctor.monitor.autostart.launch import CHOICES, OPTIONS, obstacle, read_plain, set_hook, unreached
from doctor.monitor.integrations.hook_guard import is_disabled
from doctor.monitor.watch_options import OnError, OnHang, Probes
from tests.lab.needs import ROOT, clean_environ
from tests.lab.speed import patience

RUN = [sys.executable, "-m", "doctor", "run"]
SHOW = "import json, os, sys; print(json.dumps([sys.argv, sys.path, sorted(sys.modules), dict(os.environ)]))"
OURS = {"PYTHONPATH", hook.IDENTITY, OPTIONS}
ADDED = "ImportWatcher"


@pytest.fixture(autouse=True)
def _environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*os.environ,):
        monkeypatch.delenv(name)
    for name, value in clean_environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'checks'}")


def started(*command: str, options: tuple[str, ...] = ("--",), **given: Any) -> subprocess.CompletedProcess[str]:
    """The command, below ``doctor run``."""
    return alone(*RUN, *options, *command, **given)


def alone(*command: str, **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), **given)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 3"), 3),
        (("sh", "-c", "kill -TERM $$"), -signal.SIGTERM),
        (("sh", "-c", "kill -KILL $$"), -signal.SIGKILL),
        ((sys.executable, "-c", "raise SystemExit(7)"), 7),
        (("no-such-command",), 127),
        (("./no-such-file",), 127),
        (("/",), 126),
        (("./not-executable",), 126),
        (("./binary",), 126),
        (("./no-interpreter-line",), 5),
    ],
)
@pytest.mark.parametrize("options", [("--",), ("--on-hang", "report"), ("--on-hang", "report", "--")])
def test_the_exit_code_is_that_of_the_command(
    command: tuple[str, ...], code: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    for name, content in (("binary", b"\0" * 200), ("no-interpreter-line", b"exit 5\n")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o755)
    done = started(*command, options=options, cwd=tmp_path)
    assert done.returncode == code
    assert bool(done.stderr) == (code in (126, 127))
    assert done.stderr.count("\n") == (code in (126, 127))


@pytest.mark.parametrize(
    "options",
    [(), ("--",), ("--hang-after", "0.1", "true"), ("--on-hang", "x", "true"), ("--nonsense", "true")],
)
def test_its_own_usage_errors_start_nothing(options: tuple[str, ...]) -> None:
    done = alone(*RUN, *options)
    assert done.returncode == 2
    assert "(see 'doctor run --help')" in done.stderr


def test_the_words_of_options_are_those_of_the_callback() -> None:
    assert {"on_error": get_args(OnError), "on_hang": get_args(OnHang), "probe": get_args(Probes)} == CHOICES


@pytest.mark.parametrize(
    "options",
    [
        ("--",),
        ("--on-hang", "abort", "--"),
        ("--on-hang=abort",),
        ("--on-hang", "abort", "--on-hang", "report"),
        ("--probe", "light", "--on-error=raise", "--on-hang", "abort", "--"),
        ("--on-hang", "abort", "--hang-after", "9"),
        ("--on-hang", "--"),
        ("--on-hang=",),
        ("--on_hang", "abort"),
        ("-on-hang", "abort"),
        ("--probe", "abort", "--"),
        ("-",),
    ],
)
@pytest.mark.parametrize("command", [("env", "--", "x"), ("--", "env"), ()])
def test_options_that_are_read_without_a_command_line_are_read_alike(
    options: tuple[str, ...], command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(run, "replace_process", lambda words, options: started.append(([*words], options)) or 0)
    CliRunner().invoke(run.command, [*options, *command])
    plain = read_plain([*options, *command])
    assert plain is None or started == [([*plain[0]], plain[1])]
    assert (plain is None) == (not started or "--hang-after" in options or options == ("-",))


def test_options_after_the_command_are_the_commands() -> None:
    done = started("printf", "%s ", "--help", "--", "--on-hang", options=())
    assert done.stdout == "--help -- --on-hang "


def test_nothing_else_of_the_process_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANG")  # Python then sets LC_CTYPE for itself and its children
    program = tmp_path / "program.py"
    program.write_text(SHOW)
    command = [sys.executable, str(program), "--option", "", "a b"]
    plain, watched = json.loads(alone(*command).stdout), json.loads(started(*command).stdout)
    assert watched[:3] == plain[:3]
    environ = watched[3]
    assert {name: environ[name] for name in environ if name not in OURS} == {
        name: value for name, value in plain[3].items() if name not in OURS
    }
    assert environ["PYTHONPATH"] == f"{hook.FOLDER}:{ROOT}:{ROOT / 'checks'}"
    seen = [alone(*prefix, "env").stdout.splitlines() for prefix in ((), (*RUN, "--"))]
    assert [line for line in seen[1] if line.partition("=")[0] not in OURS] == [
        line for line in seen[0] if line.partition("=")[0] not in OURS
    ]


def test_no_signal_is_ignored_that_the_command_would_not_ignore() -> None:
    ignored = ["grep", "SigIgn", "/proc/self/status"]
    assert started(*ignored).stdout == alone(*ignored).stdout


def test_standard_input_is_the_commands() -> None:
    assert started("cat", input="hello\n").stdout == "hello\n"


def test_an_interrupt_of_the_process_group_ends_it_as_alone() -> None:
    program = "import sys, time; print('ready', flush=True); time.sleep(1000)"
    codes = []
    for prefix in ([], [*RUN, "--"]):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program], stdout=-1, stderr=-1, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=patience(30))
        codes.append((process.returncode, errors.splitlines()[-1]))
    assert codes[0] == codes[1]


def test_disabled_it_leaves_nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_DISABLE", "1")
    done = started("env")
    assert not any(name in done.stdout for name in (hook.IDENTITY, hook.FOLDER))
    monkeypatch.delenv("DOCTOR_DISABLE")
    shown = started(
        "env", "DOCTOR_DISABLE=1", sys.executable, "-c", f"import sys; print({ADDED!r} in str(sys.meta_path))"
    )
    assert shown.stdout == "False\n"


@pytest.mark.parametrize("value", ["", "0", "1", "false", "No", "OFF", " ", "yes"])
def test_the_hook_reads_the_switch_as_the_callback_does(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_DISABLE", value)
    assert hook.is_disabled() == is_disabled()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [hook.FOLDER]),
        ("", [hook.FOLDER]),
        ("/a", [hook.FOLDER, "/a"]),
        (f"/a:{hook.FOLDER}:/b", [hook.FOLDER, "/a", "/b"]),
        ("/a::/b", [hook.FOLDER, "/a", "", "/b"]),  # the user's own empty entry
    ],
)
def test_python_path_gets_one_entry(given: str | None, expected: list[str]) -> None:
    environ = {} if given is None else {"PYTHONPATH": given}
    set_hook(environ, "")
    assert environ == {"PYTHONPATH": ":".join(expected), hook.IDENTITY: hook.identity()}


def test_options_pass_as_json_with_absolute_folders(tmp_path: Path) -> None:
    options = ("--folder", "out", "--hang-after", "9", "--ignore", "NET002,MEM", "--every-n-steps", "7", "--no-html")
    done = started("printenv", OPTIONS, options=options, cwd=tmp_path)
    expected = {
        "dirpath": str(tmp_path / "out"),
        "hang_after": 9.0,
        "ignore": ["NET002", "MEM"],
        "every_n_steps": 7,
        "html_report": False,
    }
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--otlp",), True), (("--otlp", "--otlp-endpoint", "http://c:4318"), "http://c:4318")],
)
def test_telemetry_is_asked_for_with_or_without_an_address(options: tuple[str, ...], expected: object) -> None:
    assert json.loads(started("printenv", OPTIONS, options=options).stdout) == {"otlp": expected}


@pytest.mark.parametrize(
    ("command", "letter"),
    [
        ("python -I train.py", "I"),
        ("/usr/bin/python3.11 -W ignore -uS train.py", "S"),
        ("python3 -X dev -Em train", "E"),
        ("python train.py -I", ""),
        ("python -m train -S", ""),
        ("python -c pass -E", ""),
        ("python -Wignore::DeprecationWarning:Ex train.py", ""),
        ("python -u -", ""),
        ("torchrun -I", ""),
    ],
)
def test_interpreters_that_ignore_the_hook_are_said_to(command: str, letter: str) -> None:
    reason = unreached(command.split())
    assert bool(reason) == bool(letter)
    assert not letter or f"-{letter}" in reason


def test_it_says_so_and_starts_them_all_the_same() -> None:
    done = started(sys.executable, "-I", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "python -I" in done.stderr
    assert done.stderr.count("\n") == 1


def copied(tmp_path: Path) -> Path:
    """A copy of the package, with the path of its hook."""
    shutil.copytree(ROOT / "doctor", tmp_path / "copy/doctor", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


@pytest.mark.parametrize("place", ["", "sitecustomize.py"])
def test_a_hook_that_others_can_write_to_is_not_used(place: str, tmp_path: Path) -> None:
    root = copied(tmp_path)
    (root / "doctor/monitor/autostart/hook" / place).chmod(0o777)
    done = started("env", env={**os.environ, "PYTHONPATH": f"{root}:{ROOT / 'checks'}"}, cwd="/")
    assert done.returncode == 0
    assert hook.IDENTITY not in done.stdout
    assert "writable by other users" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_hook_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle() == ""
    real = os.stat

    def foreign(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        seen = list(real(path, *args, **kwargs))
        seen[4] = 4242 if str(path).startswith(hook.FOLDER) else 0
        return os.stat_result(seen)

    monkeypatch.setattr("doctor.monitor.autostart.launch.os.stat", foreign)
    assert "belongs to uid 4242" in obstacle()


IMPORTED = "import sys; m = sys.modules.get('sitecustomize'); print(getattr(m, '__file__', None), sys.path)"


def test_the_sitecustomize_of_the_environment_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('site of the user', __name__)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'checks'}")
    expected = alone(sys.executable, "-c", IMPORTED)
    assert "site of the user sitecustomize" in expected.stdout
    done = started(sys.executable, "-c", IMPORTED)
    of_the_command, _, rest = done.stdout.partition("\n")
    assert of_the_command == "site of the user sitecustomize"
    assert rest == expected.stdout
    assert done.stderr == ""


def test_a_usercustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "usercustomize.py").write_text("print('user of the user')\n")
    base = str(getattr(sys, "_base_executable", sys.executable))  # virtual environments have none
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'checks'}")
    expected = alone(base, "-c", IMPORTED).stdout
    assert "user of the user" in expected
    assert started(base, "-c", IMPORTED).stdout == expected


@pytest.mark.parametrize("text", ["raise ValueError('of the user')", "import no_such_module_of_the_user", "x ="])
def test_a_sitecustomize_that_fails_does_so_as_alone(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(text + "\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{ROOT / 'checks'}")
    commands = [(sys.executable, "-c", "print(1)"), (*RUN, "--", sys.executable, "-c", "print(1)")]
    # The command doctor itself runs it, too.
    plain, watched = (alone(*command) for command in commands)
    assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
    assert set(watched.stderr.splitlines()) == set(plain.stderr.splitlines())


def test_without_any_sitecustomize_none_is_left() -> None:
    commands = [(sys.executable, "-c", IMPORTED), (*RUN, "--", sys.executable, "-c", IMPORTED)]
    plain, watched = (alone(*command).stdout for command in commands)
    assert watched == plain


WATCHES = f"import sys; print({ADDED!r} in str(sys.meta_path), sys.path[:1])"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_with_a_safe_path() -> None:
    assert started(sys.executable, "-P", "-c", WATCHES).stdout.startswith("True")


def test_through_a_wrapper_script_and_two_levels_of_children(tmp_path: Path) -> None:
    script = tmp_path / "wrapper.sh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$1"\n')
    script.chmod(0o755)
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {WATCHES!r}]))"
    assert started(str(script), outer).stdout == "True ['']\n"


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_of_multiprocessing_inherit_it(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, sys\n"
        f"def show(): print({ADDED!r} in str(sys.meta_path), any('autostart' in one for one in sys.path))\n"
        "if __name__ == '__main__':\n"
        f"    process = multiprocessing.get_context({method!r}).Process(target=show)\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    done = started(sys.executable, str(program))
    assert (done.stdout, done.stderr, done.returncode) == ("True False\n", "", 0)


def test_an_environment_without_rankdoctor_steps_aside(tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=False)
    done = started(str(tmp_path / "fresh/bin/python"), "-c", WATCHES)
    assert (done.stdout, done.returncode) == ("False ['']\n", 0)
    assert done.stderr.count("\n") == 1
    assert "is not watched: its Python" in done.stderr


@pytest.mark.parametrize("release", ["3.6", "3.8", "3.9", "3.10", "3.12", "3.13", "3.14"])
def test_another_release_steps_aside(release: str) -> None:
    places = [f"/usr/bin/python{release}", *map(str, Path(sys.base_prefix).parent.glob(f"{release}.*/bin/python"))]
    found = next((place for place in places if Path(place).exists()), None)
    if found is None or release == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"no other Python {release}")
    done = started(found, "-c", WATCHES)
    assert (done.stdout, done.returncode) == ("False ['']\n", 0)
    assert done.stderr.count("\n") == 1


def test_another_user_steps_aside() -> None:
    system = "/usr/bin/python3"
    if os.geteuid() != 0 or shutil.which("setpriv") is None or not Path(system).exists():
        pytest.skip("needs root, setpriv and a Python that all users may run")
    user = ("setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups", system)
    done = started(*user, "-c", WATCHES, cwd="/")
    if not done.stderr and not done.stdout.startswith("True"):
        pytest.skip("this folder is not readable for other users")
    assert (done.stdout, done.returncode) == ("False ['']\n", 0)
    assert "it runs as a different user than doctor run" in done.stderr


def test_a_failure_of_the_hook_costs_one_line(tmp_path: Path) -> None:
    root = copied(tmp_path)
    path = root / "doctor/monitor/autostart/hook/sitecustomize.py"
    path.write_text(path.read_text().replace("def begin() -> None:", "def begin() -> None:\n    1 / 0\n"))
    environ = {**os.environ, "PYTHONPATH": f"{root}:{ROOT / 'checks'}"}
    done = started(sys.executable, "-c", "print(1)", env=environ, cwd="/")
    assert (done.stdout, done.returncode) == ("1\n", 0)
    assert done.stderr.count("\n") == 1
    assert "ZeroDivisionError" in done.stderr
