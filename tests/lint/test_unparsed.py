"""A file that no rule could parse is never reported as one without findings."""

import json

import pytest
from click.testing import CliRunner

from doctor.cli.main import app
from doctor.core.errors import UnusableError

BROKEN, FINE, TRAINING = "def f(:\n", "x = 1\n", "import torch\ndef f(:\n"


@pytest.fixture
def lint(tmp_path):
    def run(files, *arguments):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        paths = [str(tmp_path / one) if not one.startswith("-") else one for one in arguments]
        done = CliRunner().invoke(app, ["lint", *paths])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return run


def test_alone_it_is_unusable(lint):
    with pytest.raises(UnusableError, match="nothing can be judged"):  # exit code 2, see doctor.__main__
        lint({"broken.py": BROKEN}, "broken.py")


@pytest.mark.parametrize(
    ("files", "arguments", "code"),
    [
        ({"broken.py": BROKEN, "fine.py": FINE}, ("broken.py", "fine.py"), 3),
        ({"sub/train.py": TRAINING, "sub/fine.py": FINE}, ("sub",), 3),
        ({"sub/broken.py": BROKEN, "sub/fine.py": FINE}, ("sub",), 0),
        ({"sub/broken.py": BROKEN, "sub/fine.py": FINE}, ("sub", "--strict"), 3),
        ({"sub/fine.py": FINE}, ("sub",), 0),
    ],
)
def test_beside_others(lint, files, arguments, code):
    assert lint(files, *arguments)[0] == code


def test_those_that_decide_nothing_are_counted_in_one_line(lint):
    files = {f"sub/broken{number}.py": BROKEN for number in range(7)} | {"sub/fine.py": FINE}
    code, words = lint(files, "sub")
    assert (code, words.count("skipped")) == (0, 1)
    assert "7 files skipped" in words


def test_the_document_says_which_files_decide(lint):
    files = {"sub/train.py": TRAINING, "sub/broken.py": BROKEN, "sub/fine.py": FINE}
    inputs = json.loads(lint(files, "sub", "--format=json")[1])["inputs"]
    assert [one.get("decisive") for one in inputs] == [None, None, True]
