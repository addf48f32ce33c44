"""Programs that take a secret after a short option or as a bare word, without a name that indicates it.

From the manual pages of the programs. Each pattern begins with the program's name and looks at a bounded stretch.
"""

from __future__ import annotations

import re

from doctor.core.text import lazy_compile

_BETWEEN = r"[^|;&\n]{0,120}?"
_VALUE = r"\s{0,3}[\"']?(?P<secret>[^\s\"']{1,256})"
_LOGIN_VALUE = r"[ =]?[\"']?[^\s:\"']{0,64}:(?P<secret>[^\s\"']{1,256})"

PROGRAMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (cue, lazy_compile(pattern))
    for cue, pattern in (
        ("curl", rf"\bcurl\b{_BETWEEN}\s(?:-u|-U|--user|--proxy-user){_LOGIN_VALUE}"),
        ("-u ", r"(?<![\w-])-u [\"']?[A-Za-z][\w.@-]{0,64}:(?!\d{1,5}(?!\S))(?P<secret>[^\s\"'/]{1,256})"),
        ("mysql", rf"\bmysql\w{{0,12}}\b{_BETWEEN}\s-p(?P<secret>[^\s\"']{{1,256}})"),
        ("mariadb", rf"\bmariadb[\w-]{{0,12}}{_BETWEEN}\s-p(?P<secret>[^\s\"']{{1,256}})"),
        ("sshpass", rf"\bsshpass\s{{1,3}}(?:-\w\s{{1,3}}){{0,3}}-p{_VALUE}"),
        ("redis-cli", rf"\bredis-cli\b{_BETWEEN}\s-a{_VALUE}"),
        ("docker login", rf"\bdocker login\b{_BETWEEN}\s-p{_VALUE}"),
        ("ldap", rf"\bldap\w{{1,12}}\b{_BETWEEN}\s-w{_VALUE}"),
        ("ipmitool", rf"\bipmitool\b{_BETWEEN}\s-P{_VALUE}"),
        ("smbclient", rf"\bsmbclient\b{_BETWEEN}\s-U\s{{0,3}}[\"']?[^\s%]{{1,64}}%(?P<secret>[^\s\"']{{1,256}})"),
        (
            "wandb",
            r"\bwandb[\"' ,]{1,4}login[\"' ,]{1,4}(?:--?[\w=-]{1,40}[\"' ,]{1,4}){0,4}"
            r"(?P<secret>(?!-)[^\s\"',]{8,256})",
        ),
        ("pass:", r"-pass(?:in|out)?\s{1,3}pass:(?P<secret>[^\s\"']{1,256})"),
        ("password ", r"\blogin\s{1,3}[^\s]{1,128}\s{1,3}password\s{1,3}(?P<secret>[^\s]{1,256})"),  # .netrc
        (
            "configure set",
            r"\bconfigure set\s{1,3}[\w.]{0,60}?(?:secret|token|key)[\w.]{0,40}\s{1,3}(?P<secret>[^\s\"']{1,256})",
        ),
    )
)
"""Lower-case text that such a command contains, and its pattern with the group ``secret``."""
