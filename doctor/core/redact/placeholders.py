"""Replaces whatever identifies somebody in a capture: users, hosts, addresses, hardware.

Structure is preserved: equal names get equal placeholders everywhere, also inside paths, commands and node lists, and
addresses keep their networks (:mod:`doctor.core.redact.networks`). Placeholders are numbered by first appearance, so
they can't be reversed from the document. Keys are never changed, and values only if they are not part of our own
vocabulary.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from ipaddress import IPv6Address
from typing import Any, NamedTuple

from doctor.core.job import UNKNOWN_HOST
from doctor.core.masking import mask_text, mask_value
from doctor.core.redact.name_patterns import NamePatterns, PlaceholderNumbers
from doctor.core.redact.networks import Address, AddressBook, Network, parse_address, parse_network
from doctor.core.redact.node_lists import NodeLists, folded
from doctor.core.text import natural_key
from doctor.knowledge.launcher_index import JOB_NAMES
from doctor.knowledge.launchers import INTERACTIVE_JOBS

UNTOUCHED = frozenset(
    """
    schema tool created kind state physical_state link_layer launcher lack layer role family outcome purpose
    operation backend dtype status severity verdict origin version versions python implementation specifier
    requires driver_version cuda_version nvml_version kernel_driver forward_compatibility kernel architecture
    distribution container hypervisor firmware board bus_id pci device pci_gpus compute_capability compute_mode
    clock_reasons cpu_governor cpu_driver symbols architectures ancestors modules accelerator strategy
    running_together identity peer_memory field id
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Fields with terms and versions of the hardware vendor, which can't hold a personal name."""

PLAIN_NAMES = frozenset(["name", "interface", "parent", "interfaces", "devices", "driver", "package", "process"])
"""Fields with names of interfaces, devices and packages: only hardware addresses are searched in them."""

HOST_VALUES = frozenset({"host", "hostname", "node", "peer", "remote", "addr", "local_host", "remote_host"})
"""Fields of log messages that hold hosts, lists of hosts or their addresses."""

HOST_FIELDS = frozenset(
    tuple(field.split("."))
    for field in """
    hosts.name host.hostname host.fqdn names.name reverse.name samples.peer attempts.peer readings.writer
    clock.reference master.address slurm.node_list findings.hosts last_seen.host events.host marks.host shifts.host
    evidence.hosts files.hosts
    """.split()  # noqa: SIM905 - twenty lines otherwise
) | {("values", name) for name in HOST_VALUES}
"""Fields that hold a host name and nothing else, as (parent, field)."""

_HOST_VARIABLE = re.compile(r"(?:HOST(?:NAME|S)?|NODENAME|NODELIST|NODE_LIST|_ADDR|ENDPOINT|_IP|_IPADDR)$")
_NO_HOST = frozenset({"", "SLURM_TOPOLOGY_ADDR"})
_USER_VARIABLE = re.compile(r"(?:^|_)(?:USER|LOGNAME|USERNAME)$")

LOOPBACK = {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}

COMMON = frozenset(
    """
    node nodes host hosts gpu gpus cpu cpus rank ranks master worker workers slave head login compute main
    server client root user users home data scratch work tmp temp local shared default system file files
    environment env train training test tests model models run runs job jobs cuda nvidia nccl torch python conda
    docker slurm ray mpi linux ubuntu debian admin guest public opt usr var lib bin src cache log logs name none
    true false auto lightning cluster container pod service network net ethernet infiniband shell bash ec2-user
    nobody
    """.split()  # noqa: SIM905 - a hundred lines otherwise
)
"""Words that usually mean something else: as a name they are replaced only in fields that hold names."""

_DEVICE_LIKE = re.compile(
    r"(?:eth|ib|bond|veth|docker|virbr|br|lo|wlan|tun|tap|cni|nvidia|cuda)[0-9]*|en[ospx][0-9a-z]+"
    r"|(?:mlx[0-9]|hfi[0-9]|efa|bnxt_re|irdma|rocep?[0-9a-z]*)_?[0-9]+|sm_?[0-9]+[af]?"
)
"""Host names that look like a device name are replaced only in fields that hold names."""

_HOMES = re.compile(r"/(?:home|homes|Users)/(?P<user>[^/\s:;,'\"<>()\[\]=]+)")

_HARD = re.compile(
    r"""
    (?<![0-9A-Za-z])(?:
      (?P<uuid>(?P<prefix>(?:GPU-|MIG-GPU-|MIG-)?)
        [0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})
    | (?P<part>(?:GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]*)
    | enx(?P<enx>[0-9a-f]{12})
    | (?P<mac>[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}(?:(?::[0-9a-fA-F]{2}){14}|(?::[0-9a-fA-F]{2}){2})?
        (?![:-]?[0-9a-fA-F]))
    | (?P<guid>[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3}(?![:0-9a-fA-F]))
    )(?![0-9A-Za-z])
    | (?<![0-9A-Za-z.])(?<![A-Za-z]-)(?P<four>\d{1,3}(?:\.\d{1,3}){3})(?P<length>/\d{1,3}(?![\w.]))?
      (?![0-9A-Za-z]|\.[0-9])
    | (?<![\w.:])(?P<six>[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:\d{1,3}(?:\.\d{1,3}){3})?)
      (?P<width>/\d{1,3}(?![\w.]))?(?![\w:])
    | (?<![\w.-])(?P<nodes>[A-Za-z][\w.-]*\[[0-9][0-9,-]*\][\w-]*)
    """,
    re.VERBOSE,
)
"""Identifiers found by their form: UUIDs and their prefixes, hardware addresses, IP addresses, SLURM node lists."""

_FOLDERS = re.compile(
    r"(?<![\w.~$}/:-])/(?:[^/\s:;,'\"`<>()\[\]{}=|*?]+/)+|(?<=:)/(?!/)(?:[^/\s:;,'\"`<>()\[\]{}=|*?]+/)+"
)
"""Absolute folders: up to the last slash."""
_OF_THE_SYSTEM = re.compile(r"/(?:usr|lib|lib64|bin|sbin|etc|proc|sys|dev|run|boot|var/log|var/lib)/")
_PACKAGES = re.compile(r"/(?:(?:site|dist)-packages|lib/python\d[\d.]*|lib64/python\d[\d.]*)/")

_ATOM = re.compile(r"[A-Za-z0-9]+")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def redact(document: dict[str, Any], *, paths: bool = False) -> dict[str, Any]:
    """Return a copy of a capture or report, as builtins, with placeholders for users, home folders, hosts, addresses
    and hardware identifiers. With ``paths``, folders that belong to neither the system nor a package are replaced too:
    logs are full of project names, and no check needs them. Equal documents give equal results; the original values
    can't be recovered."""
    people = _NamedEntities()
    people.networks.update(dict.fromkeys(filter(None, _interface_networks(document))))
    _rewrite(document, people.learn)
    people.settle()
    redacted: dict[str, Any] = _rewrite(document, _RedactionWriter(people, paths=paths).rewrite)
    return redacted


class _StringSite(NamedTuple):
    """A string of the document: its location, and the name of the variable if it is the value of one."""

    parent: str
    key: str
    text: str
    variable: str = ""

    @property
    def is_host(self) -> bool:
        is_named = self.variable not in _NO_HOST and bool(_HOST_VARIABLE.search(self.variable))
        return (is_named or (self.parent, self.key) in HOST_FIELDS) and self.text != UNKNOWN_HOST

    @property
    def is_user(self) -> bool:
        return bool(self.variable and _USER_VARIABLE.search(self.variable))


def _rewrite(value: Any, write: Callable[[_StringSite], str], parent: str = "", key: str = "") -> Any:
    """A copy of ``value`` with the result of ``write`` for every string, in document order."""
    if isinstance(value, str):
        return write(_StringSite(parent, key, value))
    if isinstance(value, dict):
        is_variable = isinstance(value.get("name"), str) and isinstance(value.get("value"), str)
        return {
            name: write(_StringSite(key, name, inner, value["name"]))
            if is_variable and name == "value"
            else _rewrite(inner, write, key, name)
            for name, inner in value.items()
        }
    if not isinstance(value, (list, tuple)):
        return value
    if key == "values" and len(value) == 2 and all(isinstance(part, str) for part in value):
        # A field of a log message with its name (:attr:`doctor.core.facts.Event.values`).
        name, text = value
        return [name, write(_StringSite("values", name if name in HOST_VALUES else "values", text))]
    return [_rewrite(inner, write, parent, key) for inner in value]


def _interface_networks(value: object) -> Iterator[Network | None]:
    """The network of every address that has a prefix length."""
    if isinstance(value, dict):
        address, length = value.get("address"), value.get("prefix_length")
        if isinstance(address, str) and isinstance(length, int):
            yield parse_network(address, length)
        value = list(value.values())
    for inner in value if isinstance(value, (list, tuple)) else ():
        yield from _interface_networks(inner)


class _NamedEntities:
    def __init__(self) -> None:
        self.hosts = PlaceholderNumbers()
        self.domains = PlaceholderNumbers()
        self.users = PlaceholderNumbers()
        self.full_names: dict[str, tuple[str, str]] = {}
        self.identifiers = {"machine_id": PlaceholderNumbers(), "boot_id": PlaceholderNumbers()}
        self.uuids = PlaceholderNumbers()
        self.networks: dict[Network, None] = {}
        self._addresses: dict[Address, None] = {}
        self.lists = NodeLists()
        self.forms = NamePatterns(self.hosts, self.domains, self.users)
        self._maybe_lists: dict[str, None] = {}
        self._learnt: set[_StringSite] = set()
        self.book = AddressBook((), ())

    def learn(self, site: _StringSite) -> str:
        """Register the names in ``site``, and return its text."""
        if site not in self._learnt:
            self._learnt.add(site)
            self._learn(site)
        return site.text

    def _learn(self, site: _StringSite) -> None:
        if site.key in self.identifiers:
            self.identifiers[site.key].of(site.text)
        elif site.is_host:
            for name in _host_names(site.text, self.lists):
                self._learn_host(name)
        elif site.is_user and _TOKEN.fullmatch(site.text) and site.text != "root":
            self.users.of(site.text)
        if site.key not in UNTOUCHED:
            for match in _HOMES.finditer(site.text):
                if match["user"] != "root":
                    self.users.of(match["user"])
            self._learn_forms(site)
            if site.key not in PLAIN_NAMES or site.parent == "processes":
                self.forms.learn(site.text)

    def _learn_host(self, name: str) -> None:
        if name.lower() in LOOPBACK or parse_address(name) is not None:
            return
        short, _, domain = name.partition(".")
        self.hosts.of(short)
        if domain:
            self.domains.of(domain)
            self.full_names[name] = (short, domain)

    def settle(self) -> None:
        """Number the hosts and lay out the addresses, after all names are registered."""
        for text in self._maybe_lists:
            names = self.lists.names(text)
            if any(name in self.hosts for name in names):
                for name in names:
                    self._learn_host(name)
        # Neighbors in a rack have consecutive names, from which checks locate a slow boundary.
        self.hosts = self.hosts.in_order(lambda name: (natural_key(name), name))
        self.forms.hosts = self.hosts
        self.book = AddressBook(self.networks, self._addresses)

    def _learn_forms(self, site: _StringSite) -> None:
        for match in _HARD.finditer(site.text):
            if match["uuid"]:
                self.uuids.of(match["uuid"][len(match["prefix"]) :].lower())
            elif match["nodes"]:
                self._maybe_lists.setdefault(match["nodes"])
            elif literal := match["four"] or match["six"]:
                self._learn_address(literal, match["length"] or match["width"])

    def _learn_address(self, literal: str, length: str | None) -> None:
        address = _unmapped(parse_address(literal))
        if address is None:
            return
        network = parse_network(literal, int(length[1:])) if length else None
        if network is not None:
            self.networks.setdefault(network)
        if network is None or address != network.network_address:
            self._addresses.setdefault(address)


class _RedactionWriter:
    def __init__(self, people: _NamedEntities, *, paths: bool = False) -> None:
        self._people = people
        self._folders = PlaceholderNumbers() if paths else None
        self._jobs = PlaceholderNumbers()
        self._lists: dict[str, str] = {}
        self._long_lists = PlaceholderNumbers()
        self._macs = PlaceholderNumbers()
        self._guids = PlaceholderNumbers()
        self._written: dict[_StringSite, str] = {}
        self._uuids = sorted(people.uuids.names())
        self._names = dict(_placeholders(people))
        self._sizes = sorted({len(_ATOM.findall(name)) for name in self._names}, reverse=True)

    def rewrite(self, site: _StringSite) -> str:
        if site not in self._written:
            text = self._write(site)
            self._written[site] = mask_value(site.variable, text) if site.variable else text
        return self._written[site]

    def _write(self, site: _StringSite) -> str:
        people, text = self._people, site.text
        if site.key in people.identifiers:
            return f"{site.key.partition('_')[0]}-{people.identifiers[site.key].of(text)}"
        if site.is_host:
            return self._forms(people.forms.write(text, None), typed=True)
        if site.is_user and text in people.users:
            return f"user-{people.users.of(text)}"
        if site.variable in JOB_NAMES and text not in INTERACTIVE_JOBS:
            return f"job-{self._jobs.of(text)}"
        if site.key in UNTOUCHED or (site.parent, site.key) == ("links", "path"):
            return text
        is_free = not site.is_user and (site.key not in PLAIN_NAMES or site.parent == "processes")
        text = mask_text(text)
        if is_free:
            text = _FOLDERS.sub(self._folder, people.forms.write(text, self._folders))
        return self._forms(text, typed=False, words=is_free)

    def _folder(self, match: re.Match[str]) -> str:
        """A user-chosen folder as a number; paths inside a package are kept."""
        folder = match[0]
        if self._folders is None or _OF_THE_SYSTEM.match(folder):
            return folder
        package = _PACKAGES.search(folder)
        own, rest = (folder[: package.start()], folder[package.start() :]) if package else (folder[:-1], "/")
        return f"/path-{self._folders.of(own)}{rest}"

    def _forms(self, text: str, *, typed: bool, words: bool = True) -> str:
        parts: list[str] = []
        last = 0
        for match in _HARD.finditer(text):
            parts += [text[last : match.start()], self._form(match)]
            last = match.end()
        parts.append(text[last:])
        if words:
            parts[::2] = [self._words(part, text, typed=typed) for part in parts[::2]]
        return "".join(parts)

    def _form(self, match: re.Match[str]) -> str:
        if match["uuid"]:
            return match["prefix"] + _uuid(self._people.uuids.of(match["uuid"][len(match["prefix"]) :].lower()))
        if match["part"]:
            return self._beginning(match["part"])
        if match["enx"]:
            return "enx" + _mac(self._macs.of(match["enx"]), 6).replace(":", "")
        if match["mac"]:
            joined = match["mac"].lower().replace("-", ":")
            return _mac(self._macs.of(joined.replace(":", "")), joined.count(":") + 1)
        if match["guid"]:
            return f"0000:0000:0000:{self._guids.of(match['guid'].lower()):04x}"
        if nodes := match["nodes"]:
            if nodes not in self._lists:
                self._lists[nodes] = self._new_list(nodes)
            return self._lists[nodes]
        return self._address(match)

    def _beginning(self, text: str) -> str:
        """A truncated UUID, as CUDA_VISIBLE_DEVICES accepts it: truncated again, and as ambiguous as before."""
        prefix, _, start = text.rpartition("-") if text.count("-") == 1 else text.partition("-")
        start = start.lower()
        at = bisect_left(self._uuids, start)
        full = [uuid for uuid in self._uuids[at : at + 2] if uuid.startswith(start)]
        if len(full) > 1:
            return f"{prefix}-0"
        return f"{prefix}-{_uuid(self._people.uuids.of(full[0] if full else start))[:8]}"

    def _address(self, match: re.Match[str]) -> str:
        literal, length = match["four"] or match["six"], match["length"] or match["width"]
        address = parse_address(literal)
        if address is None:
            return match[0]
        network = parse_network(literal, int(length[1:])) if length else None
        if network is not None and network.network_address == address:
            return str(self._people.book.network(network))
        inner = _unmapped(address)
        standin = self._people.book.address(inner) if inner is not None else address
        if inner is not address:
            standin = IPv6Address(f"::ffff:{standin}")
        # Eight full groups, as the kernel prints GIDs, if the original has them.
        expanded = len(literal) == 39 and isinstance(standin, IPv6Address)
        return (standin.exploded if expanded else str(standin)) + (length or "")

    def _new_list(self, text: str) -> str:
        names = self._people.lists.names(text)
        known = [self._people.hosts.of(name) for name in names if name in self._people.hosts]
        if names and len(known) == len(names):
            return folded(known)
        return f"hosts-{self._long_lists.of(text)}" if self._people.lists.is_too_long(text) else text

    def _words(self, text: str, whole: str, *, typed: bool) -> str:
        users = self._people.users

        def home(match: re.Match[str]) -> str:
            user = match["user"]
            return f"{match[0][: -len(user)]}user-{users.of(user)}" if user in users else match[0]

        return _TOKEN.sub(lambda match: self._token(match, whole, typed=typed), _HOMES.sub(home, text))

    def _token(self, match: re.Match[str], whole: str, *, typed: bool) -> str:
        """A word, such as ``slurm-node01-17.out``, with every known name in it replaced."""
        token = match[0]
        atoms = [(atom.start(), atom.end()) for atom in _ATOM.finditer(token)]
        parts, last, position = [], 0, 0
        while position < len(atoms):
            size = next((size for size in self._sizes if self._fits(token, atoms, position, size, whole, typed)), 0)
            if size:
                start, end = atoms[position][0], atoms[position + size - 1][1]
                parts += [token[last:start], self._names[token[start:end]].standin]
                last = end
            position += size or 1
        return "".join(parts) + token[last:]

    def _fits(
        self, token: str, atoms: list[tuple[int, int]], position: int, size: int, whole: str, typed: bool
    ) -> bool:
        if position + size > len(atoms):
            return False
        start, end = atoms[position][0], atoms[position + size - 1][1]
        name = self._names.get(token[start:end])
        if name is None or typed or name.is_distinct:
            return name is not None
        around = (token[max(0, start - 1) : start], token[end : end + 1])
        alone = name.may_be_joined or not {"-", "_"}.intersection(around)
        return not name.is_common and alone and token[start:end] != whole


class _KnownName:
    """A name and its placeholder. ``is_distinct``: it has a digit or a dot and no other meaning; ``is_common``: it is
    an ordinary word; ``may_be_joined``: it is also searched in compounds such as ``triton_grace``, because programs
    name users' folders like this."""

    def __init__(self, name: str, standin: str, *, may_be_joined: bool = False) -> None:
        self.standin = standin
        self.may_be_joined = may_be_joined and len(name) > 3
        self.is_common = len(name) < 2 or name.lower() in COMMON or bool(_DEVICE_LIKE.fullmatch(name))
        self.is_distinct = not self.is_common and len(name) > 2 and bool(re.search(r"[0-9.]", name))


def _placeholders(people: _NamedEntities) -> Iterator[tuple[str, _KnownName]]:
    for domain in (name for name in people.domains.names() if "." in name):
        yield domain, _KnownName(domain, f"domain-{people.domains.of(domain)}")
    for user in people.users.names():
        yield user, _KnownName(user, f"user-{people.users.of(user)}", may_be_joined=True)
    for host in people.hosts.names():
        yield host, _KnownName(host, f"host-{people.hosts.of(host)}")
    for name, (short, domain) in people.full_names.items():
        yield name, _KnownName(name, f"host-{people.hosts.of(short)}.domain-{people.domains.of(domain)}")


def _host_names(text: str, lists: NodeLists) -> Iterator[str]:
    """The names in a list of hosts, an endpoint (``tcp://node01:29400``) or a SLURM node list."""
    for word in re.split(r"[,;\s]+(?![^\[]*\])", text):
        word = re.sub(r"^\w+://", "", word)
        if "[" in word and not word.startswith("["):
            yield from lists.names(word)
        else:
            name = word.partition(":")[0]
            if _TOKEN.fullmatch(name) and not name.isdigit():
                yield name


def _uuid(number: int) -> str:
    return f"{number:08x}-0000-0000-0000-000000000000"


def _mac(number: int, octets: int) -> str:
    """A locally administered address (IEEE 802, second bit of the first octet) of ``octets`` octets."""
    digits = "02" + f"{number:0{2 * octets - 2}x}"
    return ":".join(digits[index : index + 2] for index in range(0, 2 * octets, 2))


def _unmapped(address: Address | None) -> Address | None:
    """The IPv4 address inside a mapped one (RFC 4291, 2.5.5.2)."""
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return inner or address
