"""Tokenizes a shell script into words and operators; invalid shell yields odd words, not errors.

Handles quotes, escapes, continued lines, comments, here-documents (skipped), variables and substitutions (not
parsed).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from doctor.core.text import lazy_compile
from doctor.lint.launch.partial_text import OUTPUT
from doctor.lint.launch.shell.tokens import (
    ArithmeticExpansion,
    Array,
    Literal,
    Opaque,
    Operator,
    ParameterExpansion,
    Part,
    Token,
    Word,
)

_OPERATOR = lazy_compile(r";;&?|;&|&>>?|\|&|&&|\|\||[;&|()]|\d*(?:>>|>\||>&|<&|<>|>|<)")
_HOSTNAME = lazy_compile(r"\s*(?:/bin/|/usr/bin/)?hostname(?:\s+-[a-zA-Z]+|\s+--\w+)*\s*")
_NAME = lazy_compile(r"[A-Za-z_]\w*")
_HERE = lazy_compile(r"<<-?\s*(['\"\\]?)([\w.!-]+)['\"]?")
_ASSIGNED = lazy_compile(r"[A-Za-z_]\w*\+?=")
_DOUBLE = lazy_compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_WITHIN_DOUBLE = lazy_compile(r'[^"$`\\]+')
_ORDINARY = lazy_compile(r"[^\s'\"$`\\;&|()<>]+|.", re.DOTALL)
_STOPS = {"{": lazy_compile(r"[\\{}\n]"), "[": lazy_compile(r"[\\\[\]\n]"), "(": lazy_compile(r"[\\()'\"#\n]")}
"""Special characters between brackets."""
_BLANK = " \t\r"
DEPTH = 20
"""Nested substitutions that are followed."""


def tokens(text: str) -> Iterator[Token]:
    """The words and operators of a script, in order."""
    return _Lexer(text).run()


def comments(text: str) -> tuple[tuple[int, str], ...]:
    """The comments of a script and their lines; here-documents and quoted texts have none."""
    lexer = _Lexer(text)
    for _ in lexer.run():
        pass
    return tuple(lexer.comments)


class _Lexer:
    def __init__(self, text: str, line: int = 1, depth: int = 0) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._depth = depth
        self.comments: list[tuple[int, str]] = []
        self._pending: list[str] = []  # ends of here-documents that begin after this line

    def run(self) -> Iterator[Token]:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in _BLANK:
                self._at += 1
            elif char == "\n":
                yield Operator("\n", self._line)
                self._skip_newline()
                while self._pending:
                    self._skip_document(self._pending.pop(0))
            elif self._text.startswith(("\\\n", "\\\r\n"), self._at):
                self._skip_newline()
            elif char == "#":
                self._skip_comment()
            elif not self._skip_here():
                yield self._operator() or self._word()

    def _skip_newline(self) -> None:
        self._at = self._text.index("\n", self._at) + 1
        self._line += 1

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        end = len(self._text) if end < 0 else end
        self.comments.append((self._line, self._text[self._at : end]))
        self._at = end

    def _skip_document(self, end: str) -> None:
        while self._at < len(self._text):
            stop = self._text.find("\n", self._at)
            stop = len(self._text) if stop < 0 else stop
            line = self._text[self._at : stop]
            self._at = min(stop + 1, len(self._text))
            self._line += 1
            if line.strip() == end:
                return

    def _skip_here(self) -> bool:
        """``<<EOF``; a here-string (``<<<``) is a redirection."""
        match = _HERE.match(self._text, self._at)
        if match is None or self._text.startswith("<<<", self._at):
            return False
        self._pending.append(match[2])
        self._at = match.end()
        return True

    def _operator(self) -> Operator | None:
        if self._text.startswith(("<(", ">("), self._at):
            return None
        match = _OPERATOR.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        if self._text.startswith("<", self._at) and match[0] == "<":
            self._at += len(re.match("<*", self._text[self._at :])[0])  # type: ignore[index]
        return Operator(">" if re.search("[<>]", match[0]) else match[0], self._line)

    # -- words

    def _word(self) -> Word:
        start, parts, quoted = self._line, list[Part](), False
        while self._at < len(self._text):
            char = self._text[self._at]
            starts_process = self._text.startswith(("<(", ">("), self._at)
            if char in "\n" + _BLANK or (char in ";&|)<>" and not starts_process):
                break
            if char == "(":
                if not (len(parts) == 1 and isinstance(parts[0], Literal) and _ASSIGNED.fullmatch(parts[0].text)):
                    break
                parts.append(self._array())
                continue
            quoted = quoted or char in "'\""
            _append(parts, self._parts(char))
        return Word(tuple(parts), start, self._line, quoted)

    def _parts(self, char: str) -> list[Part]:
        if char == "'":
            return [Literal(self._single())]
        if char == '"':
            return self._double()
        if char == "$":
            return [self._dollar(quoted=False)]
        if char == "`":
            return [self._backticks()]
        if char == "\\":
            return self._escape()
        if char in "<>":
            self._at += 1
            self._skip_brackets("(", ")")
            return [Opaque(OUTPUT)]
        match = _ORDINARY.match(self._text, self._at)
        self._at = match.end() if match else len(self._text)
        return [Literal(match[0] if match else "")]

    def _escape(self) -> list[Part]:
        if self._text.startswith(("\\\n", "\\\r\n"), self._at):
            self._skip_newline()
            return []
        following = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        return [Literal(following)]

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        end = len(self._text) if end < 0 else end
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        self._line += text.count("\n")
        return text

    def _double(self) -> list[Part]:
        self._at += 1
        parts: list[Part] = [Literal("")]
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "$":
                more: list[Part] = [self._dollar(quoted=True)]
            elif char == "`":
                more = [self._backticks()]
            elif char == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                more = self._escape()
            else:
                more = [Literal(self._within_double())]
            _append(parts, more)
        self._at += 1
        return parts

    def _within_double(self) -> str:
        """Literal characters between double quotes; a backslash before any other one is literal too."""
        match = _WITHIN_DOUBLE.match(self._text, self._at)
        text = match[0] if match else self._text[self._at]
        self._at += len(text)
        self._line += text.count("\n")
        return text

    # -- behind a dollar sign

    def _dollar(self, *, quoted: bool) -> Part:
        rest = self._text[self._at + 1 : self._at + 3]
        if rest == "((":
            return ArithmeticExpansion(self._between("(", ")")[1:-1])
        if rest[:1] == "(":
            return _output(self._between("(", ")"), quoted)
        if rest[:1] == "[":  # an older spelling of $((…)), which bash still accepts (parse.y, subst.c)
            return ArithmeticExpansion(self._between("[", "]"))
        if rest[:1] in ("'", '"') and not quoted:
            return self._translated(rest[0])
        if rest[:1] == "{":
            return self._braces(self._between("{", "}"), quoted)
        match = _NAME.match(self._text, self._at + 1)
        if match:
            self._at = match.end()
            return ParameterExpansion(match[0], quoted)
        if rest[:1] and rest[:1] in "@*#?$!-0123456789":
            self._at += 2
            return Opaque(rest[:1] if rest[:1] not in "#$" else OUTPUT)
        self._at += 1
        return Literal("$")

    def _translated(self, quote: str) -> Part:
        """``$'…'``, whose escapes are not followed, or ``$"…"``, whose text follows; the dollar sign is not in it."""
        self._at += 1
        if quote == '"':
            return Literal("")
        text = self._single()
        return Opaque(OUTPUT) if "\\" in text else Literal(text)

    def _between(self, opening: str, closing: str) -> str:
        self._at += 1
        start = self._at
        self._skip_brackets(opening, closing)
        return self._text[start + 1 : self._at - 1]

    def _skip_brackets(self, opening: str, closing: str) -> None:
        """Advance past the closing bracket; those in quotes and comments do not count."""
        level = 0
        stops = _STOPS[opening]
        while found := stops.search(self._text, self._at):
            self._at = found.start()
            char = found[0]
            if opening == "(" and self._skip_quoted(char):
                continue
            if char == "\\":
                self._line += self._text[self._at + 1 : self._at + 2] == "\n"
                self._at += 1
            self._line += char == "\n"
            self._at += 1
            level += (char == opening) - (char == closing)
            if level == 0:
                return
        self._at = len(self._text)

    def _skip_quoted(self, char: str) -> bool:
        if char == "'":
            self._single()
        elif char == '"':
            end = _DOUBLE.match(self._text, self._at)
            stop = end.end() if end else len(self._text)
            self._line += self._text.count("\n", self._at, stop)
            self._at = stop
        elif char == "#" and self._text[self._at - 1].isspace():
            self._skip_comment()
        else:
            return False
        return True

    def _braces(self, inside: str, quoted: bool) -> Part:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:(\[[@*]\])|:?([-=])(.*))?", inside, re.DOTALL)
        if match is None:
            named = _NAME.search(inside)
            return Opaque(named[0] if named else OUTPUT)
        default = self._default(match[4], quoted) if match[3] else None
        return ParameterExpansion(match[1], quoted, default, bool(match[2]))

    def _default(self, text: str, quoted: bool) -> tuple[Part, ...]:
        if self._depth >= DEPTH:
            return (Opaque(OUTPUT),)
        inner = _Lexer(f'"{text}"' if quoted and '"' not in text else text, self._line, self._depth + 1)
        words = [token for token in inner.run() if isinstance(token, Word)]
        return words[0].parts if len(words) == 1 else (Literal(""),) if not words else (Opaque(OUTPUT),)

    def _backticks(self) -> Part:
        end = self._text.find("`", self._at + 1)
        end = len(self._text) if end < 0 else end
        self._line += self._text.count("\n", self._at, end)
        command = self._text[self._at + 1 : end]
        self._at = end + 1
        return _output(command, quoted=True)

    def _array(self) -> Array:
        start, begin = self._line, self._at
        self._skip_brackets("(", ")")
        if self._depth >= DEPTH:
            return Array(())
        inner = _Lexer(self._text[begin + 1 : self._at - 1], start, self._depth + 1)
        return Array(tuple(token for token in inner.run() if isinstance(token, Word)))


def _output(command: str, quoted: bool) -> Part:
    """``$(hostname)`` is the shell's own ``$HOSTNAME``; the output of other commands is unknown."""
    return ParameterExpansion("HOSTNAME", quoted) if _HOSTNAME.fullmatch(command) else Opaque(OUTPUT)


def _append(parts: list[Part], more: list[Part]) -> None:
    """Add parts to a word, with neighbouring characters in one piece."""
    for part in more:
        if parts and isinstance(part, Literal) and isinstance(parts[-1], Literal):
            parts[-1] = Literal(parts[-1].text + part.text)
        else:
            parts.append(part)
