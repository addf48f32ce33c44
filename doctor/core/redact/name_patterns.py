"""Finds names of people and places in free text by their form: mail addresses, full host names, buckets, network
shares, hosts in URLs, user numbers.

A dotted word counts as a host name only if its last part is a top-level domain and it is not a Python name; public
domains (github.com, pytorch.org) are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from doctor.core.redact.networks import parse_address


class PlaceholderNumbers:
    """Numbers names by first appearance, from 1."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The number of ``name``; a new one if it has none."""
        return self._known.setdefault(name, len(self._known) + 1)

    def __contains__(self, name: str) -> bool:
        """Whether ``name`` has a number."""
        return name in self._known

    def names(self) -> tuple[str, ...]:
        """All numbered names, in the order of their numbers."""
        return tuple(self._known)

    def in_order(self, key: Callable[[str], Any]) -> PlaceholderNumbers:
        """The same names numbered by ``key``."""
        found = PlaceholderNumbers()
        for name in sorted(self._known, key=key):
            found.of(name)
        return found


BUCKETS = frozenset("s3 s3a s3n gs gcs az abfs abfss wasb wasbs oss cos r2 swift b2 obs tos".split())  # noqa: SIM905
"""Schemes whose authority is a bucket or a container."""
_LOCAL = frozenset({"file", "pkg", "env", "data", "memory", "shm", "docker"})
"""Schemes that name no host."""

_TOP = frozenset("com org net edu gov mil io ai cloud internal local lan corp intra intranet private cluster".split())  # noqa: SIM905
_COUNTRIES = frozenset(
    """
    ae ar at au be bg br ca ch cl cn cz de dk ee es eu fi fr gr hk hr hu ie il in ir is it jp kr lt lu lv mx my nl no nz
    pl pt ro rs ru sa se sg si sk th tr tw ua uk us vn za
    """.split()  # noqa: SIM905
)
"""Top-level domains. Country domains that are also source file extensions are omitted; the others need three parts."""
_PLAIN_TOP = frozenset({"com", "org", "edu", "gov", "mil"})
"""Top-level domains that are not attribute names in Python; the others need a third part, or a hyphen or digit in the
first."""
_MODULES = frozenset(
    """
    torch torchvision torchaudio lightning pytorch lightning_fabric numpy np scipy pandas nvidia nccl ray transformers
    deepspeed accelerate self cls model module modules models np jax os sys io at std c10 c10d aten triton megatron
    datasets tokenizers peft trl vllm wandb mlflow tensorboard horovod apex xformers flash_attn builtins collections
    """.split()  # noqa: SIM905
)
_PUBLIC = frozenset(
    """
    github.com githubusercontent.com gitlab.com pytorch.org nvidia.com huggingface.co hf.co python.org pypi.org
    pythonhosted.org lightning.ai kernel.org open-mpi.org openmpi.org schedmd.com wandb.ai arxiv.org readthedocs.io
    readthedocs.org docker.com docker.io ghcr.io nvcr.io quay.io conda.io anaconda.org anaconda.com google.com
    googleapis.com microsoft.com intel.com amd.com ubuntu.com debian.org redhat.com openssl.org ietf.org w3.org
    stackoverflow.com example.com example.org example.net kubernetes.io ray.io mpich.org gnu.org apache.org
    """.split()  # noqa: SIM905
)
"""Public domains: documentation, packages, models."""
PUBLIC_USERS = frozenset("root git nobody ubuntu ec2-user admin user none null daemon slurm munge".split())  # noqa: SIM905

_LABEL = r"[A-Za-z0-9][A-Za-z0-9-]{0,62}"
_FULL = rf"{_LABEL}(?:\.{_LABEL}){{1,8}}"

_FORMS = re.compile(
    rf"""
    (?P<scheme>(?<![\w.+-])[A-Za-z][\w+.-]{{0,20}})://(?P<authority>[^\s/?\#"'<>`)\],;|\\]{{1,255}})
      (?P<folders>/(?:[^/\s"'<>`)\],;|\\]{{1,255}}/){{1,30}})?
    | (?<![\w.+%@-])(?P<login>[\w.+%-]{{1,64}})@(?P<home>{_LABEL}(?:\.{_LABEL}){{0,8}})(?![\w@(-]|\.[A-Za-z0-9])
    | (?<![\w:\\])(?P<lead>\\\\(?:\\\\)?)(?P<server>{_LABEL}(?:\.{_LABEL}){{0,8}})(?P<gap>\\{{1,2}})
      (?P<share>[\w$.-]{{1,80}})
    | (?<![\w:/.])//(?P<filer>{_LABEL}(?:\.{_LABEL}){{0,8}})/(?P<export>[A-Za-z0-9][\w$.-]{{0,79}})
    | \b(?P<word>(?:e|s|fs|login)?[ug]id|user_?id|group_?id)(?P<sign>[=:]\ ?|\ )(?:(?P<named>[a-z_][\w.-]{{0,31}})\()?
      (?P<number>\d{{3,10}})(?!\w)(?:\((?P<user>[a-z_][\w.-]{{0,31}})\))?
    | \b(?P<who>user(?:name)?|logname|login|owner)(?P<is>=|:\ |\ ?[\"'`])
      (?P<person>[A-Za-z_][\w.-]{{1,31}})(?![\w(/:@-])
    | (?<![\w.@/$%{{-])(?P<full>{_FULL})(?![\w(@-]|\.[A-Za-z0-9])
    """,
    re.VERBOSE | re.IGNORECASE,
)


class NamePatterns:
    """Finds such names in text and replaces them. ``hosts``, ``domains`` and ``users`` are shared with the caller,
    which may know names from other sources."""

    def __init__(self, hosts: PlaceholderNumbers, domains: PlaceholderNumbers, users: PlaceholderNumbers) -> None:
        self.hosts = hosts
        self._domains = domains
        self._users = users
        self._servers = PlaceholderNumbers()
        self._buckets = PlaceholderNumbers()
        self._shares = PlaceholderNumbers()
        self._uids = PlaceholderNumbers()

    def learn(self, text: str) -> None:
        """Register users and domains, so that they are replaced wherever they occur."""
        for match in _FORMS.finditer(text):
            for user in (match["named"], match["user"], match["person"], match["login"]):
                if user and _is_person(user) and (user != match["login"] or _is_login(match)):
                    self._users.of(user)
            for name in (match["full"], match["home"], match["server"], match["filer"], _host_of(match)):
                if name and is_full_name(name, surely=name != match["full"]):
                    self._domains.of(name if name.count(".") == 1 else name.partition(".")[2])

    def write(self, text: str, folders: PlaceholderNumbers | None) -> str:
        """Return ``text`` with placeholders. ``folders``: numbers of folders, if folders in bucket URLs are replaced
        too."""
        return _FORMS.sub(lambda match: self._form(match, folders), text)

    def _form(self, match: re.Match[str], folders: PlaceholderNumbers | None) -> str:
        if match["scheme"]:
            return self._address(match, folders)
        if match["login"]:
            return f"{self._user(match['login'])}@{self._host(match['home'])}" if _is_login(match) else match[0]
        if match["server"]:
            return f"{match['lead']}{self._host(match['server'])}{match['gap']}share-{self._shares.of(match['share'])}"
        if match["filer"]:
            return f"//{self._host(match['filer'])}/share-{self._shares.of(match['export'])}"
        if match["number"]:
            return self._uid(match)
        if match["person"]:
            return f"{match['who']}{match['is']}{self._user(match['person'])}"
        return self._host(match["full"], surely=False)

    def _address(self, match: re.Match[str], folders: PlaceholderNumbers | None) -> str:
        scheme, authority, inner = match["scheme"], match["authority"], match["folders"] or ""
        if scheme.lower() in BUCKETS:
            if inner and folders is not None:
                inner = f"/path-{folders.of(inner[:-1])}/"
            return f"{scheme}://bucket-{self._buckets.of(authority)}{inner}"
        host = _host_of(match)
        if scheme.lower() in _LOCAL or not host:
            return match[0]
        before, _, after = authority.partition(host)
        return f"{scheme}://{before}{self._host(host)}{after}{inner}"

    def _uid(self, match: re.Match[str]) -> str:
        number = match["number"]
        shown = number if int(number) < 1000 else f"uid-{self._uids.of(number)}"
        named = f"{self._user(match['named'])}(" if match["named"] else ""
        user = f"({self._user(match['user'])})" if match["user"] else ""
        return f"{match['word']}{match['sign']}{named}{shown}{user}"

    def _user(self, name: str) -> str:
        return f"user-{self._users.of(name)}" if _is_person(name) else name

    def _host(self, name: str, *, surely: bool = True) -> str:
        """The placeholder of a host name. Hosts that are already known are left to
        :mod:`doctor.core.redact.placeholders`."""
        short, _, domain = name.partition(".")
        if not domain:
            common = name.lower() in _NO_SERVERS or name.isdigit() or name in self.hosts or _PLACEHOLDER.fullmatch(name)
            return name if common else f"server-{self._servers.of(name)}"
        if not is_full_name(name, surely=surely):
            return name
        if short in self.hosts:
            return f"host-{self.hosts.of(short)}.domain-{self._domains.of(domain)}"
        if name.count(".") == 1:
            return f"domain-{self._domains.of(name)}"
        return f"server-{self._servers.of(name)}.domain-{self._domains.of(domain)}"


_PLACEHOLDER = re.compile(r"(?:host|hosts|server|bucket|user|domain|path|share)-[0-9]+")
_NO_SERVERS = frozenset("localhost proxy host server master node worker head cluster store registry".split())  # noqa: SIM905


def is_full_name(name: str, *, surely: bool = False) -> bool:
    """Whether a dotted word is a full host name or a domain that identifies somebody. ``surely``: at this position it
    can't be anything else."""
    labels = name.lower().split(".")
    if len(labels) < 2 or not re.search("[a-z]", labels[-1]) or ".".join(labels[-2:]) in _PUBLIC:
        return False
    if parse_address(name) or any(_PLACEHOLDER.fullmatch(label) for label in labels):
        return False
    if surely:
        return True
    if labels[0] in _MODULES or not (labels[-1] in _TOP or labels[-1] in _COUNTRIES):
        return False
    return labels[-1] in _PLAIN_TOP or len(labels) > 2 or bool(re.search("[0-9-]", labels[0]))


def _host_of(match: re.Match[str]) -> str:
    """The host in the authority of a URL; empty for an IP address or a bucket."""
    if not match["scheme"] or match["scheme"].lower() in BUCKETS:
        return ""
    host = match["authority"].rpartition("@")[2].partition(":")[0]
    return host if re.fullmatch(rf"{_LABEL}(?:\.{_LABEL}){{0,8}}", host) and not parse_address(host) else ""


def _is_login(match: re.Match[str]) -> bool:
    """Accept ``alice@acme.com`` and ``alice@node1``, but not ``git@github.com`` or ``train:2.1@sha256``."""
    return _is_person(match["login"]) and not re.match(r"sha\d", match["home"])


def _is_person(name: str) -> bool:
    return name.lower() not in PUBLIC_USERS and bool(re.search("[A-Za-z]", name)) and not _PLACEHOLDER.fullmatch(name)
