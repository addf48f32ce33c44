"""The import path of the command and of its child interpreters, without the working directory.

``python -m doctor`` puts the working directory in front of the standard library, and so does an empty or relative entry
of ``PYTHONPATH``: a file ``json.py`` beside a log would be executed. This module is the first that the package imports;
it imports nothing but ``sys`` and ``os``, which every interpreter has loaded before.
"""

import os
import sys


def leave_working_directory() -> None:
    """Take the working directory from ``sys.path``, where ``-I``, ``-P`` and PYTHONSAFEPATH do not put it."""
    is_safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if is_main_package() and not is_safe and sys.path[:1] == [working_directory()]:
        del sys.path[0]
    sys.path[:] = cleaned_path()


def cleaned_path() -> list[str]:
    """``sys.path`` without relative entries, and without the working directory where only an empty or relative entry
    of ``PYTHONPATH`` put it there: the module ``site`` makes these absolute. A checkout that runs from itself stays,
    as the last entry."""
    here = working_directory()
    # Entries of PYTHONPATH precede the standard library, those of ``.pth`` files follow it.
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    behind = sys.path.index(library) if library in sys.path else len(sys.path)
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    entries = given.split(os.pathsep) if given else []
    named = [os.path.normpath(entry) for entry in entries if os.path.isabs(entry)]  # noqa: PTH117
    unwanted = {here} if len(named) < len(entries) and here not in named else set()
    path = [
        entry
        for index, entry in enumerate(sys.path)
        if os.path.isabs(entry) and not (entry in unwanted and index < behind)  # noqa: PTH117
    ]
    package = str(sys.modules[__name__.partition(".")[0]].__file__)
    home = os.path.dirname(os.path.dirname(os.path.abspath(package)))  # noqa: PTH100, PTH120 - pathlib is not loaded
    return path if home in path else [*path, home]


def is_main_package() -> bool:
    """Whether ``python -m doctor``, or ``-m`` with a module of this package, is being looked up."""
    index = len(sys.orig_argv) - len(sys.argv)  # of the word that became the "-m" of sys.argv
    if sys.argv[:1] != ["-m"] or index < 1:
        return False
    word = sys.orig_argv[index]
    module = word.partition("m")[2] if word.startswith("-") else word
    return module.split(".")[0] == "doctor"


def working_directory() -> str | None:
    """The working directory; ``None`` if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return None
