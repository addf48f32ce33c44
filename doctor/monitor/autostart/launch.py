"""Replaces this process by a command whose Python processes are watched.

Imports nothing but modules that the interpreter has loaded already: this is the way of every start, on every rank.
"""

import os
import stat
import sys

from doctor.monitor.autostart.hook import sitecustomize as hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence
    from typing import Any, NoReturn

OPTIONS = "DOCTOR_RUN_OPTIONS"
"""The variable that holds the options as JSON."""
CHOICES = {"on_error": ("warn", "raise"), "on_hang": ("report", "abort"), "probe": ("none", "light")}
"""The options that choose one of some words, the default first."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes as shells set them."""
_SHELL = "/bin/sh"
_ENOEXEC, _WRITABLE = 8, stat.S_IWGRP | stat.S_IWOTH


def replace_process(command: "Sequence[str]", options: str = "") -> int:
    """Run ``command`` in place of this process; return the exit code of a shell if that is not possible.

    ``options``: JSON for :data:`OPTIONS`, already validated.
    """
    environ = original_environ()
    if not hook.is_disabled():
        reason = obstacle()
        if not reason:
            set_hook(environ, options)
            reason = unreached(command)  # its children may still be reached
        if reason:
            hook.tell(reason)
    _restore_signals()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        _execute(command, environ)
    except FileNotFoundError:
        _say(f"{command[0]}: command not found" if "/" not in command[0] else f"{command[0]}: no such file")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        _say(f"{command[0]}: {getattr(error, 'strerror', None) or error}")
        return NOT_EXECUTABLE


def read_plain(words: "Sequence[str]") -> "tuple[Sequence[str], str] | None":
    """Return the command in the words after ``doctor run``, and its options as JSON.

    ``None`` where the command line has to be built: for other options than :data:`CHOICES`, and for errors.
    """
    given: dict[str, str] = {}
    at = 0
    while words[at : at + 1] and words[at].startswith("-") and words[at] != "--":
        option, equals, value = words[at].partition("=")
        at += 1
        if not equals:
            value = words[at] if at < len(words) else ""
            at += 1
        name = option[2:].replace("-", "_")
        if value not in CHOICES.get(name, ()) or option != "--" + name.replace("_", "-"):
            return None
        given[name] = value
    command = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    chosen = [
        f'"{name}": "{given[name]}"' for name, choices in CHOICES.items() if given.get(name, choices[0]) != choices[0]
    ]
    return (command, f"{{{', '.join(chosen)}}}" if chosen else "") if command else None


def original_environ() -> dict[str, str]:
    """Return the environment as this process got it: in the C locale, Python adds ``LC_CTYPE`` (PEP 538)."""
    environ = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            given = file.read()
    except OSError:
        return environ
    if not any(entry.startswith(b"LC_CTYPE=") for entry in given.split(b"\0")):
        environ.pop("LC_CTYPE", None)
    return environ


def set_hook(environ: "MutableMapping[str, str]", options: str) -> None:
    """Add what the hook needs; an empty entry of PYTHONPATH, which is the working directory, is never added."""
    entries = environ.get("PYTHONPATH", "").split(os.pathsep) if environ.get("PYTHONPATH") else []
    environ["PYTHONPATH"] = os.pathsep.join([hook.FOLDER, *(entry for entry in entries if entry != hook.FOLDER)])
    environ[hook.IDENTITY] = hook.identity()
    environ.pop(OPTIONS, None)
    if options:
        environ[OPTIONS] = options


def obstacle() -> str:
    """Return why the hook can't be trusted or passed on; empty if it can.

    Trusted are files of root, of this user and of whoever owns the interpreter, that nobody else can write to.
    """
    if os.pathsep in hook.FOLDER:
        return f"{hook.FOLDER} can't be an entry of PYTHONPATH"
    owners = {0, os.geteuid(), os.stat(os.path.realpath(sys.executable)).st_uid}
    folders = [hook.FOLDER, *(os.path.join(hook.FOLDER, *[".."] * height) for height in (1, 2, 3))]
    files = [os.path.join(hook.FOLDER, name) for name in ("sitecustomize.py", "__pycache__")]
    for path in map(os.path.normpath, folders + [file for file in files if os.path.exists(file)]):
        seen = os.stat(path)
        if seen.st_uid not in owners:
            return (
                f"{path} belongs to uid {seen.st_uid}, neither to you nor to root nor to the owner of the interpreter"
            )
        if seen.st_mode & _WRITABLE:
            return f"{path} is writable by other users; chmod -R go-w {os.path.join(hook.ROOT, 'doctor')}"
    return ""


def unreached(command: "Sequence[str]") -> str:
    """Return why the interpreter that ``command`` names will not import the hook; empty if it will."""
    if not os.path.basename(command[0]).startswith(("python", "pypy")):
        return ""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return ""
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "IES":
                return f"python -{letter} ignores PYTHONPATH or module site; start it without -{letter}"
            if letter in "cm":
                return ""
            if letter in "WX":  # with a value, in this word or the next
                if place == len(word):
                    next(words, None)
                break
    return ""


def _restore_signals() -> None:
    """Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so in the command.

    The built-in module does that: ``signal`` imports ``enum`` for its constants, and takes milliseconds.
    """
    signals: Any = sys.modules.get("_signal") or __import__("signal")
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signals, name):
            signals.signal(getattr(signals, name), signals.SIG_DFL)


def _execute(command: "Sequence[str]", environ: "Mapping[str, str]") -> "NoReturn":
    try:
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        if error.errno != _ENOEXEC:
            raise
        path = _found(command[0], environ)
        if path is None or _is_binary(path):
            raise
    # A script without an interpreter line, as execvp(3) and shells run it.
    os.execve(_SHELL, [_SHELL, path, *command[1:]], environ)


def _found(name: str, environ: "Mapping[str, str]") -> "str | None":
    if "/" in name:
        return name
    places = (os.path.join(folder, name) for folder in os.get_exec_path(dict(environ)))
    return next((place for place in places if os.access(place, os.X_OK) and os.path.isfile(place)), None)


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(128)


def _say(text: str) -> None:
    from doctor.core.masking import mask_text
    from doctor.report.formatting import spelt_out

    print(f"doctor: {spelt_out(mask_text(text))}", file=sys.stderr, flush=True)  # noqa: T201
