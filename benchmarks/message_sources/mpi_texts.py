"""Messages in the files that MPI implementations keep apart from their code: help texts and error names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from message_sources.c_calls import conversions_text

LEAST_LETTERS = 20
"""Letters of a line that identifies its text."""
_FAILURE = re.compile(
    r"(?i)fail|error|unable|abort|could not|cannot|can't|invalid|terminated|lost|conflict|not found|no active|"
    r"insufficient|exceed|unexpected|not supported|refused|unrecognized|timed out|not enough|died|exited|warning"
)
_OPTIONS = re.compile(r"(?m)^\s*(?:Syntax|Usage|usage):|default(?:s)? (?:to|is)\b|`--|\[default: ")


def help_texts(source: str) -> Iterator[str]:
    """Yield the first telling line of every topic of a help file of Open MPI or PRRTE that reports a failure."""
    for topic in re.split(r"^\[[^\]\n]+\]\s*$", source, flags=re.MULTILINE)[1:]:
        body = "\n".join(line for line in topic.splitlines() if not line.startswith("#"))
        if not _FAILURE.search(body) or _OPTIONS.search(body):
            continue
        lines = (conversions_text(line.strip()) for line in body.splitlines())
        telling = next((line for line in lines if sum(map(str.isalpha, line)) >= LEAST_LETTERS), "")
        if re.match(r"[A-Z%*]", telling):
            yield telling


def error_names(source: str) -> Iterator[str]:
    """Yield the messages of a file of error names of MPICH (``**name:message``)."""
    for line in source.splitlines():
        if found := re.match(r"\*\*[^:]+:(.+)", line):
            yield conversions_text(found[1].strip())
