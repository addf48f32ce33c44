"""Masks the secrets in one text: a log line, an exception message, a value, a command.

Every search begins at a literal and examines a bounded stretch around it, so the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import chain

from doctor.core.masking.program_options import PROGRAMS
from doctor.core.masking.secret_names import SecretConfidence, secrecy
from doctor.core.masking.token_formats import TOKEN_FORMATS
from doctor.core.text import lazy_compile

REDACTED = "<redacted>"
"""Replaces a secret."""

_SHORT = 400
"""Maximum length of a text whose result is cached: processes repeat short texts."""


def mask_text(text: str) -> str:
    """Return ``text`` without tokens of known form, credentials in URLs and headers, and values that follow the name
    of a secret (``HF_TOKEN=…``, ``"api_key": "…"``, ``--password …``). The same object if there is no secret."""
    if _HEXADECIMAL.fullmatch(text) and not any(cue in text.lower() for cue in _HEXADECIMAL_CUES):
        return text
    masked = _remembered(text) if len(text) <= _SHORT else _masked(text)
    return text if masked == text else masked


def _masked(text: str) -> str:
    plain = text.lower()
    for cues, mask in _RULES:
        for cue in cues:
            if cue in plain:
                text = mask(text)
                break
    if _LONG_WORD.search(text):
        for shape in TOKEN_FORMATS:
            if shape.cue in plain:
                text = shape.pattern.sub(_without_secret, text)
    return text


_LONG_WORD = lazy_compile(r"[A-Za-z0-9_-]{16}|-----")
"""Every token form contains one of these."""


_remembered = lru_cache(maxsize=8192)(_masked)


def _without_secret(match: re.Match[str]) -> str:
    whole = match[0]
    if "secret" not in match.re.groupindex:
        return REDACTED
    start, end = match.span("secret")
    return whole[: start - match.start()] + REDACTED + whole[end - match.start() :]


# Addresses: ``scheme://user:password@host`` (RFC 3986, 3.2.1), also unescaped.

_AUTHORITY = lazy_compile(r"([a-z][a-z0-9+.-]{0,20})?://([^\s/?#\"'<>`]{0,512})", re.IGNORECASE)
_UNESCAPED = lazy_compile(
    r"(?<=://)[^\s:@/\[]{0,64}:(?!//)(?!\d{1,5}(?![^\s/?#,;\"')\]]))(?:[^\s\"'<>`@]| (?! )){1,128}@(?=[\w\[.-])"
)
"""``user:pass/word@host``, ``user:pass word@host``; text that could be a port does not begin a password."""
_CONTAINERS = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Schemes of Azure storage: a container precedes the ``@``."""
_PUBLIC = frozenset({"git", "root", "hdfs", "hadoop", "ubuntu", "ec2-user", "anonymous"})


def _mask_addresses(text: str) -> str:
    parts, last, at = [], 0, 0
    while found := _AUTHORITY.search(text, at):
        start = found.start(2)
        end = _end_of_userinfo(text, start, found[2], (found[1] or "").lower())
        if end:
            parts += [text[last:start], REDACTED]
            last = end
        at = max(found.end(), end)
    return "".join([*parts, text[last:]])


def _end_of_userinfo(text: str, start: int, authority: str, scheme: str) -> int:
    """The index of the ``@`` after the userinfo of a URL; 0 if there is none or the user name is public."""
    info, sign, _ = authority.rpartition("@")
    if sign:
        kept = info in _PUBLIC or (scheme in _CONTAINERS and ":" not in info) or info == REDACTED
        return 0 if kept else start + len(info)
    unescaped = _UNESCAPED.match(text, start, start + 256)
    return unescaped.end() - 1 if unescaped else 0


_LOGIN = lazy_compile(
    r"(?<![\w.+%-])(?!mailto:|sha256:|sha512:)[\w.+%-]{1,64}:(?!\d{1,5}@)(?P<secret>[^\s:@/\"'<>,;()\[\]]{1,128})"
    r"@(?=[A-Za-z0-9\[])(?!sha\d)"
)
"""``user:password@host`` without a scheme. A port is not a password, nor is an image tag before its digest."""


# Headers (RFC 9110, 11.6.2; RFC 6265).

_AUTHORIZATION = lazy_compile(
    r"\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:bearer|basic|token|negotiate|apikey|key)\s{1,3})?"
    r"(?P<secret>(?:digest|aws4-hmac-sha256|oauth|signature)\s[^\"'\r\n]{1,2000}|[^\s\"',;]{1,4096})",
    re.IGNORECASE,
)
_BEARER = lazy_compile(r"\bbearer[ :]{1,3}[\"']?(?P<secret>[\w.~+/=-]{6,4096})", re.IGNORECASE)
_BASIC = lazy_compile(r"\bbasic (?P<secret>(?=[a-z]{0,40}[A-Z0-9+/=])[A-Za-z0-9+/]{6,4096}={0,2})")
_COOKIE = lazy_compile(
    r"\bcookie[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?P<secret>[\w.$-]{1,80}=[^\"'\r\n]{1,4000})", re.IGNORECASE
)


def _mask_headers(text: str) -> str:
    text = _AUTHORIZATION.sub(_without_secret, text)
    text = _COOKIE.sub(_without_secret, text)
    text = _BEARER.sub(lambda match: _without_secret(match) if looks_random(match["secret"]) else match[0], text)
    return _BASIC.sub(_without_secret, text)


# Names with values: assignments, JSON, YAML, query strings, options.

_WORDS = (
    "pass", "pwd", "pw", "secret", "token", "cred", "key", "auth", "sig", "jwt", "_pat", "dsn", "bearer", "cookie",
    "private", "access", "licen",
)  # fmt: skip
"""Text that every name of :mod:`doctor.core.masking.secret_names` contains."""

_NAMED = lazy_compile(
    r"(?<![\w.-])(?P<name>[\w.-]{2,100})(?![\w.-])\\?[\"'`]?\]?"
    r"(?P<sign>\s{0,3}(?::=|=>|==?|%3[Dd]|(?<!:):(?!:)|\\u003d)\s{0,3})"
    r"(?P<open>\\?[\"'`]|b[\"'])?(?=[^\s,;)}\]])"
)
_UNQUOTED = lazy_compile(r"[^\s\"'`<>|]{1,4096}")
_ENDS_EARLY = lazy_compile(r"[&,;)\]}]")
_NOTHING = lazy_compile(
    r"(?:none|null|nil|true|false|yes|no|on|off|unset|empty|required|missing|\*+|x{3,}|\.{3}|<[\w -]{1,40}>"
    r"|\$\{?\w+\}?)(?![\w])",
    re.IGNORECASE,
)
"""Values that are not secrets."""
_COUNT = lazy_compile(r"-?[\d.]{1,6}")


def _mask_named(text: str) -> str:
    parts: list[str] = []
    last = at = 0
    while found := _NAMED.search(text, at):
        at = found.end("sign")
        end = _end_of_secret(text, found)
        if end:
            parts += [text[last : found.end()], REDACTED]
            last = at = end
    return "".join([*parts, text[last:]])


def _end_of_secret(text: str, found: re.Match[str]) -> int:
    """The end of the value after a name; 0 if there is nothing to mask."""
    start, how = found.end(), _secrecy_in(text, found)
    if how is SecretConfidence.NO or text.startswith(REDACTED, start):
        return 0
    end = _end_of_value(text, start, found["open"] or "", sure=how is SecretConfidence.SURE)
    value = text[start:end]
    if not value or _NOTHING.fullmatch(value) or _is_something_else(found, value):
        return 0
    return end if how is SecretConfidence.SURE or looks_random(value) else 0


def _is_something_else(found: re.Match[str], value: str) -> bool:
    """Whether it is a token count, a working directory or a store key."""
    name = found["name"].lower().strip(".-")
    if name == "pwd":
        return value.startswith("/")
    if name in ("key", "keys"):
        return "/" in value or found["sign"].strip() == ":"
    return bool(_COUNT.fullmatch(value)) and not any(word in name for word in ("passw", "passphr", "pwd", "secret"))


_ELEMENT = lazy_compile(r"<(?P<name>[\w.:-]{2,60})>(?P<secret>[^<>\s][^<>]{0,512})</")


def _mask_elements(text: str) -> str:
    """Mask ``<password>x</password>``."""

    def masked(match: re.Match[str]) -> str:
        return _without_secret(match) if secrecy(match["name"]) is SecretConfidence.SURE else match[0]

    return _ELEMENT.sub(masked, text)


def _secrecy_in(text: str, found: re.Match[str]) -> SecretConfidence:
    """How reliably the name indicates a secret here: ``sig`` is a signal in a log and a signature in a query;
    ``pass:`` begins a line about a test."""
    name = found["name"].strip(".-")
    short = name.lower()
    if short in ("sig", "key", "auth") and text[max(0, found.start() - 1) : found.start()] in ("?", "&"):
        return SecretConfidence.SURE
    if short == "pass" and found["sign"].strip() == ":" and not found["open"]:
        return SecretConfidence.MAYBE
    return secrecy(name)


def _end_of_value(text: str, start: int, quote: str, *, sure: bool) -> int:
    if quote:
        closing = _closing(text, start, quote.lstrip("b") if quote.startswith("b") else quote)
        if closing >= 0:
            return closing
    unquoted = _UNQUOTED.match(text, start)
    end = unquoted.end() if unquoted else start
    in_query = "?" in text[max(0, start - 300) : start] or "&" in text[max(0, start - 100) : start]
    if sure and not in_query:  # in a query, other parameters follow after ``&``
        return end - len(text[start:end]) + len(text[start:end].rstrip(",;)]}"))
    early = _ENDS_EARLY.search(text, start, end)
    return early.start() if early else end


def _closing(text: str, start: int, quote: str) -> int:
    """The index of the closing quote; a backslash escapes the next character, unless it is part of the quote."""
    at = start
    while (at := text.find(quote, at, start + 8192)) >= 0:
        slashes = len(text[start:at]) - len(text[start:at].rstrip("\\"))
        if slashes % 2 == 0 or quote.startswith("\\"):
            return at
        at += 1
    return -1


_OPTION = lazy_compile(
    r"(?<![\w-])--?(?P<name>[A-Za-z][\w-]{1,40})[ \t]{1,3}(?P<quote>[\"']?)(?P<secret>[^\s\"'-][^\s\"']{0,512})"
)


def _mask_options(text: str) -> str:
    """Mask the value in ``--password x``, for options with such names."""

    def masked(match: re.Match[str]) -> str:
        is_secret = secrecy(match["name"]) and not _NOTHING.fullmatch(match["secret"])
        return _without_secret(match) if is_secret else match[0]

    return _OPTION.sub(masked, text)


def _mask_programs(text: str) -> str:
    plain = text.lower()
    for cue, pattern in PROGRAMS:
        if cue in plain:
            text = pattern.sub(_without_secret, text)
    return text


_PROSE = lazy_compile(
    r"\b(?:token|password|passwd|passphrase|secret|api[ _-]?key|credentials?)"
    r"(?: (?:is|was|of|used|value|provided|sent))?:? (?P<quote>[\"'`]?)(?P<secret>[^\s\"'`,;)]{4,512})",
    re.IGNORECASE,
)


def _mask_prose(text: str) -> str:
    """Mask ``invalid token 0f3a…``, ``password 'hunter2'``: a quoted word, or one that looks random."""

    def masked(match: re.Match[str]) -> str:
        secret = match["secret"].rstrip(".:")
        shown = looks_random(secret) or (match["quote"] and match[0][:4].lower() in ("pass", "secr"))
        if not shown or secret.startswith(("--", REDACTED[:5], "/")):
            return match[0]
        return f"{match[0][: match.start('secret') - match.start()]}{REDACTED}{match['secret'][len(secret) :]}"

    return _PROSE.sub(masked, text)


_RUN = lazy_compile(r"[A-Za-z0-9]{10,}")


def looks_random(text: str) -> bool:
    """Whether a word looks generated: it has a long run of letters mixed with digits, or a very long run; words,
    numbers, paths and memory addresses have none."""
    if text.startswith(("/", "./", "~", "<", "$")):
        return False
    runs = (run[0] for run in _RUN.finditer(text) if not run[0].startswith(("0x", "0X")))
    letters = (run for run in runs if any(map(str.isalpha, run)))
    return any(len(run) >= 24 or any(map(str.isdigit, run)) for run in letters)


_RULES: tuple[tuple[tuple[str, ...], Callable[[str], str]], ...] = (
    (("://",), _mask_addresses),
    (("@",), partial(_LOGIN.sub, _without_secret)),
    (("authorization", "cookie", "bearer ", "bearer:", "basic "), _mask_headers),
    ((" -",), _mask_options),
    (tuple(cue for cue, _ in PROGRAMS), _mask_programs),
    (_WORDS, _mask_named),
    (("</",), _mask_elements),
    (("token", "pass", "secret", "api", "credential"), _mask_prose),
)

_HEXADECIMAL = lazy_compile(r"(?:GPU-)?[0-9A-Fa-f:.-]*")
"""Numbers, addresses and UUIDs: most of the distinct texts of a large job."""
_HEXADECIMAL_CUES = tuple(
    cue
    for cue in (*chain.from_iterable(cues for cues, _ in _RULES), *(shape.cue for shape in TOKEN_FORMATS))
    if _HEXADECIMAL.fullmatch(cue)
)
