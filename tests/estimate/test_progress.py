"""The line on stderr while an estimate runs."""

import io

import pytest

from doctor.cli import progress
from doctor.cli.progress import ProgressLine, progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(progress, "PERIOD", 0.01)


def shown(stream, times):
    """What is written in that many updates."""
    line = ProgressLine(stream)
    line.tell("tracing " + "x" * 100)
    waits = iter([False] * times + [True])
    line._ended.wait = lambda _: next(waits)
    line.show()
    line.close()
    return stream.getvalue()


def test_in_a_terminal_one_line_is_updated_and_cleared():
    text = shown(Terminal(), 3)
    assert text.count("\r\x1b[2Kdoctor: tracing xxx") == 3
    assert text.endswith("\r\x1b[2K")
    assert "\n" not in text
    assert max(map(len, text.split("\r\x1b[2K"))) <= progress.WIDTH


def test_elsewhere_lines_are_rare():
    assert shown(io.StringIO(), 3).count("\n") == 1


def test_what_takes_no_second_shows_nothing(capsys):
    with progress_line() as line:
        line.tell("tracing")
    assert capsys.readouterr().err == ""


def test_the_line_is_of_what_is_done_now(capsys, fast):
    with progress_line() as line:
        line.tell("tracing")
        while "doctor: tracing … " not in capsys.readouterr().err:
            pass
