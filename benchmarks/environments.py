"""Score ``doctor check`` on recommended environments and on environment faults from public threads.

    python benchmarks/environments.py                 scores the environments and faults of the first set
    python benchmarks/environments.py --set second    those of the second set (third, fourth, fifth)
    python benchmarks/environments.py WORD ...        only those whose name contains a word; nothing is kept
    python benchmarks/environments.py --keep          adds the score to benchmarks/environments_results.json
    python benchmarks/environments.py --evidence      writes the table of kept scores into docs/evidence

``environments/recommended.json`` holds the variables that clouds, computing centers and launchers recommend or export,
``environments/faults.json`` environments that public threads report as faulty with the ids that count as found, and
``environments/machines.json`` the machines of both. A recommended environment with a ``profile`` has the source and the
variables of that site profile (``doctor check --profile``), and its own ones beside them. All of it was committed
before the first run, except for 18 environments that came later with the site profiles. ``recommended_2.json`` and
``faults_2.json`` are the second set, gathered from other sources after the rules had been corrected with the first
one, and committed before their first run; so are the third set after the second, the fourth after the third, and the
fifth after the fourth. Before their first run the fourth and the fifth set were started with a script in place of the
doctor that prints names, addresses, devices and limits, and every name in a recommended environment was compared with
what its machine has. Every environment is a process in network, mount and host-name namespaces in which the interfaces
(veth), the RDMA devices (a recorded sysfs tree), the plugins and the files of that machine exist; the GPUs are those of
a driver library of the tests.
``exported`` marks rows that were written from what a launcher is known to export. ``caused`` of a fault says whether
it is caused for real in the namespaces, is only a setting, or comes from a recorded tree or a driver library;
``wrapper`` starts the process with fewer capabilities or on fewer CPUs, ``siblings`` are more processes of its host. A
fault with ``variant_of`` has the mechanism of another one.

Every finding of severity error or warning in a recommended environment is an alarm. A fault is found if one of its ids
has a finding of any severity with the words of ``says`` in it. Exits with 1 if fewer faults are found or more
environments have an alarm than in the last kept score of the set. Needs root.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from evidence_pages import write_between

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "checks")]

from doctor.knowledge.sites.profiles import site_profiles  # noqa: E402 - the path
from tests.faults.stage import LOUD, Host, Outcome, Play, Process, own_alarms, perform  # noqa: E402 - the path
from tests.lab.needs import CannotPlay  # noqa: E402

FOLDER = ROOT / "benchmarks" / "environments"
RESULTS = FOLDER.with_name("environments_results.json")
CUDA = ("torch==2.8.0+cu128", "nvidia-nccl-cu12==2.27.3")
TOPOLOGY = (
    '<system version="1"><cpu numaid="0" affinity="ffffffff" arch="x86_64" vendor="GenuineIntel" familyid="6"'
    ' modelid="143"><pci busid="0000:0a:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16"/></cpu>'
    "</system>"
)

GRAPHS = (
    '<graphs version="1"><graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="20" speedinter="20"'
    ' latencyinter="0" typeintra="SYS" typeinter="PIX" samechannels="1"><channel><gpu dev="0"/><gpu dev="1"/>'
    '<gpu dev="2"/><gpu dev="3"/></channel></graph></graphs>'
)


SETS = {
    "first": ("recommended", "faults"),
    "second": ("recommended_2", "faults_2"),
    "third": ("recommended_3", "faults_3"),
    "fourth": ("recommended_4", "faults_4"),
    "fifth": ("recommended_5", "faults_5"),
}
"""The files of the environments and of the faults of each set."""


class Row(NamedTuple):
    """An environment: ``ids`` and ``says`` are empty for recommended ones; ``play`` is what runs.

    ``tolerated``: ids that are true of the testing machine, such as too few CPUs for the threads of the recipe.
    """

    name: str
    source: str
    ids: frozenset[str]
    says: str
    caused: str
    play: Play
    tolerated: frozenset[str] = frozenset()


class Score(NamedTuple):
    """The alarms, or the findings that count as found; ``trouble``: why the row could not run."""

    row: Row
    alarms: dict[str, list[str]]
    found: tuple[str, ...]
    trouble: str = ""


def read(name: str) -> Any:
    """The content of a file of the data."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def read_entries(name: str) -> list[dict[str, Any]]:
    """The entries of a file of environments or faults; those of a profile have its source and its variables."""
    return [_with_profile(entry) if "profile" in entry else entry for entry in read(name)]


def _with_profile(entry: Mapping[str, Any]) -> dict[str, Any]:
    profile = site_profiles()[entry["profile"]]
    # The machines are single hosts with H100s, for which the conditions of recommendations do not hold.
    published = {name: one.value for name, one in profile.recommendations() if not (one.gpus or one.multi_host)}
    return {"source": profile.source, **entry, "variables": {**published, **entry["variables"]}}


def read_rows(name: str) -> list[Row]:
    """The rows of a file of environments or faults."""
    machines = read("machines")
    return [_row(entry, machines) for entry in read_entries(name)]


def _row(entry: Mapping[str, Any], machines: Mapping[str, Any]) -> Row:
    machine = {**machines[entry["machine"]], **entry.get("changes", {})}
    variables = [entry["variables"], *([entry["peer"]] if "peer" in entry else [])]
    hosts = tuple(_host(number, machine, entry, one) for number, one in enumerate(variables))
    return Row(
        entry["name"],
        entry["source"],
        frozenset(entry.get("ids", ())),
        entry.get("says", ""),
        entry.get("caused", ""),
        Play(hosts),
        frozenset(entry.get("tolerated", ())),
    )


def _host(number: int, machine: Mapping[str, Any], entry: Mapping[str, Any], variables: Mapping[str, str]) -> Host:
    files = machine.get("files", ())
    # The driver library of the tests stays in the path of the loader.
    rest = {"LD_LIBRARY_PATH": ':"$LD_LIBRARY_PATH"'}
    verbs = ['export LD_LIBRARY_PATH="$HOME/verbs:$LD_LIBRARY_PATH"'] if machine.get("rdma") else []
    exports = [
        [f"export {name}={_in_home(value, files)}{rest.get(name, '')}" for name, value in one.items()]
        for one in (variables, *entry.get("siblings", ()))
    ]
    limit = "ulimit -l unlimited 2>/dev/null || true"
    gpus = tuple(machine.get("gpus", ()))
    packages = tuple(machine.get("packages", CUDA if gpus else ()))
    processes = tuple(
        Process(
            shell="\n".join([limit, *verbs, *lines, entry.get("shell", "")]),
            gpus=gpus,
            packages=packages,
            wrapper=entry.get("wrapper", ""),
        )
        for lines in exports
    )
    setup = [
        f"hostname node{number}",
        *(_OWN_BOOT if "peer" in entry else ()),
        "printf '127.0.0.1 localhost\\n10.7.0.1 node0\\n10.7.0.2 node1\\n' > names; mount --bind names /etc/hosts",
        *_interfaces(machine, number),
        *_rdma(machine.get("rdma", {}), gpus),
        *_files(files),
        entry.get("setup", ""),
    ]
    return Host(processes, ("net", "mount", "uts"), "\n".join(setup))


_OWN_BOOT = (
    "cat /proc/sys/kernel/random/uuid > boot; mount --bind boot /proc/sys/kernel/random/boot_id",
    "hostname | md5sum | cut -c1-32 > machine; [ ! -e /etc/machine-id ] || mount --bind machine /etc/machine-id",
)
"""Two hosts are two machines: each has its own boot and its own machine id."""


def _in_home(value: str, files: Sequence[str]) -> str:
    """``value`` quoted for a shell, with the paths that the machine has moved below the home of the process."""
    folders = {str(Path(path).parent) for path in files}
    known = sorted({*files, *folders}, key=len, reverse=True)
    parts = value.split(":")
    inside = tuple(f"{folder}/" for folder in folders)
    moved = [
        f'"$HOME"/root{part}' if part.rstrip("/") in known or part.startswith(inside) else shlex.quote(part)
        for part in parts
    ]
    return ":".join(moved)


def _interfaces(machine: Mapping[str, Any], number: int) -> list[str]:
    addresses = dict(machine["interfaces"])
    rdma = machine.get("rdma", {}).values()
    for place, device in enumerate(device for device in rdma if device.get("interface")):
        addresses.setdefault(device["interface"], f"10.224.{place}.5/24")
    lines = []
    for place, (name, address) in enumerate(addresses.items()):
        last = address.replace(".1/", f".{number + 1}/")
        # The other end is no interface of the machine: without an address, no library chooses it.
        lines.append(f"ip link add {name} type veth peer name peer{place}; ip link set peer{place} addrgenmode none up")
        lines += [f"ip addr add {last} dev {name}"] if last else []
        lines.append(f"ip link set {name} up")
    return [*lines, *machine.get("network", ())]


def _rdma(devices: Mapping[str, Mapping[str, str]], gpus: Sequence[str]) -> list[str]:
    """A copy of /sys/class with the RDMA devices in it, and a /dev with theirs and those of the GPUs."""
    if not devices:
        return []
    copy = "mkdir -p class; mount -t tmpfs class class; cp -a /sys/class/. class/ 2>/dev/null || true"
    lines = [f"{copy}; mkdir -p class/infiniband dev; mount -t tmpfs dev dev; mkdir -p dev/infiniband dev/shm"]
    # A host with RDMA devices has libibverbs, whether or not the testing machine has it.
    lines.append("mkdir -p verbs; cp -L /lib/*/libdl.so.2 verbs/libibverbs.so.1")
    lines.append(
        "cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/fd dev/; mount --rbind /dev/shm dev/shm"
    )
    count = next((int(line.removeprefix("count=")) for line in gpus if line.startswith("count=")), 8)
    nodes = ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))) if gpus else ()
    lines += [f"cp -a /dev/null dev/{node}" for node in nodes]
    for place, (name, device) in enumerate(devices.items()):
        verbs = f"class/infiniband_verbs/uverbs{place}"
        lines.append(f"cp -a /dev/null dev/infiniband/uverbs{place}; mkdir -p {verbs}; echo {name} > {verbs}/ibdev")
        lines.append(f"mkdir -p class/infiniband/{name}/device/infiniband_verbs/uverbs{place}")
        if device["link"] == "efa":
            lines.append(f"ln -sfn /sys/bus/pci/drivers/efa class/infiniband/{name}/device/driver")
        port = f"class/infiniband/{name}/ports/1"
        layer = {"roce": "Ethernet", "ib": "InfiniBand", "efa": "Unspecified"}[device["link"]]
        lines += [
            f"mkdir -p {port}/gids {port}/gid_attrs/types {port}/gid_attrs/ndevs",
            f"echo '{device.get('state', '4: ACTIVE')}' > {port}/state; echo '5: LinkUp' > {port}/phys_state",
            f"echo '400 Gb/sec (4X NDR)' > {port}/rate; echo {layer} > {port}/link_layer",
            f"echo 0x{place + 1:x} > {port}/lid",
        ]
        for index, (address, kind) in enumerate(_addresses(device["link"], place)):
            lines.append(f"echo {address} > {port}/gids/{index}; echo '{kind}' > {port}/gid_attrs/types/{index}")
            if device.get("interface"):
                lines.append(f"echo {device['interface']} > {port}/gid_attrs/ndevs/{index}")
    return [*lines, "mount --move class /sys/class; mount --move dev /dev"]


def _addresses(link: str, place: int) -> list[tuple[str, str]]:
    local = f"fe80:0000:0000:0000:0a58:0aff:fee0:{place + 1:04x}"
    if link != "roce":
        return [(local, "IB/RoCE v1")]
    mapped = f"0000:0000:0000:0000:0000:ffff:0ae0:{place:02x}05"
    return [(address, kind) for address in (local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]


def _files(files: Sequence[str]) -> list[str]:
    lines = []
    for path in files:
        place = f"root{path}"
        lines.append(f"mkdir -p {shlex.quote(str(Path(place).parent))}")
        if ".so" in Path(path).name:
            lines.append(f"cp -L /lib/*/libdl.so.2 {shlex.quote(place)}")
        else:
            content = GRAPHS if path.endswith("graph.xml") else TOPOLOGY if path.endswith(".xml") else ""
            lines.append(f"echo {shlex.quote(content)} > {shlex.quote(place)}")
    return lines


def score(row: Row) -> Score:
    """Run ``doctor check`` in the environment of a row."""
    try:
        outcome = perform(row.play)
    except (CannotPlay, AssertionError, subprocess.TimeoutExpired) as error:
        return Score(row, {}, (), f"{type(error).__name__}: {str(error)[-300:]}")
    here = own_alarms() | row.tolerated
    alarms = {check: words for check, words in outcome.alarms().items() if check not in here}
    return Score(row, alarms, tuple(found_in(row, outcome)))


def found_in(row: Row, outcome: Outcome) -> list[str]:
    """The findings that count as found: one of the ids of the row, with its words."""
    return [
        f"{result['id']} ({finding['severity']})"
        for result in outcome.report["results"]
        if result["id"] in row.ids
        for finding in result["findings"]
        if row.says in json.dumps(finding, ensure_ascii=False)
    ]


def score_all(rows: Sequence[Row]) -> list[Score]:
    """The scores of rows, in their order."""
    own_alarms()
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(score, rows))


def summary(recommended: Sequence[Score], faults: Sequence[Score]) -> dict[str, Any]:
    """The counts and the names that are kept."""
    return {
        "recommended": len(recommended),
        "with an alarm": sum(bool(one.alarms) for one in recommended),
        "faults": len(faults),
        "found": sum(bool(one.found) for one in faults),
        "not run": [one.row.name for one in (*recommended, *faults) if one.trouble],
        "alarms": {one.row.name: one.alarms for one in recommended if one.alarms},
        "missed": [one.row.name for one in faults if not one.found and not one.trouble],
    }


def show(recommended: Sequence[Score], faults: Sequence[Score]) -> None:
    """Print alarms, faults and the counts."""
    for one in recommended:
        for check, words in one.alarms.items():
            print(f"ALARM  {one.row.name}: {check} {'; '.join(words)} [{one.row.source}]")
    for one in faults:
        others = "" if one.found else f" (wanted {', '.join(sorted(one.row.ids))}; reported {one.alarms})"
        word = "found " if one.found else "MISSED"
        print(f"{word} {one.row.name} [{one.row.caused}]: {', '.join(dict.fromkeys(one.found))}{others}")
    for one in (*recommended, *faults):
        if one.trouble:
            print(f"NOT RUN {one.row.name}: {one.trouble}")
    counts = summary(recommended, faults)
    print(
        f"{counts['recommended']} recommended environments, {counts['with an alarm']} with an alarm ({LOUD[0]} or"
        f" {LOUD[1]}); {counts['faults']} faults, {counts['found']} found; {len(counts['not run'])} not run"
    )


def kept(name: str | None = None) -> list[dict[str, Any]]:
    """The kept scores of a set, or of all of them, oldest first."""
    scores: list[dict[str, Any]] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    return [one for one in scores if name in (None, one.get("set", "first"))]


def keep(name: str, counts: Mapping[str, Any]) -> None:
    """Add a score of a set with its date and commit."""
    command = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    scores = [*kept(), {"date": date, "commit": commit, "set": name, **counts}]
    RESULTS.write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", "utf-8")


def markdown() -> str:
    """The first and the last kept score of each set, and what the last one missed."""
    lines = ["| Set | Score | Recommended | With an alarm | Faults | Found |", "|---|---|---|---|---|---|"]
    rest = []
    for name in SETS:
        scores = kept(name)
        for when, one in zip(("before corrections", "now"), (scores[0], scores[-1]), strict=True):
            share = f"{one['found']} ({one['found'] / one['faults']:.0%})"
            counts = (one["recommended"], one["with an alarm"], one["faults"], share)
            lines.append(f"| {name} | {when} | {' | '.join(map(str, counts))} |")
        missed = ", ".join(f"`{fault}`" for fault in scores[-1]["missed"])
        rest.append(f"Not found in the {name} set: {missed or 'none'}.")
    return "\n".join((*lines, "", *rest))


def main(arguments: Sequence[str]) -> int:
    """Score, print, and compare with the last kept score."""
    parser = argparse.ArgumentParser(description="Score doctor check on environments.")
    parser.add_argument("--set", choices=SETS, default="first", help="which environments and faults")
    parser.add_argument("--keep", action="store_true", help="add the score to environments_results.json")
    parser.add_argument("--evidence", action="store_true", help="write the kept scores into docs/evidence")
    parser.add_argument("words", nargs="*", help="only environments whose name contains one of these")
    options = parser.parse_args(arguments)
    if options.evidence:
        write_between("environments", markdown())
        return 0
    chosen = [
        [row for row in read_rows(name) if not options.words or any(word in row.name for word in options.words)]
        for name in SETS[options.set]
    ]
    recommended, faults = (score_all(rows) for rows in chosen)
    show(recommended, faults)
    counts = summary(recommended, faults)
    last = kept(options.set)[-1:]
    worse = any(counts["found"] < one["found"] or counts["with an alarm"] > one["with an alarm"] for one in last)
    if options.keep and not options.words:
        keep(options.set, counts)
    return int(worse and not options.words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
