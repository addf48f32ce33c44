"""Tokens of shell scripts: words, whose parts may be unknown, and operators."""

from __future__ import annotations

from typing import NamedTuple


class Literal(NamedTuple):
    """Literal characters."""

    text: str


class ParameterExpansion(NamedTuple):
    """``$name``, ``${name}``, ``${name:-default}``; ``is_list``: ``${name[@]}``."""

    name: str
    quoted: bool
    default: tuple[Part, ...] | None = None
    is_list: bool = False


class ArithmeticExpansion(NamedTuple):
    """``$((text))`` or ``$[text]``."""

    text: str


class Opaque(NamedTuple):
    """A part whose value only the shell knows; ``text`` as shown behind a dollar sign."""

    text: str


class Array(NamedTuple):
    """``(a b c)`` of an assignment."""

    words: tuple[Word, ...]


Part = Literal | ParameterExpansion | ArithmeticExpansion | Opaque | Array


class Word(NamedTuple):
    """One word; ``quoted``: a part of it is quoted."""

    parts: tuple[Part, ...]
    line: int
    end_line: int
    quoted: bool = False

    @property
    def plain(self) -> str | None:
        """Its text if it is neither quoted nor expanded: a keyword or a name."""
        parts = self.parts
        return parts[0].text if len(parts) == 1 and isinstance(parts[0], Literal) and not self.quoted else None


class Operator(NamedTuple):
    """``;``, ``&``, ``&&``, ``||``, ``|``, ``(``, ``)``, ``;;``, ``>`` (any redirection), or the end of a line."""

    text: str
    line: int


Token = Word | Operator
