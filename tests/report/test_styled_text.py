"""Findings in a watched job are drawn without rich, and look as rich would show them."""

import io
import random

import pytest
from rich.console import Console
from rich.text import Text

from doctor.report.styled_text import TerminalLook, columns, escape_sequences, look_of, wrapped

PLAIN = TerminalLook(80, styled=False, colored=False)
WORDS = ("a", "rank", "NCCL_SOCKET_IFNAME", "x" * 45, "漢字の名前", "é", "—", "\n", "  ", "…")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [1, 7, 20, 41])
def test_lines_break_where_rich_breaks_them(width):
    draw = random.Random(width)
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    for _ in range(200):
        text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 12))).strip()
        if width == 1 and not text.isascii():
            continue  # a wide character fits in no line
        expected = [str(line).rstrip() for line in Text(text, overflow="fold").wrap(console, width)]
        found = [escape_sequences(line, PLAIN) for line in wrapped([(text, "")], width)]
        assert found == expected, text
        assert all(columns(line) <= width for line in found)


def test_styles_stay_with_their_words():
    rows = list(wrapped([("one two ", "bold red"), ("three", ""), (" four", "dim")], 9))
    assert [escape_sequences(row, TerminalLook(9, styled=True, colored=True)) for row in rows] == [
        "\x1b[1;31mone two\x1b[0m",
        "three",
        "\x1b[2mfour\x1b[0m",
    ]
    assert [escape_sequences(row, PLAIN) for row in rows] == ["one two", "three", "four"]
    assert escape_sequences(rows[0], TerminalLook(9, styled=True, colored=False)) == "\x1b[1mone two\x1b[0m"


def test_a_terminal_without_escape_sequences_gets_none(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert look_of(Terminal())[1:] == (True, True)
    monkeypatch.setenv("TERM", "dumb")
    assert look_of(Terminal())[1:] == (False, False)
    assert look_of(io.StringIO())[1:] == (False, False)
