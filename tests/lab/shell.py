"""Whether commands that texts recommend can be pasted into a shell."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from doctor.report.formatting import fix_parts

_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"<[A-Za-z][A-Za-z _-]*>|(?<!\S)\.\.\.(?!\S)|…")
"""A placeholder that a shell takes as a redirection or an argument; texts have names in capitals instead."""


@cache
def shell_fault(script: str) -> str:
    """Why a shell would not take the commands as they are meant; empty if it would."""
    if placeholder := _PLACEHOLDER.search(_COMMENT.sub("", script)):
        return f"{placeholder[0]!r} is a placeholder: write a name in capitals"
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60, check=False)
    return parsed.stderr.strip()


def fault_of_fix(fix: str) -> str:
    """The fault of the block of commands that a finding recommends; empty if there is none."""
    return shell_fault("\n".join(commands)) if (commands := fix_parts(fix)[1]) else ""
