"""Masks variables and command lines, whose names and options indicate what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from doctor.core.facts import Variable
from doctor.core.masking.secret_names import is_secret_name
from doctor.core.masking.text_masking import REDACTED, mask_text
from doctor.core.text import lazy_compile

LONGEST = 4096
"""Maximum length of a value. Longer values are lists of hosts or whole documents."""


def readable(text: str) -> str:
    """Return ``text`` in an encodable form: bytes that are not UTF-8, which Python keeps as lone surrogates (PEP 383),
    become U+FFFD; long texts are truncated with a note."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if not text.isascii() else text
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}… ({len(text)} characters)"


def mask_value(name: str, value: str) -> str:
    """The masked value of the variable ``name``. An empty value stays empty: it differs from an unset one."""
    if value and is_secret_name(name):
        return value if value == REDACTED else REDACTED
    return readable(mask_text(value))


def mask_variables(environ: Mapping[str, str], wanted: Callable[[str], bool]) -> tuple[Variable, ...]:
    """The ``wanted`` variables of ``environ`` by name, secrets masked."""
    return tuple(Variable(readable(name), mask_value(name, environ[name])) for name in sorted(environ) if wanted(name))


_SHORT_OPTION = lazy_compile(r"-[pP](?!ort|\d{1,5}$)[^\s=-].*")
"""``-pX``, as mysql and sshpass take it; a port may have the same form."""


def mask_command(arguments: Sequence[str], limit: int = 200) -> str:
    """A command line of at most ``limit`` characters; the values in ``--token X``, ``--token=X`` and ``TOKEN=X`` are
    masked."""
    shown = readable(mask_text(" ".join(_without_values(arguments))))
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def _without_values(arguments: Sequence[str]) -> Iterable[str]:
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            yield REDACTED
        elif equals and is_secret_name(name):
            yield f"{name}={REDACTED}"
        elif _SHORT_OPTION.fullmatch(argument):
            yield f"{argument[:2]}{REDACTED}"
        else:
            yield mask_text(argument)
        hide_next = argument.startswith("-") and not equals and is_secret_name(argument)
